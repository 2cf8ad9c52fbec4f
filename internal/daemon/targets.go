package daemon

import (
	"errors"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/internal/logkey"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/mechanism/ladder"
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
	// container returns what is known of a container.
	container func(gpreempt.Cgroup) (c gpreempt.Container, known bool)
	attacher  attacher
	chooser   chooser
	post      func(scheduler.Event)
	now       func() time.Time
	log       *zap.Logger

	mu         sync.Mutex // guards all below; taken before the scheduler's lock
	classifier *classify.Classifier
	known      map[gpreempt.ProcessKey]*knownTarget
	// matched and decided count processes by rule, since the rules were loaded; the
	// tags come last.
	matched, decided []uint64
	// rereads is how many scans have to end before what new rules look at was read.
	rereads int
}

type knownTarget struct {
	proc     discovery.Proc
	decision classify.Decision
	// override is an admin's word; it holds until expires, or for good when that is zero.
	override *classify.Decision
	expires  time.Time
	// matching reports which rules match; everMatched and everDecided which it was
	// counted for.
	matching, everMatched, everDecided []bool

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
	t.reread()
	t.due()
}

// subset reports whether all of some sorted words are among others.
func subset(some, others []string) bool {
	return !slices.ContainsFunc(some, func(word string) bool { return !slices.Contains(others, word) })
}

// reread judges everything again once what new rules look at was read.
func (t *targets) reread() {
	if t.rereads == 0 {
		return
	}
	if t.rereads--; t.rereads > 0 {
		return
	}
	for key, k := range t.known {
		if proc, ok := t.inventory.Process(key); ok {
			k.proc = proc
			t.decide(k)
		}
	}
}

// due ends overrides whose time is over and tries failed attaches again.
func (t *targets) due() {
	now := t.now()
	for _, k := range t.known {
		t.container(k.proc.Cgroup) // what is asked for is kept up to date
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
	if t.classifier != nil && len(t.known) > 0 && !subset(c.Env(), t.classifier.Env()) {
		t.rereads = 2 // the scan that goes on may have begun before
		for _, k := range t.known {
			k.proc.Unread = true
		}
	}
	t.classifier = c
	rules := len(c.Names())
	t.matched, t.decided = make([]uint64, rules), make([]uint64, rules)
	for _, k := range t.known {
		k.everMatched, k.everDecided = nil, nil
		t.decide(k)
	}
}

// told hears that the facts of a process's queues changed.
func (t *targets) told(proc discovery.Proc) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if k := t.known[proc.Key]; k != nil {
		t.decide(k)
	}
}

// containerTold hears that something new is known of a container.
func (t *targets) containerTold(id string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, k := range t.known {
		if k.proc.Cgroup.ContainerID == id {
			t.decide(k)
		}
	}
}

// subject is all that a process is judged by.
func (t *targets) subject(k *knownTarget) *classify.Subject {
	s := &classify.Subject{
		Process: k.proc.Process, Queues: t.inventory.QueuesOf(k.proc.Key), GPUs: gpusWithQueues(t.inventory.GPUs(), k.proc),
	}
	s.Container, s.ContainerKnown = t.container(k.proc.Cgroup)
	return s
}

// count takes note of the rules that match a process.
func (t *targets) count(k *knownTarget, s *classify.Subject) {
	k.matching = t.classifier.Matching(s, k.matching[:0])
	if k.everMatched == nil {
		k.everMatched, k.everDecided = make([]bool, len(k.matching)), make([]bool, len(k.matching))
	}
	for n, matches := range k.matching {
		if matches && !k.everMatched[n] {
			k.everMatched[n] = true
			t.matched[n]++
		}
	}
	if n := k.deciding(); n >= 0 && !k.everDecided[n] {
		k.everDecided[n] = true
		t.decided[n]++
	}
}

// deciding returns the rule that decides; -1 when none does.
func (k *knownTarget) deciding() int {
	if k.override != nil || k.decision.Waits {
		return -1
	}
	return slices.Index(k.matching, true)
}

// RuleCounts describes how often each rule matched.
func (t *targets) RuleCounts() []server.RuleCount {
	t.mu.Lock()
	defer t.mu.Unlock()
	classes := t.classifier.Classes()
	counts := make([]server.RuleCount, len(t.matched))
	for n, name := range t.classifier.Names() {
		counts[n] = server.RuleCount{Rule: name, Class: classes[n], Matched: t.matched[n], Decided: t.decided[n]}
	}
	for _, k := range t.known {
		for n, matches := range k.matching {
			if matches {
				counts[n].MatchesNow++
			}
		}
		if n := k.deciding(); n >= 0 {
			counts[n].DecidesNow++
		}
	}
	return counts
}

// Explain goes through what could classify a process.
func (t *targets) Explain(key gpreempt.ProcessKey) []classify.Step {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := t.known[key]
	if k == nil {
		return nil
	}
	return t.classifier.Explain(t.subject(k), k.override)
}

// Override puts an admin's word above the rules, for ttl or for as long as the
// process lives when ttl is 0. A nil decision takes it back. It reports whether the
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
// offline or releases what no longer is.
func (t *targets) decide(k *knownTarget) {
	s := t.subject(k)
	k.decision = t.classifier.Decide(s)
	t.count(k, s)
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
	if !k.attaching || errors.Is(err, mechanism.ErrGone) {
		return // the next scan finds it gone
	}
	k.ready, k.failure = err == nil, err
	if errors.Is(err, mechanism.ErrReplaced) {
		k.retryAt = t.now() // with the next scan
		t.tell(k)
		return
	}
	if err != nil {
		k.retryAt = t.now().Add(attachAgain)
		level := zap.WarnLevel
		if k.warned {
			level = zap.DebugLevel // it is tried every few seconds
		}
		t.log.Log(level, "a target cannot be suspended", logkey.Target(key), logkey.Comm(k.proc.Comm), logkey.Err(err))
	}
	k.warned = err != nil
	t.tell(k)
}

// Facts returns what is known of a process.
func (t *targets) Facts(key gpreempt.ProcessKey) (server.Facts, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := t.known[key]
	if k == nil {
		return server.Facts{}, false
	}
	facts := server.Facts{Decision: k.decision}
	facts.Container, _ = t.container(k.proc.Cgroup)
	if k.ready {
		choice, _ := t.chooser.Choice(key)
		facts.Mechanism, facts.MechanismWhy = choice.Mechanism, choice.String()
	}
	if k.failure != nil {
		facts.AttachError = k.failure.Error()
	}
	return facts, true
}
