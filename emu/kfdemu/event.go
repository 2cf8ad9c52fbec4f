package kfdemu

import (
	"cmp"
	"fmt"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// EventKind is the kind of an Event.
type EventKind string

// The kinds.
const (
	// EventCall is a call on an emulated file, once it is answered: open or an ioctl.
	EventCall EventKind = "call"
	// EventStep is a step of the hardware, once it has ended.
	EventStep EventKind = "step"
	// EventProcess and EventProcessEnd are the start and the end of the driver's
	// processes, EventQueue and EventQueueEnd those of their queues.
	EventProcess    EventKind = "process"
	EventProcessEnd EventKind = "process end"
	EventQueue      EventKind = "queue"
	EventQueueEnd   EventKind = "queue end"
	// EventFault is an injected fault that strikes.
	EventFault EventKind = "fault"
	// EventGPUFault is a queue that stopped because it made the GPU use an unmapped
	// address.
	EventGPUFault EventKind = "gpu fault"
	// EventLog is a line of the driver in the kernel log.
	EventLog EventKind = "kernel log"
	// EventTrouble is a failure of the emulator itself.
	EventTrouble EventKind = "trouble"
)

// Event is one line of the log. Fields that do not apply to its kind are empty.
type Event struct {
	// Microseconds since the emulator started.
	Microseconds int64     `json:"us"`
	Kind         EventKind `json:"event"`
	// PID and TID are the caller's, or PID that of the process.
	PID int32 `json:"pid,omitempty"`
	TID int32 `json:"tid,omitempty"`
	// Op is the call, or the kind of step.
	Op string `json:"op,omitempty"`
	// Target is the process that a call or a step is about.
	Target int32 `json:"target,omitempty"`
	// GPU is its gpu_id.
	GPU    gpreempt.GPUID `json:"gpu,omitempty"`
	Queues []uint32       `json:"queues,omitempty"`
	// Queue is the queue's id, nil without a queue.
	Queue  *uint32           `json:"queue,omitempty"`
	Mask   kfd.ExceptionMask `json:"mask,omitempty"`
	Result int64             `json:"result,omitempty"`
	Errno  string            `json:"errno,omitempty"`
	// Took is the duration of the call or the step, in microseconds.
	Took float64 `json:"took_us,omitempty"`
	// Address is the address that a GPU could not use.
	Address uint64 `json:"address,omitempty"`
	Text    string `json:"text,omitempty"`
}

// report passes an event to Config.Event.
func (e *Emulator) report(v Event) {
	if e.cfg.Event == nil {
		return
	}
	v.Microseconds = time.Since(e.began).Microseconds()
	e.reporting.Lock()
	defer e.reporting.Unlock()
	e.cfg.Event(v)
}

func (e *Emulator) trouble(what string, err error) {
	if err != nil {
		e.report(Event{Kind: EventTrouble, Text: what + ": " + err.Error()})
	}
}

// errnoName returns the name of an errno, "" for 0.
func errnoName(errno syscall.Errno) string {
	if errno == 0 {
		return ""
	}
	// The kernel's own have no name.
	return cmp.Or(unix.ErrnoName(errno), fmt.Sprintf("errno %d", int(errno)))
}
