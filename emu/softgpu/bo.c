// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Buffer objects. They are GEM objects with pages of shmem, which come into
 * being when they are touched: a program can allocate the large save area of a
 * queue without using memory. "VRAM" and "GTT" differ in the accounting only.
 */
#include <linux/mman.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>
#include <drm/drm_gem.h>

#include "softgpu.h"

struct soft_bo {
	struct amdgpu_bo bo;
	u64 user_addr;		/* of a userptr buffer */
	struct page **pages;	/* while the kernel has it mapped */
	void *cpu;
};

static struct soft_bo *to_soft_bo(struct amdgpu_bo *bo)
{
	return container_of(bo, struct soft_bo, bo);
}

static void bo_free(struct drm_gem_object *obj)
{
	struct amdgpu_bo *bo = gem_to_amdgpu_bo(obj);

	soft_bo_vunmap(bo);
	if (bo->kfd_bo)
		amdgpu_amdkfd_release_notify(bo);
	drm_gem_object_release(obj);
	kfree(to_soft_bo(bo));
}

/* The kernel's name for it differs from version to version. */
static bool copies(const struct vm_area_struct *vma)
{
	return (vma->vm_flags & (VM_SHARED | VM_MAYWRITE)) == VM_MAYWRITE;
}

/* A program that maps the buffer maps the shmem file: all else is its business. */
static int bo_mmap(struct drm_gem_object *obj, struct vm_area_struct *vma)
{
	int err;

	if (!obj->filp)
		return -EPERM;
	/* as amdgpu_gem_object_mmap() */
	if (copies(vma) && !(vma->vm_flags & VM_ACCESS_FLAGS))
		vm_flags_clear(vma, VM_MAYWRITE);
	if (copies(vma))
		return -EINVAL;
	vma->vm_pgoff -= drm_vma_node_start(&obj->vma_node);
	vma->vm_private_data = NULL;
	vma->vm_ops = NULL;
	vma_set_file(vma, obj->filp);
#if SOFT_SINCE(7, 2)
	err = vfs_mmap(obj->filp, vma);
#else
	err = call_mmap(obj->filp, vma);
#endif
	if (err)
		return err;
	vm_flags_set(vma, VM_DONTEXPAND | VM_DONTDUMP);
	/* The mapping keeps the file; drm_gem_mmap_obj() took a reference for it. */
	drm_gem_object_put(obj);
	return 0;
}

static const struct drm_gem_object_funcs bo_funcs = {
	.free = bo_free,
	.mmap = bo_mmap,
};

/*
 * soft_bo_create returns a buffer object with one reference, or an ERR_PTR.
 * Without backing it stands for memory that lies elsewhere, for a userptr
 * buffer at user_addr.
 */
struct amdgpu_bo *soft_bo_create(struct amdgpu_device *adev, u64 size, bool backed, u64 user_addr)
{
	struct drm_gem_object *obj;
	struct soft_bo *b;
	int err;

	b = kzalloc(sizeof(*b), GFP_KERNEL);
	if (!b)
		return ERR_PTR(-ENOMEM);
	obj = &b->bo.tbo.base;
	obj->funcs = &bo_funcs;
	if (backed) {
		err = drm_gem_object_init(adev_to_drm(adev), obj, size);
		if (err) {
			drm_gem_private_object_fini(obj);
			kfree(b);
			return ERR_PTR(err);
		}
	} else {
		drm_gem_private_object_init(adev_to_drm(adev), obj, size);
	}
	b->bo.tbo.bdev = &adev->mman.bdev;
	b->user_addr = user_addr;
	err = drm_gem_create_mmap_offset(obj);
	if (err) {
		drm_gem_object_put(obj);
		return ERR_PTR(err);
	}
	return &b->bo;
}

int soft_bo_vmap(struct amdgpu_bo *bo, void **cpu)
{
	struct soft_bo *b = to_soft_bo(bo);
	struct page **pages;

	if (!bo->tbo.base.filp)
		return -EINVAL;
	if (!b->cpu) {
		pages = drm_gem_get_pages(&bo->tbo.base);
		if (IS_ERR(pages))
			return PTR_ERR(pages);
		b->cpu = vmap(pages, amdgpu_bo_size(bo) >> PAGE_SHIFT, VM_MAP, PAGE_KERNEL);
		if (!b->cpu) {
			drm_gem_put_pages(&bo->tbo.base, pages, false, false);
			return -ENOMEM;
		}
		b->pages = pages;
	}
	*cpu = b->cpu;
	return 0;
}

void soft_bo_vunmap(struct amdgpu_bo *bo)
{
	struct soft_bo *b = to_soft_bo(bo);

	if (!b->cpu)
		return;
	vunmap(b->cpu);
	drm_gem_put_pages(&bo->tbo.base, b->pages, true, true);
	b->cpu = NULL;
	b->pages = NULL;
}

/* A checkpoint has the address. */
SOFT_WRAP(int, amdgpu_ttm_tt_get_userptr, const struct ttm_buffer_object *tbo, uint64_t *user_addr)
{
	const struct soft_bo *b;

	if (!soft_of(amdgpu_ttm_adev(tbo->bdev)))
		return __real_amdgpu_ttm_tt_get_userptr(tbo, user_addr);
	b = container_of(tbo, struct soft_bo, bo.tbo);
	if (!b->user_addr)
		return -EINVAL;
	*user_addr = b->user_addr;
	return 0;
}

static int to_kernel(struct kgd_mem *mem, void **kptr, uint64_t *size)
{
	int err = soft_bo_vmap(mem->bo, kptr);

	if (!err && size)
		*size = amdgpu_bo_size(mem->bo);
	return err;
}

#if SOFT_SINCE(7, 3)
SOFT_WRAP(int, amdgpu_amdkfd_gpuvm_map_bo_to_kernel, struct kgd_mem *mem, void **kptr, u64 *size,
	  u32 domain)
{
	if (!soft_devs[0])
		return __real_amdgpu_amdkfd_gpuvm_map_bo_to_kernel(mem, kptr, size, domain);
	return to_kernel(mem, kptr, size);
}

SOFT_WRAP(void, amdgpu_amdkfd_gpuvm_unmap_bo_from_kernel, struct kgd_mem *mem)
{
	if (soft_devs[0])
		soft_bo_vunmap(mem->bo);
	else
		__real_amdgpu_amdkfd_gpuvm_unmap_bo_from_kernel(mem);
}
#else
SOFT_WRAP(int, amdgpu_amdkfd_gpuvm_map_gtt_bo_to_kernel, struct kgd_mem *mem, void **kptr,
	  uint64_t *size)
{
	if (!soft_devs[0])
		return __real_amdgpu_amdkfd_gpuvm_map_gtt_bo_to_kernel(mem, kptr, size);
	return to_kernel(mem, kptr, size);
}

SOFT_WRAP(void, amdgpu_amdkfd_gpuvm_unmap_gtt_bo_from_kernel, struct kgd_mem *mem)
{
	if (soft_devs[0])
		soft_bo_vunmap(mem->bo);
	else
		__real_amdgpu_amdkfd_gpuvm_unmap_gtt_bo_from_kernel(mem);
}
#endif
