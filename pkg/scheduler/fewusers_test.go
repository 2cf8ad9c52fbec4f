package scheduler

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// Users who take all leases that they can leave some for others.
func TestFewUsersDoNotTakeAllLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		m.SetLimits(Limits{LeasesPerClient: 128, LeasesPerUser: 128, LeasesTotal: 512})
		got := map[UserID]int{}
		for i, user := range []UserID{"a", "b", "c", "d", "late"} {
			req := request()
			req.Client, req.User = ClientID{PID: int32(i + 1)}, user
			for range 130 {
				if _, _, err := m.Announce(req, func(LeaseID, Answer) {}); err != nil {
					break
				}
				got[user]++
			}
		}
		// A tenth, 51, is left when four have taken all; the last takes a sixteenth of it.
		if diff := cmp.Diff(map[UserID]int{"a": 128, "b": 128, "c": 128, "d": 77, "late": 4}, got); diff != "" {
			t.Errorf("leases (-want +got):\n%s", diff)
		}
		time.Sleep(time.Millisecond)
	})
}
