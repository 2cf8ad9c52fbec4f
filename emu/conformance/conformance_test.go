package conformance

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "exec" {
		fmt.Fprintln(os.Stderr, "shim:", shim(os.Args[1:]))
		os.Exit(1)
	}
	if os.Getenv(agentEnv) != "" {
		if err := playAgent(); err != nil {
			fmt.Fprintln(os.Stderr, "agent:", err)
		}
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

// difference is the reason why a host does not meet an expectation, under a condition.
type difference struct{ when, why string }

// compare plays the expectations for hosts of which holds is true, each in a test of its
// name, and logs a summary. Expectations in known must differ.
func compare(t *testing.T, name string, holds tags, known map[string]difference, h func(*testing.T) host) {
	t.Helper()
	asked, played, differ := 0, 0, 0
	for _, e := range table(t) {
		if !e.isFor(holds) {
			continue
		}
		asked++
		if !t.Run(e.name, func(t *testing.T) {
			played++
			err := e.perform(h(t))
			d, isKnown := known[e.name]
			isKnown = isKnown && holds.hold(strings.Fields(d.when))
			switch {
			case isKnown && err == nil:
				t.Errorf("it agrees, but a difference is known: %s", d.why)
			case isKnown:
				differ++
			case err != nil:
				t.Error(err)
			}
		}) {
			differ++
		}
	}
	t.Logf("%s: %d expectations, %d agree, %d differ", name, played, played-differ, differ)
	if asked == 0 {
		t.Error("no expectation is for this host")
	}
}

// The test finds conditions that never hold, and misspelt ones.
func TestEveryExpectationIsPlayedOnAHost(t *testing.T) {
	withQueues := realTags(profileTags("6.12.117"))
	maps.Copy(withQueues, softTags)
	withQueues["gpu"], withQueues["two-gpus"] = true, true
	hosts := []tags{realTags(profileTags("6.12.117")), withQueues}
	for _, profile := range driver.Profiles() {
		for _, m := range machines {
			hosts = append(hosts, m.tags(profile))
		}
	}
	known := tags{}
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
		len(all), len(hosts)-2, onReal, onSoft)
	if len(all) < 400 || onReal < 250 || onSoft < 380 {
		t.Error("want 400, 250 and 380 at least: part of the table is lost")
	}
}

// realTags adds the conditions of a real driver.
func realTags(holds tags) tags {
	holds["real"] = true
	return holds
}

func TestRealDriverMeetsTheTable(t *testing.T) {
	version, holds := realDriver(t)
	h := newKernelHost(t, holds)
	if holds["soft"] {
		if err := h.prepareSoftGPU(); err != nil {
			t.Fatal(err)
		}
	}
	compare(t, fmt.Sprintf("the driver of Linux %s, KFD %s", release(t), version), holds, nil, func(*testing.T) host { return h })
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
	if gpus > 0 && !soft && !realHardware {
		t.Skipf("this machine has %d GPU nodes, and the table preempts all work on them: build with -tags hw to run it", gpus)
	}
	profile := device.Profile().Name
	var minor, patch int
	if _, err := fmt.Sscanf(release(t), "6.%d.%d", &minor, &patch); err == nil && minor == 12 {
		// Stable releases of one interface version differ.
		switch {
		case patch >= 117:
			profile = "6.12.117"
		case patch >= 103:
			profile = "6.12.103"
		}
	}
	holds := realTags(profileTags(profile))
	holds["gpu"] = gpus > 0
	if soft && gpus > 0 {
		maps.Copy(holds, softTags)
		holds["two-gpus"] = gpus > 1
	}
	return device.Version(), holds
}

// softTags are the conditions of a driver with nodes of emu/softgpu.
var softTags = tags{"soft": true, "faults": true, "queues": true, "hws": true, "per-vmid": true}

// profileTags returns the conditions of the drivers of a profile of kfdtest.
func profileTags(profile string) tags {
	holds := tags{profile: true, "checks-buffers": profile != "6.5"}
	switch profile {
	case "6.12.103", "6.12.117", "7.2":
		holds["process-rule"] = true
	default:
		holds["thread-rule"] = true
	}
	if profile == "6.12.117" || profile == "7.2" {
		holds["destroy-recovers"], holds["enable-unwinds"] = true, true
	}
	return holds
}

func release(t *testing.T) string {
	t.Helper()
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	return unix.ByteSliceToString(u.Release[:])
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
