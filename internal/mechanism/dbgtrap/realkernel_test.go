package dbgtrap

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"strings"
	"testing"

	"go.uber.org/zap/zaptest"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// realFixture is the mechanism on the driver of this machine, which need not have a
// GPU: the debug session, the runtime's announcements and every end of a process are
// the driver's own, only queues are missing.
type realFixture struct {
	*Mechanism
	device *kfd.Device
	births chan gpreempt.ProcessKey
	lost   chan error
}

func newReal(t *testing.T) *realFixture {
	t.Helper()
	device, err := kfd.Open()
	if errors.Is(err, fs.ErrNotExist) {
		t.Skip("this machine has no /dev/kfd: the amdgpu driver is not loaded")
	}
	if err != nil {
		t.Skipf("/dev/kfd cannot be used: %v", err)
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root: it traces processes")
	}
	f := &realFixture{device: device, births: make(chan gpreempt.ProcessKey, 1), lost: make(chan error, 1)}
	f.Mechanism = New(Config{
		Device: device,
		Attach: realTracer,
		Log:    zaptest.NewLogger(t),
	})
	t.Cleanup(func() {
		if err := device.Close(); err != nil {
			t.Error(err)
		}
	})
	return f
}

// Attach is the mechanism's, with what the daemon does about a session.
func (f *realFixture) Attach(ctx context.Context, target gpreempt.ProcessKey) (*driven, error) {
	return drive(ctx, f.Mechanism, target, f.births, f.lost)
}

func (f *realFixture) attach(t *testing.T, p *program) *driven {
	t.Helper()
	s, err := f.Attach(t.Context(), p.key)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("closing: %v", err)
		}
	})
	return s
}

