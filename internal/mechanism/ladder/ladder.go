// Package ladder hides which mechanism holds a target: the best one that can be
// used on it, and the next when that fails.
package ladder

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/logkey"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const (
	// firstBackOff is how long a mechanism that failed on a target is left alone;
	// each further failure doubles it up to lastBackOff.
	firstBackOff = 10 * time.Second
	lastBackOff  = time.Hour
)

// Verdict is what is known against using a mechanism on a target, beyond what the
// mechanism can see itself.
type Verdict struct {
	// Evidence says what was looked at. It is the hazard table's word.
	Evidence mechanism.Evidence
	// Limited are the GPUs on which the mechanism may hold one target at a time.
	Limited []gpreempt.GPUID
}

// Config is what a Ladder needs.
type Config struct {
	// Rungs are the mechanisms, best first.
	Rungs []mechanism.Mechanism
	// Judge is asked before a mechanism is used on a target; nil allows all.
	Judge func(mechanism string, target gpreempt.ProcessKey) Verdict
	// Lost hears that a session can suspend no longer; another Attach may find
	// another mechanism. It must not block.
	Lost func(target gpreempt.ProcessKey, err error)
	Now  func() time.Time
	Log  *zap.Logger
}

// Rejection is a mechanism that was not chosen.
type Rejection struct {
	Mechanism string
	// Why says what stood in the way, and Remedy what to do about it, if anything.
	Why, Remedy string
}

// Choice is which mechanism holds a target, and why.
type Choice struct {
	// Mechanism is "" when none can be used.
	Mechanism string
	Why       string
	// Rejected are the better ones, best first.
	Rejected []Rejection
}

// String says why it was chosen, and why the better ones were not, in one line.
func (c Choice) String() string {
	if len(c.Rejected) == 0 {
		return c.Why
	}
	return c.Why + "; not " + (&NotSuspendable{c.Rejected}).Error()
}

// Ladder chooses mechanisms. Its methods may be called by several goroutines at
// once.
type Ladder struct {
	cfg Config

	mu       sync.Mutex // guards all below; not held while a mechanism is called
	choices  map[gpreempt.ProcessKey]Choice
	failures map[rung]failure
	held     map[slot]gpreempt.ProcessKey
}

// rung is a mechanism on a target, slot a limited mechanism on a GPU.
type (
	rung struct {
		mechanism string
		target    gpreempt.ProcessKey
	}
	slot struct {
		mechanism string
		gpu       gpreempt.GPUID
	}
	failure struct {
		err   error
		times int
		until time.Time
	}
)

// New returns a ladder that holds no target.
func New(cfg Config) *Ladder {
	return &Ladder{
		cfg:      cfg,
		choices:  map[gpreempt.ProcessKey]Choice{},
		failures: map[rung]failure{},
		held:     map[slot]gpreempt.ProcessKey{},
	}
}

// NotSuspendable reports that no mechanism can hold a target.
type NotSuspendable struct{ Rejected []Rejection }

func (e *NotSuspendable) Error() string {
	if len(e.Rejected) == 0 {
		return "there is no mechanism to hold it with: the config key mechanisms names those to use, gpctl status says what keeps them away"
	}
	parts := make([]string, len(e.Rejected))
	for i, r := range e.Rejected {
		parts[i] = r.Mechanism + ": " + r.Why
		if r.Remedy != "" {
			parts[i] += " (" + r.Remedy + ")"
		}
	}
	return strings.Join(parts, "; ")
}

// Attach takes the first mechanism that can be used on the target and is not being
// left alone after a failure. It returns mechanism.ErrGone when the process left and
// *NotSuspendable when no mechanism can be used.
func (l *Ladder) Attach(ctx context.Context, target gpreempt.ProcessKey) (mechanism.Session, error) {
	chosen, choice, err := l.climb(ctx, target, len(l.cfg.Rungs))
	if err != nil {
		return nil, err
	}
	l.setChoice(target, choice)
	if chosen == nil {
		return nil, &NotSuspendable{choice.Rejected}
	}
	return newSession(l, target, chosen), nil
}

func (l *Ladder) setChoice(target gpreempt.ProcessKey, c Choice) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.choices[target] = c
}

// Choice reports what holds the target, or why nothing does; false when no Attach
// was tried.
func (l *Ladder) Choice(target gpreempt.ProcessKey) (Choice, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c, ok := l.choices[target]
	return c, ok
}

// Survey reports which mechanism an Attach would take as far as can be seen without
// touching the target.
func (l *Ladder) Survey(ctx context.Context, target gpreempt.ProcessKey) Choice {
	var choice Choice
	for _, m := range l.cfg.Rungs {
		if no, _ := l.judge(m, target); no != nil {
			choice.Rejected = append(choice.Rejected, *no)
			continue
		}
		capability := m.Probe(ctx, target)
		if capability.Usable() {
			choice.Mechanism, choice.Why = m.Name(), capability.Why()
			return choice
		}
		choice.Rejected = append(choice.Rejected, rejected(m, capability))
	}
	return choice
}

// Forget drops what is known of a target that left.
func (l *Ladder) Forget(target gpreempt.ProcessKey) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.choices, target)
	for r := range l.failures {
		if r.target == target {
			delete(l.failures, r)
		}
	}
}

