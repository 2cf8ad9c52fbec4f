package conformance

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// system is the system calls of one thread, for verbs.
type system interface {
	kfd.Sys
	Seize(pid int32) error
	Detach(pid int32) error
	PidfdOpen(pid int32) (int, error)
	PidfdGetfd(pid int32, fd int) (int, error)
	Pipe(nonblock bool) (r, w int, err error)
	// Unmapped is an unmapped address.
	Unmapped() (kfd.Pointer, error)
	// program is the thread's process.
	program() *program
}

// call is a verb with every name resolved: it can be sent to another process.
type call struct {
	Verb   string
	Values map[string]string
}

// reply is the result. R is the returned value, or Errno is not 0; Out has the results, also
// after errors.
type reply struct {
	R     int64
	Errno unix.Errno
	Out   map[string]string
	// Broken is the reason if the verb could not be carried out at all.
	Broken string
}

// verbs make the calls about the driver; fd is its descriptor.
var verbs = map[string]func(*doing) (int64, error){
	"open": func(d *doing) (int64, error) {
		flags := unix.O_RDWR
		if d.text("inherit", "no") != "yes" {
			flags |= unix.O_CLOEXEC
		}
		fd, err := d.sys.Open(kfd.DevicePath, flags)
		return d.newFD(fd, err)
	},
	// opens reports whether a file can be opened, and returns its content.
	"opens": func(d *doing) (int64, error) { return 0, d.look() },
	// vanishes waits until it cannot be opened.
	"vanishes": func(d *doing) (int64, error) {
		return 0, eventually("the file stays", func() (bool, error) {
			err := d.look()
			return errors.Is(err, unix.ENOENT), ignore(err, unix.ENOENT)
		})
	},
	"close": func(d *doing) (int64, error) { return 0, d.sys.Close(d.fd()) },
	"pipe": func(d *doing) (int64, error) {
		r, w, err := d.sys.Pipe(d.text("mode", "nonblock") == "nonblock")
		if err == nil {
			d.out("r", r)
			d.out("w", w)
		}
		return 0, err
	},
	"read": func(d *doing) (int64, error) {
		b := make([]byte, d.num("size", 64))
		n, err := d.sys.Read(d.fd(), b)
		if err == nil {
			d.out("bytes", string(b[:n]))
		}
		return int64(n), err
	},
	"write": func(d *doing) (int64, error) {
		n, err := d.sys.Write(d.fd(), make([]byte, d.num("size", 8)))
		return int64(n), err
	},
	"seize":  func(d *doing) (int64, error) { return 0, d.sys.Seize(int32(d.num("pid", 0))) },
	"detach": func(d *doing) (int64, error) { return 0, d.sys.Detach(int32(d.num("pid", 0))) },
	"getfd": func(d *doing) (int64, error) {
		fd, err := d.sys.PidfdGetfd(int32(d.num("pid", 0)), int(d.num("theirs", 0)))
		return d.newFD(fd, err)
	},
	"raw":     rawCall,
	"version": version,
	"apertures": func(d *doing) (int64, error) {
		n := d.num("n", 0)
		buf := make([]kfdabi.ProcessDeviceApertures, max(n, 1))
		args := kfdabi.ProcessAperturesNewArgs{Apertures: kfd.PointerToSlice(buf), NumOfNodes: uint32(n)}
		r, err := d.ioctl(kfdabi.ReqGetProcessAperturesNew, kfd.PointerTo(&args))
		d.out("n", args.NumOfNodes)
		if err == nil && n > 0 {
			var gpus []uint32
			for _, a := range buf[:min(args.NumOfNodes, uint32(n))] {
				gpus = append(gpus, a.GPUID)
			}
			d.list("gpus", gpus)
		}
		return r, err
	},
	"runtime_enable":  func(d *doing) (int64, error) { return runtimeCall(d, d.num("mode", 1)) },
	"runtime_disable": func(d *doing) (int64, error) { return runtimeCall(d, 0) },
	"smi": func(d *doing) (int64, error) {
		args := kfd.SMIEventsArgs{GPUID: uint32(d.num("gpu", 0))}
		_, err := d.ioctl(kfd.ReqSMIEvents, kfd.PointerTo(&args))
		return d.newFD(int(args.AnonFD), err)
	},
	"select": func(d *doing) (int64, error) {
		n, err := d.sys.Write(d.fd(), binary.NativeEndian.AppendUint64(nil, d.num("events", 0))[:d.num("size", 8)])
		return int64(n), err
	},
	"events": smiEvents,
	"criu":   criu,

	"enable":          trapEnable,
	"disable":         trapDisable,
	"trap":            trapDisable,
	"send":            trapSend,
	"set_exceptions":  trapSetExceptions,
	"suspend":         trapSuspend,
	"resume":          trapResume,
	"query_event":     trapQueryEvent,
	"await_event":     awaitEvent,
	"query_info":      trapQueryInfo,
	"snapshot":        trapSnapshot,
	"devices":         trapDevices,
	"set_flags":       trapSetFlags,
	"launch_mode":     trapLaunchMode,
	"launch_override": trapLaunchOverride,
	"watch":           trapWatch,
	"clear_watch":     trapClearWatch,

	"create_queue":  createQueue,
	"destroy_queue": destroyQueue,
	"update_queue":  updateQueue,
	"cu_mask":       cuMask,
	"gws":           gws,
}

