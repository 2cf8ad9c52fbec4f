package kfdabi

import (
	"structs"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// The structures of a process's calls about events that it waits for (kfd_events.c). These
// are not the events of a debugger.

// CreateEventArgs is struct kfd_ioctl_create_event_args.
type CreateEventArgs struct {
	_ structs.HostLayout
	// EventPageOffset is the handle of the memory for signals, 0 for the driver's or the
	// present one, and in the result the mmap offset of the driver's.
	EventPageOffset  uint64
	EventTriggerData uint32 // set by the driver
	EventType        uint32 // of the EventType constants
	AutoReset        uint32
	NodeID           uint32
	EventID          uint32 // set by the driver
	EventSlotIndex   uint32 // set by the driver
}

// The values of EventType: KFD_IOC_EVENT_*. The driver also creates events of other types,
// which are never signalled.
const (
	EventTypeSignal      uint32 = 0
	EventTypeHWException uint32 = 3
	EventTypeDebug       uint32 = 5
	EventTypeMemory      uint32 = 8
)

// SignalEventLimit is KFD_SIGNAL_EVENT_LIMIT: the most signal events of a process with a
// page of the required size, one of them the driver's.
const SignalEventLimit = 4096

// DestroyEventArgs is struct kfd_ioctl_destroy_event_args.
type DestroyEventArgs struct {
	_       structs.HostLayout
	EventID uint32
	Pad     uint32
}

// SetEventArgs is struct kfd_ioctl_set_event_args.
type SetEventArgs struct {
	_       structs.HostLayout
	EventID uint32
	Pad     uint32
}

// ResetEventArgs is struct kfd_ioctl_reset_event_args.
type ResetEventArgs struct {
	_       structs.HostLayout
	EventID uint32
	Pad     uint32
}

// WaitEventsArgs is struct kfd_ioctl_wait_events_args.
type WaitEventsArgs struct {
	_ structs.HostLayout
	// EventsPtr points to an array of SignalEventData, MemoryEventData or HWEventData.
	EventsPtr  kfd.Pointer
	NumEvents  uint32
	WaitForAll uint32
	Timeout    uint32 // ms, or WaitForever; after an interruption the rest
	WaitResult uint32 // set by the driver, of the WaitResult constants
}

// WaitForever is the infinite Timeout (KFD_EVENT_TIMEOUT_INFINITE).
const WaitForever = ^uint32(0)

// The values of WaitResult: KFD_IOC_WAIT_RESULT_*.
const (
	WaitResultComplete uint32 = 0
	WaitResultTimeout  uint32 = 1
	WaitResultFail     uint32 = 2
)

// SignalEventData is struct kfd_event_data with the union's arm signal_event_data,
// struct kfd_hsa_signal_event_data, which was added with 1.14.
type SignalEventData struct {
	_ structs.HostLayout
	// LastEventAge is the count of the event's signals at the process's last check, 0 if
	// unknown, and in the result the present count.
	LastEventAge    uint64
	_               [24]byte
	KFDEventDataExt uint64
	EventID         uint32
	Pad             uint32
}

// MemoryEventData is struct kfd_event_data with the arm memory_exception_data, struct
// kfd_hsa_memory_exception_data.
type MemoryEventData struct {
	_               structs.HostLayout
	NotPresent      uint32
	ReadOnly        uint32
	NoExecute       uint32
	Imprecise       uint32
	VA              uint64
	GPUID           uint32
	ErrorType       uint32 // KFD_MEM_ERR_*, 0 where memory did not fail
	KFDEventDataExt uint64
	EventID         uint32
	Pad             uint32
}

// HWEventData is struct kfd_event_data with the arm hw_exception_data, struct
// kfd_hsa_hw_exception_data.
type HWEventData struct {
	_               structs.HostLayout
	ResetType       uint32
	ResetCause      uint32 // KFD_HW_EXCEPTION_*: 0 a hang, 1 memory that failed
	MemoryLost      uint32
	GPUID           uint32
	_               [16]byte
	KFDEventDataExt uint64
	EventID         uint32
	Pad             uint32
}
