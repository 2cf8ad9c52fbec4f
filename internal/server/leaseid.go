package server

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// leasePrefix begins the lease ids of one run of the daemon: the epoch in 16
// lower-case hex digits and a minus.
func leasePrefix(epoch uint64) string { return fmt.Sprintf("%016x-", epoch) }

// LeaseID returns the API's name of a lease of a run of the daemon, by Config.Epoch.
func LeaseID(epoch uint64, id scheduler.LeaseID) string { return leaseID(leasePrefix(epoch), id) }

// leaseID returns the API's name of a lease: prefix and decimal number.
func leaseID(prefix string, id scheduler.LeaseID) string {
	buf := make([]byte, 0, 40)
	buf = append(buf, prefix...)
	return string(strconv.AppendUint(buf, uint64(id), 10))
}

// parseLeaseID reads what leaseID writes, and nothing else. The errors are all
// UNKNOWN_LEASE and say why.
func parseLeaseID(prefix, s string) (scheduler.LeaseID, error) {
	digits, ours := strings.CutPrefix(s, prefix)
	if !ours {
		if epoch, digits, ok := strings.Cut(s, "-"); ok && isEpoch(epoch) && isNumber(digits) {
			return 0, &gpreempt.Error{
				Code: gpreempt.CodeNotFound, Reason: gpreempt.ReasonUnknownLease,
				Message: fmt.Sprintf("lease %s is of an earlier run: the daemon has restarted since, and its leases ended with it", s),
				Next:    "announce again",
			}
		}
		return 0, noLeaseID(s)
	}
	if !isNumber(digits) {
		return 0, noLeaseID(s)
	}
	id, err := strconv.ParseUint(digits, 10, 64)
	if err != nil {
		return 0, noLeaseID(s)
	}
	return scheduler.LeaseID(id), nil
}

func noLeaseID(s string) error {
	return &gpreempt.Error{
		Code: gpreempt.CodeNotFound, Reason: gpreempt.ReasonUnknownLease,
		Message: fmt.Sprintf("%.64q is no lease id", s),
		Next:    "use the lease_id an announcement was answered with, unchanged",
	}
}

func isEpoch(s string) bool {
	return len(s) == 16 && strings.Trim(s, "0123456789abcdef") == ""
}

// isNumber tells a decimal number above 0 as strconv writes it.
func isNumber(s string) bool {
	return s != "" && s[0] != '0' && strings.Trim(s, "0123456789") == ""
}
