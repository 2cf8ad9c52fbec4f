package nvchannels

import (
	"context"
	"errors"
	"slices"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// search returns a view of a process after trying all handles for its clients, unless it is canceled.
func search(canceled func() error, sys nvrm.Sys, p nvrm.Process) (*nvrm.View, error) {
	v := nvrm.NewView(sys, p)
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

// restore enables the known channels of a process. If some of them are gone, or none are known, it
// also enables all channels that a search finds in clients that are owned. It returns nil for a process
// that has exited.
func restore(sys nvrm.Sys, p nvrm.Process, known []nvrm.Channel, owned func(nvrm.Handle) bool) error {
	if len(known) > 0 && nvrm.Set([]nvrm.Group{{Process: p, Channels: known}}, false) == nil {
		return nil
	}
	lost, err := nvrm.EnableEach(p, known)
	if lost || len(known) == 0 {
		v, searchErr := search(func() error { return nil }, sys, p)
		if searchErr == nil {
			channels, unknown := v.Channels()
			channels = slices.DeleteFunc(slices.Clone(channels), func(c nvrm.Channel) bool { return !owned(c.Client) })
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

// every reports that any client is owned, for restore.
func every(nvrm.Handle) bool { return true }

// Undo enables the channels of a process that an earlier daemon may have left disabled, and removes
// the entry. Enabling a channel that is enabled has no effect.
func (m *Mechanism) Undo(_ context.Context, e mechanism.JournalEntry) error {
	return m.pauses.Undo(e, func() error {
		p, err := m.cfg.Sys.Open(e.Target)
		if err != nil {
			return err
		}
		defer p.Close()
		return restore(m.cfg.Sys, p, nil, every)
	})
}
