package kfd

import (
	"encoding/binary"
	"errors"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// SMIEventID is enum kfd_smi_event of kfd_ioctl.h.
type SMIEventID uint32

// Those of memory and queues.
const (
	SMIQueueEviction SMIEventID = 9
	SMIQueueRestore  SMIEventID = 10
)

// SMIMask is a set of events, event id being bit id-1.
type SMIMask uint64

// SMIAllProcesses selects the events of other processes, too. It needs CAP_SYS_ADMIN when
// the stream is opened.
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

// SMIStream is the events of one GPU node. Its methods may be called by any
// goroutine.
//
// The lines of VMFAULT, PROCESS_START and PROCESS_END contain the name of a process, which
// the process chooses, including line ends: it can forge any event in a stream with these
// events. Do not select them in a stream that decisions depend on.
type SMIStream struct {
	handle
	gpu gpreempt.GPUID
}

// OpenSMI opens the events in mask of a GPU node (kfd_smi_event_open). The *Error has EINVAL if
// the process cannot use such a GPU. The call is made once; if it is interrupted it returns EINTR.
func (d *Device) OpenSMI(gpu gpreempt.GPUID, mask SMIMask) (*SMIStream, error) {
	args := SMIEventsArgs{GPUID: uint32(gpu)}
	if _, err := d.ioctl(ReqSMIEvents, PointerTo(&args)); err != nil {
		return nil, fail(err, Error{Op: opSMI, GPU: gpu})
	}
	s := &SMIStream{handle: handle{sys: d.sys, fd: int(args.AnonFD)}, gpu: gpu}
	if _, err := s.write(binary.NativeEndian.AppendUint64(nil, uint64(mask))); err != nil {
		return nil, closeAfter(fail(err, Error{Op: opSMI + " select", GPU: gpu}), s.Close())
	}
	return s, nil
}

// FD returns the descriptor to poll for events (POLLIN), valid until Close. Reading never
// waits.
func (s *SMIStream) FD() int { return s.fd }

// Read returns the buffered events, which may be none. The driver buffers 1024 bytes
// (6.12) or 8192 (7.2), of which it drops events that do not fit, silently and as a whole.
// Lines that are not events are skipped.
func (s *SMIStream) Read() ([]SMIEvent, error) {
	var buf [8192]byte
	n, err := s.read(buf[:])
	if errors.Is(err, unix.EAGAIN) {
		return nil, nil
	}
	if err != nil {
		return nil, fail(err, Error{Op: opSMI + " read", GPU: s.gpu})
	}
	var events []SMIEvent
	for line := range strings.Lines(string(buf[:max(n, 0)])) {
		if event, ok := parseSMIEvent(strings.TrimSuffix(line, "\n")); ok {
			events = append(events, event)
		}
	}
	return events, nil
}

// parseSMIEvent reads "ID TEXT", ID being hexadecimal.
func parseSMIEvent(line string) (SMIEvent, bool) {
	id, text, ok := strings.Cut(line, " ")
	n, err := strconv.ParseUint(id, 16, 32)
	return SMIEvent{ID: SMIEventID(n), Text: text}, ok && err == nil && n != 0
}

// SMITrigger is the reason of an eviction (enum KFD_QUEUE_EVICTION_TRIGGERS).
type SMITrigger int

// The triggers.
const (
	// TriggerTTM: another process took the memory, VRAM is oversubscribed.
	TriggerTTM            SMITrigger = 2
	TriggerCRIUCheckpoint SMITrigger = 4
)

// Evicted returns why the queues of a process were evicted, and false for other events
// (KFD_EVENT_FMT_QUEUE_EVICTION: "NS -PID GPU TRIGGER").
func (e SMIEvent) Evicted() (why SMITrigger, ok bool) {
	words := strings.Fields(e.Text)
	if e.ID != SMIQueueEviction || len(words) != 4 {
		return 0, false
	}
	n, err := strconv.ParseUint(words[3], 10, 31)
	return SMITrigger(n), err == nil
}
