// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Processes' memory: the render nodes, a VM for each opened file, allocation
 * and mapping. There are no page tables, but the driver's own structures are
 * filled: an amdgpu_bo_va_mapping in the VM's tree for each mapping. So
 * kfd_queue.c runs unchanged, with its checks and reference counts.
 */
#include <linux/interval_tree_generic.h>
#include <linux/slab.h>
#include <drm/drm_drv.h>
#include <drm/drm_file.h>
#include <drm/drm_gem.h>
#include <drm/drm_prime.h>
#include <drm/drm_print.h>

#include "softgpu.h"

/* The same tree as amdgpu_vm.c's, which looks up what is inserted here. */
#define MAP_START(m)	((m)->start)
#define MAP_LAST(m)	((m)->last)
INTERVAL_TREE_DEFINE(struct amdgpu_bo_va_mapping, rb, uint64_t, __subtree_last, MAP_START,
		     MAP_LAST, static __maybe_unused, soft_map)

/* struct soft_attachment is a buffer in a VM, mapped or not. */
struct soft_attachment {
	struct kfd_mem_attachment entry;	/* in kgd_mem.attachments */
	struct amdgpu_bo_va bo_va;		/* in amdgpu_bo.vm_bo */
	struct amdgpu_bo_va_mapping map;	/* in amdgpu_vm.va if entry.is_mapped */
};

static const struct file_operations soft_render_fops = {
	.owner = THIS_MODULE,
	DRM_GEM_FOPS,
	.show_fdinfo = drm_show_fdinfo,
};

/* Since 7.2 a PASID is the opened file's, before it is the process's. */
static int set_pasid(struct amdgpu_device *adev, struct amdgpu_fpriv *fpriv)
{
#if SOFT_SINCE(7, 3)
	int pasid = amdgpu_pasid_alloc(16, fpriv);

	if (pasid < 0)
		return pasid;
	fpriv->vm.pasid = pasid;
#elif SOFT_SINCE(7, 2)
	int pasid = amdgpu_pasid_alloc(16), err;

	if (pasid < 0)
		return pasid;
	err = xa_err(xa_store_irq(&adev->vm_manager.pasids, pasid, &fpriv->vm, GFP_KERNEL));
	if (err) {
		amdgpu_pasid_free(pasid);
		return err;
	}
	fpriv->vm.pasid = pasid;
#endif
	return 0;
}

static void drop_pasid(struct amdgpu_device *adev, struct amdgpu_fpriv *fpriv)
{
#if SOFT_SINCE(7, 2)
#if !SOFT_SINCE(7, 3)
	xa_erase_irq(&adev->vm_manager.pasids, fpriv->vm.pasid);
#endif
	amdgpu_pasid_free(fpriv->vm.pasid);
#else
	amdgpu_vm_set_pasid(adev, &fpriv->vm, 0);
#endif
}

static int render_open(struct drm_device *ddev, struct drm_file *file)
{
	struct amdgpu_device *adev = drm_to_adev(ddev);
	struct amdgpu_fpriv *fpriv;
	struct amdgpu_bo *root;
	int err;

	fpriv = kzalloc(sizeof(*fpriv), GFP_KERNEL);
	if (!fpriv)
		return -ENOMEM;
	/* The page directory has no memory: the driver only locks it. */
	root = soft_bo_create(adev, PAGE_SIZE, false, 0);
	if (IS_ERR(root)) {
		kfree(fpriv);
		return PTR_ERR(root);
	}
	err = -ENOMEM;
	fpriv->vm.task_info = kzalloc(sizeof(*fpriv->vm.task_info), GFP_KERNEL);
	if (fpriv->vm.task_info)
		err = set_pasid(adev, fpriv);
	if (err) {
		kfree(fpriv->vm.task_info);
		amdgpu_bo_unref(&root);
		kfree(fpriv);
		return err;
	}
	kref_init(&fpriv->vm.task_info->refcount);
	fpriv->xcp_id = AMDGPU_XCP_NO_PARTITION;
	fpriv->vm.va = RB_ROOT_CACHED;
	fpriv->vm.root.bo = root;
	fpriv->vm.pd_phys_addr = 0x100000;	/* made up */
	fpriv->vm.last_tlb_flush = dma_fence_get_stub();
	file->driver_priv = fpriv;
	return 0;
}

