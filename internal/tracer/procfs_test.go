package tracer

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/discovery"
)

const statusText = "Name:\tgdb\nUmask:\t0022\nState:\tS (sleeping)\nTgid:\t4300\nNgid:\t0\nPid:\t4301\nTracerPid:\t17\nCapEff:\t000001ffffffffff\n"

func allowUnexported() cmp.Option { return cmp.AllowUnexported(procStatus{}) }

func TestParseStatus(t *testing.T) {
	got, err := parseStatus([]byte(statusText))
	if err != nil {
		t.Fatal(err)
	}
	want := procStatus{name: "gdb", tgid: 4300, tracer: 17, capEff: 1<<41 - 1}
	if diff := cmp.Diff(want, got, allowUnexported()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for _, line := range []string{"Name", "Tgid", "TracerPid", "CapEff"} {
		without := strings.Replace(statusText, line+":", "Other:", 1)
		if _, err := parseStatus([]byte(without)); err == nil || !strings.Contains(err.Error(), line) {
			t.Errorf("without the line %s the error is %v", line, err)
		}
	}
}

func FuzzParseStatus(f *testing.F) {
	for _, seed := range []string{statusText, "", "Name", "Tgid:\t-1\n", "CapEff:\tx\n", statusText + statusText} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		got, err := parseStatus([]byte(text))
		if err != nil && got != (procStatus{}) {
			t.Errorf("both %+v and %v", got, err)
		}
		if got.tgid < 0 || got.tracer < 0 {
			t.Errorf("negative ids: %+v", got)
		}
	})
}

func TestRefusalNamesTheReasonAndTheRemedy(t *testing.T) {
	const all = 1<<41 - 1
	running := discovery.ProcStat{State: 'S', Threads: 3}
	for _, tc := range []struct {
		name       string
		facts      facts
		why, next  string
		wantTracer int32
	}{
		{name: "itself", facts: facts{stat: running, self: true, capEff: all}, why: "the tracing program itself", next: "never suspended"},
		{name: "kernel thread", facts: facts{stat: discovery.ProcStat{State: 'I', Flags: kernelThread}, capEff: all}, why: "kernel thread", next: "GPU queues"},
		{name: "main thread ended", facts: facts{stat: discovery.ProcStat{State: 'Z', Threads: 2}, capEff: all}, why: "main thread has ended", next: "restart it"},
		{
			name:  "traced, whatever else",
			facts: facts{stat: running, tracer: procStatus{name: "gdb", tgid: 4300}, scope: "3"},
			why:   "already traced by pid 4300 (gdb)", next: "end that debugger", wantTracer: 4300,
		},
		{name: "Yama, root included", facts: facts{stat: running, scope: "3", capEff: all}, why: "ptrace_scope is 3", next: "reboot"},
		{name: "no capability", facts: facts{stat: running, scope: "2", capEff: all &^ (1 << unix.CAP_SYS_PTRACE)}, why: "lacks CAP_SYS_PTRACE", next: "CapabilityBoundingSet"},
		{name: "something else", facts: facts{stat: running, scope: "2", capEff: all}, why: "security module", next: "audit log"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := tc.facts.explain(4211)
			if !strings.Contains(got.Why, tc.why) || !strings.Contains(got.Next, tc.next) || got.Tracer != tc.wantTracer || got.PID != 4211 {
				t.Errorf("%+v; want %q, %q and tracer %d", got, tc.why, tc.next, tc.wantTracer)
			}
			if want := "process 4211 cannot be traced: " + got.Why + ": " + got.Next; got.Error() != want {
				t.Errorf("the text is %q, want %q", got.Error(), want)
			}
		})
	}
}