func mustDo(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

func TestRealDriverRuntimeEndsPromptlyWhenAttachedAfterItCame(t *testing.T) {
	f := newReal(t)
	job := startReal(t, roleJob)
	job.must("open")
	job.must("enable")
	s := f.attach(t, job)
	mustDo(t, "suspend", s.Suspend(t.Context(), nil))
	mustDo(t, "resume", s.Resume(t.Context()))
	job.must("disable")
	<-f.births
	job.tell("exit")
	job.exits()
	if err := s.Suspend(t.Context(), nil); !errors.Is(err, mechanism.ErrGone) {
		t.Errorf("suspending a process that has exited returns %v, want ErrGone", err)
	}
}

func TestRealDriverRuntimeComesAndGoesPromptlyWhenAttachedBefore(t *testing.T) {
	f := newReal(t)
	job := startReal(t, roleJob)
	job.must("open")
	s := f.attach(t, job)
	// Each change waits for an answer, and one answer was given ahead: more than two
	// show that they are answered.
	for range 20 {
		job.must("enable")
		mustDo(t, "suspend", s.Suspend(t.Context(), nil))
		job.must("disable")
		mustDo(t, "suspend", s.Suspend(t.Context(), nil))
	}
	<-f.births
	job.tell("exit")
	job.exits()
}

func TestRealDriverNeedsNoDeviceOpenInTheTarget(t *testing.T) {
	f := newReal(t)
	job := startReal(t, roleJob)
	s := f.attach(t, job)
	mustDo(t, "suspend", s.Suspend(t.Context(), nil))
	job.must("open")
	job.must("enable")
	job.must("disable")
}

func TestRealDriverTargetRunsOnAfterClose(t *testing.T) {
	f := newReal(t)
	job := startReal(t, roleJob)
	job.must("open")
	for range 5 {
		job.must("enable")
		s := f.attach(t, job)
		mustDo(t, "suspend", s.Suspend(t.Context(), nil))
		mustDo(t, "close", s.Close())
		mustDo(t, "close again", s.Close())
		if err := s.Suspend(t.Context(), nil); !errors.Is(err, errClosed) {
			t.Errorf("suspend after close returns %v", err)
		}
		job.must("disable")
	}
}

func TestRealDriverTargetIsKilled(t *testing.T) {
	f := newReal(t)
	job := startReal(t, roleJob)
	job.must("open")
	job.must("enable")
	s := f.attach(t, job)
	mustDo(t, "suspend", s.Suspend(t.Context(), nil))
	job.kill()
	if err := s.Suspend(t.Context(), nil); !errors.Is(err, mechanism.ErrGone) {
		t.Errorf("suspend returns %v, want ErrGone", err)
	}
	if err := s.Resume(t.Context()); !errors.Is(err, mechanism.ErrGone) {
		t.Errorf("resume returns %v, want ErrGone", err)
	}
	if _, err := f.Attach(t.Context(), job.key); err == nil {
		t.Error("a process that was killed can be attached to")
	}
}

func TestRealDriverTargetReplacesItsProgram(t *testing.T) {
	f := newReal(t)
	job := startReal(t, roleJob)
	job.must("open")
	job.must("enable")
	s := f.attach(t, job)
	job.must("exec")
	if err := <-f.lost; !errors.Is(err, mechanism.ErrReplaced) {
		t.Errorf("lost gets %v, want mechanism.ErrReplaced", err)
	}
	if err := s.Suspend(t.Context(), nil); !errors.Is(err, mechanism.ErrReplaced) {
		t.Errorf("suspend returns %v, want mechanism.ErrReplaced", err)
	}
	mustDo(t, "close", s.Close())
	job.must("open")
	again := f.attach(t, job)
	job.must("enable")
	mustDo(t, "suspend", again.Suspend(t.Context(), nil))
	job.must("disable")
}

func TestRealDriverDeathOfTheDaemonLeavesTheTargetFree(t *testing.T) {
	f := newReal(t)
	for _, runtimeFirst := range []bool{true, false} {
		job := startReal(t, roleJob)
		job.must("open")
		if runtimeFirst {
			job.must("enable")
		}
		daemon := startReal(t, roleDaemon)
		daemon.must("attach", job.key.String())
		daemon.must("suspend")
		daemon.kill()
		if !runtimeFirst {
			job.must("enable")
		}
		job.must("disable")
		job.must("enable")
		s := f.attach(t, job)
		mustDo(t, "suspend", s.Suspend(t.Context(), nil))
		job.must("disable")
		job.tell("exit")
		job.exits()
	}
}

func TestRealDriverSecondDebuggerIsRefusedAndTheFirstGetsItsRightBack(t *testing.T) {
	f := newReal(t)
	job := startReal(t, roleJob)
	job.must("open")
	job.must("enable")
	daemon := startReal(t, roleDaemon)
	daemon.must("attach", job.key.String())
	daemon.must("suspend")
	_, err := f.Attach(t.Context(), job.key)
	if err == nil {
		t.Fatal("two debuggers hold the process")
	}
	// Where the kernel asks for the tracing thread, the first one traces it still.
	if !errors.Is(err, mechanism.ErrDebugged) && !strings.Contains(err.Error(), "traced by") {
		t.Errorf("the second debugger gets %v", err)
	}
	daemon.must("resume")
	daemon.must("suspend")
	daemon.must("close")
	s := f.attach(t, job)
	mustDo(t, "suspend", s.Suspend(t.Context(), nil))
	job.must("disable")
}

// The death of a debugger releases nobody it had not answered.
func TestRealDriverAttachReleasesATargetThatADeadDaemonLeftWaiting(t *testing.T) {
	f := newReal(t)
	for _, change := range []string{"enable", "disable"} {
		job := startReal(t, roleJob)
		job.must("open")
		if change == "disable" {
			job.must("enable")
		}
		daemon := startReal(t, roleDaemon)
		daemon.must("ignore", job.key.String())
		job.tell(change)
		daemon.must("await-runtime")
		daemon.kill()
		s := f.attach(t, job)
		if got := job.answer(); got != "ok" {
			t.Errorf("%s: %s", change, got)
		}
		mustDo(t, "suspend", s.Suspend(t.Context(), nil))
		mustDo(t, "close", s.Close())
	}
}

func TestRealDriverMainThreadThatEndsLeavesTheProcessHeld(t *testing.T) {
	f := newReal(t)
	job := startReal(t, roleJob)
	job.must("open")
	job.must("enable")
	s := f.attach(t, job)
	if f.PermissionRule() != kfd.PermissionProcess {
		t.Skip("this driver asks for the tracing thread, and a main thread that has ended cannot be traced anew")
	}
	mustDo(t, "suspend", s.Suspend(t.Context(), nil))
	job.must("end-main")
	mustDo(t, "resume", s.Resume(t.Context()))
	mustDo(t, "suspend", s.Suspend(t.Context(), nil))
	job.must("disable")
	job.must("enable")
	mustDo(t, "close", s.Close())
	job.must("disable")
	if _, err := f.Attach(t.Context(), job.key); err == nil {
		t.Error("a process without its main thread can be attached to")
	}
}

func TestRealDriverTargetIsKilledWhileItsRuntimeComesAndGoes(t *testing.T) {
	f := newReal(t)
	for i := range 10 {
		job := startReal(t, roleJob)
		job.must("open")
		s := f.attach(t, job)
		job.tell("come-and-go")
		for range i {
			<-f.births
			if err := s.Suspend(t.Context(), nil); err != nil {
				t.Errorf("suspend: %v", err)
			}
		}
		job.kill()
		if err := s.Suspend(t.Context(), nil); !errors.Is(err, mechanism.ErrGone) {
			t.Errorf("suspend returns %v, want ErrGone", err)
		}
		mustDo(t, "close", s.Close())
	}
}
