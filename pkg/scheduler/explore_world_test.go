package scheduler

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// The world of the explorer: what the environment of a core can do, two GPUs, two jobs and
// two clients, each with at most one lease. A situation is a plain value, so that it can be
// copied; the checks in explore_checks_test.go hold the core against it.

const (
	mostProcesses = 3
	worldGPUs     = 2
	worldClients  = 2
	worldUnits    = 2

	leaseTTL  = 8 * time.Millisecond
	leaseWait = 2 * time.Millisecond
	leaseETA  = time.Millisecond
	parkTime  = 4 * time.Millisecond
)

// modelLease is the live lease of a client.
type modelLease struct {
	id       LeaseID
	offer    uint8 // which of the offers it is
	live     bool
	started  bool
	answered bool
	created  Time
}

// modelUnit is what the promises about a job need.
type modelUnit struct {
	away      bool
	awaySince Time
	// coveredUntil is when the last lease that outranks it ended, or now.
	coveredUntil Time
	// budget is its share budget at chargedAt.
	budget    time.Duration
	chargedAt Time
	// capped: the share cap has it suspended.
	capped bool
}

type situation struct {
	now       Time
	processes [mostProcesses]modelProcess
	// quarantined is until when a process that failed is not suspended.
	quarantined [mostProcesses]Time
	resisted    [mostProcesses]bool // a result said that it resists
	held        [mostProcesses]Time // an admin keeps it running until then
	parked      [mostProcesses]Time // a pin has it suspended until then, to keep slots free
	// credit is how long the share cap permitted each process to run at creditAt.
	credit    [mostProcesses]time.Duration
	creditAt  Time
	leases    [worldClients]modelLease
	units     [worldUnits]modelUnit
	breakers  [worldGPUs]Time
	policy    uint8
	draining  bool
	lastLease LeaseID
}

// place is a process of a layout.
type place struct {
	unit     uint8
	job      string
	priority gpreempt.Priority
	gpus     []gpreempt.GPUID
	// kin has the owner of the layout where the first client announces the work of this place.
	kin []gpreempt.ProcessKey
}

// layout is which processes there are; alike are the renamings that change nothing.
type layout struct {
	name   string
	places []place
	// parks: processes are parked.
	parks bool
	// owner is that of the first client's leases.
	owner gpreempt.ProcessKey
	// onResist is that of every process.
	onResist gpreempt.Resistance
	alike    []renaming
}

var (
	onFirst  = []gpreempt.GPUID{1}
	onSecond = []gpreempt.GPUID{2}
	onBoth   = []gpreempt.GPUID{1, 2}
)

var (
	same    = [4]uint8{0, 1, 2, 3}
	swapped = [4]uint8{0, 2, 1, 3}
)

// layouts: a job on two GPUs beside a process on both, and one process on each GPU. In both,
// nothing changes when the GPUs are exchanged together with the first two processes, nor
// when the clients are. In the third, processes are parked. In the
// fourth, the first client announces the work of one of them. In the last, a process is killed when it
// resists.
var layouts = []layout{
	{name: "job", places: []place{{0, "a", 0, onFirst, nil}, {0, "a", 0, onSecond, nil}, {1, "", 5, onBoth, nil}}, alike: []renaming{
		{same, same, same},
		{swapped, swapped, same},
		{same, same, swapped},
		{swapped, swapped, swapped},
	}},
	{name: "pair", places: []place{{0, "", 0, onFirst, nil}, {1, "", 0, onSecond, nil}}, alike: []renaming{
		{same, same, same},
		{swapped, swapped, same},
		{same, same, swapped},
		{swapped, swapped, swapped},
	}},
	{
		name: "parks", places: []place{{0, "", 0, onFirst, nil}, {1, "", 5, onFirst, nil}}, parks: true,
		alike: []renaming{{same, same, same}, {same, same, swapped}},
	},
	{
		name: "owner", places: []place{{0, "", 0, onFirst, []gpreempt.ProcessKey{procKey(3)}}, {1, "", 0, onFirst, nil}}, owner: procKey(3),
		alike: []renaming{{same, same, same}},
	},
	{
		name: "resist", places: []place{{0, "", 0, onFirst, nil}}, onResist: gpreempt.Resistance{KillAfter: 1},
		alike: []renaming{{same, same, same}, {same, same, swapped}},
	},
}

// offer is an announcement that a client can make.
type offer struct {
	gpus     []gpreempt.GPUID
	priority gpreempt.Priority
	eta      time.Duration
}

var offers = []offer{{onFirst, 10, 0}, {onSecond, 10, 0}, {onBoth, 10, 0}, {onBoth, 3, leaseETA}}

