// Package authz hides who may call what: it turns a proved identity into rights
// and a gRPC method into the rights it needs. It does no I/O; names of users and
// groups have become ids before they get here.
package authz

import (
	"slices"
	"strings"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/peercred"
)

// Rights is a set of rights.
type Rights uint8

// The rights.
const (
	// Online: announce work and end what one announced, and look at everything.
	Online Rights = 1 << iota
	// Admin: everything. Policy.Rights never gives it without Online, since an
	// admin may create leases anyway.
	Admin
)

// Allows tells whether r satisfies need, as Need gives it: any right of need is
// enough, and when need is 0 none is necessary.
func (r Rights) Allows(need Rights) bool { return need == 0 || r&need != 0 }

// Policy says who has which rights. Uid 0 and the owner have all; the groups
// count whether they are a caller's own or supplementary.
type Policy struct {
	// OwnerUID is the daemon's own effective user id.
	OwnerUID uint32
	// OnlineGIDs and AdminGIDs are groups whose members have the right.
	OnlineGIDs, AdminGIDs []uint32
	// OnlineUIDs and AdminUIDs are users who have the right.
	OnlineUIDs, AdminUIDs []uint32
}

// Rights gives the rights of peer; 0 when it has none.
func (p Policy) Rights(peer peercred.Peer) Rights {
	in := func(uids, gids []uint32) bool {
		return slices.Contains(uids, peer.UID) || slices.Contains(gids, peer.GID) ||
			slices.ContainsFunc(peer.Groups, func(g uint32) bool { return slices.Contains(gids, g) })
	}
	switch {
	case peer.UID == 0 || peer.UID == p.OwnerUID || in(p.AdminUIDs, p.AdminGIDs):
		return Admin | Online
	case in(p.OnlineUIDs, p.OnlineGIDs):
		return Online
	}
	return 0
}

// The needs of the admin service's two kinds of calls.
const (
	reads   = Admin | Online
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
	"gpreempt.sim.v1.SimService":               Online | Admin,
	"grpc.health.v1.Health":                    0,
	"grpc.reflection.v1.ServerReflection":      0,
	"grpc.reflection.v1alpha.ServerReflection": 0,
}

// Need gives the rights of which a caller of fullMethod, "/package.Service/Method",
// must have one; 0: being identified is enough. false: nobody may call it, since
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
