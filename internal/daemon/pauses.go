package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/journal"
	"github.com/gpreempt/gpreempt/internal/logkey"
	"github.com/gpreempt/gpreempt/internal/mechanism/criu"
	"github.com/gpreempt/gpreempt/internal/mechanism/freezer"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// cleanupTime bounds the undoing of one pause.
const cleanupTime = 30 * time.Second

// journalDir is where pauses that outlive the daemon are written down. They end
// with the host, and so does what lies in /run.
func journalDir(run string) string { return filepath.Join(run, "journal") }

// pauses is the mechanisms whose pauses outlive the daemon, and the journal of them.
type pauses struct {
	journal *journal.Journal
	criu    *criu.Mechanism
	freezer *freezer.Mechanism
	log     *zap.Logger

	mu      sync.Mutex // guards orphans; not held while one is undone
	orphans []journal.Entry
}

func openPauses(dir string, log *zap.Logger) (*pauses, error) {
	j, err := journal.Open(dir)
	if err != nil {
		return nil, err
	}
	return &pauses{
		journal: j,
		criu:    criu.New(criu.Config{Sys: kfd.Kernel(), Attach: criuThread, Journal: j, Log: log.Named("criu")}),
		freezer: freezer.New(freezer.Config{Root: "/", Journal: j, Log: log.Named("freezer")}),
		log:     log,
	}, nil
}

// findOrphans takes what the journal holds for the pauses of a daemon before this
// one. Call it before anything is paused. The errors are about files that cannot be
// read: a name alone is acted on when it names a mechanism that there is.
func (p *pauses) findOrphans() []error {
	entries, bad := p.journal.Entries()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.orphans = slices.DeleteFunc(entries, func(e journal.Entry) bool {
		return e.NameOnly && e.Mechanism != p.criu.Name() && e.Mechanism != p.freezer.Name()
	})
	return bad
}

// undoOrphans lets what is left of them run again, all at once, and tells of those
// that could not be. One caller at a time.
func (p *pauses) undoOrphans(ctx context.Context) (undone int, failures []error) {
	p.mu.Lock()
	orphans := slices.Clone(p.orphans)
	p.mu.Unlock()
	errs := make([]error, len(orphans))
	var all sync.WaitGroup
	for i, e := range orphans {
		all.Go(func() { errs[i] = p.undo(ctx, e) })
	}
	all.Wait()
	for i, e := range orphans {
		if errs[i] != nil {
			failures = append(failures, fmt.Errorf("process %d, paused by %s: %w", e.Target.PID, e.Mechanism, errs[i]))
			continue
		}
		undone++
		p.mu.Lock()
		p.orphans = slices.DeleteFunc(p.orphans, func(o journal.Entry) bool { return o == e })
		p.mu.Unlock()
		p.log.Warn("a process that an earlier daemon left paused runs again",
			logkey.Target(e.Target), logkey.Mechanism(e.Mechanism), logkey.Since(e.At))
	}
	return undone, failures
}

// orphaned reports whether an earlier daemon's pause of a process is not undone yet.
// Nothing may hold it meanwhile: undoing that pause would undo a new one.
func (p *pauses) orphaned(target gpreempt.ProcessKey) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.ContainsFunc(p.orphans, func(e journal.Entry) bool { return e.Target == target })
}

func (p *pauses) undo(ctx context.Context, e journal.Entry) error {
	ctx, cancel := context.WithTimeout(ctx, cleanupTime)
	defer cancel()
	switch e.Mechanism {
	case p.criu.Name():
		return p.criu.Undo(ctx, e)
	case p.freezer.Name():
		return p.freezer.Undo(ctx, e)
	}
	return fmt.Errorf("this version knows no mechanism %q; the one that wrote it has to undo it", e.Mechanism)
}

// Cleanup lets every process run again that a daemon which died left paused. It may
// be called at any time and any number of times: while a daemon runs it leaves that
// one's pauses alone. What it did is written to w.
func Cleanup(ctx context.Context, w io.Writer) error {
	return cleanup(ctx, w, journalDir(ThisHost().RunDir))
}

func cleanup(ctx context.Context, w io.Writer, dir string) error {
	p, err := openPauses(dir, zap.NewNop())
	switch {
	case errors.Is(err, journal.ErrInUse):
		_, err := fmt.Fprintln(w, "a gpreemptd is running, or cleaning up, and answers for what is paused; nothing to do")
		return err
	case err != nil:
		return err
	}
	bad := p.findOrphans()
	type outcome struct {
		undone   int
		failures []error
	}
	ended := make(chan outcome, 1)
	go func() {
		undone, failures := p.undoOrphans(ctx)
		ended <- outcome{undone, failures}
	}()
	var undone int
	var failures []error
	select {
	case o := <-ended:
		undone, failures = o.undone, o.failures
	case <-time.After(cleanupTime + endTime):
		return errors.New("a call of the driver hangs: processes may still be paused; run it again when the GPU has been reset")
	}
	text := "nothing was left paused"
	if undone > 0 {
		text = fmt.Sprintf("processes that run again: %d", undone)
	}
	if _, err := fmt.Fprintln(w, text); err != nil {
		failures = append(failures, err)
	}
	return errors.Join(append(append(failures, bad...), p.journal.Close())...)
}

const (
	// orphansAgain is the time between two attempts to undo an earlier daemon's pauses.
	orphansAgain = 5 * time.Second
	// orphansTime is how long the start of the daemon waits for the first.
	orphansTime = 2 * time.Second
)

// undoOrphans lets what an earlier daemon left paused run again, and tries until
// all of it does, which may take as long as a GPU that hangs. It calls tried after
// the first attempt.
func (d *daemon) undoOrphans(ctx context.Context, tried func()) {
	defer tried()
	if d.backend.pauses == nil {
		return
	}
	for {
		_, failures := d.backend.pauses.undoOrphans(ctx)
		var warnings []gpreempt.Warning
		for _, err := range failures {
			warnings = append(warnings, gpreempt.WarnOrphanedPause.Warn(fmt.Sprintf("an earlier daemon may have left it paused: %v", err)))
		}
		d.warnings.set("orphans", warnings...)
		tried()
		if len(failures) == 0 {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(orphansAgain):
		}
	}
}
