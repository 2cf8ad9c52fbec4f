package daemon

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/client"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// live is a running daemon whose config file changes.
type live struct {
	*testing.T
	h       *fakeHost
	c       *client.Client // an admin
	values  map[string]string
	ca      *testutil.Authority
	address string
	log     string // what it has logged is in this file
}

// liveCase changes keys of a running daemon.
type liveCase struct {
	// keys are separated by spaces, and so are their values.
	keys, from, to string
	// others are the values of other keys.
	others map[string]string
	// start looks at a daemon with the old values, and returns what looks at it with the new
	// ones.
	start func(l *live) (changed func())
}

// nobody and its group have no rights without the config.
const nobody = 65534

var liveCases = []liveCase{
	{keys: "access.online_groups", from: "[65534]", to: "[]", start: rights(peer{uid: nobody, gid: nobody}, false)},
	{keys: "access.admin_users", from: "[65534]", to: "[]", start: rights(peer{uid: nobody}, true)},
	{keys: "access.admin_groups", from: "[65534]", to: "[]", start: rights(peer{uid: nobody, gid: nobody}, true)},
	{keys: "access.container_admins", from: "true", to: "false", start: rights(peer{nested: true}, true)},
	{keys: "access.online_groups", from: "[]", to: "[65534]", start: groupOfTheSocket},
	{keys: "tcp.online", from: `["dns:peer"]`, to: "[]", start: rights(peer{names: []string{"peer"}}, false)},
	{keys: "tcp.admin", from: `["dns:peer"]`, to: "[]", start: rights(peer{names: []string{"peer"}}, true)},
	{keys: "tcp.certificate tcp.key", start: certificateOfTheDaemon},
	{keys: "tcp.client_ca", start: authorityOfClients},

	{
		keys: "limits.leases_per_user", from: "10", to: "3", others: map[string]string{"access.online_groups": "[65534]"},
		start: leases(gpreempt.ReasonLeasesPerUser, peer{uid: nobody, gid: nobody}, peer{uid: nobody, gid: nobody}, 3),
	},
	{
		keys: "limits.requests_per_user", from: "1000000", to: "20", start: requestsTogether, others: map[string]string{"access.online_groups": "[65534]"},
	},

	{keys: "policy.preset", from: "strict", to: "share", start: shownPolicy("preset")},
	{keys: "policy.linger", from: "1ms", to: "2ms", start: shownPolicy("linger")},
	{keys: "policy.share_floor", from: "0.25", to: "0.5", start: shownPolicy("share_floor")},
	{keys: "policy.share_cap", from: "0.75", to: "1", start: shownPolicy("share_cap")},
	{keys: "policy.max_suspend", from: "1s", to: "2s", start: shownPolicy("max_suspend")},
	{keys: "policy.attach_after", from: "1s", to: "2s", start: shownPolicy("attach_after")},
	{keys: "policy.max_wait", from: "1ms", to: "2ms", start: shownPolicy("max_wait")},

	{keys: "hqd_budget", from: "0", to: "1", start: parked},
	{
		keys: "discovery.debugfs", from: "false", to: "true",
		start: source("mqds", (*gpreemptv1.Source).GetAvailable),
	},
	{
		keys: "rules", from: "[]", to: `[{name: view, match: {comm: "view*"}, class: offline}]`,
		start: targetOf("viewer", func(t *gpreemptv1.Target) bool { return t.GetClass() == gpreemptv1.Class_CLASS_OFFLINE }),
	},
	{
		keys: "jobs", from: "[]", to: `[{name: site, cgroup: "/batch"}]`,
		start: targetOf("viewer", func(t *gpreemptv1.Target) bool { return strings.Contains(t.GetJob().GetWhy(), "site") }),
	},
	{
		keys: "safety.hazards", from: "[]", to: `[{id: ours, gfx: [gfx942], action: deny, why: Ours hangs.}]`, start: denied,
	},
	{keys: "log.level", from: "error", to: "info", start: func(l *live) func() {
		logged := func() bool {
			text, err := os.ReadFile(l.log)
			return err == nil && bytes.Contains(text, []byte("config reloaded"))
		}
		l.reload()
		if logged() {
			l.Error("a line of level info at level error")
		}
		return func() { testutil.Until(l, "a line of level info", logged) }
	}},
}

