package e2e

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

// swinging builds gpreemptd with a time.Now whose wall clock is a year ahead or behind
// every other 100 ms. Nothing else can set the clock for one process: time namespaces
// leave CLOCK_REALTIME alone, and the vDSO is no system call.
func swinging(t *testing.T) (program string) {
	t.Helper()
	root, err := exec.CommandContext(t.Context(), "go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(strings.TrimSpace(string(root)), "src/time/time.go")
	const now = "sec, nsec, mono := runtimeNow()\n"
	return changed(t, change{file, now, now + "\tsec += [...]int64{0, 31e6, -31e6}[mono/1e8%3]\n"})
}

// Leases, waits, overrides, rate limits and the watchdog last as long as they should by
// the monotonic clock, whatever somebody does to the other.
func TestWallClockThatJumpsByYearsChangesNoDuration(t *testing.T) {
	program := swinging(t)
	m := emulate(t, kfdemu.Config{})
	job := m.work("--queues", "2", "--duration", "500", "--runtime")
	m.gpreemptd = program
	d, systemd := m.manage(testutil.TempSocketDir(t))
	d.offlineTarget(job, 2)

	const late = 20 * time.Second // on a busy host; a year would be wrong
	// A lease that lasts is not ended, and the watchdog is fed all the time.
	long := d.announce(t.Context())
	m.checkFrozen(job)
	for began := time.Now(); time.Since(began) < 3*time.Second; {
		systemd.awaitBeat()
	}
	m.checkFrozen(job)
	if _, err := d.online.Renew(t.Context(), &gpreemptv1.RenewRequest{LeaseId: long.GetLeaseId(), Ttl: durationpb.New(time.Minute)}); err != nil {
		t.Errorf("a lease of a minute after 3 seconds: %v", err)
	}
	d.complete(long.GetLeaseId())
	m.awaitEach(job, 2, onGPU)

	// One that does not is ended, not before its time and not long after it.
	for range 5 {
		const ttl = 250 * time.Millisecond
		req := announcement()
		req.Ttl = durationpb.New(ttl)
		began := time.Now()
		lease, err := d.online.NotifyOnline(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		if end := d.awaitEnd(lease.GetLeaseId()); end != gpreemptv1.LeaseEnd_LEASE_END_EXPIRED {
			t.Errorf("the lease ended as %v", end)
		}
		if took := time.Since(began); took < ttl || took > ttl+late {
			t.Errorf("a lease of %v ended after %v", ttl, took)
		}
		m.awaitEach(job, 2, onGPU)
	}

	// What an admin says lasts as long as he says.
	began := time.Now()
	const unmanaged = 500 * time.Millisecond
	if _, err := d.admin.ClassifyTarget(t.Context(), &gpreemptv1.ClassifyTargetRequest{
		TargetId: d.target(job.PID).GetTargetId(), Class: gpreemptv1.Class_CLASS_UNMANAGED, Ttl: durationpb.New(unmanaged),
	}); err != nil {
		t.Fatal(err)
	}
	d.offlineTarget(job, 2)
	if took := time.Since(began); took < unmanaged {
		t.Errorf("a class for %v lasted %v", unmanaged, took)
	}
	// The rate limit lets through what it should.
	for range 200 {
		lease := d.announce(t.Context())
		d.complete(lease.GetLeaseId())
	}
	m.awaitProgress(job)
	job.stop()
	d.stop()
	years := map[string]bool{}
	for _, line := range d.log.all() {
		var entry struct{ Time time.Time }
		if err := json.Unmarshal([]byte(line), &entry); err == nil {
			years[entry.Time.Format("2006")] = true
		}
	}
	t.Logf("years in the log: %v", years)
	if len(years) < 2 {
		t.Errorf("the wall clock has not jumped: %v", years)
	}
}
