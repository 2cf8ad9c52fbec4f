package helper

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

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

// name is that of a helper in ps and top; the kernel keeps 15 bytes.
const name = "gpreempt-helper"

// socketFD is the descriptor by which a helper talks to its daemon.
const socketFD = 3

// Main is the program of a helper. It returns the exit status, when the daemon has ended.
func Main() int {
	// A terminal and systemd send these to all processes of the daemon. The daemon resumes
	// everything first; a helper ends with it.
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	if err := unix.SetNonblock(socketFD, true); err != nil {
		fmt.Fprintf(os.Stderr, "gpreemptd: %s is started by gpreemptd only: descriptor %d: %v\n", Argument, socketFD, err)
		return 2
	}
	unix.CloseOnExec(socketFD)
	rename()
	err := serve(os.NewFile(socketFD, "daemon"), newMechanism, newCalls)
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		return 1
	}
	return 0
}

// rename names the threads that there are; others get the name of the one that starts them.
// The name is for people only.
func rename() {
	threads, _ := filepath.Glob("/proc/self/task/*/comm")
	for _, thread := range threads {
		_ = os.WriteFile(thread, []byte(name), 0)
	}
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

// worker is the helper's side of a connection.
type worker struct {
	codec
	log  *zap.Logger
	open opener
	criu criu.Calls
	safe atomic.Pointer[map[gpreempt.GPUID]bool]

	sending sync.Mutex // of messages

	// What follows belongs to the goroutine of serve.
	mechanism *dbgtrap.Mechanism // nil until the first attach
	device    *kfd.Device
	session   mechanism.Watcher // nil for none
	target    gpreempt.ProcessKey
	stop      chan struct{}            // closed to end the forwarding of the session's events
	listed    []kfd.QueueSnapshotEntry // as the daemon knows them
	spent     bool

	// notified: the daemon has been asked for opHandle, and has not requested it yet.
	notified atomic.Bool
}

// serve carries out the requests from a connection until the other side closes it.
func serve(file *os.File, open opener, call caller) error {
	w := &worker{codec: newCodec(file), open: open}
	w.safe.Store(&map[gpreempt.GPUID]bool{})
	defer w.end()
	w.log = log.Forward(func(f log.Forwarded) { w.send(message{Kind: kindLog, Log: f}) })
	w.criu = call(w.log)
	for {
		var req request
		err := w.Decode(&req)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("read a request: %w", err)
		}
		var r result
		err = mechanism.Guard(func() error {
			var err error
			r, err = w.do(req)
			return err
		})
		w.spent = w.spent || errors.Is(err, unix.EALREADY) // the driver may not have counted this process
		r.Err, r.Held, r.Spent = newFailure(err), w.session != nil, w.spent
		if req.Op < opPause && w.mechanism != nil {
			w.describe(&r)
		}
		w.send(message{Result: r})
	}
}

func (w *worker) send(m message) {
	w.sending.Lock()
	defer w.sending.Unlock()
	_ = w.Encode(m) // serve sees that the daemon has ended
}

// do carries out a request.
func (w *worker) do(req request) (r result, err error) {
	ctx := context.Background() //nolint:forbidigo // the daemon asks for nothing that it does not wait for
	switch req.Op {
	case opPause:
		r.Numbers, r.Paused, err = w.criu.Pause(ctx, req.Attach.Target, req.Seen, req.Doubtful)
		return r, err
	case opUnpause:
		return r, w.criu.Unpause(ctx, req.Attach.Target)
	case opAttach:
	default:
		if w.session == nil {
			return r, errors.New("there is no session")
		}
	}
	switch req.Op {
	case opAttach:
		return r, w.attach(ctx, req.Attach)
	case opSuspend:
		err = w.session.SuspendThen(ctx, func() { w.send(message{Kind: kindDone}) })
	case opResume:
		err = w.session.Resume(ctx)
	case opHandle:
		w.notified.Store(false)
		r.Running, err = w.session.Handle(ctx)
	case opClose:
		if err = w.session.Close(); err == nil {
			w.drop()
			return r, nil
		}
	case opPause, opUnpause: // above
	}
	r.Changed = w.session.Changed()
	return r, err
}

// openDriver makes this process one of the driver. What makes calls of criu only never
// becomes one: the end of such a process costs each GPU with a runlist a cycle.
func (w *worker) openDriver() (err error) {
	if w.mechanism != nil {
		return nil
	}
	w.mechanism, w.device, err = w.open(dbgtrap.Config{
		Crashes: func(gpu gpreempt.GPUID) bool { return !(*w.safe.Load())[gpu] },
		Log:     w.log,
	})
	w.spent = w.spent || err != nil
	return err
}

func (w *worker) attach(ctx context.Context, a attachment) error {
	if err := w.openDriver(); err != nil {
		return err
	}
	safe := map[gpreempt.GPUID]bool{}
	for _, gpu := range a.Safe {
		safe[gpu] = true
	}
	w.safe.Store(&safe)
	w.target, w.listed = a.Target, nil
	w.mechanism.Foreign.Known(a.Target, time.Now().Add(-a.DebuggedFor))
	session, err := w.mechanism.Attach(ctx, a.Target)
	if session == nil {
		return err
	}
	w.session, w.stop = session.(mechanism.Watcher), make(chan struct{})
	w.notified.Store(false)
	go w.forward(w.session.Events(), w.stop)
	return err
}

// forward tells the daemon of the session's events.
func (w *worker) forward(events <-chan struct{}, stop <-chan struct{}) {
	for {
		select {
		case <-events:
			if !w.notified.Swap(true) {
				w.send(message{Kind: kindEvent})
			}
		case <-stop:
			return
		}
	}
}

func (w *worker) drop() {
	close(w.stop)
	w.session = nil
}

// end releases the target, if there is one. The kernel does that too, at the end of the process.
func (w *worker) end() {
	if w.session == nil {
		return
	}
	if err := w.session.Close(); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
	}
	w.drop()
}

// describe adds what the daemon shows of the session.
func (w *worker) describe(r *result) {
	r.Rule = w.mechanism.PermissionRule()
	r.Calls, r.Took = w.device.Calls()
	queues, held := w.mechanism.Queues(w.target)
	if held && (len(queues) != len(w.listed) || len(queues) > 0 && &queues[0] != &w.listed[0]) {
		r.Listed, r.Queues, w.listed = true, queues, queues
	}
}
