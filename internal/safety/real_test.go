package safety

import (
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// grafted is the host that runs the test, with the GPUs of a fake one.
type grafted struct {
	host fs.FS
	fake *fakeHost
}

func (g grafted) Open(name string) (fs.File, error) {
	if strings.HasPrefix(name, "sys/class/kfd") || strings.HasPrefix(name, "sys/bus/pci") {
		return g.fake.Open(name)
	}
	return g.host.Open(name)
}

func (g grafted) ReadLink(name string) (string, error)   { return fs.ReadLink(g.host, name) }
func (g grafted) Lstat(name string) (fs.FileInfo, error) { return fs.Lstat(g.host, name) }

func TestTheFilesOfARealKernelAreRead(t *testing.T) {
	h := mi300x()
	h.cfg.Root = grafted{os.DirFS("/"), h}
	report := Examine(t.Context(), h.cfg)
	checkWhole(t, report)
	for _, c := range report.GetChecks() {
		t.Logf("%-4v  %s: %s", c.GetStatus(), c.GetId(), c.GetFound())
		if c.GetId() == "daemon" && os.Geteuid() != 0 {
			continue // a daemon of this host may have a lock file that only root can read
		}
		switch c.GetId() {
		case "kernel", "rights", "namespaces", "groups", "cgroup", "daemon", "yama":
			if c.GetStatus() == gpreemptv1.CheckStatus_CHECK_STATUS_SKIP {
				t.Errorf("%s was skipped: %s", c.GetId(), c.GetFound())
			}
		}
	}
}

func TestTheHolderOfARealLockIsFound(t *testing.T) {
	if _, err := os.ReadFile("/proc/locks"); err != nil {
		t.Skipf("no /proc/locks: %v", err)
	}
	path := filepath.Join(t.TempDir(), "gpreemptd.lock")
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if _, err := file.WriteString(strconv.Itoa(os.Getpid()) + "\n"); err != nil {
		t.Fatal(err)
	}
	p := &host{cfg: Config{Root: os.DirFS("/"), Lock: path}}
	if got, err := p.running(); got != 0 || err != nil {
		t.Errorf("unlocked: %d, %v; want 0", got, err)
	}
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if got, err := p.running(); got != int32(os.Getpid()) || err != nil {
		t.Errorf("held by %d, %v; want this process, %d", got, err, os.Getpid())
	}
}
