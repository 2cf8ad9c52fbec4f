package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/mechanism/criu"
	"github.com/gpreempt/gpreempt/internal/mechanism/freezer"
	"github.com/gpreempt/gpreempt/internal/mechanism/helper"
	"github.com/gpreempt/gpreempt/internal/mechanism/nvchannels"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

const (
	// resumeTime bounds one attempt to resume a process.
	resumeTime = 30 * time.Second
	// cleanupTime bounds cleanUp: one attempt for each process, all at once.
	cleanupTime = resumeTime + 5*time.Second
	// openTime is how long openPauses waits for a cleanup that is running.
	openTime = 10 * time.Second
	// retryTime is the time between two attempts to resume what is left.
	retryTime = 5 * time.Second
)

// journalDir returns the directory of the journal below the runtime directory of the daemon.
// Its files end with the host, as the pauses do.
func journalDir(run string) string { return filepath.Join(run, "journal") }

// pauses are the mechanisms whose pauses the kernel does not end when the daemon dies, with
// the journal of the pauses. Its methods are safe for concurrent use, except that one
// goroutine at a time may resume.
type pauses struct {
	CRIU    *criu.Mechanism
	Freezer *freezer.Mechanism
	// Stop is the freezer for processes whose rule says so.
	Stop *freezer.Mechanism
	// NVIDIA is nil without a driver that is known.
	NVIDIA  *nvchannels.Mechanism
	journal *mechanism.Journal
	log     *zap.Logger

	mu      sync.Mutex // guards orphans; not held while one is resumed
	orphans []mechanism.JournalEntry
}

