package dbgtrap

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// driven is a session with the part of the daemon that owns it: a goroutine that makes
// every call, has events handled, suspends again when a queue of a suspended target runs,
// and closes what has failed until that works.
type driven struct {
	session mechanism.Session
	target  gpreempt.ProcessKey
	births  chan<- gpreempt.ProcessKey
	lost    chan<- error

	calls   chan func()
	closing chan struct{} // closed to have Close called until it works
	once    sync.Once
	ended   chan struct{}
}

// drive attaches m to a target.
func drive(ctx context.Context, m *Mechanism, target gpreempt.ProcessKey, births chan<- gpreempt.ProcessKey, lost chan<- error) (*driven, error) {
	s, err := m.Attach(ctx, target)
	if s == nil {
		return nil, err
	}
	d := &driven{
		session: s, target: target, births: births, lost: lost,
		calls: make(chan func()), closing: make(chan struct{}), ended: make(chan struct{}),
	}
	go d.run()
	if err != nil {
		d.closeLater()
		return nil, err
	}
	return d, nil
}

func (d *driven) run() {
	defer close(d.ended)
	closing := d.closing
	var again <-chan time.Time
	for {
		select {
		case call := <-d.calls:
			call()
		case <-d.session.Events():
			r, err := d.session.Handle(context.Background())
			if r.Changed {
				select {
				case d.births <- d.target:
				default:
				}
			}
			if r.Running == mechanism.NewQueue {
				err = d.session.Suspend(context.Background(), nil)
			}
			if err != nil && !errors.Is(err, mechanism.ErrGone) {
				d.lost <- err
			}
		case <-closing:
			closing, again = nil, time.After(time.Millisecond)
		case <-again:
			if d.session.Close() == nil {
				return
			}
			again = time.After(time.Millisecond)
		}
	}
}

// do makes a call on the goroutine.
func (d *driven) do(call func() error) error {
	result := make(chan error, 1)
	select {
	case d.calls <- func() { result <- call() }:
		return <-result
	case <-d.ended:
		return errClosed
	}
}

func (d *driven) Suspend(ctx context.Context, done func()) error {
	return d.do(func() error { return d.session.Suspend(ctx, done) })
}

func (d *driven) Resume(ctx context.Context) error {
	return d.do(func() error { return d.session.Resume(ctx) })
}

// Close calls Close once, and until it works if it fails.
func (d *driven) Close() error {
	err := d.do(func() error { return d.session.Close() })
	d.closeLater()
	if errors.Is(err, errClosed) {
		return nil
	}
	return err
}

func (d *driven) closeLater() { d.once.Do(func() { close(d.closing) }) }

// report takes what the kernel reports.
func (f *fixture) report(what string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reports = append(f.reports, what)
}

// reported returns what the kernel has reported, and forgets it.
func (f *fixture) reported() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	reports := f.reports
	f.reports = nil
	return reports
}
