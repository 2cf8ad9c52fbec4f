package fleet

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestHostsAreExpanded(t *testing.T) {
	got, err := ParseHosts("gpu[01-03,10], rack[1-2]n[8-9]:9000 # a comment\nfar=10.0.0.5:7000\r\n[fd00::1]:7443 fd00::2\nssh=/run/user/gpu7.sock\n#last")
	if err != nil {
		t.Fatal(err)
	}
	want := []Host{
		{Name: "gpu01", Address: "tcp://gpu01:7443"},
		{Name: "gpu02", Address: "tcp://gpu02:7443"},
		{Name: "gpu03", Address: "tcp://gpu03:7443"},
		{Name: "gpu10", Address: "tcp://gpu10:7443"},
		{Name: "rack1n8", Address: "tcp://rack1n8:9000"},
		{Name: "rack1n9", Address: "tcp://rack1n9:9000"},
		{Name: "rack2n8", Address: "tcp://rack2n8:9000"},
		{Name: "rack2n9", Address: "tcp://rack2n9:9000"},
		{Name: "far", Address: "tcp://10.0.0.5:7000"},
		{Name: "fd00::1", Address: "tcp://[fd00::1]:7443"},
		{Name: "fd00::2", Address: "tcp://[fd00::2]:7443"},
		{Name: "ssh", Socket: "/run/user/gpu7.sock"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("hosts (-want +got):\n%s", diff)
	}
}

func TestInvalidHostsAreRefusedWithTheReason(t *testing.T) {
	for text, want := range map[string]string{
		"":                    "no hosts",
		"# none":              "no hosts",
		"a,a":                 "host a is in the list twice",
		"gpu[1-":              "missing ]",
		"gpu[3-1]":            `invalid range "3-1"`,
		"gpu[a]":              `invalid range "a"`,
		"gpu[]":               `invalid range ""`,
		"gpu[0-20000]":        "more than 10000 hosts",
		"a[1-2000]b[1-2000]c": "more than 10000 hosts",
		"/run/x.sock":         "invalid host",
		"=a":                  "invalid host",
		"a:http":              "invalid host",
		"a=":                  "invalid host",
		":7443":               "invalid host",
	} {
		if got, err := ParseHosts(text); err == nil || !strings.Contains(err.Error(), want) || got != nil {
			t.Errorf("%q: %v, error %v, want %s", text, got, err, want)
		}
	}
}

func FuzzParseHosts(f *testing.F) {
	f.Add("gpu[01-03,10], far=10.0.0.5:7000 [::1]:7443 a=/s")
	f.Fuzz(func(t *testing.T, text string) {
		all, err := ParseHosts(text)
		if (err == nil) != (len(all) > 0) || len(all) > maxHosts {
			t.Fatalf("%d hosts, error %v", len(all), err)
		}
		for _, h := range all {
			if h.Name == "" || (h.Address == "") == (h.Socket == "") {
				t.Errorf("host %+v", h)
			}
		}
	})
}

// world is hosts that obey orders.
type world struct {
	modes    map[string]Mode
	readings map[string]Reading
}

var began = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func newWorld(hosts ...string) *world {
	w := &world{modes: map[string]Mode{}, readings: map[string]Reading{}}
	for _, h := range hosts {
		w.readings[h] = Reading{Up: true, Started: began, Count: 1000, P99: 2 * time.Millisecond}
	}
	return w
}

func (w *world) obey(orders []Order) {
	for _, o := range orders {
		for _, h := range o.Hosts {
			w.modes[h] = o.Mode
			is := w.readings[h]
			is.Mode = o.Mode
			w.readings[h] = is
		}
	}
}

func (w *world) change(host string, by func(*Reading)) {
	is := w.readings[host]
	by(&is)
	w.readings[host] = is
}

func plan() Plan {
	return Plan{Canary: []string{"a", "b"}, Rest: []string{"c", "d", "e"}, Batch: 2, Shadow: time.Minute, Observe: 2 * time.Minute, Slower: 2}
}

func TestPolicyReachesTheFleetInStages(t *testing.T) {
	w, r := newWorld("a", "b", "c", "d", "e"), NewRollout(plan())
	var got []string
	for now := time.Duration(0); !r.Done(); now += 30 * time.Second {
		for _, o := range r.Step(now, w.readings) {
			got = append(got, fmt.Sprint(now, " ", o.Hosts, " ", o.Mode))
			w.obey([]Order{o})
		}
		if now > time.Hour {
			t.Fatal("it does not end")
		}
	}
	want := []string{"0s [a b] shadow", "1m0s [a b] new", "3m0s [c d] new", "5m0s [e] new"}
	if diff := cmp.Diff(want, got); diff != "" || r.Stopped != "" {
		t.Errorf("stopped: %q; orders (-want +got):\n%s", r.Stopped, diff)
	}
}

func TestAlarmStopsTheRolloutAndUndoesIt(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Reading)
		want   string
	}{
		"lost":           {func(r *Reading) { *r = Reading{} }, "host a does not answer any more"},
		"restarted":      {func(r *Reading) { r.Started = began.Add(1) }, "the daemon of host a was restarted, and has the policy of its file again"},
		"warning":        {func(r *Reading) { r.Alarms = []string{"JOB_SLOW"} }, "host a raised JOB_SLOW"},
		"failure":        {func(r *Reading) { r.Failures += 3 }, "host a: 3 suspends or resumes failed"},
		"another policy": {func(r *Reading) { r.Mode = Unknown }, "the policy of host a was changed by somebody else"},
		"slower": {
			func(r *Reading) { r.Count, r.P99 = 1100, 5*time.Millisecond },
			"host a: the p99 of the time to quiet GPUs is 5ms, 2.5 times that before",
		},
	} {
		t.Run(name, func(t *testing.T) {
			w, r := newWorld("a", "b", "c", "d", "e"), NewRollout(plan())
			w.obey(r.Step(0, w.readings))
			w.obey(r.Step(time.Minute, w.readings))
			w.obey(r.Step(2*time.Minute, w.readings))
			w.change("a", c.change)
			orders := r.Step(2*time.Minute+time.Second, w.readings)
			if diff := cmp.Diff([]Order{{[]string{"a", "b"}, Old}}, orders); diff != "" {
				t.Errorf("orders (-want +got):\n%s", diff)
			}
			if r.Stopped != c.want || !r.Done() {
				t.Errorf("stopped: %q, want %q", r.Stopped, c.want)
			}
		})
	}
}