static void render_postclose(struct drm_device *ddev, struct drm_file *file)
{
	struct amdgpu_fpriv *fpriv = file->driver_priv;
	struct amdgpu_vm *vm = &fpriv->vm;

	amdgpu_amdkfd_gpuvm_destroy_cb(drm_to_adev(ddev), vm);
	drop_pasid(drm_to_adev(ddev), fpriv);
	WARN_ON(!RB_EMPTY_ROOT(&vm->va.rb_root));
	dma_fence_put(vm->last_tlb_flush);
	amdgpu_vm_put_task_info(vm->task_info);
	amdgpu_bo_unref(&vm->root.bo);
	kfree(fpriv);
}

/* What amdgpu_show_fdinfo() shows of a VM that KFD has acquired. */
static void render_fdinfo(struct drm_printer *p, struct drm_file *file)
{
	struct amdgpu_fpriv *fpriv = file->driver_priv;

	drm_printf(p, "pasid:\t%u\n", fpriv->vm.pasid);
}

const struct drm_driver soft_drm_driver = {
	.driver_features = DRIVER_GEM | DRIVER_RENDER,
	.open = render_open,
	.postclose = render_postclose,
	.show_fdinfo = render_fdinfo,
	.fops = &soft_render_fops,
	.name = "amdgpu",
	.desc = "softgpu: a node without a GPU",
#if !SOFT_SINCE(7, 2)
	.date = "20261123",
#endif
	.major = 3,
};

SOFT_WRAP(int, amdgpu_file_to_fpriv, struct file *file, struct amdgpu_fpriv **fpriv)
{
	if (file->f_op != &soft_render_fops)
		return __real_amdgpu_file_to_fpriv(file, fpriv);
	*fpriv = ((struct drm_file *)file->private_data)->driver_priv;
	return 0;
}

/* Evictions of userptr buffers come from debugfs, so nothing has to be restored. */
static void restore_userptr(struct work_struct *work)
{
}

static struct amdgpu_amdkfd_fence *fence_create(const struct amdkfd_process_info *info, u64 context,
						struct mm_struct *mm)
{
#if SOFT_SINCE(7, 3)
	return amdgpu_amdkfd_fence_create(context, mm, info->context_id);
#elif SOFT_SINCE(7, 2)
	return amdgpu_amdkfd_fence_create(context, mm, NULL, info->context_id);
#else
	return amdgpu_amdkfd_fence_create(context, mm, NULL);
#endif
}

static struct amdkfd_process_info *process_info_create(struct kfd_process *p)
{
	struct amdkfd_process_info *info = kzalloc(sizeof(*info), GFP_KERNEL);

	if (!info)
		return NULL;
#if SOFT_SINCE(7, 2)
	info->context_id = p->context_id;
#endif
	info->eviction_fence = fence_create(info, dma_fence_context_alloc(1), current->mm);
	if (!info->eviction_fence) {
		kfree(info);
		return NULL;
	}
	mutex_init(&info->lock);
	mutex_init(&info->notifier_lock);
	INIT_LIST_HEAD(&info->vm_list_head);
	INIT_LIST_HEAD(&info->kfd_bo_list);
	INIT_LIST_HEAD(&info->userptr_valid_list);
	INIT_LIST_HEAD(&info->userptr_inval_list);
	INIT_DELAYED_WORK(&info->restore_userptr_work, restore_userptr);
	info->pid = get_task_pid(current->group_leader, PIDTYPE_PID);
	return info;
}

/* amdgpu_amdkfd_gpuvm_destroy_cb() is the driver's own; it frees the last one's info. */
SOFT_WRAP(int, amdgpu_amdkfd_gpuvm_acquire_process_vm, struct amdgpu_device *adev,
	  struct amdgpu_vm *vm, void **process_info, struct dma_fence **ef)
{
	struct kfd_process *p = container_of(process_info, struct kfd_process, kgd_process_info);
	struct amdkfd_process_info *info = *process_info;

	if (!soft_of(adev))
		return __real_amdgpu_amdkfd_gpuvm_acquire_process_vm(adev, vm, process_info, ef);
	if (vm->process_info)
		return -EINVAL;
	if (!info) {
		info = process_info_create(p);
		if (!info)
			return -ENOMEM;
		*process_info = info;
		soft_channel_watch(p);
	}
	mutex_lock(&info->lock);
	vm->process_info = info;
	list_add_tail(&vm->vm_list_node, &info->vm_list_head);
	info->n_vms++;
	if (ef)
		*ef = dma_fence_get(&info->eviction_fence->base);
	mutex_unlock(&info->lock);
	vm->is_compute_context = true;
	amdgpu_vm_set_task_info(vm);
	return 0;
}

