package mechanism

import (
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Store keeps entries: a *Journal.
type Store interface {
	Begin(JournalEntry) error
	End(target gpreempt.ProcessKey, mechanism string) error
}

// Pauses are the entries of one mechanism.
type Pauses struct {
	Store     Store
	Mechanism string
	Log       *zap.Logger
}

// Begin records that the target of e will be paused. It fills in the mechanism and the
// time. After an error the process must not be paused.
func (p Pauses) Begin(e JournalEntry) error {
	e.Mechanism, e.At = p.Mechanism, time.Now()
	return p.Store.Begin(e)
}

// End removes the entry of a pause that has ended. A failure is only logged: the next
// Undo resumes a process that runs, which has no effect.
func (p Pauses) End(target gpreempt.ProcessKey) {
	if err := p.Store.End(target, p.Mechanism); err != nil {
		p.Log.Warn("the entry of an ended pause stays in the journal", log.Target(target), log.Err(err))
	}
}

// Undo calls resume for the pause of an entry and removes the entry. The error
// proc.ErrGone of resume counts as success. After an error the entry remains.
func (p Pauses) Undo(e JournalEntry, resume func() error) error {
	if e.Mechanism != p.Mechanism {
		return fmt.Errorf("process %v was paused by %s, not by %s", e.Target, e.Mechanism, p.Mechanism)
	}
	if err := resume(); err != nil && !errors.Is(err, proc.ErrGone) {
		return fmt.Errorf("resume process %v: %w", e.Target, err)
	}
	return p.Store.End(e.Target, p.Mechanism)
}
