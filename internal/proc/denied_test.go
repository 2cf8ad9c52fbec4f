package proc

import (
	"os"
	"strings"
	"testing"

	"github.com/gpreempt/gpreempt/pkg/discovery"
)

func TestRefusalNamesTheReasonAndTheRemedy(t *testing.T) {
	running := discovery.ProcStat{State: 'S', Threads: 3}
	gdb := discovery.ProcStatus{Name: "gdb", Process: 4300}
	helper := discovery.ProcStatus{Name: "gpreempt-helper", Process: 4301}
	claims := discovery.ProcStatus{Name: "gpreempt-helper", Process: 4302, UID: uint32(os.Geteuid()) + 1}
	for _, tc := range []struct {
		name       string
		stat       discovery.ProcStat
		tracer     discovery.ProcStatus
		why, next  string
		wantTracer int32
	}{
		{name: "main thread ended", stat: discovery.ProcStat{State: 'Z', Threads: 2}, tracer: gdb, why: "main thread has ended", next: "restart the process"},
		{name: "traced", stat: running, tracer: gdb, why: "process 4300 (gdb) traces it", next: "end that debugger", wantTracer: 4300},
		{name: "traced by ours", stat: running, tracer: helper, why: "process 4301 (gpreempt-helper), a part of gpreempt,", next: "it ends with its own gpreemptd", wantTracer: 4301},
		{name: "traced by a user's of that name", stat: running, tracer: claims, why: "process 4302 (gpreempt-helper) traces it", next: "end that debugger", wantTracer: 4302},
		{name: "something else", stat: running, why: "CAP_SYS_PTRACE", next: "gpctl doctor"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := explain(4211, tc.stat, tc.tracer)
			if !strings.Contains(got.Why, tc.why) || !strings.Contains(got.Next, tc.next) || got.Tracer != tc.wantTracer || got.PID != 4211 {
				t.Errorf("%+v; want %q, %q and tracer %d", got, tc.why, tc.next, tc.wantTracer)
			}
			if want := "process 4211 cannot be traced: " + got.Why + ": " + got.Next; got.Error() != want {
				t.Errorf("the text is %q, want %q", got.Error(), want)
			}
		})
	}
}
