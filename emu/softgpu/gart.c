// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The memory that the driver shares with the firmware: MQDs, the HIQ, runlists
 * and fences. It is ordinary kernel memory with a GPU address of its own.
 * Doorbells are pages of one contiguous block, which stands for the BAR.
 */
#include <linux/interval_tree.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>

#include "softgpu.h"

struct soft_gart {
	struct interval_tree_node it;	/* GPU addresses */
	void *cpu;			/* NULL: not in the tree, it holds bo */
	struct amdgpu_bo *bo;
};

static DEFINE_SPINLOCK(gart_lock);	/* guards gart and gart_next */
static struct rb_root_cached gart = RB_ROOT_CACHED;
/* Addresses are not used again, so a late access meets no other buffer. */
static u64 gart_next = 0x7f0000000000ull;

/*
 * The memory may be freed while the scheduler still has its address: after a
 * hang, or because nothing waits for the end of a runlist. So it is read and
 * written only under the lock, and a missing buffer is an error.
 */
static void *gart_find(u64 addr, size_t size)
{
	struct interval_tree_node *it;

	lockdep_assert_held(&gart_lock);
	it = interval_tree_iter_first(&gart, addr, addr);
	if (!it || size > it->last - addr + 1)
		return NULL;
	return container_of(it, struct soft_gart, it)->cpu + (addr - it->start);
}

int soft_gart_read(u64 addr, void *buf, size_t size)
{
	void *p;

	spin_lock(&gart_lock);
	p = gart_find(addr, size);
	if (p)
		memcpy(buf, p, size);
	spin_unlock(&gart_lock);
	return p ? 0 : -EFAULT;
}

int soft_gart_write64(u64 addr, u64 value)
{
	u64 *p;

	spin_lock(&gart_lock);
	p = gart_find(addr, sizeof(*p));
	if (p)
		WRITE_ONCE(*p, value);
	spin_unlock(&gart_lock);
	return p ? 0 : -EFAULT;
}

static int gart_alloc(size_t size, void **mem_obj, uint64_t *gpu_addr, void **cpu_ptr)
{
	struct soft_gart *g;

	g = kzalloc(sizeof(*g), GFP_KERNEL);
	if (!g)
		return -ENOMEM;
	g->cpu = vzalloc(size);
	if (!g->cpu) {
		kfree(g);
		return -ENOMEM;
	}
	spin_lock(&gart_lock);
	g->it.start = gart_next;
	g->it.last = gart_next + PAGE_ALIGN(size) - 1;
	gart_next += PAGE_ALIGN(size) + PAGE_SIZE;
	interval_tree_insert(&g->it, &gart);
	spin_unlock(&gart_lock);
	*mem_obj = g;
	*gpu_addr = g->it.start;
	*cpu_ptr = g->cpu;
	return 0;
}

static void gart_free(void **mem_obj)
{
	struct soft_gart *g = *mem_obj;

	if (!g)
		return;
	if (g->cpu) {
		spin_lock(&gart_lock);
		interval_tree_remove(&g->it, &gart);
		spin_unlock(&gart_lock);
		vfree(g->cpu);
	}
	amdgpu_bo_unref(&g->bo);
	kfree(g);
	*mem_obj = NULL;
}

#if SOFT_SINCE(7, 2)
SOFT_WRAP(int, amdgpu_amdkfd_alloc_kernel_mem, struct amdgpu_device *adev, size_t size, u32 domain,
	  void **mem_obj, uint64_t *gpu_addr, void **cpu_ptr, bool mqd_gfx9)
{
	if (!soft_of(adev))
		return __real_amdgpu_amdkfd_alloc_kernel_mem(adev, size, domain, mem_obj, gpu_addr,
							     cpu_ptr, mqd_gfx9);
	return gart_alloc(size, mem_obj, gpu_addr, cpu_ptr);
}

SOFT_WRAP(void, amdgpu_amdkfd_free_kernel_mem, struct amdgpu_device *adev, void **mem_obj)
{
	if (soft_of(adev))
		gart_free(mem_obj);
	else
		__real_amdgpu_amdkfd_free_kernel_mem(adev, mem_obj);
}
#else
SOFT_WRAP(int, amdgpu_amdkfd_alloc_gtt_mem, struct amdgpu_device *adev, size_t size,
	  void **mem_obj, uint64_t *gpu_addr, void **cpu_ptr, bool mqd_gfx9)
{
	if (!soft_of(adev))
		return __real_amdgpu_amdkfd_alloc_gtt_mem(adev, size, mem_obj, gpu_addr,
							  cpu_ptr, mqd_gfx9);
	return gart_alloc(size, mem_obj, gpu_addr, cpu_ptr);
}

SOFT_WRAP(void, amdgpu_amdkfd_free_gtt_mem, struct amdgpu_device *adev, void **mem_obj)
{
	if (soft_of(adev))
		gart_free(mem_obj);
	else
		__real_amdgpu_amdkfd_free_gtt_mem(adev, mem_obj);
}
#endif

/*
 * MES reads write pointers of unmapped queues, so the driver maps their buffer
 * to the GART. It only keeps what it gets, to free it as it frees the memory above.
 */
