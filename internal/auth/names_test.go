package auth

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestNamesAndNumbersBecomeIDs(t *testing.T) {
	got, unknown := Names{
		OnlineGroups: []string{"root", "990"}, AdminGroups: []string{"991"},
		AdminUsers: []string{"root"},
	}.LookUp()
	want := &Policy{
		OwnerUID: uint32(os.Geteuid()), OnlineGIDs: []uint32{0, 990}, AdminGIDs: []uint32{991},
		AdminUIDs: []uint32{0},
	}
	if diff := cmp.Diff(want, got); diff != "" || unknown != nil {
		t.Errorf("unknown %v; policy (-want +got):\n%s", unknown, diff)
	}
}

func TestUnknownNamesHaveNoRightAndAreReturned(t *testing.T) {
	got, unknown := Names{
		OnlineGroups: []string{"no-such-group", "root"}, AdminUsers: []string{"no-such-user", "-1", "4294967296"},
	}.LookUp()
	if diff := cmp.Diff(&Policy{OwnerUID: uint32(os.Geteuid()), OnlineGIDs: []uint32{0}}, got); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"group no-such-group", "user no-such-user", "user -1", "user 4294967296"}, unknown); diff != "" {
		t.Errorf("unknown (-want +got):\n%s", diff)
	}
}
