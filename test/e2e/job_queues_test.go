package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// What the design documents want to see after a suspension: the process's queues
// are in no hardware slot, and back in theirs afterwards.
func TestSuspendedQueuesAreInNoHardwareSlot(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	pid := d.startOffline()
	target := fmt.Sprint(pid)
	slots := func() int {
		var list gpreemptv1.ListHqdsResponse
		d.ctlJSON(&list, "queue", "slots", "--target", target)
		return len(list.GetHqds())
	}
	d.eventually("its queue is in a slot", func() bool { return slots() > 0 })
	lease := d.announce(t.Context())
	d.checkFrozen(pid)
	d.eventually("its queue is in no slot", func() bool { return slots() == 0 })
	d.complete(lease.GetLeaseId())
	d.eventually("its queue is in a slot again", func() bool { return slots() > 0 })
	d.stopJob(pid)
}

func TestQueuesAreFoundByProcessAndExportedForPython(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	pid := d.startOffline()
	var list gpreemptv1.ListQueuesResponse
	d.eventually("its rings are known", func() bool {
		list.Reset()
		d.ctlJSON(&list, "queue", "list", "--target", fmt.Sprint(pid), "--backlog")
		for _, q := range list.GetQueues() {
			if q.GetRingAddress() == 0 || q.Backlog == nil {
				return false
			}
		}
		return len(list.GetQueues()) > 0
	})
	file := filepath.Join(t.TempDir(), "queues.py")
	d.check(0, fmt.Sprintf("0x%016x", list.GetQueues()[0].GetRingAddress()), "queue", "find", fmt.Sprint(pid), "--python-config="+file)
	text, err := os.ReadFile(file)
	if err != nil || !strings.Contains(string(text), fmt.Sprintf("0x%016x", list.GetQueues()[0].GetRingAddress())) {
		t.Errorf("the file for Python: %v\n%s", err, text)
	}
	if python, err := exec.LookPath("python3"); err != nil {
		t.Log("python3 is not there: the file is not run")
	} else if out, err := exec.CommandContext(t.Context(), python, file).CombinedOutput(); err != nil {
		t.Errorf("python3: %v\n%s", err, out)
	}
	d.check(4, "", "queue", "find", "999999")
	d.stopJob(pid)
}

func TestATagClassifiesWhereNoRuleDoes(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	pid := d.startJob("simulation")
	d.eventually("the job is known", func() bool { return d.target(pid) != nil })
	d.check(0, "simulated mi300x: no hardware is involved", "target", "list")
	d.check(0, "neither GPREEMPT_CLASS nor AMD_QUEUE_TAG is set", "target", "explain", fmt.Sprint(pid))
	r := d.ctl("run", "--class", "offline", "--priority", "3", "--", "/bin/sh", "-c", "echo $GPREEMPT_CLASS $GPREEMPT_PRIORITY")
	if r.Code != 0 || r.Out != "offline 3\n" {
		t.Errorf("gpctl run: exit status %d, %q, %q", r.Code, r.Out, r.Err)
	}
	d.stopJob(pid)
}

func TestStatusShowsTheStateOfEachSource(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	pid := d.startOffline()
	d.eventually("mqds is read", func() bool {
		for _, source := range d.status().GetSources() {
			if source.GetName() == "mqds" {
				return source.GetReadings() > 0 && source.GetAvailable()
			}
		}
		return false
	})
	if len(d.status().GetWarnings()) > 0 {
		t.Errorf("warnings %v of a machine that is well", d.status().GetWarnings())
	}
	if d.status().GetBootId() == "" {
		t.Error("the boot has no id")
	}
	d.stopJob(pid)
}