// openPauses opens the journal of a host and reads the pauses of earlier daemons. Call it before
// anything is paused. It waits for a cleanup that is running, until ctx ends or 10 s have
// passed. unreadable are errors about files of the journal; a file name alone is used if
// it names a mechanism of this version.
func openPauses(ctx context.Context, h Host, helpers *helper.Pool, log *zap.Logger) (p *pauses, unreadable []error, err error) {
	ctx, cancel := context.WithTimeout(ctx, openTime)
	defer cancel()
	for {
		p, unreadable, err = readPauses(h, helpers, log)
		if !errors.Is(err, mechanism.ErrInUse) || ctx.Err() != nil {
			return p, unreadable, err
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

func readPauses(h Host, helpers *helper.Pool, log *zap.Logger) (*pauses, []error, error) {
	j, err := mechanism.OpenJournal(journalDir(h.RunDir))
	if err != nil {
		return nil, nil, err
	}
	p := &pauses{
		CRIU:    criu.New(criu.Config{Sys: kfd.Kernel(), Calls: helpers, Journal: j, Log: log.Named("criu")}),
		Freezer: freezer.New(freezer.Config{Root: "/", Journal: j, Log: log.Named("freezer")}),
		Stop:    freezer.NewStop(freezer.Config{Root: "/", Journal: j, Log: log.Named("stop")}),
		journal: j,
		log:     log,
	}
	if version, err := nvrm.ReadVersion(h.files()); err == nil && h.RM != nil {
		p.NVIDIA = newNVIDIA(h, version, nil, j, log)
	}
	entries, unreadable := j.Entries()
	for _, err := range unreadable {
		if bad, ok := errors.AsType[*mechanism.BadEntry](err); ok {
			bad.Used = bad.Used && p.undoes(strings.TrimPrefix(filepath.Ext(bad.Path), "."))
		}
	}
	p.orphans = slices.DeleteFunc(entries, func(e mechanism.JournalEntry) bool { return e.NameOnly && !p.undoes(e.Mechanism) })
	return p, unreadable, nil
}

// undoes reports whether this version has a mechanism, by its name.
func (*pauses) undoes(name string) bool {
	k, known := mechanism.KindOf(name)
	return known && k.Journal
}

// Close closes the journal.
func (p *pauses) Close() error { return p.journal.Close() }

// Resume tries once to resume every process that is still paused, all at once. It returns
// how many it resumed and an error for each of the others.
func (p *pauses) Resume(ctx context.Context) (resumed int, failures []error) {
	p.mu.Lock()
	orphans := slices.Clone(p.orphans)
	p.mu.Unlock()
	errs := make([]error, len(orphans))
	var all sync.WaitGroup
	for i, e := range orphans {
		all.Go(func() { errs[i] = p.resume(ctx, e) })
	}
	all.Wait()
	for i, e := range orphans {
		if errs[i] != nil {
			failures = append(failures, fmt.Errorf("process %d, paused by %s: %w", e.Target.PID, e.Mechanism, errs[i]))
			continue
		}
		resumed++
		p.mu.Lock()
		p.orphans = slices.DeleteFunc(p.orphans, func(o mechanism.JournalEntry) bool { return o == e })
		p.mu.Unlock()
		p.log.Warn("resumed a process that an earlier daemon left paused",
			log.Target(e.Target), log.Mechanism(e.Mechanism), log.Since(e.At))
	}
	return resumed, failures
}

// Run calls Resume until every process is resumed or ctx ends; a GPU that hangs can take
// long. After each attempt it calls tried with the errors.
func (p *pauses) Run(ctx context.Context, tried func(failures []error)) {
	for {
		_, failures := p.Resume(ctx)
		tried(failures)
		if len(failures) == 0 {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(retryTime):
		}
	}
}

// Orphaned reports whether a process is still paused by an earlier daemon. No mechanism
// may attach to it meanwhile: resuming it would end a new pause as well.
func (p *pauses) Orphaned(target gpreempt.ProcessKey) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.ContainsFunc(p.orphans, func(e mechanism.JournalEntry) bool { return e.Target == target })
}

func (p *pauses) resume(ctx context.Context, e mechanism.JournalEntry) error {
	ctx, cancel := context.WithTimeout(ctx, resumeTime)
	defer cancel()
	switch e.Mechanism {
	case mechanism.CRIU:
		return p.CRIU.Undo(ctx, e)
	case mechanism.Freezer:
		return p.Freezer.Undo(ctx, e)
	case mechanism.Stop:
		return p.Stop.Undo(ctx, e)
	case mechanism.NVChannels:
		if p.NVIDIA != nil {
			return p.NVIDIA.Undo(ctx, e)
		}
		return errors.New("the NVIDIA driver is not loaded, or not known to this version: restart the process if it does not run")
	}
	return fmt.Errorf("unknown mechanism %q: only the version that wrote the journal can resume it", e.Mechanism)
}

// cleanUp resumes every process that a crashed daemon left paused, according to the
// journal in dir. It may be called at any time and any number of times: while a daemon
// runs it does nothing. It writes the result to w. Helper processes make the calls of the
// driver: one that does not return keeps its helper, and not the program.
func cleanUp(ctx context.Context, w io.Writer, h Host) (err error) {
	helpers := helper.NewPool(zap.NewNop(), nil, nil)
	defer func() { err = errors.Join(err, helpers.Close()) }()
	p, unreadable, err := readPauses(h, helpers, zap.NewNop())
	switch {
	case errors.Is(err, mechanism.ErrInUse):
		_, err := fmt.Fprintln(w, "gpreemptd is running, or another cleanup is: nothing to do")
		return err
	case err != nil:
		return err
	}
	type result struct {
		resumed  int
		failures []error
	}
	ended := make(chan result, 1)
	go func() {
		resumed, failures := p.Resume(ctx)
		ended <- result{resumed, failures}
	}()
	var r result
	select {
	case r = <-ended:
	case <-time.After(cleanupTime):
		return errors.New("a call of the driver hangs: processes may still be paused; run it again after the GPU has been reset")
	}
	text := "nothing was left paused"
	if r.resumed > 0 {
		text = fmt.Sprintf("processes resumed: %d", r.resumed)
	}
	if _, err := fmt.Fprintln(w, text); err != nil {
		r.failures = append(r.failures, err)
	}
	return errors.Join(append(append(r.failures, unreadable...), p.journal.Close())...)
}