// Each live key is changed in the file of a running daemon, and a client sees the new value after
// the reload, not before.
func TestEachLiveKeyIsInForceAfterAReload(t *testing.T) {
	var tested []string
	for _, tc := range liveCases {
		keys, from, to := strings.Fields(tc.keys), strings.Fields(tc.from), strings.Fields(tc.to)
		if len(keys) == 1 {
			from, to = []string{tc.from}, []string{tc.to}
		}
		tested = append(tested, keys...)
		t.Run(tc.keys, func(t *testing.T) {
			l := newLive(t)
			maps.Copy(l.values, tc.others)
			set := func(values []string) {
				for i, key := range keys {
					if tc.from != "" {
						l.values[key] = values[i]
					}
				}
			}
			set(from)
			l.serve()
			changed := tc.start(l)
			set(to)
			l.reload()
			changed()
		})
	}
	slices.Sort(tested)
	var want []string
	for _, key := range yamlfile.Keys(new(config.Config)) {
		if _, live := key.Tag.Lookup("live"); live {
			want = append(want, key.Name)
		}
	}
	slices.Sort(want)
	if diff := cmp.Diff(want, slices.Compact(tested)); diff != "" {
		t.Errorf("keys with a case in liveCases (-want +got):\n%s", diff)
	}
}

func newLive(t *testing.T) *live {
	t.Helper()
	l := &live{T: t, ca: testutil.NewAuthority(t, "clients"), address: testutil.FreeAddress(t), log: filepath.Join(t.TempDir(), "log")}
	l.h = newFakeHost(t, "6.12", "")
	l.h.put("sys/kernel/debug/kfd/mqds", "")
	l.h.opts.Host.Backlogs = func(_ context.Context, _ gpreempt.ProcessKey, queues []gpreempt.QueueEntry) ([]inventory.Backlog, error) {
		return slices.Repeat([]inventory.Backlog{{Known: true, Unit: inventory.Packets}}, len(queues)), nil // idle
	}
	certificate, key := l.ca.Issue(testutil.ForServer)
	l.values = map[string]string{
		"access.online_groups": "[]", "access.admin_groups": "[]",
		"tcp.address": `"` + l.address + `"`, "tcp.certificate": certificate, "tcp.key": key, "tcp.client_ca": l.ca.File,
		"tcp.online":    `["dns:client", "dns:other"]`,
		"policy.preset": "strict", "policy.linger": "0s", "policy.attach_after": "0s",
		"limits.requests_per_user": "1000000", // the tests look all the time
		"rules":                    `[{name: training, match: {comm: "train*"}, class: offline}]`,
	}
	return l
}

// serve starts the daemon.
func (l *live) serve() {
	l.Helper()
	l.write()
	log, err := os.Create(l.log)
	if err != nil {
		l.Fatal(err)
	}
	stderr := os.Stderr
	l.Cleanup(func() { // after the daemon
		os.Stderr = stderr
		_ = log.Close()
	})
	os.Stderr, l.h.opts.Log = log, nil
	l.c, _ = l.h.serve()
	l.Cleanup(func() {
		if text, err := os.ReadFile(l.log); err == nil && l.Failed() {
			l.Logf("the daemon's log:\n%s", text)
		}
	})
	l.h.warns(l.c, "") // it is connected from now on
	if err := os.Chmod(filepath.Dir(l.h.opts.Socket), 0o755); err != nil {
		l.Fatal(err)
	}
}

// write writes the values to the config file, in its order of sections.
func (l *live) write() {
	l.Helper()
	sections := map[string][]string{}
	text := ""
	for key, value := range l.values {
		if section, name, nested := strings.Cut(key, "."); nested {
			sections[section] = append(sections[section], fmt.Sprintf("  %s: %s\n", name, value))
		} else {
			text += fmt.Sprintf("%s: %s\n", key, value)
		}
	}
	for name, lines := range sections {
		text += name + ":\n" + strings.Join(lines, "")
	}
	write(l, l.h.opts.ConfigPath, text)
}

// reload writes the file and has the daemon read it.
func (l *live) reload() {
	l.Helper()
	l.write()
	if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
		l.Fatal(err)
	}
	testutil.Receive(l, l.h.ready, "the end of the reload")
	for _, code := range []string{"CONFIG_REJECTED", "CERTIFICATE_REJECTED", "RESTART_NEEDED"} {
		if l.h.warns(l.c, code) {
			l.Fatalf("the reload ends with the warning %s", code)
		}
	}
}