// policies returns what a reload can bring into force. With a floor or a cap of a half a bucket fills
// as fast as it empties, so that nothing is rounded.
func policies() []Policy {
	base := Policy{
		Preset: "no floor", ShareCap: 1, ShareWindow: 16 * time.Millisecond, MaxSuspend: 6 * time.Millisecond,
		MinRun: 3 * time.Millisecond, MaxWait: leaseWait, DefaultTTL: leaseTTL, MaxTTL: time.Second,
	}
	floor := base
	floor.Preset, floor.ShareFloor, floor.ShareWindow = "floor", 0.5, 8*time.Millisecond
	floor.Linger = time.Millisecond
	shadow := base
	shadow.Preset, shadow.Shadow = "shadow", true
	capped := base
	capped.Preset, capped.ShareCap, capped.ShareWindow = "cap", 0.5, 8*time.Millisecond
	return []Policy{base, floor, shadow, capped}
}

var worldLimits = Limits{LeasesPerClient: 1, LeasesPerUser: 1, LeasesTotal: 2}

func procKey(n uint8) gpreempt.ProcessKey { return gpreempt.ProcessKey{PID: int32(n), Start: 1} }

// explored is a core in its world.
type explored struct {
	*layout
	policies []Policy
	core     *Core
	situation
	bug *seededBug
	// moves are those of the situation, kept between calls.
	moves []move
}

// newExplored returns a world in which everything is attached and nothing has been announced.
func newExplored(l *layout) (*explored, error) {
	x := &explored{layout: l, policies: policies()}
	x.core = New(x.policies[0], worldLimits)
	x.start()
	x.now = time.Hour // so that no point in time is 0
	for id := range gpreempt.GPUID(worldGPUs) {
		if err := x.step(GPUAdded{GPU: id + 1}); err != nil {
			return nil, err
		}
	}
	for i := range l.places {
		x.processes[i] = modelProcess{alive: true, queues: 1, born: 1, reported: 1}
		if err := x.step(x.seen(i)); err != nil {
			return nil, err
		}
	}
	for range 100 { // attach, whatever the core waits for before
		moved := false
		for i := range l.places {
			if p := &x.processes[i]; p.flight != ActRecord {
				moved = true
				p.perform()
				if err := x.report(i); err != nil {
					return nil, err
				}
			}
		}
		if due, armed := x.core.NextDeadline(); !moved && armed {
			x.now = due
			if err := x.step(Tick{}); err != nil {
				return nil, err
			}
		}
	}
	for i := range l.places {
		if !x.core.targets[procKey(uint8(i)+1)].ready() {
			return nil, fmt.Errorf("process %d is not attached at the start", i+1)
		}
	}
	return x, nil
}

func (x *explored) seen(i int) TargetSeen {
	at, p := x.places[i], &x.processes[i]
	class := gpreempt.Offline
	if p.unmanaged {
		class = gpreempt.Unmanaged
	}
	return TargetSeen{Target: procKey(uint8(i) + 1), Job: at.job, Class: class, Priority: at.priority, GPUs: at.gpus, Kin: at.kin, Queues: uint64(p.born), OnResist: x.onResist}
}

// moveKind is what the environment can do.
type moveKind uint8

// failures are the results of a moveFail.
var failures = [...]Cause{CauseFailed, CauseHardware}

const (
	moveClock    moveKind = iota // time passes until the next deadline, and the runner is late
	moveTick                     // the runner wakes
	moveAnnounce                 // client n, offer k
	moveComplete
	moveClientGone
	movePerform // the action in flight on process n takes effect
	moveFail    // it fails: k is that of failures
	moveReport  // its result arrives
	moveBirth
	moveReportBirth
	moveDie
	moveReportDeath
	moveReplace
	moveReportLoss
	moveDebug
	moveUndebug
	moveReclassify
	moveAlarm // GPU n
	moveDrain
	moveReload // policy n
	moveHold
	moveStuck // the action of process n is found to wait for the process
	movePark  // process n is parked, or no longer
	moveHung  // the action of process n is found to wait for something else
)

var moveNames = []string{
	"time passes until the next deadline", "the runner wakes", "client %d announces %s", "client %d completes", "client %d disconnects", "%s of process %d takes effect",
	"%s of process %d fails: %v", "the result of %s of process %d arrives", "process %d creates a queue", "the new queue of process %d is reported", "process %d dies",
	"the death of process %d is reported", "process %d replaces its program", "the loss of the session with process %d is reported", "a debugger attaches to process %d",
	"the debugger of process %d ends", "process %d is classified", "an alarm of GPU %d", "drain is switched", "a reload brings policy %q", "an admin holds process %d",
	"the action of process %d is found to wait for the process", "process %d is parked, or no longer", "the action of process %d is found to wait for something else",
}

