// Package kfd implements the ioctl interface of AMD's compute driver, /dev/kfd: its
// request numbers, the structures of the calls of debuggers, the differences between its
// versions, and the meaning of its results. The structures of other calls, which a GPU
// program makes for itself, are in emu/kfdabi.
//
// The facts here were read from the driver's source (kfd_chardev.c, kfd_debug.c,
// kfd_device_queue_manager.c and kfd_smi_events.c of Linux 6.12.107 and 7.2) and
// from its header, include/uapi/linux/kfd_ioctl.h. Nothing here was run on AMD
// hardware.
//
// # Threads
//
// Several goroutines may use a [Device], but the driver checks the calling thread or
// process: see [PermissionRule]. Calls may block: an operation on queues waits for the
// firmware, by default up to 9 seconds for each GPU, and every operation waits for the
// lock of the target, which another operation may hold as long. No signal and no context
// ends that wait, so the calls take no context.
package kfd

// DevicePath is the path of the driver's character device.
const DevicePath = "/dev/kfd"

// MaxQueues is KFD_MAX_NUM_OF_QUEUES_PER_PROCESS: the most queues of a process and of a
// call.
const MaxQueues = 1024
