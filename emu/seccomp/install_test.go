package seccomp

import (
	"errors"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestThisMachineIsSupportedOrTheErrorNamesWhatIsMissing(t *testing.T) {
	if err := Supported(); err != nil {
		t.Skip(err)
	}
}

// seccompFails is a filter that makes seccomp(2) fail with an errno for an operation and
// flags, as on a machine that lacks something.
func seccompFails(op, flags uint32, errno syscall.Errno) []unix.SockFilter {
	p := []unix.SockFilter{
		load(dataNR),
		jump(unix.BPF_JEQ, unix.SYS_SECCOMP, 1, 0),
		ret(unix.SECCOMP_RET_ALLOW),
		loadArg(0),
		jump(unix.BPF_JEQ, op, 1, 0),
		ret(unix.SECCOMP_RET_ALLOW),
	}
	if flags != 0 {
		p = append(p, loadArg(1), jump(unix.BPF_JSET, flags, 1, 0), ret(unix.SECCOMP_RET_ALLOW))
	}
	return append(p, ret(unix.SECCOMP_RET_ERRNO|uint32(errno)))
}

// imitate imitates another machine for the calling thread.
func imitate(t *testing.T, filter []unix.SockFilter) {
	t.Helper()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		t.Error(err)
	}
	if _, errno := setFilter(filter, 0); errno != 0 {
		t.Errorf("a filter without a listener: %v", errno)
	}
}

func TestErrorsNameWhatTheMachineLacks(t *testing.T) {
	needSupport(t)
	for name, tc := range map[string]struct {
		filter []unix.SockFilter
		want   string
	}{
		"no seccomp":          {seccompFails(unix.SECCOMP_GET_ACTION_AVAIL, 0, unix.ENOSYS), "CONFIG_SECCOMP_FILTER"},
		"a container":         {seccompFails(unix.SECCOMP_GET_ACTION_AVAIL, 0, unix.EPERM), "seccomp profile"},
		"before Linux 5.0":    {seccompFails(unix.SECCOMP_GET_ACTION_AVAIL, 0, unix.EOPNOTSUPP), "SECCOMP_RET_USER_NOTIF"},
		"before Linux 5.19":   {seccompFails(unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV, unix.EINVAL), "WAIT_KILLABLE_RECV (Linux 5.19)"},
		"filters forbidden":   {seccompFails(unix.SECCOMP_SET_MODE_FILTER, 0, unix.EPERM), "filters are forbidden"},
		"something new":       {seccompFails(unix.SECCOMP_GET_NOTIF_SIZES, 0, unix.EIO), "sizes of the kernel's structures"},
		"something else new":  {seccompFails(unix.SECCOMP_GET_ACTION_AVAIL, 0, unix.EIO), "check for user notification"},
		"a flag nobody knows": {seccompFails(unix.SECCOMP_SET_MODE_FILTER, 0, unix.EIO), "check for SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV"},
	} {
		t.Run(name, func(t *testing.T) {
			OwnThread(func() {
				imitate(t, tc.filter)
				if err := kernelSupport(); err == nil || !strings.Contains(err.Error(), tc.want) {
					t.Errorf("got %v, want %q in it", err, tc.want)
				}
			})
		})
	}
}

func TestInstallNamesWhatTheKernelLacks(t *testing.T) {
	needSupport(t)
	filter := Filter(ioctlType)
	OwnThread(func() {
		old := seccompFails(unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV, unix.EINVAL)
		imitate(t, old)
		if _, err := Install(filter); err == nil || !strings.Contains(err.Error(), "Linux 5.19") {
			t.Errorf("got %v, want the kernel it takes in it", err)
		}
	})
}

func TestInstallRejectsAnInvalidFilter(t *testing.T) {
	needSupport(t)
	OwnThread(func() {
		fd, err := Install([]unix.SockFilter{{Code: 0xffff}})
		if !errors.Is(err, unix.EINVAL) || !strings.Contains(err.Error(), "filter of 1 instructions") {
			t.Errorf("got %d, %v", fd, err)
		}
	})
}

func TestSupportedReportsAListener(t *testing.T) {
	p := launch(t, newDevice(t), "supported")
	if got := p.finish(); !strings.Contains(got, ErrAlready.Error()) {
		t.Errorf("under a listener: got %q, want %q in it", got, ErrAlready)
	}
}

func TestOwnThreadIsNeverTheFirst(t *testing.T) {
	cmd := command(t, "own")
	out := output(cmd)
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	if got, want := out(), "false\n"; got != want {
		t.Errorf("is it: got %q, want %q", got, want)
	}
}

// If a thread with CAP_SYS_ADMIN installs the filter, set-user-ID programs keep their
// privilege.
func TestPrivilegedThreadsKeepTheirPrivileges(t *testing.T) {
	needSupport(t)
	OwnThread(func() {
		fd, err := Install([]unix.SockFilter{ret(unix.SECCOMP_RET_ALLOW)})
		if err != nil {
			t.Error(err)
			return
		}
		unix.Close(fd)
		nnp, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)
		if err != nil {
			t.Error(err)
		}
		want := 1
		if hasSysAdmin(t) {
			want = 0
		}
		if nnp != want {
			t.Errorf("no_new_privs is %d, want %d", nnp, want)
		}
	})
}

// hasSysAdmin reports whether the calling thread has CAP_SYS_ADMIN.
func hasSysAdmin(t *testing.T) bool {
	t.Helper()
	var caps [2]unix.CapUserData
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &caps[0]); err != nil {
		t.Fatal(err)
	}
	return caps[0].Effective&(1<<unix.CAP_SYS_ADMIN) != 0
}
