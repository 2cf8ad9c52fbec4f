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

// The events.
const (
	SMIVMFault         SMIEventID = 1
	SMIThermalThrottle SMIEventID = 2
	SMIGPUPreReset     SMIEventID = 3
	SMIGPUPostReset    SMIEventID = 4
	SMIMigrateStart    SMIEventID = 5
	SMIMigrateEnd      SMIEventID = 6
	SMIPageFaultStart  SMIEventID = 7
	SMIPageFaultEnd    SMIEventID = 8
	SMIQueueEviction   SMIEventID = 9
	SMIQueueRestore    SMIEventID = 10
	SMIUnmapFromGPU    SMIEventID = 11
	// SMIProcessStart and SMIProcessEnd came between 6.12 and 7.2.
	SMIProcessStart SMIEventID = 12
	SMIProcessEnd   SMIEventID = 13
)

// SMIMask is a set of events, event id being bit id-1.
type SMIMask uint64

// SMIAllProcesses asks for the events of other processes too. It needs
// CAP_SYS_ADMIN when the events are opened; newer drivers go by that alone.
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
	// Text is what follows the id, in the form of that event.
	Text string
}

// SMIStream is the events of one GPU node. FD, Select and Close may be called by
// any goroutine at any time, Read by one at a time.
//
// The lines of VMFAULT, PROCESS_START and PROCESS_END hold the name of a process,
// which that process may choose, line ends included: it can forge any event in a
// stream that asks for these. Keep them out of a stream that decides anything.
type SMIStream struct {
	handle handle
	gpu    gpreempt.GPUID
	lines  lines
}

// OpenSMI opens the events of a GPU node (kfd_smi_event_open); none come before
// Select. The *Error has EINVAL when the process cannot see such a GPU. It is made
// once, an interrupted call returns EINTR.
func (d *Device) OpenSMI(gpu gpreempt.GPUID) (*SMIStream, error) {
	args := SMIEventsArgs{GPUID: uint32(gpu)}
	if _, err := d.handle.ioctl(ReqSMIEvents, PointerTo(&args)); err != nil {
		return nil, fail(err, Error{Op: opSMI, GPU: gpu, Queue: NoQueue})
	}
	return &SMIStream{handle: handle{sys: d.handle.sys, fd: int(args.AnonFD)}, gpu: gpu}, nil
}

// FD returns the descriptor to poll for events (POLLIN); reading never waits. It is
// good until Close.
func (s *SMIStream) FD() int { return s.handle.fd }

// Select says which events come from now on.
func (s *SMIStream) Select(mask SMIMask) error {
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], uint64(mask))
	_, err := s.handle.write(b[:])
	return fail(err, Error{Op: opSMI + " select", GPU: s.gpu, Queue: NoQueue})
}

// Read returns the events that are waiting, none if none are. The driver keeps 1024
// bytes of them (6.12) or 8192 (7.2) and drops what comes on top without a word.
// Lines that are no event are passed over.
func (s *SMIStream) Read() ([]SMIEvent, error) {
	var buf [8192]byte
	n, err := s.handle.read(buf[:])
	if errors.Is(err, unix.EAGAIN) {
		return nil, nil
	}
	if err != nil {
		return nil, fail(err, Error{Op: opSMI + " read", GPU: s.gpu, Queue: NoQueue})
	}
	return s.lines.add(buf[:max(n, 0)]), nil
}

// Close ends the stream, once a Read that is under way has returned. It is
// idempotent.
func (s *SMIStream) Close() error { return s.handle.close() }

// maxLine is more than any event takes; what is longer is thrown away.
const maxLine = 1024

// lines puts events together from reads that may end in the middle of a line.
type lines struct {
	rest []byte
	// skipping: the line under way is too long, its end is awaited.
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

// SMITrigger is why queues were evicted (enum KFD_QUEUE_EVICTION_TRIGGERS).
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

// QueueEviction is the driver taking all queues of a process off a GPU, or putting
// them back. Suspending and resuming queues is not reported.
type QueueEviction struct {
	// BoottimeNS is when, in nanoseconds of CLOCK_BOOTTIME.
	BoottimeNS int64
	// PID is the process; in which namespace, see Profile.SMIHostPIDs.
	PID int32
	GPU gpreempt.GPUID
	// Restored: the queues are back, or will be (Rescheduled). Otherwise they went,
	// because of Trigger.
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
		return bad("it is not about queues")
	}
	words := strings.Fields(e.Text)
	if len(words) < 3 || len(words) > 4 {
		return bad("want a time, a process, a GPU and a cause")
	}
	ns, err := strconv.ParseInt(words[0], 10, 64)
	if err != nil {
		return bad("the first word is no time in nanoseconds")
	}
	pid, err := strconv.ParseInt(words[1], 10, 32)
	if err != nil || pid > 0 {
		return bad("the second word is no process id with a - before it")
	}
	gpu, err := strconv.ParseUint(words[2], 16, 32)
	if err != nil {
		return bad("the third word is no GPU in hexadecimal")
	}
	ev := QueueEviction{BoottimeNS: ns, PID: int32(-pid), GPU: gpreempt.GPUID(gpu)}
	if e.ID == SMIQueueRestore {
		// The mark of a plain restore is '0', or may be missing.
		ev.Restored = true
		ev.Rescheduled = len(words) == 4 && words[3] == "R"
		return ev, nil
	}
	if len(words) < 4 {
		return bad("want the cause as the fourth word")
	}
	trigger, err := strconv.ParseUint(words[3], 10, 31)
	if err != nil {
		return bad("the fourth word is no cause")
	}
	ev.Trigger = SMITrigger(trigger)
	return ev, nil
}
