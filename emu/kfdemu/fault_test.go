package kfdemu

import (
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/emu/driver"
)

func TestFaultsAreReadAsTheyAreWritten(t *testing.T) {
	for text, want := range map[string]Fault{
		"open:errno=EBUSY":                        {Op: "open", Always: true, Errno: syscall.EBUSY},
		"SUSPEND_QUEUES#2:errno-after=EIO":        {Op: "DBG_TRAP SUSPEND_QUEUES", Nth: 2, Errno: syscall.EIO, After: true},
		"CREATE_QUEUE#3+/pid=17:delay=80ms":       {Op: "CREATE_QUEUE", Caller: 17, Nth: 3, Always: true, Delay: 80 * time.Millisecond},
		"DBG_TRAP ENABLE/target=9:kill=target":    {Op: "DBG_TRAP ENABLE", Target: 9, Always: true, Kill: KillTarget},
		"RESUME_QUEUES:delay=1s,kill=caller":      {Op: "DBG_TRAP RESUME_QUEUES", Always: true, Delay: time.Second, Kill: KillCaller},
		"step=unmap#2/target=9:reset=3":           {Step: driver.StepUnmap, Target: 9, Nth: 2, Reset: &driver.QueueOf{ID: 3}},
		"step=unmap:reset=17.0":                   {Step: driver.StepUnmap, Always: true, Reset: &driver.QueueOf{PID: 17}},
		"step=unmap#1/gpu=7:delay=9s,errno=ETIME": {Step: driver.StepUnmap, GPU: 7, Nth: 1, Delay: 9 * time.Second, Errno: syscall.ETIME},
	} {
		got, err := ParseFault(text)
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("%s: %v\n%s", text, err, diff)
		}
	}
}

func TestMistakesInFaultsAreNamed(t *testing.T) {
	for text, want := range map[string]string{
		"":                           "a colon",
		"open":                       "a colon",
		"open:":                      "a colon",
		"OPENN:errno=EIO":            `no call "OPENN"`,
		"step=nap:errno=EIO":         `"nap" is not a step`,
		"open#0:errno=EIO":           `"0" is not a number from 1`,
		"open#x:errno=EIO":           `"x" is not a number from 1`,
		"open/gpu=1:errno=EIO":       "a GPU narrows down steps",
		"open/cpu=1:errno=EIO":       `"cpu" is not gpu, pid or target`,
		"open/pid=-1:errno=EIO":      `"pid=-1" is not a number`,
		"open:delay=-1s":             `"-1s" is no positive duration`,
		"open:errno=E2SMALL":         `"E2SMALL" is no errno`,
		"open:kill=me":               `"me" is neither caller nor target`,
		"open:explode":               `"explode" is not delay`,
		"step=map:errno-after=EIO":   "a step knows delay, errno and reset",
		"step=map/gpu=1:kill=caller": "a step knows delay, errno and reset",
		"step=map:reset=1":           "a queue is reset at step=unmap only",
		"open:reset=1":               "a queue is reset at step=unmap only",
		"step=unmap:reset=-1":        `"-1" is not PID.QUEUE or QUEUE`,
	} {
		_, err := ParseFault(text)
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "the form is WHAT") {
			t.Errorf("%q: %v, want it to say %q and the form", text, err, want)
		}
	}
}

func FuzzParseFault(f *testing.F) {
	for _, seed := range []string{"open:errno=EBUSY", "step=unmap#1/gpu=7:delay=9s,errno=ETIME", "CREATE_QUEUE#3+/pid=17:delay=80ms,kill=caller", "a:b", "#/:=,"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		fault, err := ParseFault(text)
		if err == nil && fault.Op == "" == (fault.Step == "") {
			t.Errorf("%q is about %+v", text, fault)
		}
	})
}

func TestFaultsStrikeWhenTheyShould(t *testing.T) {
	e := &Emulator{}
	second := e.Inject(Fault{Op: "open", Caller: 1, Nth: 2, Errno: syscall.EIO})
	later := e.Inject(Fault{Op: "open", Nth: 3, Always: true, Errno: syscall.EBUSY})
	var got []syscall.Errno
	call := func(op driver.Op, caller int32) {
		var errno syscall.Errno
		if f := e.faults.forCall(op, caller, 0); f != nil {
			errno = f.Errno
		}
		got = append(got, errno)
	}
	call("open", 1) // the first of both
	call("open", 2) // none of the first's, the second of the other's
	call("CREATE_QUEUE", 1)
	call("open", 1) // the first's second: it strikes, the other does not see it
	call("open", 1) // the other's third
	call("open", 3)
	later.Remove()
	call("open", 3)
	want := []syscall.Errno{0, 0, 0, syscall.EIO, syscall.EBUSY, syscall.EBUSY, 0}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if second.Hits() != 1 || later.Hits() != 2 {
		t.Errorf("they struck %d and %d times, want 1 and 2", second.Hits(), later.Hits())
	}
}

// Another fault may have ended the process of a fault.
func TestProcessThatHasEndedIsKilledWithoutAnError(t *testing.T) {
	cmd := exec.Command("cat")
	in, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	pid := int32(cmd.Process.Pid)
	for _, state := range []string{"running", "ended", "reaped"} {
		if err := kill(pid); err != nil {
			t.Errorf("kill of a process that is %s: %v", state, err)
		}
		if state == "ended" {
			_ = cmd.Wait() // the status is the signal
		}
	}
}
