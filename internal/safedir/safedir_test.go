package safedir

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// tree has directories for a test.
type tree struct {
	t    *testing.T
	base string
}

func newTree(t *testing.T) tree {
	t.Helper()
	base := t.TempDir()
	if err := os.Chmod(base, 0o755); err != nil {
		t.Fatal(err)
	}
	return tree{t, base}
}

func (tr tree) path(name string) string { return filepath.Join(tr.base, name) }

func (tr tree) must(err error) {
	tr.t.Helper()
	if err != nil {
		tr.t.Fatal(err)
	}
}

func (tr tree) dir(name string, mode os.FileMode) {
	tr.t.Helper()
	tr.must(os.MkdirAll(tr.path(name), 0o755))
	tr.must(os.Chmod(tr.path(name), mode))
}

func TestMissingDirectoriesAreMade(t *testing.T) {
	tr := newTree(t)
	tr.must(Make(tr.path("a/b/c")))
	tr.must(Make(tr.path("a/b/c")))
	for _, name := range []string{"a", "a/b", "a/b/c"} {
		info, err := os.Lstat(tr.path(name))
		if err != nil || !info.IsDir() || info.Mode().Perm()&^0o755 != 0 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
}

func TestDirectoriesThatNoOtherUserCanReplaceAreAccepted(t *testing.T) {
	tr := newTree(t)
	tr.dir("sticky", 0o777|os.ModeSticky)
	tr.must(os.Symlink(tr.path("sticky"), tr.path("absolute")))
	tr.must(os.Symlink("absolute/./../absolute", tr.path("relative")))
	for _, name := range []string{"sticky", "sticky/own/below", "absolute/new", "relative/new2"} {
		if err := Make(tr.path(name)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := Make("/"); err != nil {
		t.Error(err)
	}
}

func TestEachComponentIsChecked(t *testing.T) {
	tr := newTree(t)
	tr.dir("world/below", 0o755)
	tr.dir("world", 0o777)
	tr.dir("group/below", 0o755)
	tr.dir("group", 0o775)
	tr.must(os.Symlink("world/below", tr.path("link")))
	tr.must(os.Symlink("loop", tr.path("loop")))
	tr.must(os.Symlink("missing", tr.path("dangling")))
	tr.must(os.WriteFile(tr.path("file"), nil, 0o600))
	writable := func(name, mode string) *Error {
		return &Error{tr.path(name), "is writable for other users (mode " + mode + ")", "chmod go-w " + tr.path(name) + ", or choose another path"}
	}
	want := map[string]*Error{
		"world": writable("world", "0777"), "world/below": writable("world", "0777"), "world/new": writable("world", "0777"),
		"group/below": writable("group", "0775"), "link": writable("world", "0777"),
		"loop": {tr.path("loop"), "leads through too many symbolic links", "remove the loop"},
		"file": {tr.path("file"), "is not a directory", "move it away, or choose another path"},
	}
	if os.Geteuid() == 0 {
		belongs := func(name string) *Error {
			return &Error{tr.path(name), "belongs to user 4711", "chown it to root, or choose another path: user 4711 can replace everything below it"}
		}
		tr.dir("other/below", 0o755)
		tr.must(os.Chown(tr.path("other"), 4711, -1))
		tr.dir("sticky", 0o777|os.ModeSticky)
		tr.must(os.Symlink("/etc", tr.path("sticky/link")))
		tr.must(os.Lchown(tr.path("sticky/link"), 4711, -1))
		want["other"], want["other/below"], want["sticky/link"] = belongs("other"), belongs("other"), belongs("sticky/link")
	} else {
		t.Log("not root: directories of another user are not tested")
	}
	for name, want := range want {
		got, _ := errors.AsType[*Error](Make(tr.path(name)))
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if _, err := os.Lstat(tr.path("world/new")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a directory was made below an unsafe one: %v", err)
	}
	tr.must(Make(tr.path("dangling")))
	if _, err := os.Stat(tr.path("missing")); err != nil {
		t.Errorf("the directory that a safe link names was not made: %v", err)
	}
	got, _ := errors.AsType[*Error](Make("run/gpreempt"))
	if diff := cmp.Diff(&Error{"run/gpreempt", "is not an absolute path", "write one that begins with /"}, got); diff != "" {
		t.Errorf("a relative path (-want +got):\n%s", diff)
	}
}

// Root of a user namespace sees the directories of the host's root as those of nobody.
func TestDirectoriesOfTheHostAreAcceptedInAUserNamespace(t *testing.T) {
	const role = "SAFEDIR_TEST_MAKE"
	if dir := os.Getenv(role); dir != "" {
		if err := Make(dir); err != nil {
			t.Fatal(err)
		}
		return
	}
	dir := filepath.Join(t.TempDir(), "new")
	cmd := exec.Command("/proc/self/exe", "-test.run", "^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), role+"="+dir)
	uid := os.Getuid()
	if uid == 0 {
		uid = 4712
		if err := os.Chown(filepath.Dir(dir), uid, uid); err != nil {
			t.Fatal(err)
		}
		for up := filepath.Dir(dir); !strings.HasSuffix(up, "/tmp") && up != "/"; up = filepath.Dir(up) {
			if err := os.Chmod(up, 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: uid, Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: uid, Size: 1}},
		Credential:  &syscall.Credential{Uid: 0, Gid: 0, NoSetGroups: true},
	}
	if out, err := cmd.CombinedOutput(); errors.Is(err, syscall.EPERM) || errors.Is(err, fs.ErrPermission) {
		t.Skipf("no user namespace: %v", err)
	} else if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		t.Errorf("%v, %v", info, err)
	}
}
