package helper

import (
	"encoding/gob"
	"errors"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

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
	opHandle
	opClose
	// opPause and opUnpause are the methods of criu.Calls, without a session.
	opPause
	opUnpause
)

// request is a message to a helper, which answers each with a result.
type request struct {
	Op op
	// Attach is set for opAttach; Target of it for opPause and opUnpause.
	Attach attachment
	// Seen and Doubtful are those of criu.Calls.
	Seen     []int
	Doubtful bool
}

// attachment is what a helper must know to attach to a target.
type attachment struct {
	Target gpreempt.ProcessKey
	// Safe are the GPUs for which dbgtrap.Config.Crashes returns false.
	Safe []gpreempt.GPUID
	// DebuggedFor is for how long somebody else is known to debug the target.
	DebuggedFor time.Duration
}

type kind uint8

const (
	kindResult kind = iota
	// kindDone: every queue is suspended, and the result of opSuspend follows.
	kindDone
	// kindEvent: opHandle is to be requested.
	kindEvent
	kindLog
)

// message is one from a helper.
type message struct {
	Kind   kind
	Result result
	Log    log.Forwarded
}

// result is the result of a request.
type result struct {
	Err *failure
	// Held: there is a session.
	Held bool
	// Spent: the helper must end before it is used for another target.
	Spent bool
	// Running and Changed are those of mechanism.Watcher.
	Running mechanism.Running
	Changed bool
	// Numbers and Paused are those of criu.Calls.
	Numbers []int
	Paused  bool
	// Listed: Queues is the driver's last snapshot, which differs from the one before.
	Listed bool
	Queues []kfd.QueueSnapshotEntry
	Rule   kfd.PermissionRule
	// Calls and Took are what kfd.Device.Calls returns.
	Calls int64
	Took  time.Duration
}

// failure is an error of a helper, with what the daemon asks errors for.
type failure struct {
	Text                     string
	Gone, Replaced, Debugged bool
	Hardware                 bool
	GPUs                     []gpreempt.GPUID
	API                      *gpreempt.Error
}

func newFailure(err error) *failure {
	if err == nil {
		return nil
	}
	f := &failure{
		Text: err.Error(), Gone: errors.Is(err, mechanism.ErrGone), Replaced: errors.Is(err, mechanism.ErrReplaced),
		Debugged: errors.Is(err, mechanism.ErrDebugged),
	}
	if e, ok := errors.AsType[*mechanism.HardwareError](err); ok {
		f.Hardware, f.GPUs = true, e.GPUs
	}
	f.API, _ = errors.AsType[*gpreempt.Error](err)
	return f
}

// error returns the error, nil for nil.
func (f *failure) error() error {
	if f == nil {
		return nil
	}
	return (*remoteError)(f)
}

// remoteError is an error that a helper has reported.
type remoteError failure

func (e *remoteError) Error() string { return e.Text }

// Unwrap returns what the error is to the daemon.
func (e *remoteError) Unwrap() []error {
	var errs []error
	for _, known := range []struct {
		is  bool
		err error
	}{{e.Gone, mechanism.ErrGone}, {e.Replaced, mechanism.ErrReplaced}, {e.Debugged, mechanism.ErrDebugged}} {
		if known.is {
			errs = append(errs, known.err)
		}
	}
	if e.Hardware {
		errs = append(errs, &mechanism.HardwareError{GPUs: e.GPUs, Err: errors.New(e.Text)})
	}
	if e.API != nil {
		errs = append(errs, e.API)
	}
	return errs
}

// maxPacket is the most bytes of one packet: much less than a socket takes by default.
const maxPacket = 32 << 10

// packets is a stream of bytes over a socket that keeps packets apart.
type packets struct {
	file *os.File
	buf  [maxPacket]byte
	rest []byte // of buf, not read yet
}

// Read implements io.Reader. It returns io.EOF when the other side has closed the socket.
func (p *packets) Read(to []byte) (int, error) {
	if len(p.rest) == 0 {
		n, err := p.file.Read(p.buf[:])
		if err != nil {
			return 0, err
		}
		p.rest = p.buf[:n]
	}
	n := copy(to, p.rest)
	p.rest = p.rest[n:]
	return n, nil
}

// ReadByte implements io.ByteReader: a decoder then reads no further than it must.
func (p *packets) ReadByte() (byte, error) {
	var b [1]byte
	_, err := p.Read(b[:])
	return b[0], err
}

// Write implements io.Writer.
func (p *packets) Write(from []byte) (written int, err error) {
	for len(from) > 0 {
		n, err := p.file.Write(from[:min(len(from), maxPacket)])
		written += n
		if err != nil {
			return written, err
		}
		from = from[n:]
	}
	return written, nil
}

// newPair returns the two ends of a connection, which no program inherits.
func newPair() (daemon, helper *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	return os.NewFile(uintptr(fds[0]), "helper"), os.NewFile(uintptr(fds[1]), "daemon"), nil
}

// codec encodes and decodes the messages of one end. One goroutine at a time may encode, and
// one may decode.
type codec struct {
	*gob.Encoder
	*gob.Decoder
	packets *packets
}

func newCodec(file *os.File) codec {
	p := &packets{file: file}
	return codec{gob.NewEncoder(p), gob.NewDecoder(p), p}
}

var _ io.ByteReader = (*packets)(nil)
