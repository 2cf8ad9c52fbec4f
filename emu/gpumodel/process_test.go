package gpumodel

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestKeysOfProcessesAreUnique(t *testing.T) {
	r := newRig(t, hws(), 1)
	start := func(spec ProcSpec) gpreempt.ProcessKey {
		key, err := r.StartProcess(spec)
		r.ok(err)
		return key
	}
	// The pid that would come next is taken by hand.
	start(ProcSpec{PID: firstPID + 1, Start: 5})
	got := []gpreempt.ProcessKey{start(ProcSpec{}), start(ProcSpec{}), start(ProcSpec{PID: 9})}
	r.AdvanceTo(2 * time.Second)
	got = append(got, start(ProcSpec{}))
	want := []gpreempt.ProcessKey{
		{PID: firstPID, Start: bootTicks},
		{PID: firstPID + 2, Start: bootTicks + 1},
		{PID: 9, Start: bootTicks + 2},
		{PID: firstPID + 3, Start: bootTicks + 200},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("keys (-want +got):\n%s", diff)
	}
	if _, err := r.StartProcess(ProcSpec{PID: 9}); err == nil {
		t.Error("two living processes have one pid")
	}
	// A pid is reused with another start time.
	r.ok(r.EndProcess(want[2]))
	if again := start(ProcSpec{PID: 9}); again == want[2] || r.byKey[want[2]] != nil || r.byKey[again] == nil {
		t.Errorf("second process with pid 9: %v", again)
	}
}

func TestCountersOfThoseThatLeftAreForgottenInTheEnd(t *testing.T) {
	r := newRig(t, zeroCost(hws()), 1)
	var keys []gpreempt.ProcessKey
	for range 2 * maxEnded {
		key, err := r.StartProcess(ProcSpec{})
		r.ok(err)
		r.ok(r.EndProcess(key))
		keys = append(keys, key)
	}
	if n := len(r.Counters()); n > maxEnded || n < maxEnded*3/4 {
		t.Errorf("%d remembered, want at most %d and at least 3/4 of them", n, maxEnded)
	}
	if _, ok := r.ProcessCounters(keys[0]); ok {
		t.Error("the first is remembered")
	}
	if _, ok := r.ProcessCounters(keys[len(keys)-1]); !ok {
		t.Error("the last is forgotten")
	}
}

// The driver permits 255 queues of a process on gfx942 (pqm_create_queue).
func TestProcessHas255QueuesOnAGPU(t *testing.T) {
	r := newRig(t, hws(), 1)
	a := r.start("a", 255, 0)
	if _, err := r.CreateQueue(a, r.facts[0].ID, gpreempt.QueueCompute, 64); err == nil {
		t.Error("it has another one")
	}
	ended := 0
	for id := range uint32(255) {
		r.ok(r.Submit(a, id, Packet{Duration: ms, Occupancy: 0.1, Done: func(_, _ time.Duration) { ended++ }}))
	}
	r.AdvanceTo(r.Now() + time.Minute)
	if ended != 255 {
		t.Errorf("%d of 255 queues ran their kernel", ended)
	}
}
