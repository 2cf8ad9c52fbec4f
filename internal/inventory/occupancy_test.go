package inventory_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestOccupancyCountsMappedComputeQueues(t *testing.T) {
	v := inventory.New(10)
	v.SetGPUs([]gpreempt.GPU{{ID: 1, QueueSlots: 4}, {ID: 2}})
	online, parked, running := proc(1, 1, 0, 1), proc(2, 1, 0, 1, 2), proc(3, 1, 0, 1, 2, 3)
	for _, p := range []*[]gpreempt.Queue{&online.Queues, &parked.Queues, &running.Queues} {
		for n := range *p {
			(*p)[n].GPU, (*p)[n].Type = 1, gpreempt.QueueCompute
		}
	}
	running.Queues[1].Type, running.Queues[2].GPU, running.Queues[3].GPU = gpreempt.QueueSDMA, 2, 3
	v.Apply(at(1), snapshot(online, parked, running))
	got := v.Occupancy(func(key gpreempt.ProcessKey) (offline, suspended bool) { return key.PID != 1, key.PID == 2 })
	want := map[gpreempt.GPUID]inventory.Occupancy{1: {Slots: 4, Mapped: 3, Offline: 1}, 2: {Mapped: 1, Offline: 1}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestSlotsAreLowBelowAPercentage(t *testing.T) {
	for _, test := range []struct {
		used    inventory.Occupancy
		percent int
		want    bool
	}{
		{inventory.Occupancy{}, 10, false},
		{inventory.Occupancy{Mapped: 3}, 10, false},
		{inventory.Occupancy{Slots: 960, Mapped: 865}, 10, true},
		{inventory.Occupancy{Slots: 960, Mapped: 864}, 10, false},
		{inventory.Occupancy{Slots: 24, Mapped: 30}, 10, true},
		{inventory.Occupancy{Slots: 24, Mapped: 30}, 0, false},
	} {
		if got := test.used.Low(test.percent); got != test.want {
			t.Errorf("%+v, below %d percent: %v, want %v", test.used, test.percent, got, test.want)
		}
	}
}
