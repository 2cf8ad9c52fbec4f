package nvchannels

import (
	"context"
	"errors"
	"slices"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// search returns a view of a process whose clients were looked for among all handles, unless it is
// canceled.
func search(canceled func() error, sys nvrm.Sys, profile nvrm.Profile, p nvrm.Process) (*nvrm.View, error) {
	v := nvrm.NewView(sys, p, profile)
	for range searchScans {
		if err := canceled(); err != nil {
			return nil, err
		}
		if err := v.Scan(); err != nil {
			return nil, err
		}
		if v.Searched() {
			break
		}
	}
	return v, nil
}

// restore puts channels of a process on: those that are known, and if some are not there any more, or
// none are known, all that a search finds and that are mine. It returns nil for a process that has
// exited.
func restore(sys nvrm.Sys, profile nvrm.Profile, p nvrm.Process, known []nvrm.Channel, mine func(nvrm.Handle) bool) error {
	if len(known) > 0 && nvrm.Set([]nvrm.Group{{Process: p, Channels: known}}, false) == nil {
		return nil
	}
	lost, err := nvrm.EnableEach(p, known)
	if lost || len(known) == 0 {
		v, searchErr := search(func() error { return nil }, sys, profile, p)
		if searchErr == nil {
			channels, unknown := v.Channels()
			channels = slices.DeleteFunc(slices.Clone(channels), func(c nvrm.Channel) bool { return !mine(c.Client) })
			if _, searchErr = nvrm.EnableEach(p, channels); searchErr == nil && (unknown > 0 || !v.Searched()) {
				searchErr = errors.New("its channels, or their GPUs, are not known")
			}
		}
		err = errors.Join(err, searchErr)
	}
	if p.Exited() || errors.Is(err, mechanism.ErrGone) {
		return nil
	}
	return err
}

// every is for restore: all clients.
func every(nvrm.Handle) bool { return true }

// Undo puts the channels of a process on that an earlier daemon may have left off, and removes the
// entry. That has no effect on channels that are on.
func (m *Mechanism) Undo(_ context.Context, e mechanism.JournalEntry) error {
	return m.pauses.Undo(e, func() error {
		p, err := m.cfg.Sys.Open(e.Target)
		if err != nil {
			return err
		}
		defer p.Close()
		return restore(m.cfg.Sys, m.cfg.Profile, p, nil, every)
	})
}
