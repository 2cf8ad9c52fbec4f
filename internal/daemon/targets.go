package daemon

import (
	"errors"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/internal/preempt"
	"github.com/gpreempt/gpreempt/internal/preempt/ladder"
	"github.com/gpreempt/gpreempt/internal/server"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// attachAgain is how long after a failed attach the next one is tried.
const attachAgain = 5 * time.Second

// chooser is the part of the ladder that targets need.
type chooser interface {
	Choice(gpreempt.ProcessKey) (ladder.Choice, bool)
	Forget(gpreempt.ProcessKey)
}

// attacher is the part of the executor that targets need.
type attacher interface {
	Attach(gpreempt.ProcessKey)
	Detach(gpreempt.ProcessKey)
}

// targets joins what discovery sees, what rules and admins say of it, and
// whether a mechanism is attached, and keeps the scheduler told. Its methods are
// safe for concurrent use.
type targets struct {
	inventory *inventory.Inventory
	attacher  attacher
	chooser   chooser
	post      func(scheduler.Event)
	now       func() time.Time
	log       *zap.Logger

	mu         sync.Mutex // guards all below; taken before the scheduler's lock
	classifier *classify.Classifier
	known      map[gpreempt.ProcessKey]*knownTarget
}

type knownTarget struct {
	proc     discovery.Proc
	decision classify.Decision
	// override is an admin's word; it holds until expires, or for good when that is zero.
	override *classify.Decision
	expires  time.Time

	attaching bool // Attach was called and not undone by Detach
	ready     bool
	failure   error
	retryAt   time.Time
	// warned: the log has it that the target cannot be suspended.
	warned bool
}

// apply takes in what a scan found, and does what is due at this time.
func (t *targets) apply(diff inventory.Diff) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, key := range diff.Gone {
		if t.known[key] == nil {
			continue
		}
		delete(t.known, key)
		t.post(scheduler.TargetGone{Target: key})
		t.attacher.Detach(key)
		t.chooser.Forget(key)
	}
	for _, proc := range slices.Concat(diff.Born, diff.Changed) {
		k := t.known[proc.Key]
		if k == nil {
			k = &knownTarget{}
			t.known[proc.Key] = k
		}
		k.proc = proc
		t.decide(k)
	}
	t.due()
}

// due ends overrides whose time is over and tries failed attaches again.
func (t *targets) due() {
	now := t.now()
	for _, k := range t.known {
		if k.override != nil && !k.expires.IsZero() && !now.Before(k.expires) {
			k.override = nil
			t.decide(k)
		}
		if k.failure != nil && k.decision.Class == gpreempt.Offline && !now.Before(k.retryAt) {
			k.failure = nil
			t.attacher.Detach(k.proc.Key)
			t.attacher.Attach(k.proc.Key)
		}
	}
}

// setRules takes over new rules and judges every process again.
func (t *targets) setRules(c *classify.Classifier) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.classifier = c
	for _, k := range t.known {
		t.decide(k)
	}
}

// Override puts an admin's word above the rules, for ttl or for as long as the
// process lives when ttl is 0. A nil decision takes it back. It tells whether the
// process is known.
func (t *targets) Override(key gpreempt.ProcessKey, decision *classify.Decision, ttl time.Duration) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := t.known[key]
	if k == nil {
		return false
	}
	k.override, k.expires = decision, time.Time{}
	if ttl > 0 {
		k.expires = t.now().Add(ttl)
	}
	t.decide(k)
	return true
}

// decide judges a process, tells the scheduler, and attaches to what became
// offline or lets go of what no longer is.
func (t *targets) decide(k *knownTarget) {
	k.decision = t.classifier.Decide(k.proc.Process)
	if k.override != nil {
		k.decision = *k.override
	}
	offline := k.decision.Class == gpreempt.Offline
	if !offline {
		k.ready, k.failure = false, nil
	}
	t.tell(k)
	switch {
	case offline && !k.attaching:
		k.attaching = true
		t.attacher.Attach(k.proc.Key)
	case !offline && k.attaching:
		k.attaching = false
		t.attacher.Detach(k.proc.Key)
	}
}

func (t *targets) tell(k *knownTarget) {
	gpus := make([]gpreempt.GPUID, 0, 1)
	for _, q := range k.proc.Queues {
		if !slices.Contains(gpus, q.GPU) {
			gpus = append(gpus, q.GPU)
		}
	}
	slices.Sort(gpus)
	t.post(scheduler.TargetSeen{
		Target: k.proc.Key, Job: k.proc.Cgroup.Path, Class: k.decision.Class, Priority: k.decision.Priority,
		GPUs: gpus, Queues: t.inventory.QueuesBorn(k.proc.Key), Ready: k.ready,
	})
}

// attached hears how an Attach went, or that what was attached can suspend no
// longer: then another Attach follows.
func (t *targets) attached(key gpreempt.ProcessKey, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := t.known[key]
	if k == nil {
		t.chooser.Forget(key) // it left before
		return
	}
	if !k.attaching || errors.Is(err, preempt.ErrGone) {
		return // the next scan finds it gone
	}
	k.ready, k.failure = err == nil, err
	if err != nil {
		k.retryAt = t.now().Add(attachAgain)
		level := zap.WarnLevel
		if k.warned {
			level = zap.DebugLevel // it is tried every few seconds
		}
		t.log.Log(level, "a target cannot be suspended", zap.Stringer("target", key), zap.String("comm", k.proc.Comm), zap.Error(err))
	}
	k.warned = err != nil
	t.tell(k)
}

// Facts gives what is known of a process.
func (t *targets) Facts(key gpreempt.ProcessKey) (server.Facts, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := t.known[key]
	if k == nil {
		return server.Facts{}, false
	}
	facts := server.Facts{Decision: k.decision}
	if k.ready {
		choice, _ := t.chooser.Choice(key)
		facts.Mechanism, facts.MechanismWhy = choice.Mechanism, choice.String()
	}
	if k.failure != nil {
		facts.AttachError = k.failure.Error()
	}
	return facts, true
}