/* The memory never left; only the fence has to be a new one. */
SOFT_WRAP(int, amdgpu_amdkfd_gpuvm_restore_process_bos, void *process_info,
	  struct dma_fence __rcu **ef)
{
	struct amdkfd_process_info *info = process_info;
	struct amdgpu_amdkfd_fence *fence, *old;
	int err = 0;

	if (!soft_devs[0])
		return __real_amdgpu_amdkfd_gpuvm_restore_process_bos(process_info, ef);
	mutex_lock(&info->lock);
	old = info->eviction_fence;
	if (!dma_fence_is_signaled(&old->base))
		goto out;
	fence = fence_create(info, old->base.context, old->mm);
	if (!fence) {
		err = -ENOMEM;
		goto out;
	}
	info->eviction_fence = fence;
	dma_fence_put(rcu_replace_pointer(*ef, dma_fence_get(&fence->base),
					  lockdep_is_held(&info->lock)));
	dma_fence_put(&old->base);
out:
	mutex_unlock(&info->lock);
	return err;
}

SOFT_WRAP(int, amdgpu_amdkfd_criu_resume, void *process_info)
{
	struct amdkfd_process_info *info = process_info;
	bool blocked;

	if (!soft_devs[0])
		return __real_amdgpu_amdkfd_criu_resume(process_info);
	mutex_lock(&info->lock);
	blocked = info->block_mmu_notifications;
	WRITE_ONCE(info->block_mmu_notifications, false);
	mutex_unlock(&info->lock);
	return blocked ? 0 : -EINVAL;
}

/* user_range reports whether a process has memory at all of a range. */
static bool user_range(u64 addr, u64 size)
{
	struct mm_struct *mm = current->mm;
	u64 end = addr + size;
	struct vm_area_struct *vma;
	bool all = false;

	if (!mm || end < addr)
		return false;
	mmap_read_lock(mm);
	while ((vma = vma_lookup(mm, addr))) {
		if (vma->vm_end >= end) {
			all = true;
			break;
		}
		addr = vma->vm_end;
	}
	mmap_read_unlock(mm);
	return all;
}

SOFT_WRAP(int, amdgpu_amdkfd_gpuvm_alloc_memory_of_gpu, struct amdgpu_device *adev, uint64_t va,
	  uint64_t size, void *drm_priv, struct kgd_mem **mem, uint64_t *offset, uint32_t flags,
	  bool criu_resume)
{
	struct amdkfd_process_info *info;
	bool user, elsewhere;
	struct amdgpu_bo *bo;
	struct kgd_mem *m;
	int err;

	if (!soft_of(adev))
		return __real_amdgpu_amdkfd_gpuvm_alloc_memory_of_gpu(adev, va, size, drm_priv, mem,
								      offset, flags, criu_resume);
	user = false;
	elsewhere = false;
	if (!(flags & (KFD_IOC_ALLOC_MEM_FLAGS_VRAM | KFD_IOC_ALLOC_MEM_FLAGS_GTT))) {
		user = flags & KFD_IOC_ALLOC_MEM_FLAGS_USERPTR;
		elsewhere = flags & (KFD_IOC_ALLOC_MEM_FLAGS_DOORBELL |
				     KFD_IOC_ALLOC_MEM_FLAGS_MMIO_REMAP);
		if (user ? !offset || !*offset : !elsewhere)
			return -EINVAL;
	}
	if (flags & KFD_IOC_ALLOC_MEM_FLAGS_AQL_QUEUE_MEM)
		size >>= 1;	/* it will be mapped twice */
	size = PAGE_ALIGN(size);
	if (!size)
		return -EINVAL;
	if (user && !criu_resume && !user_range(untagged_addr(*offset), size))
		return -EFAULT;

	m = kzalloc(sizeof(*m), GFP_KERNEL);
	if (!m)
		return -ENOMEM;
	mutex_init(&m->lock);
	INIT_LIST_HEAD(&m->attachments);
	amdgpu_sync_create(&m->sync);
	m->va = va;
	m->alloc_flags = flags;
	m->aql_queue = flags & KFD_IOC_ALLOC_MEM_FLAGS_AQL_QUEUE_MEM;
	m->domain = flags & KFD_IOC_ALLOC_MEM_FLAGS_VRAM ? AMDGPU_GEM_DOMAIN_VRAM :
							   AMDGPU_GEM_DOMAIN_GTT;
	bo = soft_bo_create(adev, size, !user && !elsewhere, user ? untagged_addr(*offset) : 0);
	if (IS_ERR(bo)) {
		err = PTR_ERR(bo);
		goto free;
	}
	bo->preferred_domains = m->domain;
	bo->allowed_domains = m->domain;
	bo->xcp_id = m->domain == AMDGPU_GEM_DOMAIN_VRAM ? 0 : -1;
	err = amdgpu_amdkfd_reserve_mem_limit(adev, size, flags, bo->xcp_id);
	if (err)
		goto unref;
	err = drm_vma_node_allow(&bo->tbo.base.vma_node, drm_priv);
	if (err)
		goto unreserve;
	bo->kfd_bo = m;	/* from here on freed with the buffer object */
	m->bo = bo;
	info = drm_priv_to_vm(drm_priv)->process_info;
	m->process_info = info;
	mutex_lock(&info->lock);
	list_add_tail(&m->validate_list, user ? &info->userptr_valid_list : &info->kfd_bo_list);
	mutex_unlock(&info->lock);
	*mem = m;
	if (offset)
		*offset = amdgpu_bo_mmap_offset(bo);
	return 0;

unreserve:
	amdgpu_amdkfd_unreserve_mem_limit(adev, size, flags, bo->xcp_id);
unref:
	amdgpu_bo_unref(&bo);
free:
	amdgpu_sync_free(&m->sync);
	mutex_destroy(&m->lock);
	kfree(m);
	return err;
}

