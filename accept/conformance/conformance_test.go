package conformance

import (
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

func init() {
	if len(os.Args) > 1 && os.Args[1] == AgentCommand {
		runtime.LockOSThread() // the main goroutine stays on the main thread
	}
}

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "exec" {
		fmt.Fprintln(os.Stderr, "shim:", shim(os.Args[1:]))
		os.Exit(1)
	}
	if len(os.Args) > 1 && os.Args[1] == AgentCommand {
		fmt.Fprintln(os.Stderr, "agent:", Agent())
		os.Exit(1)
	}
	os.Exit(testutil.VerifyMain(m))
}

// table returns the expectations.
func table(t *testing.T) []expectation {
	t.Helper()
	all, err := loadTable()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// compare plays the expectations for hosts of which holds is true, each in a test of its
// name, and logs a summary.
func compare(t *testing.T, name string, holds tags, h func(*testing.T) host) {
	t.Helper()
	compareBy(t, name, holds, func(t *testing.T, e expectation) error { return e.perform(h(t)) })
}

// compareBy is compare, with the function that plays an expectation.
func compareBy(t *testing.T, name string, holds tags, perform func(*testing.T, expectation) error) {
	t.Helper()
	played, differ := 0, 0
	for _, e := range table(t) {
		if !e.isFor(holds) {
			continue
		}
		played++
		if !t.Run(e.name, func(t *testing.T) {
			if err := perform(t, e); err != nil {
				t.Error(err)
			}
		}) {
			differ++
		}
	}
	t.Logf("%s: %d expectations, %d agree, %d differ", name, played, played-differ, differ)
	if played == 0 {
		t.Error("no expectation is for this host")
	}
}

// The test finds conditions that never hold, and misspelt ones.
func TestEveryExpectationIsPlayedOnAHost(t *testing.T) {
	withQueues := realTags(profileTags("6.12.117"))
	maps.Copy(withQueues, softTags)
	withQueues["gpu"], withQueues["two-gpus"] = true, true
	withMES := realTags(profileTags("7.3"))
	maps.Copy(withMES, softTags)
	withMES["gpu"], withMES["hws"], withMES["mes"] = true, false, true
	hosts := []tags{realTags(profileTags("6.12.117")), withQueues, withMES}
	for _, profile := range append(driver.Profiles(), driver.KmapProfile) {
		for _, m := range machines {
			hosts = append(hosts, m.tags(profile))
		}
	}
	known := tags{"emulated": true} // its rows are for every other host
	for _, holds := range hosts {
		maps.Copy(known, holds)
	}
	all := table(t)
	onReal, onSoft := 0, 0
	for _, e := range all {
		if e.isFor(hosts[0]) {
			onReal++
		}
		if e.isFor(withQueues) {
			onSoft++
		}
		if !slices.ContainsFunc(hosts, e.isFor) {
			t.Errorf("no host plays %s", e.name)
		}
		conditions := slices.Clone(e.when)
		for _, s := range e.steps {
			for _, a := range s.answers {
				conditions = append(conditions, a.when...)
			}
		}
		for _, c := range conditions {
			if name := strings.TrimPrefix(c, "!"); !known[name] {
				t.Errorf("%s has the condition %s, which never holds", e.name, c)
			}
		}
	}
	t.Logf("%d expectations for %d fakes; %d of them also for a real driver without a GPU, %d for one with two nodes of emu/softgpu",
		len(all), len(hosts)-3, onReal, onSoft)
	if len(all) < 400 || onReal < 250 || onSoft < 380 {
		t.Error("want 400, 250 and 380 at least: part of the table is lost")
	}
}

func TestRealDriverMeetsTheTable(t *testing.T) {
	version, holds := realDriver(t)
	h := testHost(t, holds)
	if holds["soft"] {
		if err := h.prepareSoftGPU(); err != nil {
			t.Fatal(err)
		}
	}
	compare(t, fmt.Sprintf("the driver of Linux %s, KFD %s", release(t), version), holds, func(*testing.T) host { return h })
}

// realDriver returns the conditions of the running kernel's driver. It skips the test on a
// machine without a driver, and with GPUs that may be in use.
func realDriver(t *testing.T) (kfd.Version, tags) {
	t.Helper()
	device, err := kfd.Open()
	if err != nil {
		t.Skipf("no driver: %v; `make vm-kfd` runs this in a guest with a driver", err)
	}
	defer device.Close()
	soft, err := hasSoftGPU()
	if err != nil {
		t.Fatal(err)
	}
	gpus := gpuNodes(t)
	if gpus > 0 && !soft {
		t.Skipf("this machine has %d GPU nodes, and the table preempts all work on them: gpaccept plays it", gpus)
	}
	holds := realTags(profileTags(profileOf(device.Version(), release(t))))
	holds.addKmap()
	holds["gpu"] = gpus > 0
	if soft && gpus > 0 {
		maps.Copy(holds, softTags)
		holds["two-gpus"] = gpus > 1
		if gfx := softGFX(t); gfx >= 110000 {
			holds["hws"], holds["mes"], holds["cu-workaround"] = false, true, gfx < 110004
		}
	}
	return device.Version(), holds
}

// softGFX returns the gfx_target_version of the nodes of emu/softgpu, which are alike.
func softGFX(t *testing.T) uint64 {
	t.Helper()
	nodes, err := softLines("nodes")
	if err != nil || len(nodes) == 0 {
		t.Fatal("no nodes: ", err)
	}
	n, err := topologyNode(number32(nodes[0]["gpu"]))
	if err != nil {
		t.Fatal(err)
	}
	return n["gfx_target_version"]
}

// softTags are the conditions of a driver with nodes of emu/softgpu.
var softTags = tags{"soft": true, "faults": true, "queues": true, "hws": true, "per-vmid": true}

func release(t *testing.T) string {
	t.Helper()
	release, err := kernelRelease()
	if err != nil {
		t.Fatal(err)
	}
	return release
}

// testHost returns a host until the test ends.
func testHost(t *testing.T, holds tags) *kernelHost {
	t.Helper()
	h, err := newKernelHost(t.Context(), testutil.TempSocketDir(t), holds)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.close(); err != nil {
			t.Error(err)
		}
	})
	return h
}

// gpuNodes counts the GPUs of the topology: nodes whose gpu_id is not 0.
func gpuNodes(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir(topology)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, e := range entries {
		id, err := os.ReadFile(topology + "/" + e.Name() + "/gpu_id")
		if err != nil || strings.TrimSpace(string(id)) != "0" {
			n++ // an unreadable one counts
		}
	}
	return n
}