type move struct {
	kind moveKind
	n, k uint8
}

// possible returns the moves of the situation, in a fixed order.
func (x *explored) possible() []move {
	x.moves = x.moves[:0]
	add := func(can bool, kind moveKind, n, k int) {
		if can && (x.bug == nil || x.bug.needs(move{kind: kind})) {
			x.moves = append(x.moves, move{kind, uint8(n), uint8(k)})
		}
	}
	due, armed := x.core.NextDeadline()
	add(armed && due > x.now, moveClock, 0, 0)
	add(armed && due <= x.now, moveTick, 0, 0)
	for c := range x.leases {
		for k := range offers {
			add(!x.leases[c].live, moveAnnounce, c, k)
		}
		add(x.leases[c].live, moveComplete, c, 0)
		add(x.leases[c].live, moveClientGone, c, 0)
	}
	for i := range x.places {
		p := &x.processes[i]
		flying, known := p.flight != ActRecord, x.core.targets[procKey(uint8(i)+1)] != nil
		add(flying && !p.done, movePerform, i, 0)
		add(flying && !p.done && p.alive, moveFail, i, 0)
		add(flying && !p.done && p.alive, moveFail, i, 1)
		add(flying && p.done, moveReport, i, 0)
		add(p.alive && p.queues < mostQueues, moveBirth, i, 0)
		add(p.alive && known && p.born > p.reported && (p.enabled && p.ours && p.session || !p.session), moveReportBirth, i, 0)
		add(p.alive, moveDie, i, 0)
		add(!p.alive && known, moveReportDeath, i, 0)
		add(p.alive && p.session && p.enabled, moveReplace, i, 0)
		add(p.session && known && (!p.enabled || p.knownGap()) && p.flight == ActRecord, moveReportLoss, i, 0)
		add(p.alive && !p.foreigner && p.debugger != aForeigner, moveDebug, i, 0)
		add(p.foreigner, moveUndebug, i, 0)
		add(p.alive && known, moveReclassify, i, 0)
		add(p.alive && known, moveHold, i, 0)
		add(x.parks && p.alive && known, movePark, i, 0)
		add(p.inspect != 0, moveStuck, i, 0)
		add(p.inspect != 0, moveHung, i, 0)
	}
	for g := range x.breakers {
		add(true, moveAlarm, g, 0)
	}
	add(true, moveDrain, 0, 0)
	for n := range x.policies {
		add(n != int(x.policy), moveReload, n, 0)
	}
	return x.moves
}

// make makes a move, and returns what it broke.
func (x *explored) make(m move) error {
	x.noteCover()
	p := &x.processes[min(int(m.n), mostProcesses-1)]
	switch m.kind {
	case moveClock:
		x.now, _ = x.core.NextDeadline()
		return nil
	case moveTick:
		return x.step(Tick{})
	case moveAnnounce:
		return x.announce(int(m.n), int(m.k))
	case moveComplete:
		x.leases[m.n].live = false
		return x.step(LeaseFinished{Lease: x.leases[m.n].id, End: EndCompleted})
	case moveClientGone:
		x.leases[m.n].live = false
		return x.step(ClientGone{Client: ClientID{PID: int32(m.n) + 1}, End: EndDisconnected})
	case movePerform:
		p.perform()
		if x.bug != nil && x.bug.perform != nil {
			x.bug.perform(p)
		}
	case moveFail:
		p.fail(failures[m.k])
	case moveReport:
		return x.report(int(m.n))
	case moveBirth:
		p.queues++
		p.born++
	case moveReportBirth:
		if p.session {
			p.reported++
			return x.step(Running{Target: procKey(m.n + 1), Cause: CauseNewQueue})
		}
		p.reported = p.born
		return x.step(x.seen(int(m.n)))
	case moveDie:
		p.die()
	case moveReportDeath:
		return x.step(TargetGone{Target: procKey(m.n + 1)})
	case moveReplace:
		p.replace()
	case moveReportLoss:
		result := CauseReplaced
		if p.enabled {
			result = gpreempt.ReasonResisted
			x.resisted[m.n] = true
		}
		return x.step(Lost{Target: procKey(m.n + 1), Result: result})
	case moveDebug:
		p.debug()
	case moveUndebug:
		p.undebug()
	case moveReclassify:
		x.reclassify(int(m.n))
		return x.step(x.seen(int(m.n)))
	case movePark:
		ev := Pin{Target: procKey(m.n + 1), Cause: CauseHQDRoom}
		if x.now >= x.parked[m.n] {
			ev.Cause, ev.For = CauseHQDBudget, parkTime
		}
		if x.now >= x.held[m.n] {
			x.parked[m.n] = x.now + ev.For
		}
		return x.step(ev)
	case moveAlarm:
		x.breakers[m.n] = x.now + BreakerTime
		x.doubt(m.n)
		return x.step(Alarm{GPU: gpreempt.GPUID(m.n) + 1})
	case moveDrain:
		x.draining = !x.draining
		return x.step(Drain{On: x.draining})
	case moveReload:
		x.takePolicy(m.n)
		return x.step(PolicyChanged{Policy: x.policies[m.n]})
	case moveHold:
		x.quarantined[m.n], x.held[m.n], x.parked[m.n] = x.now, x.now+leaseTTL, x.now
		return x.step(Pin{Target: procKey(m.n + 1), Cause: CauseHold, For: leaseTTL})
	case moveStuck, moveHung:
		return x.answerInspect(int(m.n), m.kind == moveStuck)
	}
	return x.checkModel()
}

