package kfd

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// SMIEventID is enum kfd_smi_event of kfd_ioctl.h.
type SMIEventID uint32

// The events that this project names.
const (
	SMIVMFault       SMIEventID = 1
	SMIGPUPreReset   SMIEventID = 3
	SMIGPUPostReset  SMIEventID = 4
	SMIQueueEviction SMIEventID = 9
	SMIQueueRestore  SMIEventID = 10
	// SMIProcessStart and SMIProcessEnd came between 6.12 and 7.2.
	SMIProcessStart SMIEventID = 12
	SMIProcessEnd   SMIEventID = 13
)

// SMIMask is a set of events, event id being bit id-1.
type SMIMask uint64

// SMIAllProcesses selects the events of other processes, too. It needs CAP_SYS_ADMIN when
// the stream is opened; newer drivers check only that.
const SMIAllProcesses SMIMask = 1 << 63

// SMIEvents returns the set of ids.
func SMIEvents(ids ...SMIEventID) SMIMask {
	var m SMIMask
	for _, id := range ids {
		if id >= 1 && id < 64 {
			m |= 1 << (id - 1)
		}
	}
	return m
}

// SMIEvent is one line of an event stream.
type SMIEvent struct {
	ID SMIEventID
	// Text is the line after the ID, in the format of the event.
	Text string
}

// SMIStream is the events of one GPU node. Any goroutine may call FD, Select and Close at
// any time, and one at a time Read.
//
// The lines of VMFAULT, PROCESS_START and PROCESS_END contain the name of a process, which
// the process chooses, including line ends: it can forge any event in a stream with these
// events. Do not select them in a stream that decisions depend on.
type SMIStream struct {
	handle
	gpu   gpreempt.GPUID
	lines lines
}

// OpenSMI opens the events of a GPU node (kfd_smi_event_open). There are no events before
// Select. The *Error has EINVAL if the process cannot use such a GPU. The call is made
// once; if it is interrupted it returns EINTR.
func (d *Device) OpenSMI(gpu gpreempt.GPUID) (*SMIStream, error) {
	args := SMIEventsArgs{GPUID: uint32(gpu)}
	if _, err := d.ioctl(ReqSMIEvents, PointerTo(&args)); err != nil {
		return nil, fail(err, Error{Op: opSMI, GPU: gpu})
	}
	return &SMIStream{handle: handle{sys: d.sys, fd: int(args.AnonFD)}, gpu: gpu}, nil
}

// FD returns the descriptor to poll for events (POLLIN), valid until Close. Reading never
// waits.
func (s *SMIStream) FD() int { return s.fd }

// Select sets the events of the stream from now on.
func (s *SMIStream) Select(mask SMIMask) error {
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], uint64(mask))
	_, err := s.write(b[:])
	return fail(err, Error{Op: opSMI + " select", GPU: s.gpu})
}

// Read returns the buffered events, which may be none. The driver buffers 1024 bytes
// (6.12) or 8192 (7.2) and silently drops events that do not fit. Lines that are not
// events are skipped.
func (s *SMIStream) Read() ([]SMIEvent, error) {
	var buf [8192]byte
	n, err := s.read(buf[:])
	if errors.Is(err, unix.EAGAIN) {
		return nil, nil
	}
	if err != nil {
		return nil, fail(err, Error{Op: opSMI + " read", GPU: s.gpu})
	}
	return s.lines.add(buf[:max(n, 0)]), nil
}

// maxLine is more than the length of any event; longer lines are dropped.
const maxLine = 1024

// lines assembles events from reads that may end in the middle of a line.
type lines struct {
	rest []byte
	// skipping: the present line is too long and is dropped up to its end.
	skipping bool
}

