package daemon

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/authz"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestNamesAndNumbersBecomeIds(t *testing.T) {
	d := &daemon{}
	got := d.lookUpAccess(config.Config{Access: config.Access{
		OnlineGroups: []string{"root", "990"}, AdminGroups: []string{"991"},
		OnlineUsers: []string{"992"}, AdminUsers: []string{"root"},
	}})
	want := &authz.Policy{
		OwnerUID: uint32(os.Geteuid()), OnlineGIDs: []uint32{0, 990}, AdminGIDs: []uint32{991},
		OnlineUIDs: []uint32{992}, AdminUIDs: []uint32{0},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if got := d.warnings.list(); len(got) > 0 {
		t.Errorf("it warns of %v", got)
	}
}

func TestUnknownNamesGiveNobodyARightAndAreTold(t *testing.T) {
	d := &daemon{}
	got := d.lookUpAccess(config.Config{Access: config.Access{
		OnlineGroups: []string{"no-such-group", "root"}, AdminUsers: []string{"no-such-user", "-1", "4294967296"},
	}})
	want := &authz.Policy{OwnerUID: uint32(os.Geteuid()), OnlineGIDs: []uint32{0}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	wantWarnings := []gpreempt.Warning{{
		Code: "UNKNOWN_PRINCIPAL", Severity: "warning",
		Text: "access names what this host does not know: group no-such-group, user no-such-user, user -1, user 4294967296",
	}}
	warnings := d.warnings.list()
	for i := range warnings {
		if warnings[i].Remedy == "" {
			t.Error("the warning has no remedy")
		}
		warnings[i].Remedy = ""
	}
	if diff := cmp.Diff(wantWarnings, warnings); diff != "" {
		t.Error(diff)
	}
	d.lookUpAccess(config.Config{})
	if got := d.warnings.list(); len(got) > 0 {
		t.Errorf("it still warns of %v", got)
	}
}

func TestWarningsAreKeptByPartInAFixedOrder(t *testing.T) {
	var w warnings
	w.set("scan", gpreempt.Warning{Code: "S"})
	w.set("access", gpreempt.Warning{Code: "A1"}, gpreempt.Warning{Code: "A2"})
	w.set("reload", gpreempt.Warning{Code: "R"})
	w.set("scan", gpreempt.Warning{Code: "S2"})
	w.set("reload")
	w.set("gpus")
	want := []gpreempt.Warning{{Code: "A1"}, {Code: "A2"}, {Code: "S2"}}
	if diff := cmp.Diff(want, w.list()); diff != "" {
		t.Error(diff)
	}
}