// Lost takes the word of a mechanism that its session can suspend no longer. It
// does not block.
func (l *Ladder) Lost(mechanism string, target gpreempt.ProcessKey, err error) {
	l.failed(rung{mechanism, target}, err)
	l.mu.Lock()
	delete(l.choices, target)
	l.mu.Unlock()
	l.cfg.Lost(target, err)
}

// chosen is a session of one mechanism with what it occupies.
type chosen struct {
	inner mechanism.Session
	index int // in Rungs
	slots []slot
}

// climb tries the rungs above below, best first. No session and no error means
// that none can be used.
func (l *Ladder) climb(ctx context.Context, target gpreempt.ProcessKey, below int) (*chosen, Choice, error) {
	var choice Choice
	for i, m := range l.cfg.Rungs[:below] {
		no, slots := l.judge(m, target)
		if no == nil {
			no, slots = l.reserve(m, target, slots)
		}
		if no != nil {
			choice.Rejected = append(choice.Rejected, *no)
			continue
		}
		inner, why, no, err := l.try(ctx, m, target)
		if inner == nil {
			l.free(slots, target)
		}
		if err != nil {
			return nil, Choice{}, err
		}
		if no != nil {
			choice.Rejected = append(choice.Rejected, *no)
			continue
		}
		choice.Mechanism, choice.Why = m.Name(), why
		return &chosen{inner: inner, index: i, slots: slots}, choice, nil
	}
	return nil, choice, nil
}

// judge reports why m is not to be used on target before it is asked itself, or else
// which slots it would need.
func (l *Ladder) judge(m mechanism.Mechanism, target gpreempt.ProcessKey) (*Rejection, []slot) {
	l.mu.Lock()
	f, failed := l.failures[rung{m.Name(), target}]
	l.mu.Unlock()
	if failed && l.cfg.Now().Before(f.until) {
		return &Rejection{
			Mechanism: m.Name(),
			Why:       fmt.Sprintf("it failed on this target and is left alone until %s: %v", f.until.UTC().Format(time.RFC3339), f.err),
		}, nil
	}
	if l.cfg.Judge == nil {
		return nil, nil
	}
	verdict := l.cfg.Judge(m.Name(), target)
	if e := verdict.Evidence; !e.OK {
		return &Rejection{Mechanism: m.Name(), Why: e.Check + ": " + e.Found, Remedy: e.Remedy}, nil
	}
	slots := make([]slot, len(verdict.Limited))
	for i, gpu := range verdict.Limited {
		slots[i] = slot{m.Name(), gpu}
	}
	return nil, slots
}

// reserve takes the slots for target, all or none.
func (l *Ladder) reserve(m mechanism.Mechanism, target gpreempt.ProcessKey, slots []slot) (*Rejection, []slot) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range slots {
		if holder, taken := l.held[s]; taken {
			return &Rejection{
				Mechanism: m.Name(),
				Why:       fmt.Sprintf("GPU %v can have one process held by it at a time, and process %d is", s.gpu, holder.PID),
				Remedy:    "another mechanism in the config key mechanisms can hold it: criu, freezer",
			}, nil
		}
	}
	for _, s := range slots {
		l.held[s] = target
	}
	return nil, slots
}

func (l *Ladder) free(slots []slot, target gpreempt.ProcessKey) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range slots {
		if l.held[s] == target {
			delete(l.held, s)
		}
	}
}

// try probes and attaches one mechanism. An error ends the climb: the process
// left, or ctx ended.
func (l *Ladder) try(ctx context.Context, m mechanism.Mechanism, target gpreempt.ProcessKey) (s mechanism.Session, why string, no *Rejection, err error) {
	capability := m.Probe(ctx, target)
	if !capability.Usable() {
		r := rejected(m, capability)
		return nil, "", &r, context.Cause(ctx)
	}
	s, err = m.Attach(ctx, target)
	switch {
	case err == nil:
		return s, capability.Why(), nil, nil
	case errors.Is(err, mechanism.ErrGone), ctx.Err() != nil:
		return nil, "", nil, err
	}
	l.failed(rung{m.Name(), target}, err)
	l.cfg.Log.Info("a mechanism cannot hold a target", logkey.Mechanism(m.Name()), logkey.Target(target), logkey.Err(err))
	return nil, "", &Rejection{Mechanism: m.Name(), Why: err.Error()}, nil
}

func rejected(m mechanism.Mechanism, c mechanism.Capability) Rejection {
	r := Rejection{Mechanism: m.Name(), Why: c.Why()}
	if i := slices.IndexFunc(c.Evidence, func(e mechanism.Evidence) bool { return !e.OK && e.Remedy != "" }); i >= 0 {
		r.Remedy = c.Evidence[i].Remedy
	}
	return r
}

// failed leaves a mechanism alone on a target for a time that grows, until it has
// done well for as long as the longest of them. It does not grow while a debugger is in
// the way: the target can be held as soon as that one ends.
func (l *Ladder) failed(r rung, err error) {
	if errors.Is(err, mechanism.ErrReplaced) {
		return // of the new program nothing is known
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.failures[r]
	if now := l.cfg.Now(); now.Sub(f.until) > lastBackOff {
		f.times = 0 // it has done well since
	}
	wait := lastBackOff
	if f.times < 9 { // 10 s << 9 is more than an hour
		wait = min(firstBackOff<<f.times, lastBackOff)
	}
	if errors.Is(err, mechanism.ErrDebugged) {
		wait = firstBackOff
	} else {
		f.times++
	}
	f.err, f.until = err, l.cfg.Now().Add(wait)
	l.failures[r] = f
}
