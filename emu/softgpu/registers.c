// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * What the driver does by registers. The table of the GC version stays, with
 * all callbacks that only compute; those that read or write a register are
 * replaced. Tables of other blocks get the few functions that amdkfd calls.
 */
#include <linux/slab.h>
#include <linux/timekeeping.h>

#include "softgpu.h"
#include "amdgpu_reset.h"

extern const struct kfd2kgd_calls gc_9_4_3_kfd2kgd;
extern const struct kfd2kgd_calls aldebaran_kfd2kgd;
extern const struct kfd2kgd_calls gfx_v11_kfd2kgd;

static void program_sh_mem(struct amdgpu_device *adev, u32 vmid, u32 config, u32 ape1_base,
			   u32 ape1_limit, u32 bases, u32 inst)
{
}

static int set_pasid_vmid(struct amdgpu_device *adev, u32 pasid, unsigned int vmid, u32 inst)
{
	return 0;
}

static int init_interrupts(struct amdgpu_device *adev, u32 pipe, u32 inst)
{
	return 0;
}

/* The firmware loads and unloads the queues' HQDs, not the driver. */
static int hqd_load(struct amdgpu_device *adev, void *mqd, u32 pipe, u32 queue, u32 __user *wptr,
		    u32 shift, u32 mask, struct mm_struct *mm, u32 inst)
{
	return 0;
}

static int hiq_mqd_load(struct amdgpu_device *adev, void *mqd, u32 pipe, u32 queue, u32 doorbell,
			u32 inst)
{
	return 0;
}

static int sdma_load(struct amdgpu_device *adev, void *mqd, u32 __user *wptr, struct mm_struct *mm)
{
	return 0;
}

/* The registers of a slot are those that the MQD of its queue keeps, from dword 0x80 on. */
#define SOFT_HQD_FIRST	0xc914
#define SOFT_HQD_COUNT	56
#define SOFT_HQD_IN_MQD	(0x80 * sizeof(u32))

/* debugfs "hqds" has the queues that are mapped. */
static int hqd_dump(struct amdgpu_device *adev, u32 pipe, u32 queue, u32 (**dump)[2], u32 *n,
		    u32 inst)
{
	struct soft_dev *s = soft_of(adev);
	u32 values[SOFT_HQD_COUNT] = {};
	u32 vmid = 0, i;
	u64 mqd = s ? soft_hws_in_slot(s, pipe, queue, &vmid) : 0;

	*dump = kcalloc(SOFT_HQD_COUNT, sizeof(**dump), GFP_KERNEL);
	if (!*dump)
		return -ENOMEM;
	if (mqd && !soft_gart_read(mqd + SOFT_HQD_IN_MQD, values, sizeof(values))) {
		values[2] = 1;		/* CP_HQD_ACTIVE */
		values[3] = vmid;
	}
	for (i = 0; i < SOFT_HQD_COUNT; i++) {
		(*dump)[i][0] = SOFT_HQD_FIRST + i * sizeof(u32);
		(*dump)[i][1] = values[i];
	}
	*n = SOFT_HQD_COUNT;
	return 0;
}

/* It shows no registers of SDMA. */
static int sdma_dump(struct amdgpu_device *adev, u32 engine, u32 queue, u32 (**dump)[2], u32 *n)
{
	*n = 0;
	*dump = kzalloc(sizeof(**dump), GFP_KERNEL);
	return *dump ? 0 : -ENOMEM;
}

static bool hqd_is_occupied(struct amdgpu_device *adev, u64 addr, u32 pipe, u32 queue, u32 inst)
{
	return false;
}

static int hqd_destroy(struct amdgpu_device *adev, void *mqd, enum kfd_preempt_type type,
		       unsigned int timeout, u32 pipe, u32 queue, u32 inst)
{
	return 0;
}

static bool sdma_is_occupied(struct amdgpu_device *adev, void *mqd)
{
	return false;
}

static int sdma_destroy(struct amdgpu_device *adev, void *mqd, unsigned int timeout)
{
	return 0;
}

static int wave_control(struct amdgpu_device *adev, u32 index, u32 command, u32 inst)
{
	return 0;
}

static bool atc_mapping(struct amdgpu_device *adev, u8 vmid, u16 *pasid)
{
	*pasid = 0;
	return false;
}

static void set_page_table(struct amdgpu_device *adev, u32 vmid, u64 base)
{
}

static void cu_occupancy(struct amdgpu_device *adev, struct kfd_cu_occupancy *occupancy,
			 int *max_waves, u32 inst)
{
	*max_waves = adev->gfx.cu_info.simd_per_cu * adev->gfx.cu_info.max_waves_per_simd;
}

static void trap_handler(struct amdgpu_device *adev, u32 vmid, u64 tba, u64 tma, u32 inst)
{
}

/* Since 7.2 the driver writes the register at its start, and takes what it reads for the default. */
static void iq_wait_times(struct amdgpu_device *adev, u32 *times, u32 inst)
{
	struct soft_hws *h = &soft_of(adev)->hws;

	spin_lock(&h->lock);
	*times = h->grace;
	spin_unlock(&h->lock);
}

/* The driver keeps the returned control word and sends it with the process. */
static u32 set_watch(struct amdgpu_device *adev, u64 addr, u32 mask, u32 id, u32 mode, u32 vmid,
		     u32 inst)
{
	u32 shift = amdgpu_ip_version(adev, GC_HWIP, 0) == IP_VERSION(9, 4, 2) ? 6 : 7;

	return mode << 29 | 1u << 31 | (mask >> shift & 0xffffff);
}

static u32 clear_watch(struct amdgpu_device *adev, u32 id)
{
	return 0;
}