// perform makes a call. It is the only interpreter: the fake's threads run it in the test,
// and real processes in themselves.
func perform(sys system, c call) reply {
	verb, ok := verbs[c.Verb]
	if !ok {
		return reply{Broken: "no verb " + c.Verb}
	}
	d := &doing{sys: sys, values: c.Values, reply: reply{Out: map[string]string{}}}
	r, err := verb(d)
	if err != nil && !errors.As(err, &d.reply.Errno) {
		d.reply.Broken = err.Error()
	}
	if d.wrong != nil {
		d.reply.Broken = d.wrong.Error()
	}
	if d.reply.Errno == 0 {
		d.reply.R = r
	}
	return d.reply
}

// doing is a call in progress.
type doing struct {
	sys    system
	values map[string]string
	reply  reply
	wrong  error
}

func (d *doing) text(key, otherwise string) string {
	if v, ok := d.values[key]; ok {
		return v
	}
	return otherwise
}

func (d *doing) num(key string, otherwise uint64) uint64 {
	v, ok := d.values[key]
	if !ok {
		return otherwise
	}
	n, err := parseNumber(v)
	if err != nil {
		d.wrong = fmt.Errorf("%s: %w", key, err)
	}
	return n
}

func (d *doing) nums(key string) []uint32 {
	var list []uint32
	for word := range strings.SplitSeq(d.values[key], ",") {
		if word == "" {
			continue
		}
		n, err := parseNumber(word)
		if err != nil {
			d.wrong = fmt.Errorf("%s: %w", key, err)
		}
		list = append(list, uint32(n))
	}
	return list
}

// parseNumber reads a number; -1 is all ones.
func parseNumber(s string) (uint64, error) {
	if rest, negative := strings.CutPrefix(s, "-"); negative {
		n, err := strconv.ParseUint(rest, 0, 63)
		return -n, err
	}
	return strconv.ParseUint(s, 0, 64)
}

func (d *doing) mask(key string) kfd.ExceptionMask { return kfd.ExceptionMask(d.num(key, 0)) }

func (d *doing) fd() int { return int(int32(d.num("fd", 1<<32-1))) }

func (d *doing) out(key string, value any) { d.reply.Out[key] = fmt.Sprint(value) }

func (d *doing) list(key string, values []uint32) {
	words := make([]string, len(values))
	for i, v := range values {
		words[i] = strconv.FormatUint(uint64(v), 10)
	}
	d.out(key, strings.Join(words, ","))
}

// newFD returns a new descriptor; its number is not part of the answer.
func (d *doing) newFD(fd int, err error) (int64, error) {
	if err == nil {
		d.out("fd", fd)
	}
	return 0, err
}

// look opens the file path and reads its beginning, with blanks as "_".
func (d *doing) look() error {
	fd, err := d.sys.Open(d.text("path", ""), unix.O_RDONLY|unix.O_CLOEXEC)
	if err != nil {
		return err
	}
	b := make([]byte, 4096)
	n, err := d.sys.Read(fd, b)
	if err == nil { // a directory cannot be read like this
		d.out("text", strings.Join(strings.Fields(string(b[:n])), "_"))
	}
	return d.sys.Close(fd)
}

func (d *doing) ioctl(req kfd.Request, arg kfd.Pointer) (int64, error) {
	r, err := d.sys.Ioctl(d.fd(), req, arg)
	return int64(int32(r)), err
}

// pointer returns the address of a buffer, or of what "buf" selects instead.
func pointer[T any](d *doing, buf []T) kfd.Pointer {
	switch how := d.text("buf", "there"); how {
	case "there":
		return kfd.PointerToSlice(buf)
	case "null":
		return kfd.Pointer{}
	case "bad":
		p, err := d.sys.Unmapped()
		if err != nil {
			d.wrong = err
		}
		return p
	default:
		d.wrong = fmt.Errorf("buf=%s: want null or bad", how)
		return kfd.Pointer{}
	}
}

// rawCall is a request of any number and size on a buffer of words.
func rawCall(d *doing) (int64, error) {
	size := d.num("size", 0)
	request := kfd.Request(d.num("dir", 3)<<30 | size<<16 | d.num("type", 'K')<<8 | d.num("nr", 0))
	buf := make([]uint32, max(64, int(size/4)))
	given := d.nums("words")
	copy(buf, given)
	r, err := d.ioctl(request, pointer(d, buf))
	d.list("words", buf[:size/4])
	return r, err
}