func (x *explored) announce(client, k int) error {
	o := offers[k]
	x.lastLease++
	req := LeaseRequested{
		Client: ClientID{PID: int32(client) + 1}, User: []UserID{"u1", "u2"}[client], RequestID: strconv.Itoa(int(x.lastLease)),
		GPUs: o.gpus, Priority: o.priority, TTL: leaseTTL, MaxWait: leaseWait, ETA: o.eta,
	}
	if client == 0 {
		req.Owner = x.owner
	}
	if due, armed := x.core.NextDeadline(); armed && due <= x.now {
		if err := x.step(Tick{}); err != nil {
			return err
		}
	}
	if id, err := x.core.Admit(&req); err != nil || id != 0 {
		return fmt.Errorf("the announcement of client %d is not admitted: lease %d, %w", client+1, id, err)
	}
	req.Lease = x.lastLease
	x.leases[client] = modelLease{id: req.Lease, offer: uint8(k), live: true, created: x.now}
	return x.step(req)
}

// report posts the result of the action in flight.
func (x *explored) report(i int) error {
	p, key := &x.processes[i], procKey(uint8(i)+1)
	x.passTime() // what is due comes before the result
	kind, result, seq := p.flight, p.result, p.seq
	p.flight, p.done, p.seq, p.result = ActRecord, false, 0, ""
	if p.thenDetach {
		p.thenDetach, p.flight = false, ActDetach
	}
	if kind == ActSuspend && result == "" {
		x.disbelieve(i)
	}
	p.doubted = 0
	x.takeResult(i, kind, result)
	var failed []gpreempt.GPUID
	if result == CauseHardware {
		failed = x.places[i].gpus
	}
	switch kind {
	case ActAttach:
		return x.step(Attached{Target: key, Result: result, FailedGPUs: failed, ReportsBirths: true})
	case ActDetach:
		return x.step(Detached{Target: key, Result: result, FailedGPUs: failed})
	case ActSuspend:
		return x.step(Suspended{Target: key, Seq: seq, Result: result, FailedGPUs: failed})
	default:
		return x.step(Resumed{Target: key, Seq: seq, Result: result, FailedGPUs: failed})
	}
}

// text describes a move before it is made.
func (x *explored) text(m move) string {
	kinds := map[ActionKind]string{ActAttach: "the attach", ActDetach: "the detach", ActSuspend: "the suspend", ActResume: "the resume"}
	format := moveNames[m.kind]
	switch m.kind {
	case moveAnnounce:
		o := offers[m.k]
		return fmt.Sprintf(format, m.n+1, fmt.Sprintf("work of priority %d on GPUs %v", o.priority, o.gpus))
	case movePerform, moveReport:
		return fmt.Sprintf(format, kinds[x.processes[m.n].flight], m.n+1)
	case moveFail:
		return fmt.Sprintf(format, kinds[x.processes[m.n].flight], m.n+1, failures[m.k])
	case moveReload:
		return fmt.Sprintf(format, x.policies[m.n].Preset)
	case moveClock, moveTick, moveDrain:
		return format
	default:
		return fmt.Sprintf(format, m.n+1)
	}
}

// covers reports whether a live lease that has started outranks a job on one of its GPUs.
func (x *explored) covers(g uint8) bool {
	for c := range x.leases {
		l := &x.leases[c]
		if !l.live || !l.started || !x.outranks(c, g) {
			continue
		}
		for i, at := range x.places {
			if at.unit == g && !x.processes[i].unmanaged && x.core.targets[procKey(uint8(i)+1)] != nil &&
				slices.ContainsFunc(at.gpus, func(id gpreempt.GPUID) bool { return slices.Contains(offers[l.offer].gpus, id) }) {
				return true
			}
		}
	}
	return false
}
