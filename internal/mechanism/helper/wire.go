package helper

import (
	"errors"
	"time"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// op is what the daemon asks a helper for.
type op uint8

const (
	opAttach op = iota
	opSuspend
	opResume
	opClose
	// opPause and opUnpause are the methods of criu.Calls, without a session.
	opPause
	opUnpause
)

// request is a message to a helper, which answers each with a message.
type request struct {
	Op op
	// Target is set for opAttach, opPause and opUnpause; the next two for opAttach.
	Target gpreempt.ProcessKey
	// Safe are the GPUs for which dbgtrap.Config.Crashes returns false.
	Safe []gpreempt.GPUID
	// Deserted is the result of dbgtrap.Config.Deserted.
	Deserted bool
	// Seen and Doubtful are those of criu.Calls.
	Seen     []int
	Doubtful bool
}

type kind uint8

const (
	// kindResult: the answer to a request.
	kindResult kind = iota
	// kindDone: every queue is suspended, and the answer to opSuspend follows. Nothing else is set.
	kindDone
	// kindHandled: the result of Handle, which the helper calls by itself.
	kindHandled
	// kindLog: only Log is set.
	kindLog
)

// message is one from a helper: the result of a request, or of Handle.
type message struct {
	Kind kind
	Log  log.Forwarded
	Err  *failure
	// Held: there is a session.
	Held bool
	// Spent: the helper must end before it is used for another target.
	Spent  bool
	Report mechanism.Report
	// Numbers and Paused are those of criu.Calls.
	Numbers []int
	Paused  bool
	// Listed: Queues is the driver's last snapshot, which differs from the one before.
	Listed bool
	Queues []kfd.QueueSnapshotEntry
	// Calls and Took are what kfd.Device.Calls returns.
	Calls int64
	Took  time.Duration
}

// failure is an error that a helper has reported, with what the daemon asks errors for.
type failure struct {
	Text string
	// Known are the indexes in known of the errors that it is.
	Known    []int
	Hardware *mechanism.HardwareError
	API      *gpreempt.Error
}

var known = []error{mechanism.ErrGone, mechanism.ErrReplaced, mechanism.ErrDebugged}

func newFailure(err error) *failure {
	if err == nil {
		return nil
	}
	f := &failure{Text: err.Error()}
	for i, k := range known {
		if errors.Is(err, k) {
			f.Known = append(f.Known, i)
		}
	}
	if e, ok := errors.AsType[*mechanism.HardwareError](err); ok {
		f.Hardware = &mechanism.HardwareError{GPUs: e.GPUs}
	}
	f.API, _ = errors.AsType[*gpreempt.Error](err)
	return f
}

// err returns the error of a message, nil for none.
func (m *message) err() error {
	if m.Err == nil {
		return nil
	}
	return m.Err
}

func (e *failure) Error() string { return e.Text }

// Unwrap returns what the error is to the daemon.
func (e *failure) Unwrap() []error {
	var errs []error
	for _, i := range e.Known {
		errs = append(errs, known[i])
	}
	if e.Hardware != nil {
		errs = append(errs, &mechanism.HardwareError{GPUs: e.Hardware.GPUs, Err: errors.New(e.Text)})
	}
	if e.API != nil {
		errs = append(errs, e.API)
	}
	return errs
}
