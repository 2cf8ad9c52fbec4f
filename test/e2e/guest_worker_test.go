package e2e

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpreempt/gpreempt/pkg/client"
)

const (
	counted = "/run/worker.count"
	cgroup  = "/sys/fs/cgroup/system.slice/worker.service"
	faked   = "/run/faked-kfd"
)

// work counts for as long as it is let.
func work() int {
	f, err := os.Create(counted)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for n := 1; ; n++ {
		<-tick.C
		if _, err := f.WriteAt([]byte(strconv.Itoa(n)), 0); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
}

// count is how far the worker has come.
func count(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(counted)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// frozen is whether the kernel says that the worker stands still.
func frozen(t *testing.T) bool {
	t.Helper()
	text, err := os.ReadFile(cgroup + "/cgroup.events")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Contains(string(text), "frozen 1")
}

// mustRun waits until the worker goes on, and returns the time since.
func mustRun(t *testing.T, since time.Time) time.Duration {
	t.Helper()
	eventually(t, "the worker is resumed", guestAtOnce, func() bool { return !frozen(t) })
	took := time.Since(since)
	before := count(t)
	eventually(t, "the worker runs", guestAtOnce, func() bool { return count(t) != before })
	return took
}

const guestConfig = `
mechanisms: [freezer]
policy: {preset: strict, linger: 0s, attach_after: 0s}
rules: [{name: training, match: {cgroup: "/system.slice/worker.service"}, class: offline}]
`

// startWorker has a real process in a list of GPU processes that is faked, and a daemon
// that reads it.
func startWorker(t *testing.T) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	must(t, "systemd-run", "--unit=worker", "--setenv="+roleEnv+"=worker", self)
	eventually(t, "the worker begins", guestAtOnce, func() bool { _, err := os.Stat(counted); return err == nil && count(t) != "" })
	pid := strings.TrimSpace(must(t, "systemctl", "show", "--value", "-p", "MainPID", "worker.service"))
	const gpu = "63420"
	node, queue := faked+"/kfd/topology/nodes/1/", faked+"/kfd/proc/"+pid+"/queues/0/"
	for name, text := range map[string]string{
		faked + "/kfd/emulated":        "for a test: the list of GPU processes is faked\n",
		node + "gpu_id":                gpu + "\n",
		node + "name":                  "ip discovery\n",
		node + "properties":            "simd_count 1216\nsimd_per_cu 4\ngfx_target_version 90402\nnum_cp_queues 24\nnum_xcc 8\ncapability 2893521536\n",
		queue + "gpuid":                gpu,
		queue + "size":                 "4096",
		queue + "type":                 "0",
		"/etc/gpreempt/gpreemptd.yaml": guestConfig,
		"/etc/systemd/system/gpreemptd.service.d/faked.conf": "[Service]\nBindReadOnlyPaths=" + faked + ":/sys/class/kfd\n",
	} {
		write(t, name, text)
	}
	must(t, "systemctl", "daemon-reload")
	must(t, "systemctl", "restart", service)
	if got := property(t, "StatusText"); !strings.HasPrefix(got, "emulated for a test") {
		t.Errorf("status %q does not say that it is faked", got)
	}
}

// suspend announces online work, for which the worker is frozen. The lease is the
// client's: it ends with it.
func suspend(t *testing.T) (*client.Client, *client.Lease) {
	t.Helper()
	c, err := client.Dial(client.DefaultAddr, client.FailClosed())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	var lease *client.Lease
	eventually(t, "the worker is suspended", nowAndThen, func() bool {
		lease, err = c.Acquire(t.Context(), client.Request{GPUs: client.OwnGPUs(), MaxWait: 10 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		if lease.SuspendedTargets() > 0 {
			return true
		}
		for err = lease.Release(t.Context()); err != nil; err = lease.Release(t.Context()) { // it waits for a second only
			t.Log(err)
		}
		return false
	})
	if !frozen(t) {
		t.Fatalf("the daemon says so, the kernel does not\n%s", lastWords(t))
	}
	return c, lease
}

// mustLeaveNothing checks that the journal of pauses is empty.
func mustLeaveNothing(t *testing.T) {
	t.Helper()
	left, err := os.ReadDir("/run/gpreempt/journal")
	if err != nil || len(left) != 0 {
		t.Errorf("journal: %v, %v", left, err)
	}
}