static void detach(struct soft_attachment *a)
{
	struct amdgpu_vm_bo_base **base = &a->bo_va.base.bo->vm_bo;

	while (*base != &a->bo_va.base)
		base = &(*base)->next;
	*base = a->bo_va.base.next;
	list_del(&a->entry.list);
	kfree(a);
}

SOFT_WRAP(int, amdgpu_amdkfd_gpuvm_free_memory_of_gpu, struct amdgpu_device *adev,
	  struct kgd_mem *mem, void *drm_priv, uint64_t *size)
{
	struct soft_attachment *a, *next;
	bool mapped;

	if (!soft_of(adev))
		return __real_amdgpu_amdkfd_gpuvm_free_memory_of_gpu(adev, mem, drm_priv, size);
	mutex_lock(&mem->lock);
	mapped = mem->mapped_to_gpu_memory;
	mutex_unlock(&mem->lock);
	if (mapped)
		return -EBUSY;
	mutex_lock(&mem->process_info->lock);
	list_del(&mem->validate_list);
	mutex_unlock(&mem->process_info->lock);
	list_for_each_entry_safe(a, next, &mem->attachments, entry.list)
		detach(a);
	if (size)
		*size = mem->domain == AMDGPU_GEM_DOMAIN_VRAM ? amdgpu_bo_size(mem->bo) : 0;
	amdgpu_sync_free(&mem->sync);
	mutex_destroy(&mem->lock);
	drm_vma_node_revoke(&mem->bo->tbo.base.vma_node, drm_priv);
	drm_gem_object_put(&mem->bo->tbo.base);
	return 0;
}

static bool attached(struct kgd_mem *mem, struct amdgpu_vm *vm)
{
	struct kfd_mem_attachment *e;

	list_for_each_entry(e, &mem->attachments, list)
		if (e->bo_va->base.vm == vm)
			return true;
	return false;
}

static int attach(struct amdgpu_device *adev, struct kgd_mem *mem, struct amdgpu_vm *vm)
{
	struct amdgpu_bo *bo = mem->bo;
	struct soft_attachment *a;
	int i;

	/* Nodes do not reach each other's memory: see amdgpu_device_is_peer_accessible. */
	if (adev != amdgpu_ttm_adev(bo->tbo.bdev) &&
	    (mem->domain == AMDGPU_GEM_DOMAIN_VRAM ||
	     mem->alloc_flags & (KFD_IOC_ALLOC_MEM_FLAGS_DOORBELL |
				 KFD_IOC_ALLOC_MEM_FLAGS_MMIO_REMAP)))
		return -EINVAL;
	for (i = 0; i <= mem->aql_queue; i++) {
		a = kzalloc(sizeof(*a), GFP_KERNEL);
		if (!a) {
			if (i)
				detach(list_first_entry(&mem->attachments, typeof(*a), entry.list));
			return -ENOMEM;
		}
		a->entry.type = KFD_MEM_ATT_SHARED;
		a->entry.bo_va = &a->bo_va;
		a->entry.adev = adev;
		a->entry.va = mem->va + i * amdgpu_bo_size(bo);
		a->bo_va.base.vm = vm;
		a->bo_va.base.bo = bo;
		a->bo_va.base.next = bo->vm_bo;
		bo->vm_bo = &a->bo_va.base;
		a->map.bo_va = &a->bo_va;
		a->map.start = a->entry.va >> AMDGPU_GPU_PAGE_SHIFT;
		a->map.last = a->map.start + (amdgpu_bo_size(bo) >> AMDGPU_GPU_PAGE_SHIFT) - 1;
		list_add(&a->entry.list, &mem->attachments);
	}
	return 0;
}

