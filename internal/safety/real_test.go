package safety

import (
	"io/fs"
	"os"
	"strings"
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
		switch c.GetId() {
		case "kernel", "rights", "namespaces", "cgroup", "daemon", "yama":
			if c.GetStatus() == gpreemptv1.CheckStatus_CHECK_STATUS_SKIP {
				t.Errorf("%s was skipped: %s", c.GetId(), c.GetFound())
			}
		}
	}
}
