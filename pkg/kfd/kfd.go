// Package kfd hides the ioctl interface of AMD's compute driver, /dev/kfd: its
// numbers, its structures, the differences between its versions, and what its
// answers mean.
//
// The facts here were read from the driver's source (kfd_chardev.c, kfd_debug.c,
// kfd_device_queue_manager.c and kfd_smi_events.c of Linux 6.12.107 and 7.2) and
// from its header, include/uapi/linux/kfd_ioctl.h. Nothing here was run on AMD
// hardware.
//
// # Threads
//
// A [Device] may be used by several goroutines, but the driver asks who calls:
// see [PermissionRule]. Calls may block: an operation on queues waits for the
// firmware, by default up to 9 seconds for each GPU, and every operation waits
// for the lock of the target, which another operation may hold as long. No
// signal and no context cuts that short, so the calls take no context.
package kfd

// DevicePath is where the driver's character device is.
const DevicePath = "/dev/kfd"

// MaxQueues is KFD_MAX_NUM_OF_QUEUES_PER_PROCESS: no process has more queues,
// and no call names more.
const MaxQueues = 1024
