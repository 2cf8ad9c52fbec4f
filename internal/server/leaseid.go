package server

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// leasePrefix returns the beginning of the lease IDs of one run of the daemon: the
// epoch in 16 lower-case hex digits and a minus.
func leasePrefix(epoch uint64) string { return fmt.Sprintf("%016x-", epoch) }

// LeaseID returns the API's ID of a lease of a run of the daemon, by Config.Epoch.
func LeaseID(epoch uint64, id scheduler.LeaseID) string { return leaseID(leasePrefix(epoch), id) }

// leaseID returns the API's ID of a lease: prefix and decimal number.
func leaseID(prefix string, id scheduler.LeaseID) string {
	buf := make([]byte, 0, 40)
	buf = append(buf, prefix...)
	return string(strconv.AppendUint(buf, uint64(id), 10))
}

// parseLeaseID is the inverse of leaseID. All its errors are UNKNOWN_LEASE and say
// why.
func parseLeaseID(prefix, s string) (scheduler.LeaseID, error) {
	refused := &gpreempt.Error{Code: gpreempt.CodeNotFound, Reason: gpreempt.ReasonUnknownLease}
	epoch, number, _ := strings.Cut(s, "-")
	id, err := strconv.ParseUint(number, 10, 64)
	switch {
	case err != nil || id == 0 || number != strconv.FormatUint(id, 10) || len(epoch) != 16 || strings.Trim(epoch, "0123456789abcdef") != "":
		refused.Message = fmt.Sprintf("invalid lease ID %.64q", s)
		refused.Next = "use the lease_id of the announcement's answer, unchanged, or one of gpctl lease list"
	case epoch+"-" != prefix:
		refused.Message = fmt.Sprintf("lease %s ended when the daemon restarted", s)
		refused.Next = "announce again"
	default:
		return scheduler.LeaseID(id), nil
	}
	return 0, refused
}