SOFT_WRAP(int, amdgpu_amdkfd_gpuvm_map_memory_to_gpu, struct amdgpu_device *adev,
	  struct kgd_mem *mem, void *drm_priv)
{
	struct amdgpu_vm *vm = drm_priv_to_vm(drm_priv);
	struct soft_attachment *a;
	int err = 0;

	if (!soft_of(adev))
		return __real_amdgpu_amdkfd_gpuvm_map_memory_to_gpu(adev, mem, drm_priv);
	mutex_lock(&mem->lock);
	if (!attached(mem, vm))
		err = attach(adev, mem, vm);
	if (!err)
		err = amdgpu_bo_reserve(vm->root.bo, true);
	if (err)
		goto out;
	list_for_each_entry(a, &mem->attachments, entry.list) {
		if (a->bo_va.base.vm != vm || a->entry.is_mapped)
			continue;
		/* as amdgpu_vm_bo_map() */
		if (a->entry.va & ~PAGE_MASK || a->map.last < a->map.start ||
		    a->map.last >= adev->vm_manager.max_pfn ||
		    soft_map_iter_first(&vm->va, a->map.start, a->map.last)) {
			err = -EINVAL;
			break;
		}
		soft_map_insert(&a->map, &vm->va);
		a->entry.is_mapped = true;
		mem->mapped_to_gpu_memory++;
	}
	amdgpu_bo_unreserve(vm->root.bo);
out:
	mutex_unlock(&mem->lock);
	return err;
}

SOFT_WRAP(int, amdgpu_amdkfd_gpuvm_unmap_memory_from_gpu, struct amdgpu_device *adev,
	  struct kgd_mem *mem, void *drm_priv)
{
	struct amdgpu_vm *vm = drm_priv_to_vm(drm_priv);
	struct soft_attachment *a;
	int err;

	if (!soft_of(adev))
		return __real_amdgpu_amdkfd_gpuvm_unmap_memory_from_gpu(adev, mem, drm_priv);
	mutex_lock(&mem->lock);
	err = amdgpu_bo_reserve(vm->root.bo, true);
	if (err)
		goto out;
	err = -EINVAL;	/* unless it is mapped there */
	list_for_each_entry(a, &mem->attachments, entry.list) {
		if (a->bo_va.base.vm != vm || !a->entry.is_mapped)
			continue;
		if (a->bo_va.queue_refcount) {
			err = -EBUSY;
			break;
		}
		soft_map_remove(&a->map, &vm->va);
		a->entry.is_mapped = false;
		mem->mapped_to_gpu_memory--;
		err = 0;
	}
	amdgpu_bo_unreserve(vm->root.bo);
out:
	mutex_unlock(&mem->lock);
	return err;
}

/* A checkpoint needs the file, to map it; as of any GEM object. */
SOFT_WRAP(int, amdgpu_amdkfd_gpuvm_export_dmabuf, struct kgd_mem *mem, struct dma_buf **dma_buf)
{
	struct dma_buf *buf;

	if (!soft_devs[0])
		return __real_amdgpu_amdkfd_gpuvm_export_dmabuf(mem, dma_buf);
	if (!mem->bo->tbo.base.filp)
		return -EINVAL;
	buf = drm_gem_prime_export(&mem->bo->tbo.base, DRM_RDWR);
	if (IS_ERR(buf))
		return PTR_ERR(buf);
	*dma_buf = buf;
	return 0;
}

/* Memory of other devices is not reached. */
SOFT_WRAP(int, amdgpu_amdkfd_gpuvm_import_dmabuf_fd, struct amdgpu_device *adev, int fd,
	  uint64_t va, void *drm_priv, struct kgd_mem **mem, uint64_t *size, uint64_t *mmap_offset)
{
	if (!soft_of(adev))
		return __real_amdgpu_amdkfd_gpuvm_import_dmabuf_fd(adev, fd, va, drm_priv, mem,
								   size, mmap_offset);
	return -EOPNOTSUPP;
}
