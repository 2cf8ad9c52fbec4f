package proc

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/discovery"
)

func TestRefusalNamesTheReasonAndTheRemedy(t *testing.T) {
	const all = 1<<41 - 1
	running := discovery.ProcStat{State: 'S', Threads: 3}
	for _, tc := range []struct {
		name       string
		facts      facts
		why, next  string
		wantTracer int32
	}{
		{name: "itself", facts: facts{stat: running, self: true, caps: all}, why: "the tracing program itself", next: "never suspended"},
		{name: "kernel thread", facts: facts{stat: discovery.ProcStat{State: 'I', Flags: kernelThread}, caps: all}, why: "kernel thread", next: "GPU queues"},
		{name: "main thread ended", facts: facts{stat: discovery.ProcStat{State: 'Z', Threads: 2}, caps: all}, why: "main thread has ended", next: "restart the process"},
		{
			name:  "traced, whatever else",
			facts: facts{stat: running, tracer: discovery.ProcStatus{Name: "gdb", Process: 4300}, scope: "3"},
			why:   "already traced by pid 4300 (gdb)", next: "end that debugger", wantTracer: 4300,
		},
		{name: "Yama, root included", facts: facts{stat: running, scope: "3", caps: all}, why: "ptrace_scope is 3", next: "reboot"},
		{name: "no capability", facts: facts{stat: running, scope: "2", caps: all &^ (1 << unix.CAP_SYS_PTRACE)}, why: "lacks CAP_SYS_PTRACE", next: "CapabilityBoundingSet"},
		{name: "something else", facts: facts{stat: running, scope: "2", caps: all}, why: "security module", next: "audit log"},
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