func TestWhatIsNoAlarmLetsTheRolloutGoOn(t *testing.T) {
	for name, change := range map[string]struct {
		host string
		by   func(*Reading)
	}{
		"few new times":              {"a", func(r *Reading) { r.Count, r.P99 = 1099, time.Second }},
		"a p99 below a millisecond":  {"a", func(r *Reading) { r.Count, r.P99 = 5000, time.Millisecond }},
		"a warning of an unchanged":  {"e", func(r *Reading) { r.Alarms = []string{"STUCK"} }},
		"an unchanged one is lost":   {"e", func(r *Reading) { *r = Reading{} }},
		"a p99 that is little worse": {"a", func(r *Reading) { r.Count, r.P99 = 5000, 4*time.Millisecond }},
	} {
		t.Run(name, func(t *testing.T) {
			w, r := newWorld("a", "b", "c", "d", "e"), NewRollout(plan())
			w.obey(r.Step(0, w.readings))
			w.obey(r.Step(time.Minute, w.readings))
			w.change(change.host, change.by)
			if orders := r.Step(2*time.Minute, w.readings); orders != nil || r.Stopped != "" {
				t.Errorf("orders %v, stopped: %q", orders, r.Stopped)
			}
		})
	}
}

func TestRolloutDoesNotBeginWithAnAlarm(t *testing.T) {
	for want, change := range map[string]func(*Reading){
		"host e does not answer":             func(r *Reading) { *r = Reading{} },
		"host e has the alarm STUCK already": func(r *Reading) { r.Alarms = []string{"STUCK"} },
	} {
		w, r := newWorld("a", "b", "c", "d", "e"), NewRollout(plan())
		w.change("e", change)
		if orders := r.Step(0, w.readings); orders != nil || r.Stopped != want {
			t.Errorf("orders %v, stopped: %q, want %q", orders, r.Stopped, want)
		}
	}
}

func TestOrderThatFailsAndInterruptUndoWhatWasDone(t *testing.T) {
	for want, stop := range map[string]func(*Rollout) []Order{
		"host b: the policy cannot be set: denied": func(r *Rollout) []Order { return r.Fail("b", errors.New("denied")) },
		"interrupted": func(r *Rollout) []Order { return r.Abort("interrupted") },
	} {
		w, r := newWorld("a", "b", "c", "d", "e"), NewRollout(plan())
		w.obey(r.Step(0, w.readings))
		if diff := cmp.Diff([]Order{{[]string{"a", "b"}, Old}}, stop(r)); diff != "" || r.Stopped != want {
			t.Errorf("stopped: %q, want %q; orders (-want +got):\n%s", r.Stopped, want, diff)
		}
		if again := stop(r); again != nil {
			t.Errorf("it is undone twice: %v", again)
		}
	}
}

// Whatever happens, a rollout ends with the new policy on all hosts, or with the old one on each that obeys, and
// no host gets the new policy before the canary has had it for its time.
func TestRolloutEndsWithOnePolicyWhateverHappens(t *testing.T) {
	hosts := []string{"a", "b", "c", "d", "e"}
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 0))
		p := plan()
		p.Batch, p.Shadow = r.IntN(4), time.Duration(r.IntN(2))*time.Minute
		w, o := newWorld(hosts...), NewRollout(p)
		canary := time.Duration(-1)
		for now := time.Duration(0); !o.Done(); now += time.Duration(1+r.IntN(60)) * time.Second {
			if now > 2*time.Hour {
				t.Fatalf("seed %d: it does not end", seed)
			}
			if r.IntN(40) == 0 {
				w.change(hosts[r.IntN(len(hosts))], []func(*Reading){
					func(r *Reading) { r.Up = !r.Up }, func(r *Reading) { r.Failures++ }, func(r *Reading) { r.Started = r.Started.Add(1) },
					func(r *Reading) { r.Alarms = []string{"X"} }, func(r *Reading) { r.Mode = Unknown },
				}[r.IntN(5)])
			}
			orders := o.Step(now, w.readings)
			if r.IntN(60) == 0 && len(orders) > 0 {
				orders = append(orders, o.Fail(orders[0].Hosts[0], errors.New("no"))...)
			}
			for _, order := range orders {
				if order.Mode == New {
					if canary < 0 {
						canary = now
					} else if now-canary < p.Observe {
						t.Fatalf("seed %d: %v gets the policy %v after the canary", seed, order.Hosts, now-canary)
					}
				}
			}
			w.obey(orders)
		}
		want := New
		if o.Stopped != "" {
			want = Old
		}
		for _, h := range hosts {
			if got := w.modes[h]; got != want {
				t.Fatalf("seed %d: stopped %q, and host %s has the %v policy, want the %v one", seed, o.Stopped, h, got, want)
			}
		}
		if o.Stopped == "" && canary < 0 {
			t.Fatalf("seed %d: done without a canary", seed)
		}
	}
}