SOFT_WRAP(int, amdgpu_amdkfd_map_gtt_bo_to_gart, struct amdgpu_bo *bo, struct amdgpu_bo **bo_gart)
{
	struct soft_gart *g;

	if (!soft_of(amdgpu_ttm_adev(bo->tbo.bdev)))
		return __real_amdgpu_amdkfd_map_gtt_bo_to_gart(bo, bo_gart);
	if (!bo->tbo.base.filp)
		return -EPERM;	/* as for the pages of a userptr, which cannot be pinned */
	g = kzalloc(sizeof(*g), GFP_KERNEL);
	if (!g)
		return -ENOMEM;
	g->bo = amdgpu_bo_ref(bo);
	*bo_gart = (struct amdgpu_bo *)g;
	return 0;
}

/*
 * The place of doorbells, since 7.2, and the address that MES would have for a
 * write pointer; the user's is used instead.
 */
SOFT_WRAP(u64, amdgpu_bo_gpu_offset, struct amdgpu_bo *bo)
{
	if (!soft_of(amdgpu_ttm_adev(bo->tbo.bdev)))
		return __real_amdgpu_bo_gpu_offset(bo);
	return bo->tbo.resource ? amdgpu_bo_gpu_offset_no_check(bo) : 0;
}

/* Global wave sync: the driver only hands the object around. */
SOFT_WRAP(int, amdgpu_amdkfd_alloc_gws, struct amdgpu_device *adev, size_t size, void **mem_obj)
{
	if (!soft_of(adev))
		return __real_amdgpu_amdkfd_alloc_gws(adev, size, mem_obj);
	*mem_obj = kzalloc(64, GFP_KERNEL);
	return *mem_obj ? 0 : -ENOMEM;
}

SOFT_WRAP(void, amdgpu_amdkfd_free_gws, struct amdgpu_device *adev, void *mem_obj)
{
	if (!soft_of(adev)) {
		__real_amdgpu_amdkfd_free_gws(adev, mem_obj);
		return;
	}
	kfree(mem_obj);
}

SOFT_WRAP(int, amdgpu_amdkfd_add_gws_to_process, void *info, void *gws, struct kgd_mem **mem)
{
	if (!soft_devs[0])
		return __real_amdgpu_amdkfd_add_gws_to_process(info, gws, mem);
	*mem = kzalloc(sizeof(**mem), GFP_KERNEL);
	return *mem ? 0 : -ENOMEM;
}

SOFT_WRAP(int, amdgpu_amdkfd_remove_gws_from_process, void *info, void *mem)
{
	if (!soft_devs[0])
		return __real_amdgpu_amdkfd_remove_gws_from_process(info, mem);
	kfree(mem);
	return 0;
}

struct soft_doorbells {
	struct amdgpu_bo bo;
	struct ttm_resource res;	/* start is the first page in the BAR */
	unsigned int pages;
};

/* The driver asks its own amdgpu_doorbell_index_on_bar() for the place. */
SOFT_WRAP(int, amdgpu_bo_create_kernel, struct amdgpu_device *adev, unsigned long size,
	  int align, u32 domain, struct amdgpu_bo **bo_ptr, u64 *gpu_addr, void **cpu_addr)
{
	struct soft_dev *s = soft_of(adev);
	struct soft_doorbells *d;
	unsigned long page;

	if (!s)
		return __real_amdgpu_bo_create_kernel(adev, size, align, domain, bo_ptr,
						      gpu_addr, cpu_addr);
	if (WARN_ON(domain != AMDGPU_GEM_DOMAIN_DOORBELL))
		return -EINVAL;
	d = kzalloc(sizeof(*d), GFP_KERNEL);
	if (!d)
		return -ENOMEM;
	d->pages = DIV_ROUND_UP(size, PAGE_SIZE);
	spin_lock(&s->doorbell_lock);
	page = bitmap_find_next_zero_area(s->doorbell_pages, 1 << SOFT_DOORBELL_ORDER, 0,
					  d->pages, 0);
	if (page < 1 << SOFT_DOORBELL_ORDER)
		bitmap_set(s->doorbell_pages, page, d->pages);
	spin_unlock(&s->doorbell_lock);
	if (page >= 1 << SOFT_DOORBELL_ORDER) {
		kfree(d);
		return -ENOMEM;
	}
	memset(s->doorbells + page * PAGE_SIZE, 0, d->pages * PAGE_SIZE);
	d->res.mem_type = AMDGPU_PL_DOORBELL;
	d->res.start = page;
	d->bo.tbo.resource = &d->res;
	d->bo.tbo.bdev = &adev->mman.bdev;
	*bo_ptr = &d->bo;
	if (cpu_addr)
		*cpu_addr = s->doorbells + page * PAGE_SIZE;
	return 0;
}

SOFT_WRAP(void, amdgpu_bo_free_kernel, struct amdgpu_bo **bo, u64 *gpu_addr, void **cpu_addr)
{
	struct soft_doorbells *d;
	struct soft_dev *s;

	s = *bo ? soft_of(amdgpu_ttm_adev((*bo)->tbo.bdev)) : NULL;
	if (!s) {
		__real_amdgpu_bo_free_kernel(bo, gpu_addr, cpu_addr);
		return;
	}
	d = container_of(*bo, struct soft_doorbells, bo);
	spin_lock(&s->doorbell_lock);
	bitmap_clear(s->doorbell_pages, d->res.start, d->pages);
	spin_unlock(&s->doorbell_lock);
	kfree(d);
	*bo = NULL;
	if (cpu_addr)
		*cpu_addr = NULL;
}
