package targets

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// Assessment is what is known of using a mechanism on a target, beyond what the
// mechanism can see itself.
type Assessment struct {
	// Evidence is the result of the check, such as that of the hazard table.
	Evidence mechanism.Evidence
	// Limited are the GPUs on which the mechanism may be attached to one target at a time.
	Limited []gpreempt.GPUID
}

// Rejection is a mechanism that was not chosen.
type Rejection struct {
	Mechanism string
	// Reason is the stable name of what prevents its use, if that has one.
	Reason gpreempt.Reason
	// Why says what prevents its use, and Remedy what to do about it, if anything.
	Why, Remedy string
}

// Choice is the mechanism of a target, and why it was chosen.
type Choice struct {
	// Mechanism is "" when none can be used.
	Mechanism string
	Why       string
	// Rejected are the better mechanisms, best first.
	Rejected []Rejection
}

// String returns in one line why the mechanism was chosen, and why the better ones were
// not.
func (c Choice) String() string {
	if len(c.Rejected) == 0 {
		return c.Why
	}
	return c.Why + "; not " + (&NotSuspendable{c.Rejected}).Error()
}

// NotSuspendable reports that no mechanism can be used on a target.
type NotSuspendable struct{ Rejected []Rejection }

func (e *NotSuspendable) Error() string {
	if len(e.Rejected) == 0 {
		return "no mechanism is enabled and usable: the config key mechanisms names those to use, gpctl status shows why they cannot be used"
	}
	parts := make([]string, len(e.Rejected))
	for i, r := range e.Rejected {
		parts[i] = r.Mechanism + ": " + r.Why
		if r.Reason != "" {
			parts[i] = fmt.Sprintf("%s: %s: %s", r.Mechanism, r.Reason, r.Why)
		}
		if r.Remedy != "" {
			parts[i] += " (" + r.Remedy + ")"
		}
	}
	return strings.Join(parts, "; ")
}

// history is what decides which mechanism is tried on which target: the failures so
// far, and the slots of mechanisms that are limited on a GPU. Time is an argument. Its methods
// are safe for concurrent use.
type history struct {
	start time.Time // the wall clock at time 0, for explanations

	mu       sync.Mutex // guards what follows
	failures map[use]*failure
	slots    map[slot]gpreempt.ProcessKey
}

type (
	use struct {
		mechanism string
		target    gpreempt.ProcessKey
	}
	slot struct {
		mechanism string
		gpu       gpreempt.GPUID
	}
	failure struct {
		err     error
		backoff scheduler.Backoff
	}
)

func newHistory(start time.Time) *history {
	return &history{start: start, failures: map[use]*failure{}, slots: map[slot]gpreempt.ProcessKey{}}
}

// reject returns why a mechanism is not to be tried on a target at now; nil if it may
// be.
func (h *history) reject(now time.Duration, name string, target gpreempt.ProcessKey, a Assessment) *Rejection {
	h.mu.Lock()
	defer h.mu.Unlock()
	if f := h.failures[use{name, target}]; a.Evidence.OK && f != nil && now < f.backoff.Until() {
		return &Rejection{
			Mechanism: name, Reason: reasonOf(f.err),
			Why: fmt.Sprintf("it failed on this target and is not tried again before %s: %v",
				h.start.Add(f.backoff.Until()).UTC().Format(time.RFC3339), f.err),
		}
	}
	if e := a.Evidence; !e.OK {
		r := rejection(name, e)
		return &r
	}
	return nil
}

// reasonOf returns the stable name of the failure of a mechanism, if it has one.
func reasonOf(err error) gpreempt.Reason {
	if errors.Is(err, mechanism.ErrTraced) || errors.Is(err, mechanism.ErrDebugged) || errors.Is(err, mechanism.ErrResumed) {
		return gpreempt.ReasonResisted
	}
	return gpreempt.ReasonOf(err)
}

// rejection returns the rejection of a mechanism that evidence prevents.
func rejection(name string, e mechanism.Evidence) Rejection {
	return Rejection{Mechanism: name, Reason: e.Reason, Why: e.Check + ": " + e.Found, Remedy: e.Remedy}
}

// reserve takes the slots that a mechanism needs for target, all or none; the rejection
// names a target that has one.
func (h *history) reserve(name string, target gpreempt.ProcessKey, gpus []gpreempt.GPUID) *Rejection {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, gpu := range gpus {
		if owner, taken := h.slots[slot{name, gpu}]; taken {
			return &Rejection{
				Mechanism: name,
				Why:       fmt.Sprintf("on GPU %v it can be attached to one process at a time, and is attached to process %d", gpu, owner.PID),
				Remedy:    "another mechanism in the config key mechanisms can be used: criu, freezer",
			}
		}
	}
	for _, gpu := range gpus {
		h.slots[slot{name, gpu}] = target
	}
	return nil
}

// free releases the slots of a mechanism on target.
func (h *history) free(name string, target gpreempt.ProcessKey, gpus []gpreempt.GPUID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, gpu := range gpus {
		if s := (slot{name, gpu}); h.slots[s] == target {
			delete(h.slots, s)
		}
	}
}

