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
	digits, ok := strings.CutPrefix(s, prefix)
	if !ok {
		if epoch, digits, ok := strings.Cut(s, "-"); ok && isEpoch(epoch) && isNumber(digits) {
			return 0, &gpreempt.Error{
				Code: gpreempt.CodeNotFound, Reason: gpreempt.ReasonUnknownLease,
				Message: fmt.Sprintf("lease %s ended when the daemon restarted", s),
				Next:    "announce again",
			}
		}
		return 0, invalidLeaseID(s)
	}
	if !isNumber(digits) {
		return 0, invalidLeaseID(s)
	}
	id, err := strconv.ParseUint(digits, 10, 64)
	if err != nil {
		return 0, invalidLeaseID(s)
	}
	return scheduler.LeaseID(id), nil
}

func invalidLeaseID(s string) error {
	return &gpreempt.Error{
		Code: gpreempt.CodeNotFound, Reason: gpreempt.ReasonUnknownLease,
		Message: fmt.Sprintf("invalid lease ID %.64q", s),
		Next:    "use the lease_id from the answer to the announcement, unchanged",
	}
}

func isEpoch(s string) bool {
	return len(s) == 16 && strings.Trim(s, "0123456789abcdef") == ""
}

// isNumber reports whether s is a decimal number above 0 as strconv writes it.
func isNumber(s string) bool {
	return s != "" && s[0] != '0' && strings.Trim(s, "0123456789") == ""
}