func (l *lines) add(b []byte) []SMIEvent {
	var events []SMIEvent
	for {
		line, after, whole := bytes.Cut(b, []byte("\n"))
		if !l.skipping {
			l.rest = append(l.rest, line...)
		}
		if len(l.rest) > maxLine {
			l.rest, l.skipping = l.rest[:0], true
		}
		if !whole {
			return events
		}
		if event, ok := parseSMIEvent(l.rest); ok && !l.skipping {
			events = append(events, event)
		}
		l.rest, l.skipping = l.rest[:0], false
		b = after
	}
}

// parseSMIEvent reads "ID TEXT", ID being hexadecimal.
func parseSMIEvent(line []byte) (SMIEvent, bool) {
	id, text, ok := strings.Cut(string(line), " ")
	n, err := strconv.ParseUint(id, 16, 32)
	if !ok || err != nil || n == 0 {
		return SMIEvent{}, false
	}
	return SMIEvent{ID: SMIEventID(n), Text: text}, true
}

// SMITrigger is the reason of an eviction (enum KFD_QUEUE_EVICTION_TRIGGERS).
type SMITrigger int

// The triggers.
const (
	TriggerSVM     SMITrigger = 0
	TriggerUserptr SMITrigger = 1
	// TriggerTTM: another process took the memory, VRAM is oversubscribed.
	TriggerTTM            SMITrigger = 2
	TriggerSuspend        SMITrigger = 3
	TriggerCRIUCheckpoint SMITrigger = 4
	TriggerCRIURestore    SMITrigger = 5
)

// QueueEviction is the eviction of all queues of a process from a GPU, or their restore.
// Suspending and resuming queues is not reported.
type QueueEviction struct {
	// BoottimeNS is the time, in nanoseconds of CLOCK_BOOTTIME.
	BoottimeNS int64
	// PID is the process, by its pid in the host's namespace; since Linux 7.2 in its own.
	PID int32
	GPU gpreempt.GPUID
	// Restored: the queues were restored, or will be (Rescheduled). Otherwise they were
	// evicted because of Trigger.
	Restored    bool
	Rescheduled bool
	Trigger     SMITrigger
}

// ParseQueueEviction reads the text of SMIQueueEviction and SMIQueueRestore
// (KFD_EVENT_FMT_QUEUE_EVICTION and KFD_EVENT_FMT_QUEUE_RESTORE): "NS -PID GPU
// TRIGGER" and "NS -PID GPU MARK", with GPU in hexadecimal.
func ParseQueueEviction(e SMIEvent) (QueueEviction, error) {
	bad := func(why string) (QueueEviction, error) {
		return QueueEviction{}, fmt.Errorf("SMI event %d %q: %s", e.ID, e.Text, why)
	}
	if e.ID != SMIQueueEviction && e.ID != SMIQueueRestore {
		return bad("not an event of queues")
	}
	words := strings.Fields(e.Text)
	if len(words) < 3 || len(words) > 4 {
		return bad("want a time, a process, a GPU and a trigger")
	}
	ns, err := strconv.ParseInt(words[0], 10, 64)
	if err != nil {
		return bad("invalid time in nanoseconds as the first word")
	}
	pid, err := strconv.ParseInt(words[1], 10, 32)
	if err != nil || pid > 0 {
		return bad("invalid process ID, with a - before it, as the second word")
	}
	gpu, err := strconv.ParseUint(words[2], 16, 32)
	if err != nil {
		return bad("invalid GPU, in hexadecimal, as the third word")
	}
	ev := QueueEviction{BoottimeNS: ns, PID: int32(-pid), GPU: gpreempt.GPUID(gpu)}
	if e.ID == SMIQueueRestore {
		// The mark of a plain restore is '0', or may be missing.
		ev.Restored = true
		ev.Rescheduled = len(words) == 4 && words[3] == "R"
		return ev, nil
	}
	if len(words) < 4 {
		return bad("want a trigger as the fourth word")
	}
	trigger, err := strconv.ParseUint(words[3], 10, 31)
	if err != nil {
		return bad("invalid trigger as the fourth word")
	}
	ev.Trigger = SMITrigger(trigger)
	return ev, nil
}
