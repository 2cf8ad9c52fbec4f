package inventory

import "github.com/gpreempt/gpreempt/pkg/gpreempt"

// Occupancy is how the compute queues of a GPU use its slots (HQDs). It is derived from the
// queues that exist: a queue that is not suspended counts as mapped, which needs a slot unless
// there are more of them than slots.
type Occupancy struct {
	// Slots is how many compute queues fit at once, 0 if that is not known.
	Slots int
	// Mapped are the compute queues that are not suspended, and Offline those of them whose
	// process is offline.
	Mapped, Offline int
}

// Free returns the slots that no mapped queue needs.
func (o Occupancy) Free() int { return max(0, o.Slots-o.Mapped) }

// Low reports whether less than a percentage of the slots is free; false if their number is
// not known.
func (o Occupancy) Low(percent int) bool { return o.Slots > 0 && 100*o.Free() < percent*o.Slots }

// Occupancy returns the use of the slots of every GPU. state says whether a process is offline,
// and whether its queues are suspended.
func (v *Inventory) Occupancy(state func(gpreempt.ProcessKey) (offline, suspended bool)) map[gpreempt.GPUID]Occupancy {
	used := map[gpreempt.GPUID]Occupancy{}
	for _, g := range v.GPUs() {
		used[g.ID] = Occupancy{Slots: g.QueueSlots}
	}
	queues, _ := v.Queues()
	for _, q := range queues {
		o, known := used[q.GPU]
		if offline, suspended := state(q.Process); known && q.Type == gpreempt.QueueCompute && !suspended {
			o.Mapped++
			if offline {
				o.Offline++
			}
			used[q.GPU] = o
		}
	}
	return used
}
