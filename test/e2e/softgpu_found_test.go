package e2e

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
)

// evict has the driver take a process's queues off their GPUs, or restore them, as when it moves memory.
func (m *softGPU) evict(verb string, w *worker) {
	m.t.Helper()
	if err := os.WriteFile(filepath.Join(softGPUDir, "control"), fmt.Appendf(nil, "%s %d\n", verb, w.PID), 0); err != nil {
		m.t.Fatal(err)
	}
}

// awaitReads has the test wait for longer: in a guest that gets no CPU for 10 s a read of mqds is abandoned, and the
// daemon waits for 5 minutes before the next one.
func (m *softGPU) awaitReads() {
	before := timeout
	timeout = 15 * time.Minute
	m.t.Cleanup(func() { timeout = before })
}

// rings returns where the rings of a process's queues are, and which queues are on their GPU, by the driver.
func (m *softGPU) rings(w *worker) (at map[uint32]uint64, running map[uint32]bool) {
	m.t.Helper()
	at, running = map[uint32]uint64{}, map[uint32]bool{}
	for _, line := range m.lines("queues") {
		if line["pid"] == fmt.Sprint(w.PID) {
			id := uint32(line.number(m.t, "queue"))
			at[id], running[id] = line.number(m.t, "ring"), line["running"] == "1"
		}
	}
	return at, running
}

// notSo returns what is said of queues and is not so; "" is nothing.
func (m *softGPU) notSo(queues []foundQueue, w *worker) string {
	at, running := m.rings(w)
	for _, q := range queues {
		if q.Address != 0 && q.Address != at[q.ID] || q.Active != nil && *q.Active != running[q.ID] {
			return fmt.Sprintf("queue %d is said to be at %#x, and active: %v; the driver has %#x, %v", q.ID, q.Address, q.Active != nil && *q.Active, at[q.ID], running[q.ID])
		}
	}
	return ""
}

// slots returns the hardware slots that a process's queues have.
func (d *daemon) slots(w *worker) []*gpreemptv1.Hqd {
	d.t.Helper()
	var list gpreemptv1.ListHqdsResponse
	d.ctlJSON(&list, "queue", "slots", "--target", fmt.Sprint(w.PID))
	return list.GetHqds()
}

// With the default config, jobs that nobody attached to: addresses, active or not, slots, backlog, a class by the
// priority of queues, queues that appear and disappear. The driver's own state is the truth.
func TestSoftGPUQueuesThatNobodyAttachedToAreFound(t *testing.T) {
	m := onSoftGPU(t)
	m.awaitReads()
	d := m.start(nothingSet + "rules: [{name: low, match: {queue_priority: {max: 9}}, class: offline, priority: 2}]\npolicy: {preset: strict, attach_after: 1h, max_suspend: 10m}\n")
	m.serve("--gpus", m.gpu(0), "--queues", "2") // others with rings of the same size
	job := m.serve("--gpus", m.gpu(0), "--queues", "3")
	all := func(what string) {
		t.Helper()
		d.eventually("the daemon has noticed "+what, func() bool {
			queues, known := d.found(job)
			return known && len(queues) == 3 && m.notSo(queues, job) == ""
		})
	}
	slots := func() int { return len(d.slots(job)) }
	all("the job")
	d.eventually("the job is offline by the priority of its queues", func() bool {
		target := d.target(job.PID)
		return target.GetClass() == gpreemptv1.Class_CLASS_OFFLINE && target.GetPriority() == 2
	})
	d.eventually("the backlog of each queue is known", func() bool {
		var list gpreemptv1.ListQueuesResponse
		d.ctlJSON(&list, "queue", "list", "--target", fmt.Sprint(job.PID), "--backlog")
		return !slices.ContainsFunc(list.GetQueues(), func(q *gpreemptv1.Queue) bool { return q.Backlog == nil })
	})

	looks, right := m.times(1000, 25), 0
	for look := range looks {
		switch look % 20 {
		case 0:
			m.evict("evict", job)
			all("an eviction")
			d.eventually("the job has no slot", func() bool { return slots() == 0 })
		case 10:
			m.evict("restore", job)
			all("its end")
			d.eventually("the job has slots", func() bool { return slots() >= 3 })
		case 15:
			job.tell("destroy 1")
			job.await("destroyed")
			job.create()
			all("the next queue")
		}
		queues, known := d.found(job)
		if wrong := m.notSo(queues, job); wrong != "" {
			t.Error(wrong)
		} else if known && len(queues) == 3 {
			right++
		}
	}
	if right*100 < 99*looks {
		t.Errorf("of %d looks %d showed all", looks, right)
	}
	if target := d.target(job.PID); target.GetMechanism() != "" {
		t.Errorf("the job is held by %s: nobody should be attached to it", target.GetMechanism())
	}
	for _, s := range d.status().GetSources() {
		if s.GetName() == "mqds" || s.GetName() == "hqds" {
			t.Logf("%d of %d looks right; %s: %d readings, the last took %v, the next after %v; %s", right, looks, s.GetName(), s.GetReadings(),
				s.GetTook().AsDuration(), s.GetEvery().AsDuration().Round(time.Millisecond), s.GetNote())
		}
	}
	if looks%20 > 0 && looks%20 <= 10 {
		m.evict("restore", job)
	}
	all("the end of the looks")

	d.ctl("target", "suspend", fmt.Sprint(job.PID), "--ttl", "5m") // it may be under way when it returns
	m.awaitEach(job, 3, softOff)
	d.eventually("the suspended job has no slot", func() bool { return slots() == 0 })
	d.check(0, "", "target", "resume", fmt.Sprint(job.PID))
	m.awaitEach(job, 3, softOn)
	all("the resume")
	d.eventually("the resumed job has slots", func() bool { return slots() >= 3 })
	job.stop()
	d.stop()
}

// What a read of mqds costs others: the driver takes the lock of each process within one call of read(2), so that the
// longest call bounds the time that a lock is held.
func TestSoftGPUReadOfManyQueuesHasAllOfThem(t *testing.T) {
	m := onSoftGPU(t)
	const queues = 80
	job := m.serve("--gpus", m.gpu(0), "--queues", fmt.Sprint(queues), "--rate", "0.1")
	var longest time.Duration
	found := 0
	buf := make([]byte, 1<<20)
	for range m.times(100, 10) {
		f, err := os.Open("/" + debugfs.MQDs)
		if err != nil {
			t.Fatal(err)
		}
		var text []byte
		for err == nil {
			var n int
			began := time.Now()
			n, err = f.Read(buf)
			longest = max(longest, time.Since(began))
			text = append(text, buf[:n]...)
		}
		_ = f.Close()
		found = strings.Count(string(text), "Compute queue on device")
		if !errors.Is(err, io.EOF) || found != queues {
			t.Fatalf("%d queues, %v, want %d queues and %v", found, err, queues, io.EOF)
		}
	}
	t.Logf("the longest call of a read of %d queues took %v: no lock is held for longer", found, longest)
	job.stop()
}
