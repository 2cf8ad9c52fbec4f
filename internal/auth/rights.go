package auth

import (
	"slices"

	"google.golang.org/grpc/health/grpc_health_v1"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Rights is a set of rights.
type Rights uint8

// The rights.
const (
	// Online is the right to announce work and to end one's own leases.
	Online Rights = 1 << iota
	// Read is the right to read everything except the memory of processes.
	Read
	// Admin is the right to do everything. Policy.Rights returns it only together
	// with the others.
	Admin
)

// Allows reports whether r has all rights of need.
func (r Rights) Allows(need Rights) bool { return r&need == need }

// Policy is which callers have which rights. Uid 0 and the owner have all, except in a
// container. A group counts as a caller's primary or supplementary group.
type Policy struct {
	// OwnerUID is the daemon's own effective user id.
	OwnerUID uint32
	// OnlineGIDs and AdminGIDs are groups whose members have the right.
	OnlineGIDs, AdminGIDs []uint32
	// AdminUIDs are users that have the right.
	AdminUIDs []uint32
	// ContainerAdmins permits a nested Process to have Admin. Without it such a process has
	// the other rights instead.
	ContainerAdmins bool
	// OnlineNames and AdminNames are names of certificates, as in Certificate.Names.
	OnlineNames, AdminNames []string
}

// Rights returns the rights of peer; 0 when it has none.
func (p Policy) Rights(peer Peer) Rights {
	switch peer := peer.(type) {
	case Process:
		return p.ofProcess(peer)
	case Certificate:
		return p.ofCertificate(peer)
	}
	return 0
}

// MayReadMemory reports whether peer may read what is in the memory of a user's
// process, such as its environment and its command line: the kernel shows it to that user
// and to root, and to a container only if the process is in its pid namespace.
func (p Policy) MayReadMemory(peer Peer, key gpreempt.ProcessKey, uid uint32) bool {
	process, ok := peer.(Process)
	return ok && process.UID == uid && (!process.Nested || sameNamespace(process.Key(), key)) || p.Rights(peer).Allows(Admin)
}

// sameNamespace reports whether two processes are known to be in one pid namespace.
func sameNamespace(a, b gpreempt.ProcessKey) bool {
	var names [2]string
	for i, key := range []gpreempt.ProcessKey{a, b} {
		p, err := proc.Open("/", key)
		if err == nil {
			names[i], err = p.PIDNamespace()
			p.Close()
		}
		if err != nil {
			return false
		}
	}
	return names[0] == names[1]
}

// ofProcess returns the rights of a process. With Online it has Read, because
// every user of a host can see its processes with ps; what ps shows only of a user's own
// processes, or not in a container, needs MayReadMemory.
func (p Policy) ofProcess(peer Process) Rights {
	in := func(gids []uint32) bool {
		return slices.Contains(gids, peer.GID) || slices.ContainsFunc(peer.Groups, func(g uint32) bool { return slices.Contains(gids, g) })
	}
	admin := peer.UID == 0 || peer.UID == p.OwnerUID || slices.Contains(p.AdminUIDs, peer.UID) || in(p.AdminGIDs)
	switch {
	case admin && (!peer.Nested || p.ContainerAdmins):
		return Admin | Read | Online
	case admin || in(p.OnlineGIDs):
		return Read | Online
	}
	return 0
}

// ofCertificate returns the rights of a certificate. Online does not include Read: a
// client on another host needs no information about this one.
func (p Policy) ofCertificate(peer Certificate) Rights {
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

// method is what a call of a method needs.
type method struct {
	need Rights // 0: an identity is enough
	// cost is its price in requests of the rate: its processor time as a multiple of an
	// announcement's, rounded up, by BenchmarkCosts of package server on a host with 24 processes
	// and 192 queues. Each frame of a Session has it, too. What grows with the answer is charged
	// by its bytes.
	cost int
}

// methods has every method that is served.
var methods = map[string]method{
	gpreemptv1.OnlineService_NotifyOnline_FullMethodName: {Online, 1},
	gpreemptv1.OnlineService_Complete_FullMethodName:     {Online, 1},
	gpreemptv1.OnlineService_Renew_FullMethodName:        {Online, 1},
	gpreemptv1.OnlineService_Session_FullMethodName:      {Online, 1},

	gpreemptv1.AdminService_GetStatus_FullMethodName:      {Read, 2},
	gpreemptv1.AdminService_ListGpus_FullMethodName:       {Read, 4},
	gpreemptv1.AdminService_ListTargets_FullMethodName:    {Read, 4},
	gpreemptv1.AdminService_ListQueues_FullMethodName:     {Read, 12},
	gpreemptv1.AdminService_ListHqds_FullMethodName:       {Admin, 4},
	gpreemptv1.AdminService_WatchQueues_FullMethodName:    {Read, 12},
	gpreemptv1.AdminService_ListLeases_FullMethodName:     {Read, 2},
	gpreemptv1.AdminService_CreateLease_FullMethodName:    {Admin, 2},
	gpreemptv1.AdminService_ReleaseLease_FullMethodName:   {Admin, 2},
	gpreemptv1.AdminService_SuspendTarget_FullMethodName:  {Admin, 2},
	gpreemptv1.AdminService_ResumeTarget_FullMethodName:   {Admin, 2},
	gpreemptv1.AdminService_ClassifyTarget_FullMethodName: {Admin, 2},
	gpreemptv1.AdminService_ExplainTarget_FullMethodName:  {Read, 2},
	gpreemptv1.AdminService_GetPolicy_FullMethodName:      {Read, 2},
	gpreemptv1.AdminService_SetPolicy_FullMethodName:      {Admin, 2},
	gpreemptv1.AdminService_WatchEvents_FullMethodName:    {Read, 4},
	gpreemptv1.AdminService_GetStatistics_FullMethodName:  {Read, 4},
	gpreemptv1.AdminService_SetDrain_FullMethodName:       {Admin, 1},
	// Its own cost is that of the host's checks, which are shared for a second.
	gpreemptv1.AdminService_Diagnose_FullMethodName: {Read, 8},

	grpc_health_v1.Health_Check_FullMethodName: {0, 1},
	grpc_health_v1.Health_List_FullMethodName:  {0, 1},
	grpc_health_v1.Health_Watch_FullMethodName: {0, 1},
}

// Need returns the right that a call of fullMethod, "/package.Service/Method", needs;
// 0 when an identity is enough. It returns false for an unknown method, which no
// caller may call.
func Need(fullMethod string) (Rights, bool) {
	m, known := methods[fullMethod]
	return m.need, known
}

// Cost returns the price of a call of fullMethod in requests of the rate; 0 for an unknown method.
func Cost(fullMethod string) int { return methods[fullMethod].cost }
