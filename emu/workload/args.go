package workload

import (
	"structs"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// The structures of kfd_ioctl.h for events, named in each comment; pkg/kfd has the
// others.

// createEventArgs is struct kfd_ioctl_create_event_args.
type createEventArgs struct {
	_                structs.HostLayout
	EventPageOffset  uint64 // set by the driver: where to map the page of signal events
	EventTriggerData uint32 // set by the driver
	EventType        uint32
	AutoReset        uint32
	NodeID           uint32
	EventID          uint32 // set by the driver
	EventSlotIndex   uint32 // set by the driver
}

// eventTypeSignal is KFD_IOC_EVENT_SIGNAL: one the GPU can raise.
const eventTypeSignal = 0

// eventPageBytes is the page of signal events: KFD_SIGNAL_EVENT_LIMIT slots of 8 bytes.
const eventPageBytes = 4096 * 8

// eventArgs is struct kfd_ioctl_destroy_event_args and kfd_ioctl_set_event_args.
type eventArgs struct {
	_       structs.HostLayout
	EventID uint32
	Pad     uint32
}

// waitEventsArgs is struct kfd_ioctl_wait_events_args.
type waitEventsArgs struct {
	_          structs.HostLayout
	Events     kfd.Pointer // to eventData
	NumEvents  uint32
	WaitForAll uint32
	Timeout    uint32 // ms; after an interruption what is left of them
	WaitResult uint32 // set by the driver
}

// waitTimedOut is KFD_IOC_WAIT_RESULT_TIMEOUT.
const waitTimedOut = 1

// eventData is struct kfd_event_data. The first 32 bytes are the union.
type eventData struct {
	_       structs.HostLayout
	Union   [32]byte // 8 of them the last age seen, for signal events
	Ext     uint64
	EventID uint32
	Pad     uint32
}