static u64 get_pq_addr(struct amdgpu_device *adev, u32 pipe, u32 queue, u32 inst)
{
	return soft_hws_stuck_ring(soft_of(adev), pipe, queue, false);
}

static u64 hqd_reset(struct amdgpu_device *adev, u32 pipe, u32 queue, u32 inst,
		     unsigned int timeout)
{
	/* Every XCC is reset; the queue has gone after the last. */
	return soft_hws_stuck_ring(soft_of(adev), pipe, queue,
				   inst == fls(adev->gfx.xcc_mask) - 1);
}

#if SOFT_SINCE(7, 2)
/* The driver looks at all queues of all engines after each unmap; one that is left hangs. */
static u32 sdma_get_doorbell(struct amdgpu_device *adev, int engine, int queue)
{
	return queue ? 0 : soft_hws_stuck_sdma(soft_of(adev), engine, false);
}

SOFT_WRAP(int, amdgpu_sdma_reset_engine, struct amdgpu_device *adev, u32 engine, bool kernel_queues)
{
	if (!soft_of(adev))
		return __real_amdgpu_sdma_reset_engine(adev, engine, kernel_queues);
	return soft_hws_stuck_sdma(soft_of(adev), engine, true) ? 0 : -ETIMEDOUT;
}
#endif

static struct kfd2kgd_calls calls;

static const struct kfd2kgd_calls *driver_calls(struct amdgpu_device *adev)
{
	switch (amdgpu_ip_version(adev, GC_HWIP, 0)) {
	case IP_VERSION(9, 4, 2):
		return &aldebaran_kfd2kgd;
	case IP_VERSION(11, 0, 0):
		return &gfx_v11_kfd2kgd;
	default:
		return &gc_9_4_3_kfd2kgd;
	}
}

/* The driver asks whether a callback exists, so none is added. */
#define REPLACE(member, function)		\
	do {					\
		if (calls.member)		\
			calls.member = function;\
	} while (0)

const struct kfd2kgd_calls *soft_kfd2kgd(struct amdgpu_device *adev)
{
	calls = *driver_calls(adev);
	REPLACE(program_sh_mem_settings, program_sh_mem);
	REPLACE(set_pasid_vmid_mapping, set_pasid_vmid);
	REPLACE(init_interrupts, init_interrupts);
	REPLACE(hqd_load, hqd_load);
	REPLACE(hiq_mqd_load, hiq_mqd_load);
	REPLACE(hqd_sdma_load, sdma_load);
	REPLACE(hqd_dump, hqd_dump);
	REPLACE(hqd_sdma_dump, sdma_dump);
	REPLACE(hqd_is_occupied, hqd_is_occupied);
	REPLACE(hqd_sdma_is_occupied, sdma_is_occupied);
	REPLACE(hqd_destroy, hqd_destroy);
	REPLACE(hqd_sdma_destroy, sdma_destroy);
	REPLACE(wave_control_execute, wave_control);
	REPLACE(get_atc_vmid_pasid_mapping_info, atc_mapping);
	REPLACE(set_vm_context_page_table_base, set_page_table);
	REPLACE(get_cu_occupancy, cu_occupancy);
	REPLACE(program_trap_handler_settings, trap_handler);
	REPLACE(get_iq_wait_times, iq_wait_times);
	REPLACE(set_address_watch, set_watch);
	REPLACE(clear_address_watch, clear_watch);
	REPLACE(hqd_get_pq_addr, get_pq_addr);
	REPLACE(hqd_reset, hqd_reset);
#if SOFT_SINCE(7, 2)
	REPLACE(hqd_sdma_get_doorbell, sdma_get_doorbell);
	calls.ptl_ctrl = NULL;	/* there is no PSP */
#endif
#if SOFT_SINCE(7, 3)
	calls.hqd_sdma_get_counter = NULL;	/* the driver then reads the program's counter, as before */
#endif
	return &calls;
}

static u64 gpu_clock(struct amdgpu_device *adev)
{
	return ktime_get_ns() / 10;	/* 100 MHz */
}

static void flush_hdp(struct amdgpu_device *adev, struct amdgpu_ring *ring)
{
}

static enum amdgpu_memory_partition memory_partition(struct amdgpu_device *adev)
{
	return AMDGPU_NPS1_PARTITION_MODE;
}

static enum amdgpu_pkg_type package(struct amdgpu_device *adev)
{
	return AMDGPU_PKG_TYPE_OAM;
}

static const struct amdgpu_gfx_funcs gfx_funcs = { .get_gpu_clock_counter = gpu_clock };
static const struct amdgpu_asic_funcs asic_funcs = { .flush_hdp = flush_hdp };
static const struct amdgpu_gmc_funcs gmc_funcs = { .query_mem_partition_mode = memory_partition };
static const struct amdgpu_smuio_funcs smuio_funcs = { .get_pkg_type = package };
static u32 no_register_base[8];

void soft_set_functions(struct amdgpu_device *adev)
{
	adev->gfx.funcs = &gfx_funcs;
	adev->asic_funcs = &asic_funcs;
	adev->gmc.gmc_funcs = &gmc_funcs;
	adev->smuio.funcs = &smuio_funcs;
	/* for the driver's computation of the grace period's register */
	adev->reg_offset[GC_HWIP][0] = no_register_base;
}

/* It would ask PCI for the way between the nodes. */
SOFT_WRAP(bool, amdgpu_device_is_peer_accessible, struct amdgpu_device *adev,
	  struct amdgpu_device *peer)
{
	if (!soft_of(adev))
		return __real_amdgpu_device_is_peer_accessible(adev, peer);
	return false;
}
