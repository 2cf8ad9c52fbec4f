/*
 * What kfdclient needs of <linux/kfd_ioctl.h>, by the same names, for machines where that
 * cannot be included: it wants <drm/drm.h>, which Debian's linux-libc-dev leaves out.
 * Layouts are those of Linux 6.1; kfdclient.c checks their sizes either way.
 */
#ifndef KFD_UAPI_H
#define KFD_UAPI_H

#include <linux/ioctl.h>
#include <linux/types.h>

enum {
	KFD_IOC_QUEUE_TYPE_SDMA = 1,
	KFD_IOC_QUEUE_TYPE_COMPUTE_AQL = 2,
	KFD_MAX_QUEUE_PERCENTAGE = 100,
	KFD_IOC_EVENT_SIGNAL = 0,
	KFD_IOC_WAIT_RESULT_TIMEOUT = 1,
	KFD_SIGNAL_EVENT_LIMIT = 4096,
};

struct kfd_ioctl_get_version_args {
	__u32 major_version, minor_version;
};

struct kfd_ioctl_create_queue_args {
	__u64 ring_base_address, write_pointer_address, read_pointer_address, doorbell_offset;
	__u32 ring_size, gpu_id, queue_type, queue_percentage, queue_priority, queue_id;
	__u64 eop_buffer_address, eop_buffer_size, ctx_save_restore_address;
	__u32 ctx_save_restore_size, ctl_stack_size;
};

struct kfd_ioctl_destroy_queue_args {
	__u32 queue_id, pad;
};

struct kfd_ioctl_create_event_args {
	__u64 event_page_offset;
	__u32 event_trigger_data, event_type, auto_reset, node_id, event_id, event_slot_index;
};

struct kfd_ioctl_destroy_event_args {
	__u32 event_id, pad;
};

struct kfd_ioctl_set_event_args {
	__u32 event_id, pad;
};

struct kfd_event_data {
	__u64 exception_data[4];
	__u64 kfd_event_data_ext;
	__u32 event_id, pad;
};

struct kfd_ioctl_wait_events_args {
	__u64 events_ptr;
	__u32 num_events, wait_for_all, timeout, wait_result;
};

struct kfd_process_device_apertures {
	__u64 lds_base, lds_limit, scratch_base, scratch_limit, gpuvm_base, gpuvm_limit;
	__u32 gpu_id, pad;
};

struct kfd_ioctl_get_process_apertures_new_args {
	__u64 kfd_process_device_apertures_ptr;
	__u32 num_of_nodes, pad;
};

struct kfd_ioctl_acquire_vm_args {
	__u32 drm_fd, gpu_id;
};

#define KFD_IOC_ALLOC_MEM_FLAGS_USERPTR (1 << 2)
#define KFD_IOC_ALLOC_MEM_FLAGS_WRITABLE (1 << 31)
#define KFD_IOC_ALLOC_MEM_FLAGS_EXECUTABLE (1 << 30)

struct kfd_ioctl_alloc_memory_of_gpu_args {
	__u64 va_addr, size, handle, mmap_offset;
	__u32 gpu_id, flags;
};

struct kfd_ioctl_free_memory_of_gpu_args {
	__u64 handle;
};

struct kfd_ioctl_map_memory_to_gpu_args {
	__u64 handle, device_ids_array_ptr;
	__u32 n_devices, n_success;
};

struct kfd_ioctl_unmap_memory_from_gpu_args {
	__u64 handle, device_ids_array_ptr;
	__u32 n_devices, n_success;
};

#define AMDKFD_IOC_GET_VERSION _IOR('K', 0x01, struct kfd_ioctl_get_version_args)
#define AMDKFD_IOC_CREATE_QUEUE _IOWR('K', 0x02, struct kfd_ioctl_create_queue_args)
#define AMDKFD_IOC_DESTROY_QUEUE _IOWR('K', 0x03, struct kfd_ioctl_destroy_queue_args)
#define AMDKFD_IOC_CREATE_EVENT _IOWR('K', 0x08, struct kfd_ioctl_create_event_args)
#define AMDKFD_IOC_DESTROY_EVENT _IOW('K', 0x09, struct kfd_ioctl_destroy_event_args)
#define AMDKFD_IOC_SET_EVENT _IOW('K', 0x0A, struct kfd_ioctl_set_event_args)
#define AMDKFD_IOC_WAIT_EVENTS _IOWR('K', 0x0C, struct kfd_ioctl_wait_events_args)
#define AMDKFD_IOC_GET_PROCESS_APERTURES_NEW _IOWR('K', 0x14, struct kfd_ioctl_get_process_apertures_new_args)
#define AMDKFD_IOC_ACQUIRE_VM _IOW('K', 0x15, struct kfd_ioctl_acquire_vm_args)
#define AMDKFD_IOC_ALLOC_MEMORY_OF_GPU _IOWR('K', 0x16, struct kfd_ioctl_alloc_memory_of_gpu_args)
#define AMDKFD_IOC_FREE_MEMORY_OF_GPU _IOW('K', 0x17, struct kfd_ioctl_free_memory_of_gpu_args)
#define AMDKFD_IOC_MAP_MEMORY_TO_GPU _IOWR('K', 0x18, struct kfd_ioctl_map_memory_to_gpu_args)
#define AMDKFD_IOC_UNMAP_MEMORY_FROM_GPU _IOWR('K', 0x19, struct kfd_ioctl_unmap_memory_from_gpu_args)

#endif