// fail counts a failure of a mechanism on a target, which is then not tried for a time
// that grows. It does not grow while another debugger has the process, or a call waits for it: the
// mechanism can be used as soon as that one ends. Nothing is known of a new program, which has failed
// nothing yet.
func (h *history) fail(now time.Duration, name string, target gpreempt.ProcessKey, err error) {
	if errors.Is(err, mechanism.ErrReplaced) {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	u := use{name, target}
	f := h.failures[u]
	if f == nil {
		f = &failure{}
		h.failures[u] = f
	}
	f.err = err
	if errors.Is(err, mechanism.ErrDebugged) || errors.Is(err, mechanism.ErrWaiting) {
		f.backoff.Again(now, scheduler.RetryMechanism)
	} else {
		f.backoff.Fail(now, scheduler.RetryMechanism)
	}
}

// forget drops the failures on a target that has left.
func (h *history) forget(target gpreempt.ProcessKey) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for u := range h.failures {
		if u.target == target {
			delete(h.failures, u)
		}
	}
}

// holding is a session with what it occupies.
type holding struct {
	session mechanism.Session
	// reportsBirths is that of the Capability.
	reportsBirths bool
	// batcher is the mechanism, if it is one.
	batcher mechanism.Batcher
	// index is the mechanism's in Config.Mechanisms.
	index int
	name  string
	gpus  []gpreempt.GPUID // of the slots
	// bystanders are the GPUs of others that the session disturbs.
	bystanders []gpreempt.GPUID
	// failed: an action has failed, and none has succeeded since.
	failed bool
}

// attach tries the first n mechanisms, best first. A nil holding without an error means
// that none can be used; an error, that the process has left or ctx has ended. An error
// with a holding is a session that can only be closed.
func (s *Sessions) attach(ctx context.Context, target gpreempt.ProcessKey, n int) (*holding, Choice, error) {
	var choice Choice
	for i, m := range s.cfg.Mechanisms[:n] {
		assessment := s.cfg.Assess(m.Name(), target)
		if assessment.Evidence == onlyNamed {
			continue
		}
		no := s.history.reject(s.cfg.Now(), m.Name(), target, assessment)
		if no == nil {
			no = s.history.reserve(m.Name(), target, assessment.Limited)
		}
		if no != nil {
			choice.Rejected = append(choice.Rejected, *no)
			continue
		}
		h := &holding{index: i, name: m.Name(), gpus: assessment.Limited}
		why, no, err := s.try(ctx, m, target, h)
		if h.session == nil {
			s.history.free(h.name, target, h.gpus)
		}
		if no != nil {
			choice.Rejected = append(choice.Rejected, *no)
			continue
		}
		if h.session == nil {
			return nil, Choice{}, err
		}
		h.batcher, _ = m.(mechanism.Batcher)
		choice.Mechanism, choice.Why = m.Name(), why
		s.disturb(target, h, attachCycles)
		return h, choice, err
	}
	return nil, choice, nil
}

// try probes and attaches one mechanism.
func (s *Sessions) try(ctx context.Context, m mechanism.Mechanism, target gpreempt.ProcessKey, h *holding) (why string, no *Rejection, err error) {
	capability := m.Probe(ctx, target)
	if !capability.Usable() {
		if ctx.Err() != nil {
			return "", nil, context.Cause(ctx)
		}
		r := rejected(m, capability)
		return "", &r, nil
	}
	h.reportsBirths = capability.ReportsBirths
	err = mechanism.Guard(func() (err error) {
		h.session, err = m.Attach(ctx, target)
		return err
	})
	switch {
	case err == nil, h.session != nil:
		return capability.Why(), nil, err
	case errors.Is(err, mechanism.ErrGone), ctx.Err() != nil:
		return "", nil, err
	}
	s.history.fail(s.cfg.Now(), m.Name(), target, err)
	return "", &Rejection{Mechanism: m.Name(), Reason: reasonOf(err), Why: err.Error()}, nil
}

func rejected(m mechanism.Mechanism, c mechanism.Capability) Rejection {
	r := Rejection{Mechanism: m.Name(), Why: c.Why()}
	if i := slices.IndexFunc(c.Evidence, func(e mechanism.Evidence) bool { return !e.OK && e.Remedy != "" }); i >= 0 {
		r.Reason, r.Remedy = c.Evidence[i].Reason, c.Evidence[i].Remedy
	}
	return r
}

// Preview returns which mechanism would be attached to a process, by what can be seen
// without touching the process.
func (s *Sessions) Preview(ctx context.Context, target gpreempt.ProcessKey) Choice {
	return s.preview(ctx, target, len(s.cfg.Mechanisms))
}

// preview is Preview of the first n mechanisms.
func (s *Sessions) preview(ctx context.Context, target gpreempt.ProcessKey, n int) (choice Choice) {
	for _, m := range s.cfg.Mechanisms[:n] {
		assessment := s.cfg.Assess(m.Name(), target)
		if assessment.Evidence == onlyNamed {
			continue
		}
		if no := s.history.reject(s.cfg.Now(), m.Name(), target, assessment); no != nil {
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
