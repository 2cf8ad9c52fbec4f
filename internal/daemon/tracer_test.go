package daemon

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// roleTracer is a process of one user that traces another's, until its input ends.
const roleTracer = "tracer"

func tracerMain(users []string, in io.Reader, out io.Writer) int {
	runtime.LockOSThread() // the tracer is a thread
	own, err := strconv.Atoi(users[0])
	if err == nil {
		var others int
		if others, err = strconv.Atoi(users[1]); err == nil {
			err = trace(own, others, out)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	_, _ = io.Copy(io.Discard, in)
	return 0
}

func trace(own, others int, out io.Writer) error {
	if own != 0 {
		if err := syscall.Setuid(own); err != nil {
			return err
		}
	}
	victim := exec.Command("/proc/self/exe")
	victim.Env = append(os.Environ(), roleEnv+"="+roleVictim)
	victim.SysProcAttr = &syscall.SysProcAttr{Ptrace: true, Pdeathsig: syscall.SIGKILL} //nolint:forbidigo // it stands for a debugger of a user
	if own != others {
		victim.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(others), Gid: uint32(others)}
	}
	if err := victim.Start(); err != nil {
		return err
	}
	_, err := fmt.Fprintln(out, victim.Process.Pid)
	return err
}

// Only root can trace another user's process: who does that is an admin. A tracer of the job's own
// user, or of root's own process, is none that an admin permits.
func TestOnlyADebuggerOfRootOnAUsersProcessIsPermitted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to be other users")
	}
	got := map[string]bool{}
	for name, users := range map[string][]string{
		"root's of a user's":     {"0", "30010"},
		"a user's of its own":    {"30010", "30010"},
		"root's of root's":       {"0", "0"},
		"of a process that ends": {"0", "30010"},
	} {
		c := startChild(t, roleTracer, users...)
		if err := c.pipe.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		line, err := c.out.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		status, err := proc.Status("/", strings.TrimSpace(line))
		if err != nil || status.Tracer == 0 {
			t.Fatalf("%s: process %q, status %+v, %v; want one with a tracer", name, line, status, err)
		}
		pid, err := strconv.Atoi(strings.TrimSpace(line))
		if err != nil {
			t.Fatal(err)
		}
		key := gpreempt.ProcessKey{PID: int32(pid)}
		if name == "of a process that ends" {
			key.Start = 1
		}
		got[name] = permittedTracer(key)
	}
	self := startChild(t, roleVictim)
	got["none"] = permittedTracer(gpreempt.ProcessKey{PID: int32(self.Process.Pid)})
	want := map[string]bool{"root's of a user's": true, "a user's of its own": false, "root's of root's": false, "of a process that ends": false, "none": false}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("permitted (-want +got):\n%s", diff)
	}
}
