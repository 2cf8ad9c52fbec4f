// Package authz hides who may call what: it turns a proved identity into rights
// and a gRPC method into the rights it needs. It does no I/O; names of users and
// groups have become ids before they get here.
package authz

import (
	"slices"
	"strings"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/mtls"
	"github.com/gpreempt/gpreempt/internal/peercred"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Peer is a proved identity: a peercred.Peer, a process of this host, or a
// mtls.Peer, whoever holds a certificate. Any other has no rights.
type Peer interface {
	// Process is the process, zero when the peer is none of this host.
	Process() gpreempt.ProcessKey
	// Principal names whom the peer acts for: what limits beyond one process count by.
	Principal() string
	// String names the peer for people.
	String() string
}

// Rights is a set of rights.
type Rights uint8

// The rights.
const (
	// Online: announce work and end what one announced.
	Online Rights = 1 << iota
	// Read: look at everything but what stands in the memory of processes.
	Read
	// Admin: everything. Policy.Rights never gives it without the others.
	Admin
)

// Allows reports whether r satisfies need, as Need gives it.
func (r Rights) Allows(need Rights) bool { return r&need == need }

// Policy says who has which rights. Uid 0 and the owner have all; the groups
// count whether they are a caller's own or supplementary.
type Policy struct {
	// OwnerUID is the daemon's own effective user id.
	OwnerUID uint32
	// OnlineGIDs and AdminGIDs are groups whose members have the right.
	OnlineGIDs, AdminGIDs []uint32
	// OnlineUIDs and AdminUIDs are users who have the right.
	OnlineUIDs, AdminUIDs []uint32
	// OnlineNames and AdminNames are names of certificates, as mtls.Peer has them.
	OnlineNames, AdminNames []string
}

// Rights returns the rights of peer; 0 when it has none.
func (p Policy) Rights(peer Peer) Rights {
	switch peer := peer.(type) {
	case peercred.Peer:
		return p.ofProcess(peer)
	case mtls.Peer:
		return p.ofCertificate(peer)
	}
	return 0
}

// MayReadMemory reports whether peer may see what stands in the memory of a user's
// processes, such as their environment: the kernel shows it to that user and to
// root.
func (p Policy) MayReadMemory(peer Peer, uid uint32) bool {
	process, ok := peer.(peercred.Peer)
	return ok && process.UID == uid || p.Rights(peer).Allows(Admin)
}

// ofProcess: who may announce on a host may look at it, as anybody can with ps.
func (p Policy) ofProcess(peer peercred.Peer) Rights {
	in := func(uids, gids []uint32) bool {
		return slices.Contains(uids, peer.UID) || slices.Contains(gids, peer.GID) ||
			slices.ContainsFunc(peer.Groups, func(g uint32) bool { return slices.Contains(gids, g) })
	}
	switch {
	case peer.UID == 0 || peer.UID == p.OwnerUID || in(p.AdminUIDs, p.AdminGIDs):
		return Admin | Read | Online
	case in(p.OnlineUIDs, p.OnlineGIDs):
		return Read | Online
	}
	return 0
}

// ofCertificate: whoever announces from another host learns nothing of this one.
func (p Policy) ofCertificate(peer mtls.Peer) Rights {
	in := func(names []string) bool {
		return slices.ContainsFunc(peer.Names, func(name string) bool { return slices.Contains(names, name) })
	}
	switch {
	case in(p.AdminNames):
		return Admin | Read | Online
	case in(p.OnlineNames):
		return Online
	}
	return 0
}

// The needs of the admin service's two kinds of calls.
const (
	reads   = Read
	changes = Admin
)

// methods has every method of the services whose methods differ.
var methods = map[string]Rights{
	gpreemptv1.OnlineService_NotifyOnline_FullMethodName: Online,
	gpreemptv1.OnlineService_Complete_FullMethodName:     Online,
	gpreemptv1.OnlineService_Renew_FullMethodName:        Online,
	gpreemptv1.OnlineService_Session_FullMethodName:      Online,

	gpreemptv1.AdminService_GetStatus_FullMethodName:      reads,
	gpreemptv1.AdminService_ListGpus_FullMethodName:       reads,
	gpreemptv1.AdminService_ListTargets_FullMethodName:    reads,
	gpreemptv1.AdminService_ListQueues_FullMethodName:     reads,
	gpreemptv1.AdminService_ListHqds_FullMethodName:       changes,
	gpreemptv1.AdminService_WatchQueues_FullMethodName:    reads,
	gpreemptv1.AdminService_ListLeases_FullMethodName:     reads,
	gpreemptv1.AdminService_CreateLease_FullMethodName:    changes,
	gpreemptv1.AdminService_ReleaseLease_FullMethodName:   changes,
	gpreemptv1.AdminService_SuspendTarget_FullMethodName:  changes,
	gpreemptv1.AdminService_ResumeTarget_FullMethodName:   changes,
	gpreemptv1.AdminService_ClassifyTarget_FullMethodName: changes,
	gpreemptv1.AdminService_ExplainTarget_FullMethodName:  reads,
	gpreemptv1.AdminService_GetPolicy_FullMethodName:      reads,
	gpreemptv1.AdminService_SetPolicy_FullMethodName:      changes,
	gpreemptv1.AdminService_WatchEvents_FullMethodName:    reads,
	gpreemptv1.AdminService_GetStatistics_FullMethodName:  reads,
	gpreemptv1.AdminService_SetDrain_FullMethodName:       changes,
	gpreemptv1.AdminService_Diagnose_FullMethodName:       reads,
}

// services has the services all of whose methods need the same.
var services = map[string]Rights{
	"gpreempt.sim.v1.SimService":               Read,
	"grpc.health.v1.Health":                    0,
	"grpc.reflection.v1.ServerReflection":      0,
	"grpc.reflection.v1alpha.ServerReflection": 0,
}

// Need returns the right a caller of fullMethod, "/package.Service/Method", must
// have; 0: being identified is enough. false: nobody may call it, since
// it is not known.
func Need(fullMethod string) (Rights, bool) {
	if need, ok := methods[fullMethod]; ok {
		return need, true
	}
	service, method, ok := strings.Cut(strings.TrimPrefix(fullMethod, "/"), "/")
	if !ok || method == "" {
		return 0, false
	}
	need, ok := services[service]
	return need, ok
}
