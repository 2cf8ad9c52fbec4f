package helper

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/child"
	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/mechanism/criu"
	"github.com/gpreempt/gpreempt/internal/mechanism/dbgtrap"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// Argument is the only argument of a program that is to call Main.
const Argument = "session-helper"

// Main is the program of a helper. It returns the exit status, when the daemon has ended.
func Main() int {
	socket, err := child.Main("helper")
	if err == nil {
		err = serve(socket, newMechanism, newCalls)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "gpreemptd: %s: %v\n", Argument, err)
		return 1
	}
	return 0
}

// trace is proc.Trace. An interface that holds a nil *proc.Tracer would not be nil.
func trace(ctx context.Context, pid int32, start uint64) (dbgtrap.Thread, error) {
	t, err := proc.Trace(ctx, pid, start)
	if err != nil {
		return nil, err
	}
	return t, nil
}

// newMechanism opens the driver, as a process of its own.
func newMechanism(cfg dbgtrap.Config) (*dbgtrap.Mechanism, *kfd.Device, error) {
	device, err := kfd.Open()
	if err != nil {
		return nil, nil, err
	}
	cfg.Device, cfg.Attach = device, trace
	return dbgtrap.New(cfg), device, nil
}

// newCalls returns what makes the calls of criu, which need no device that is open.
func newCalls(logger *zap.Logger) criu.Calls {
	attach := func(ctx context.Context, pid int32, start uint64) (criu.Thread, error) { return trace(ctx, pid, start) }
	return criu.New(criu.Config{Sys: kfd.Kernel(), Attach: attach, Log: logger})
}

// opener returns the mechanism of a helper with its device.
type opener func(dbgtrap.Config) (*dbgtrap.Mechanism, *kfd.Device, error)

// caller returns what makes the calls of criu in a helper.
type caller func(*zap.Logger) criu.Calls

// worker is the helper's side of a connection. It belongs to the goroutine of serve.
type worker struct {
	daemon *child.Daemon[request, *message]
	log    *zap.Logger
	open   opener
	criu   criu.Calls
	safe   atomic.Pointer[[]gpreempt.GPUID]

	mechanism *dbgtrap.Mechanism // nil until the first attach
	device    *kfd.Device
	session   mechanism.Session // nil for none
	target    gpreempt.ProcessKey
	listed    []kfd.QueueSnapshotEntry // as the daemon knows them
	spent     bool
	deserted  bool // see request
}

// serve carries out the requests from a connection until the other side closes it, and handles the
// events of the session between them.
func serve(socket *os.File, open opener, call caller) error {
	w := &worker{daemon: child.Serve[request, *message](socket), open: open}
	w.log = log.Forward(func(f log.Forwarded) { w.daemon.Report(&message{Kind: kindLog, Log: f}) })
	w.criu = call(w.log)
	defer w.end()
	for {
		var events <-chan struct{}
		if w.session != nil {
			events = w.session.Events()
		}
		select {
		case req, more := <-w.daemon.Requests:
			if !more {
				return w.daemon.Err()
			}
			w.daemon.Answer(req, w.result(kindResult, func(m *message) error { return w.do(req.Body, m) }))
		case <-events:
			m := w.result(kindHandled, func(m *message) (err error) {
				m.Report, err = w.session.Handle(dutiful())
				return err
			})
			if m.Err != nil || m.Listed || m.Report != (mechanism.Report{}) {
				w.daemon.Report(m)
			}
		}
	}
}

// dutiful returns a context that does not end: the daemon asks for nothing that it does not wait for.
func dutiful() context.Context { return context.Background() } //nolint:forbidigo // as above

// result returns the message about the result of do, with what the daemon shows of the session.
func (w *worker) result(kind kind, do func(*message) error) *message {
	m := &message{Kind: kind}
	err := mechanism.Guard(func() error { return do(m) })
	w.spent = w.spent || errors.Is(err, unix.EALREADY) // the driver may not have counted this process
	m.Err, m.Held, m.Spent = newFailure(err), w.session != nil, w.spent
	if w.mechanism != nil {
		m.Calls, m.Took = w.device.Calls()
		queues, held := w.mechanism.Queues(w.target)
		if held && (len(queues) != len(w.listed) || len(queues) > 0 && &queues[0] != &w.listed[0]) {
			m.Listed, m.Queues, w.listed = true, queues, queues
		}
	}
	return m
}

// do carries out a request.
func (w *worker) do(req request, m *message) (err error) {
	ctx := dutiful()
	switch req.Op {
	case opPause:
		m.Numbers, m.Paused, err = w.criu.Pause(ctx, req.Target, req.Seen, req.Doubtful)
		return err
	case opUnpause:
		return w.criu.Unpause(ctx, req.Target)
	case opAttach:
		return w.attach(ctx, req)
	case opSuspend, opResume, opClose:
	}
	if w.session == nil {
		return errors.New("there is no session")
	}
	switch req.Op {
	case opSuspend:
		return w.session.Suspend(ctx, func() { w.daemon.Report(&message{Kind: kindDone}) })
	case opResume:
		return w.session.Resume(ctx)
	default:
		if err = w.session.Close(); err == nil {
			w.session = nil
		}
		return err
	}
}

// openDriver makes this process one of the driver. What makes calls of criu only never
// becomes one: the end of such a process costs each GPU with a runlist a cycle.
func (w *worker) openDriver() (err error) {
	if w.mechanism != nil {
		return nil
	}
	w.mechanism, w.device, err = w.open(dbgtrap.Config{
		Crashes:  func(gpu gpreempt.GPUID) bool { return !slices.Contains(*w.safe.Load(), gpu) },
		Deserted: func(gpreempt.ProcessKey) bool { return w.deserted },
		Log:      w.log,
	})
	w.spent = w.spent || err != nil
	return err
}

func (w *worker) attach(ctx context.Context, req request) error {
	if err := w.openDriver(); err != nil {
		return err
	}
	w.safe.Store(&req.Safe)
	w.target, w.listed, w.deserted = req.Target, nil, req.Deserted
	session, err := w.mechanism.Attach(ctx, req.Target)
	if session != nil {
		w.session = session
	}
	return err
}

// end releases the target, if there is one. The kernel does that too, at the end of the process.
func (w *worker) end() {
	if w.session == nil {
		return
	}
	if err := w.session.Close(); err != nil {
		fmt.Fprintf(os.Stderr, "gpreemptd: %s: %v\n", Argument, err)
	}
}
