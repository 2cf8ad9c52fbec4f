// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Interrupts: entries of the IH ring as a GC 9.4 or 11 writes them, handed to the
 * driver where its interrupt handler hands them to amdkfd.
 */
#include "softgpu.h"
#include "soc15_int.h"

#define VMFAULT_NOT_PRESENT	0x08	/* in the ring ID of a VM fault */

/* soft_process returns a process of /dev/kfd with a reference, or NULL. */
struct kfd_process *soft_process(pid_t pid)
{
	struct pid *id = find_get_pid(pid);
	struct kfd_process *p = id ? kfd_lookup_process_by_pid(id) : NULL;

	put_pid(id);
	return p;
}

static int interrupt(struct soft_dev *s, pid_t pid, u32 client, u32 source, u32 ring, u64 context)
{
	struct kfd_process *p = soft_process(pid);
	u32 entry[8] = {};

	if (!p)
		return -ESRCH;
	/* any VMID of amdkfd's will do: the PASID tells whose it is */
	entry[0] = client | source << 8 | ring << 16 | soft_node(s)->vm_info.first_vmid_kfd << 24;
	entry[3] = soft_pasid(s, p);	/* and node ID 0: the first XCC */
	entry[4] = lower_32_bits(context);
	entry[5] = upper_32_bits(context);
	kfd_unref_process(p);
	amdgpu_amdkfd_interrupt(s->adev, entry);
	return 0;
}

/*
 * signal writes the slot of an event, as the packet processor of a GPU does
 * before it interrupts: the driver ignores an event whose slot is not written.
 * Before 7.3 the address of the slots is the first member of struct kfd_signal_page,
 * which only kfd_events.c knows. The page lives as long as the process. As for a GPU,
 * there is no lock: the driver holds p->event_mutex while it suspends queues,
 * and an interrupt may come before the queue has stopped.
 */
static int signal(pid_t pid, u32 event)
{
	struct kfd_process *p = soft_process(pid);
	u64 *slots;
	int err = 0;

	if (!p)
		return -ESRCH;
	slots = (u64 *)READ_ONCE(p->signal_page);
#if !SOFT_SINCE(7, 3)
	slots = slots ? *(u64 **)slots : NULL;
#endif
	if (slots && event < p->signal_mapped_size / sizeof(*slots))
		WRITE_ONCE(slots[event], event);
	else
		err = -ENOENT;
	kfd_unref_process(p);
	return err;
}

/* soft_interrupt_event is the end of pipe with an event's ID; 0 is one without an ID. */
int soft_interrupt_event(struct soft_dev *s, pid_t pid, u32 event)
{
	int err;

	if (event) {
		err = signal(pid, event);
		if (err)
			return err;
	}
	return interrupt(s, pid, SOC15_IH_CLIENTID_GRBM_CP, SOC15_INTSRC_CP_END_OF_PIPE, 0, event);
}

/* soft_interrupt_fault is an access to a page that is not mapped. */
int soft_interrupt_fault(struct soft_dev *s, pid_t pid, u64 addr)
{
	/* GC 11 has no client UTCL2 */
	u32 client = s->adev->enable_mes ? SOC15_IH_CLIENTID_VMC : SOC15_IH_CLIENTID_UTCL2;

	return interrupt(s, pid, client, SOC15_INTSRC_VMC_FAULT, VMFAULT_NOT_PRESENT,
			 addr >> AMDGPU_GPU_PAGE_SHIFT);
}

/*
 * A debugger lets go. The driver's function waits for the IH ring and returns
 * the time that was left, which its caller takes for an error: it never sends
 * the entry that would tell the end of the ring. On GC 9.4.3 that entry would
 * not be accepted either, because its VMID is 0.
 */
SOFT_WRAP(int, amdgpu_amdkfd_send_close_event_drain_irq, struct amdgpu_device *adev,
	  uint32_t *payload)
{
	if (!soft_of(adev))
		return __real_amdgpu_amdkfd_send_close_event_drain_irq(adev, payload);
	return 1;
}
