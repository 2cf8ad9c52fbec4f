package auth

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"
)

// A user with subordinate uids can act as each of them, in a user namespace.
func TestProcessInAUserNamespaceCountsAsItsOwner(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to map other users")
	}
	for _, tt := range []struct {
		name    string
		creator uint32
		want    func(pid int) string
	}{
		{"made by a user", 30_010, func(int) string { return "uid 30010" }},
		{"made by root", 0, func(pid int) string {
			var stat unix.Stat_t
			if err := unix.Stat(fmt.Sprintf("/proc/%d/ns/user", pid), &stat); err != nil {
				t.Fatal(err)
			}
			return fmt.Sprintf("user namespace %d", stat.Ino)
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var admitted Process
			l, path := listen(t, UnixOptions{Admit: func(p Process) error { admitted = p; return nil }, Refused: func(err error) { t.Error(err) }})
			if err := l.SetDeadline(time.Now().Add(time.Minute)); err != nil {
				t.Fatal(err)
			}
			for name, mode := range map[string]os.FileMode{path: 0o666, filepath.Dir(path): 0o755} {
				if err := os.Chmod(name, mode); err != nil {
					t.Fatal(err)
				}
			}
			owner := start(t, "owner", path, func(cmd *exec.Cmd) {
				cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: tt.creator, Gid: 30_010}}
			})
			var member int
			if _, err := fmt.Sscan(owner.line(t), &member); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(fmt.Sprintf("/proc/%d/uid_map", member), []byte("0 100000 1"), 0); err != nil {
				t.Fatal(err)
			}
			owner.order(t)
			got := accept(t, l).peer
			want := Process{PID: int32(member), UID: 100_000, GID: 30_010, Start: startOf(t, member), Account: tt.want(member)}
			if diff := cmp.Diff(want, got, sortGroups, cmpopts.IgnoreFields(Process{}, "Groups")); diff != "" {
				t.Errorf("the peer (-want +got):\n%s", diff)
			}
			if got.Principal() != want.Account || admitted.Principal() != want.Account {
				t.Errorf("it counts as %q, and before it is identified as %q; want %q", got.Principal(), admitted.Principal(), want.Account)
			}
			owner.order(t)
		})
	}
}
