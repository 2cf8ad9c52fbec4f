package sim

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/scenario"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
	"github.com/gpreempt/gpreempt/pkg/scheduler/parking"
)

// Kind is a way of sharing GPUs.
type Kind string

// The kinds.
const (
	// OfflineAlone and OnlineAlone leave out the other work.
	OfflineAlone Kind = "offline-alone"
	OnlineAlone  Kind = "online-alone"
	// None: no preemption. All kernels share the GPU.
	None Kind = "none"
	// BlockWait: offline queues stop launching kernels while online work needs the GPU, and
	// online work starts when the offline kernels in flight have finished.
	BlockWait Kind = "block-wait"
	// Sequential: one request or one step at a time on each GPU, first come first served.
	Sequential Kind = "sequential"
	// TimeSlice: online and offline work take turns of Quantum while both have work.
	TimeSlice Kind = "time-slice"
	// Reset (as REEF): the offline kernels in flight are killed at once, and repeated later.
	Reset Kind = "reset"
	// Throttle (as XSched at level 1): offline queues stop launching kernels while online work
	// needs the GPU. It starts at once and shares the GPU with the kernels in flight.
	Throttle Kind = "throttle"
	// GPreempt: the daemon's core with Policy.
	GPreempt Kind = "gpreempt"
	// Oracle suspends and resumes like GPreempt and at the same costs, but knows all arrivals:
	// offline work is off the GPU exactly when kernels are ready, and comes back when the
	// gap is longer than a resume and a suspend. It needs no announcement.
	Oracle Kind = "oracle"
)

// Kinds returns every kind.
func Kinds() []Kind {
	return []Kind{OfflineAlone, OnlineAlone, None, BlockWait, Sequential, TimeSlice, Reset, Throttle, GPreempt, Oracle}
}

// DefaultQuantum is the turn of TimeSlice where a scheme has none.
const DefaultQuantum = 10 * time.Millisecond

// Scheme is a way of sharing GPUs with its parameters.
type Scheme struct {
	Kind Kind
	// Policy is that of GPreempt.
	Policy scheduler.Policy
	// Quantum is the turn of TimeSlice, 0 for DefaultQuantum.
	Quantum time.Duration
	// InFlight is how many offline kernels of a queue are in flight under BlockWait and
	// Throttle, the running one included, 0 for 1.
	InFlight int
}

// Costs are the times that preempting takes. None was measured on hardware.
type Costs struct {
	// Suspend and Resume are how long the call for one process with queues on one GPU
	// takes, the runlist cycle, the saving and the restoring of waves included. A process
	// with more GPUs has one cycle, Disturb, for each more.
	Suspend, Resume time.Duration
	// PerQueue is added for each queue of the process.
	PerQueue time.Duration
	// Disturb is the part of a Suspend or Resume in which nothing runs on the GPU, also not
	// the online work: a runlist cycle of HWS. 0 as with MES. It is also what a change of
	// turns costs under TimeSlice. At most Suspend and Resume.
	Disturb time.Duration
	// Notify is the way of an announcement to the core, of its answer back, and of a
	// completion to the core: client, socket and daemon.
	Notify time.Duration
	// Reset is how long killing the kernels takes under Reset.
	Reset time.Duration
}

// DefaultCosts are those of the modelled MI300X (docs/lab/simulator.md), half a round trip of the
// client's Acquire on the host of docs/performance.md, and an assumed reset of 50 us.
func DefaultCosts() Costs {
	return Costs{
		Suspend: 388 * time.Microsecond, Resume: 358 * time.Microsecond, Disturb: 300 * time.Microsecond,
		Notify: 100 * time.Microsecond, Reset: 50 * time.Microsecond,
	}
}

// CostsOf returns DefaultCosts with a Suspend and a Resume of d, three quarters of which are the
// runlist cycle, as with the modelled MI300X.
func CostsOf(d time.Duration) Costs {
	c := DefaultCosts()
	c.Suspend, c.Resume, c.Disturb = d, d, d*3/4
	return c
}

// Sharing is how kernels share a GPU that they fill together more than once. The zero value
// shares evenly.
type Sharing struct {
	// Gain is how much more they do together than one alone: 0.05 for 5 % more. Negative
	// where they disturb each other.
	Gain float64
	// Weight is the share of an offline kernel beside an online kernel of the same
	// occupancy, 0 for 1.
	Weight float64
}

