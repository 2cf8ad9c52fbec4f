package safety

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// The lines are those of set_queue_as_reset in Linux 6.12.117, 7.2.13 and 7.3.4, and what must
// not be taken for one.
func TestLinesAboutResetQueuesAreParsed(t *testing.T) {
	for line, want := range map[string]Reset{
		"amdgpu 0000:c5:00.0: amdgpu: queue id 0x3 at pasid 0x8003 is reset": {Queue: 3, PASID: 0x8003},
		"amdgpu 0000:c5:00.0: queue id 0x1f at pasid 32771 is reset":         {Queue: 31, PID: 32771},
		"amdgpu 0000:c5:00.0: queue id 0x0 at pasid 4194304 is reset":        {PID: 4194304},
		"amdgpu 0000:c5:00.0: queue id 0x0 at pasid 0 is reset":              {},
		"amdgpu 0000:c5:00.0: queue id 0x0 at pasid 12ab is reset":           {},
		"amdgpu 0000:c5:00.0: queue id 0x0 at pasid 99999999999 is reset":    {},
		"amdgpu 0000:c5:00.0: queue id 0x0 at pasid 12 is reset, x":          {},
	} {
		got, ok := parseReset(line)
		if ok != (want != Reset{}) || ok && got != want {
			t.Errorf("%q is %+v %v, want %+v", line, got, ok, want)
		}
	}
}

// Each queue of each process is one alarm, although every compute die repeats the line.
func TestEachResetQueueIsAnAlarmOfItsOwn(t *testing.T) {
	var got []Reset
	w := newWatcher("", machine, func(a Alarm) {
		if a.Pattern == PatternQueueReset {
			got = append(got, *a.Reset)
		}
	})
	for _, line := range []string{
		"XCC 0: Queue preemption failed for queue with doorbell_id: 1006", "queue id 0x3 at pasid 10 is reset", "queue id 0x3 at pasid 10 is reset", "queue id 0x3 at pasid 11 is reset", "queue id 0x4 at pasid 10 is reset",
	} {
		w.check(Record{Text: "amdgpu 0000:c5:00.0: " + line})
	}
	if diff := cmp.Diff([]Reset{{Queue: 3, PID: 10}, {Queue: 3, PID: 11}, {Queue: 4, PID: 10}}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestSuspectsOfAResetAreAllThatTheDriverMayMean(t *testing.T) {
	key := func(pid int32) gpreempt.ProcessKey { return gpreempt.ProcessKey{PID: pid, Start: 1} }
	queue := func(pid int32, id uint32, gpu gpreempt.GPUID, kind gpreempt.QueueType, ring uint64) gpreempt.QueueEntry {
		return gpreempt.QueueEntry{
			Queue: gpreempt.Queue{Process: key(pid), ID: id, GPU: gpu, Type: kind}, Info: gpreempt.QueueInfo{RingBase: ring},
		}
	}
	const a, b = 0x7000_0000_0000, 0x7000_0001_0000
	queues := []gpreempt.QueueEntry{
		queue(10, 0, 1, gpreempt.QueueCompute, a),
		queue(11, 0, 1, gpreempt.QueueCompute, a),
		queue(11, 1, 1, gpreempt.QueueCompute, b),
		queue(12, 0, 1, gpreempt.QueueSDMA, a),
		queue(13, 0, 2, gpreempt.QueueCompute, a), // another GPU
		queue(14, 0, 2, gpreempt.QueueCompute, 0),
	}
	pasid := func(pid int32) uint32 { return 0x8000 + uint32(pid) }
	for _, tt := range []struct {
		name  string
		reset Reset
		gpu   gpreempt.GPU
		named int32
		all   []int32
	}{
		{"equal addresses", Reset{Queue: 0, PID: 10}, gpreempt.GPU{ID: 1}, 10, []int32{10, 11}},
		{"an address of its own", Reset{Queue: 1, PID: 11}, gpreempt.GPU{ID: 1}, 11, []int32{11}},
		{"a PASID", Reset{Queue: 0, PASID: 0x800a}, gpreempt.GPU{ID: 1}, 10, []int32{10, 11}},
		{"MES finds queues by their doorbell", Reset{Queue: 0, PID: 10}, gpreempt.GPU{ID: 1, MES: true}, 10, []int32{10}},
		{"another's address is not known", Reset{Queue: 0, PID: 13}, gpreempt.GPU{ID: 2}, 13, []int32{13, 14}},
		{"its address is not known", Reset{Queue: 0, PID: 14}, gpreempt.GPU{ID: 2}, 14, []int32{13, 14}},
		{"a queue that is not known", Reset{Queue: 9, PID: 11}, gpreempt.GPU{ID: 1}, 11, []int32{10, 11}},
		{"a process that is not known", Reset{Queue: 0, PID: 99}, gpreempt.GPU{ID: 1}, 0, []int32{10, 11, 12}},
		{"another partition", Reset{Queue: 0, PID: 13}, gpreempt.GPU{ID: 1}, 13, nil},
	} {
		named, all := tt.reset.Suspects(tt.gpu, queues, pasid)
		var pids []int32
		for _, k := range all {
			pids = append(pids, k.PID)
		}
		if diff := cmp.Diff(tt.all, pids); diff != "" || named.PID != tt.named {
			t.Errorf("%s: named %v, want %d; suspects (-want +got):\n%s", tt.name, named, tt.named, diff)
		}
	}
}