func version(d *doing) (int64, error) {
	var args kfd.GetVersionArgs
	r, err := d.ioctl(kfd.ReqGetVersion, kfd.PointerTo(&args))
	d.out("major", args.Major)
	d.out("minor", args.Minor)
	return r, err
}

func runtimeCall(d *doing, mode uint64) (int64, error) {
	args := kfdabi.RuntimeEnableArgs{RDebug: d.num("r_debug", 0), ModeMask: uint32(mode)}
	return d.ioctl(kfdabi.ReqRuntimeEnable, kfd.PointerTo(&args))
}

// smiEvents reads the pending evictions and restores; the answer is their number.
func smiEvents(d *doing) (int64, error) {
	b := make([]byte, d.num("size", 8192))
	n, err := d.sys.Read(d.fd(), b)
	if err != nil {
		return 0, err
	}
	var kinds, pids, gpus, causes []uint32
	for line := range strings.Lines(string(b[:n])) {
		id, text, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		kind, err := strconv.ParseUint(id, 16, 32)
		if err != nil {
			return 0, fmt.Errorf("event %q: %w", line, err)
		}
		var pid, gpu, cause uint32 // of other events only the kind is compared
		switch kfd.SMIEventID(kind) {
		case kfd.SMIQueueEviction:
			_, err = fmt.Sscanf(text, "%d -%d %x %d", new(int64), &pid, &gpu, &cause)
		case kfd.SMIQueueRestore: // a mark, or nothing, follows
			_, err = fmt.Sscanf(text, "%d -%d %x", new(int64), &pid, &gpu)
		default:
		}
		if err != nil {
			return 0, fmt.Errorf("event %q: %w", line, err)
		}
		kinds, pids = append(kinds, uint32(kind)), append(pids, pid)
		gpus, causes = append(gpus, gpu), append(causes, cause)
	}
	d.list("kinds", kinds)
	d.list("pid", pids)
	d.list("gpus", gpus)
	d.list("causes", causes)
	return int64(len(kinds)), nil
}

var criuOps = map[string]kfd.CRIUOp{
	"process_info": kfd.CRIUOpProcessInfo, "checkpoint": kfdabi.CRIUOpCheckpoint, "unpause": kfd.CRIUOpUnpause,
	"restore": kfdabi.CRIUOpRestore, "resume": kfdabi.CRIUOpResume,
}

func criu(d *doing) (int64, error) {
	op, ok := criuOps[d.text("op", "")]
	if !ok {
		op = kfd.CRIUOp(d.num("op", 0))
	}
	args := kfd.CRIUArgs{Op: op, PID: uint32(d.num("pid", 0))}
	r, err := d.ioctl(kfd.ReqCRIUOp, kfd.PointerTo(&args))
	d.out("devices", args.NumDevices)
	d.out("pid", args.PID)
	return r, err
}

// exceptionNames are the names in scripts.
var exceptionNames = []struct {
	code kfd.ExceptionCode
	name string
}{
	{kfdabi.ECQueueWaveAbort, "abort"},
	{kfdabi.ECQueueWaveTrap, "trap"},
	{kfdabi.ECQueueWaveMemoryViolation, "memory"},
	{kfd.ECQueueNew, "new"},
	{kfdabi.ECDeviceQueueDelete, "delete"},
	{kfdabi.ECDeviceMemoryViolation, "fault"},
	{kfdabi.ECDeviceNew, "device"},
	{kfd.ECProcessRuntime, "runtime"},
	{kfdabi.ECProcessDeviceRemove, "remove"},
}

// showMask returns a mask in the form of scripts.
func showMask(m kfd.ExceptionMask) string {
	var words []string
	for _, e := range exceptionNames {
		if m.Has(e.code) {
			words = append(words, e.name)
			m &^= e.code.Mask()
		}
	}
	if m != 0 || len(words) == 0 {
		words = append(words, fmt.Sprintf("%#x", uint64(m)))
	}
	return strings.Join(words, "+")
}

// parseMask reads a mask, or with code the number of one exception.
func parseMask(s string, code bool) (uint64, error) {
	var m uint64
words:
	for word := range strings.SplitSeq(s, "+") {
		for _, e := range exceptionNames {
			if e.name != word {
				continue
			}
			if code {
				return uint64(e.code), nil
			}
			m |= uint64(e.code.Mask())
			continue words
		}
		n, err := parseNumber(word)
		if err != nil {
			return 0, fmt.Errorf("%q is neither an exception nor a number", word)
		}
		m |= n
	}
	return m, nil
}