// Options are the rest of a run's input.
type Options struct {
	Seed    uint64
	Costs   Costs
	Sharing Sharing
	// Paced: a service sends a request only when the one before has its result, as the clients
	// of DISB and of GPreempt's benchmark do. A late request is sent at once, and its
	// latency counts from then.
	Paced bool
	// Slots is how many queues a GPU can have mapped, 0 for all. With more, sets of them take
	// turns, whether they have work or not.
	Slots int
	// ETA is announced by each request, where its time on the CPU is not longer.
	ETA time.Duration
	// HQDBudget is that of GPreempt, in percent; 0 for none.
	HQDBudget int
	// SpanLimit is until when spans are recorded, 0 for none.
	SpanLimit time.Duration
}

// Run runs the scenario in virtual time. Requests arrive for its duration and offline work is
// counted for as long; requests that are in service then are served to their end, or marked as
// failed after as long again and ten seconds.
//
// Work is in GPU seconds: the time that the offline kernels would have needed alone, each counted
// with its occupancy. Errors are about a scenario, scheme or cost that cannot be run.
func Run(s scenario.Scenario, scheme Scheme, o Options) (evidence.Repeat, error) {
	e, err := newEngine(s, scheme, o)
	if err != nil {
		return evidence.Repeat{}, fmt.Errorf("scenario %s: %w", s.Name, err)
	}
	e.run()
	return e.out, nil
}

// Arm runs the scenario once for each seed from o.Seed on, and returns the arm with that name.
func Arm(name string, s scenario.Scenario, scheme Scheme, o Options, repeats int) (evidence.Arm, error) {
	a := evidence.Arm{Name: name, Kind: scheme.armKind()}
	switch scheme.Kind {
	case GPreempt:
		a.Mechanism, a.Policy = string(GPreempt), scheme.Policy.Preset
	default:
		a.Mechanism = string(scheme.Kind)
	}
	for range repeats {
		r, err := Run(s, scheme, o)
		if err != nil {
			return evidence.Arm{}, err
		}
		a.Repeats = append(a.Repeats, r)
		o.Seed++
	}
	return a, nil
}

func (s Scheme) armKind() evidence.ArmKind {
	switch s.Kind {
	case OfflineAlone:
		return evidence.OfflineAlone
	case OnlineAlone:
		return evidence.OnlineAlone
	case None:
		return evidence.Shared
	case GPreempt:
		return evidence.Protected
	default:
		return evidence.Baseline
	}
}

func (s Scheme) check() error {
	switch {
	case !slices.Contains(Kinds(), s.Kind):
		return fmt.Errorf("unknown scheme %q: use one of %v", s.Kind, Kinds())
	case s.Quantum < 0 || s.InFlight < 0:
		return errors.New("the quantum and the number of kernels in flight must not be negative")
	case s.Kind == GPreempt:
		return s.Policy.Validate()
	}
	return nil
}

func (c Costs) check() error {
	for _, d := range []time.Duration{c.Suspend, c.Resume, c.PerQueue, c.Disturb, c.Notify, c.Reset} {
		if d < 0 || d > time.Minute {
			return fmt.Errorf("a cost of %v is outside 0 to 1m0s", d)
		}
	}
	if c.Disturb > min(c.Suspend, c.Resume) {
		return fmt.Errorf("disturb, %v, is a part of suspend, %v, and of resume, %v: it cannot be longer", c.Disturb, c.Suspend, c.Resume)
	}
	return nil
}

func (o Options) checkSlots() error {
	if o.Slots < 0 || o.Slots == 0 && o.HQDBudget > 0 {
		return fmt.Errorf("%d slots: want 0 or more, and more than 0 with an HQD budget", o.Slots)
	}
	if most := 100 - parking.Spare; o.HQDBudget < 0 || o.HQDBudget > most {
		return fmt.Errorf("an HQD budget of %d percent: want 0 to %d", o.HQDBudget, most)
	}
	return nil
}

func (s Sharing) check() error {
	if !(s.Gain > -1 && s.Gain <= 1) || !(s.Weight >= 0 && s.Weight <= 1000) {
		return fmt.Errorf("sharing gain %v, weight %v: the gain must be above -1 and at most 1, the weight 0 to 1000", s.Gain, s.Weight)
	}
	return nil
}
