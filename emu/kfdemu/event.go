package kfdemu

import (
	"fmt"
	"syscall"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// EventKind is what an Event tells of.
type EventKind string

// The kinds.
const (
	// EventCall is a call on an emulated file, once it is answered: open or an ioctl.
	EventCall EventKind = "call"
	// EventStep is a step of the hardware, once it has ended.
	EventStep EventKind = "step"
	// EventProcess and EventProcessEnd are the driver's processes coming and going,
	// EventQueue and EventQueueEnd their queues.
	EventProcess    EventKind = "process"
	EventProcessEnd EventKind = "process end"
	EventQueue      EventKind = "queue"
	EventQueueEnd   EventKind = "queue end"
	// EventFault is an injected fault striking.
	EventFault EventKind = "fault"
	// EventGPUFault is a queue that stopped, as it made the GPU touch what is not
	// mapped.
	EventGPUFault EventKind = "gpu fault"
	// EventTrouble is something the emulator itself could not do.
	EventTrouble EventKind = "trouble"
)

// Event is one line of the log. Fields that say nothing about its kind are empty.
type Event struct {
	// Microseconds since the emulator started.
	Microseconds int64     `json:"us"`
	Kind         EventKind `json:"event"`
	// PID and TID are the caller's, or PID that of the process.
	PID int32 `json:"pid,omitempty"`
	TID int32 `json:"tid,omitempty"`
	// Op is the call, or the kind of step.
	Op string `json:"op,omitempty"`
	// Target is the process a call names, or a step is about.
	Target int32 `json:"target,omitempty"`
	// GPU is its gpu_id.
	GPU    gpreempt.GPUID `json:"gpu,omitempty"`
	Queues []uint32       `json:"queues,omitempty"`
	// Queue is its id, where there is one.
	Queue  *uint32           `json:"queue,omitempty"`
	Mask   kfd.ExceptionMask `json:"mask,omitempty"`
	Result int64             `json:"result,omitempty"`
	Errno  string            `json:"errno,omitempty"`
	// Took is how long the call or the step took, in microseconds.
	Took float64 `json:"took_us,omitempty"`
	// Address is the one a GPU could not reach.
	Address uint64 `json:"address,omitempty"`
	Text    string `json:"text,omitempty"`
}

// tell returns an event to who wants them.
func (e *Emulator) tell(v Event) {
	if e.cfg.Event == nil {
		return
	}
	v.Microseconds = time.Since(e.began).Microseconds()
	e.telling.Lock()
	defer e.telling.Unlock()
	e.cfg.Event(v)
}

func (e *Emulator) trouble(what string, err error) {
	if err != nil {
		e.tell(Event{Kind: EventTrouble, Text: what + ": " + err.Error()})
	}
}

// errnoName is what the errno is called, "" for none.
func errnoName(errno syscall.Errno) string {
	if errno == 0 {
		return ""
	}
	if name := unixErrnoName(errno); name != "" {
		return name
	}
	// The kernel's own.
	return fmt.Sprintf("errno %d", int(errno))
}
