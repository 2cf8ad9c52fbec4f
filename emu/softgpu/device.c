// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The nodes: for each one a platform device, a PCI device that is on no bus
 * list, and an amdgpu_device with the fields that amdkfd reads, set as the
 * driver's discovery sets them. The driver's own probe and init then make the
 * KFD node.
 */
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/platform_device.h>
#include <linux/pm_runtime.h>
#include <linux/set_memory.h>
#include <drm/drm_drv.h>

#include "softgpu.h"
#include "amdgpu_reset.h"
#include "amd_pcie.h"

static uint softgpu;
module_param(softgpu, uint, 0444);
MODULE_PARM_DESC(softgpu, "test only: number of nodes without a GPU, 0 (default) to 8");
static uint softgpu_xcc = 1;
module_param(softgpu_xcc, uint, 0444);
MODULE_PARM_DESC(softgpu_xcc, "test only: XCCs of such a node, 1 (default) to 8");
static char *softgpu_gfx = "942";
module_param(softgpu_gfx, charp, 0444);
MODULE_PARM_DESC(softgpu_gfx, "test only: GC version of such a node, 942 (default), 90a or 1100");

/* Filled from the front and not changed between init and exit of the module. */
struct soft_dev *soft_devs[SOFT_MAX_NODES];

struct soft_dev *soft_of(struct amdgpu_device *adev)
{
	int i;

	for (i = 0; i < SOFT_MAX_NODES && soft_devs[i]; i++)
		if (soft_devs[i]->adev == adev)
			return soft_devs[i];
	return NULL;
}

struct kfd_node *soft_node(struct soft_dev *s)
{
	return s->adev->kfd.dev->nodes[0];
}

struct soft_dev *soft_by_gpu_id(u32 gpu_id)
{
	int i;

	for (i = 0; i < SOFT_MAX_NODES && soft_devs[i]; i++)
		if (soft_node(soft_devs[i])->id == gpu_id)
			return soft_devs[i];
	return NULL;
}

/* struct soft_model is a generation that can be asked for. */
static const struct soft_model {
	const char *name;
	u32 gc, sdma;		/* IP versions */
	u16 device, subsystem;	/* PCI */
	unsigned int engines, first_vmid, max_xcc;
	bool mes;
} models[] = {
	{ "942", IP_VERSION(9, 4, 3), IP_VERSION(4, 4, 2), 0x74a1, 0x74a1, 4, 3, 8, false },
	{ "90a", IP_VERSION(9, 4, 2), IP_VERSION(4, 4, 0), 0x740f, 0x0c34, 8, 8, 1, false },
	{ "1100", IP_VERSION(11, 0, 0), IP_VERSION(6, 0, 0), 0x744c, 0x0e3b, 4, 8, 1, true },
};
static const struct soft_model *model;

static const struct soft_model *find_model(const char *name)
{
	int i;

	for (i = 0; i < ARRAY_SIZE(models); i++)
		if (!strcmp(models[i].name, name))
			return &models[i];
	return NULL;
}

/* The order of amdgpu_device_gpu_recover(). */
static void reset_work(struct work_struct *work)
{
	struct amdgpu_device *adev = container_of(work, struct amdgpu_device, kfd.reset_work);
	struct amdgpu_reset_context context = {
		.method = AMD_RESET_METHOD_NONE,
		.reset_req_dev = adev,
		.src = AMDGPU_RESET_SRC_HWS,
	};

	amdgpu_device_lock_reset_domain(adev->reset_domain);
	amdgpu_amdkfd_pre_reset(adev, &context);
	soft_hws_reset(soft_of(adev));
	if (amdgpu_amdkfd_post_reset(adev))
		dev_err(adev->dev, "softgpu: the driver did not start after a reset\n");
	amdgpu_device_unlock_reset_domain(adev->reset_domain);
}

static void pci_release(struct device *dev)
{
	struct pci_dev *pdev = to_pci_dev(dev);

	put_device(&pdev->bus->dev);
	kfree(pdev);
}

#define SOFT_DEVFN(index) PCI_DEVFN(0x10 + (index), 0)

/*
 * The platform devices are named after the addresses of their PCI devices and bound to a
 * driver with amdgpu's name, so that dev_err() prints the prefix that amdgpu has.
 */
static struct platform_device_id soft_ids[SOFT_MAX_NODES + 1];
static struct platform_driver soft_driver = {
	.driver = { .name = "amdgpu" },
	.id_table = soft_ids,
};

static int soft_driver_register(void)
{
	int i;

	for (i = 0; i < SOFT_MAX_NODES; i++)
		snprintf(soft_ids[i].name, sizeof(soft_ids[i].name), "0000:00:%02x.0", PCI_SLOT(SOFT_DEVFN(i)));
	return platform_driver_register(&soft_driver);
}

/* The topology needs a PCI device's numbers; nothing accesses its registers. */
static struct pci_dev *pci_create(int index)
{
	struct pci_bus *bus = pci_find_bus(0, 0);
	struct pci_dev *pdev;

	if (!bus)
		return ERR_PTR(-ENODEV);
	pdev = kzalloc(sizeof(*pdev), GFP_KERNEL);
	if (!pdev)
		return ERR_PTR(-ENOMEM);
	get_device(&bus->dev);
	pdev->bus = bus;
	pdev->devfn = SOFT_DEVFN(index);
	pdev->vendor = PCI_VENDOR_ID_ATI;
	pdev->device = model->device;
	pdev->subsystem_vendor = PCI_VENDOR_ID_ATI;
	pdev->subsystem_device = model->subsystem;
	device_initialize(&pdev->dev);
	pdev->dev.release = pci_release;
	if (dev_set_name(&pdev->dev, "softgpu:%02x", pdev->devfn)) {
		put_device(&pdev->dev);
		return ERR_PTR(-ENOMEM);
	}
	return pdev;
}

/*
 * Few CUs: the save area of a queue has up to 0.6 MB for each.
 */
static void fill_gfx(struct amdgpu_device *adev)
{
	unsigned int engines = model->engines, per_array = 2;
	struct amdgpu_gfx_config *config = &adev->gfx.config;
	struct amdgpu_cu_info *cu = &adev->gfx.cu_info;
	int xcc, engine;

	adev->gfx.mec_fw_version = 177;
	adev->gfx.mec2_fw_version = 177;
	adev->gfx.xcc_mask = (1u << softgpu_xcc) - 1;
	config->max_shader_engines = engines;
	config->max_sh_per_se = 1;
	config->max_cu_per_sh = per_array;
	cu->simd_per_cu = 4;
	cu->max_waves_per_simd = 8;
	cu->wave_front_size = 64;
	cu->max_scratch_slots_per_cu = 32;
	cu->lds_size = 64;
	cu->number = engines * per_array * softgpu_xcc;
	/* as gfx_v9_0_get_cu_info() for more than four engines */
	for (xcc = 0; xcc < softgpu_xcc; xcc++)
		for (engine = 0; engine < engines; engine++)
			cu->bitmap[xcc][engine % 4][engine / 4] = (1u << per_array) - 1;
	adev->gfx.mec.num_mec = 2;
	adev->gfx.mec.num_pipe_per_mec = 4;
	adev->gfx.mec.num_queue_per_pipe = 8;
	/* amdgpu's own compute rings: the first two queues of each pipe */
	for (xcc = 0; xcc < 4; xcc++)
		bitmap_set(adev->gfx.mec_bitmap[0].queue_bitmap, xcc * 8, 2);
}

static void fill(struct soft_dev *s)
{
	struct amdgpu_device *adev = s->adev;
	int i;

	adev->dev = &s->plat->dev;
	adev->pdev = s->pdev;
	adev->asic_type = CHIP_IP_DISCOVERY;
	adev->ip_versions[GC_HWIP][0] = model->gc;
	adev->ip_versions[SDMA0_HWIP][0] = model->sdma;
	adev->rev_id = 1;
	adev->unique_id = 0x50f700 + s->index;
	adev->sdma.instance[0].fw_version = 22;
	adev->sdma.num_instances = 4;
	adev->gds.gws_size = 64;
	adev->vm_manager.max_pfn = 1ull << 36;
	adev->vm_manager.first_kfd_vmid = model->first_vmid;
#if !SOFT_SINCE(7, 3)
	xa_init_flags(&adev->vm_manager.pasids, XA_FLAGS_LOCK_IRQ);
#endif
	adev->gmc.real_vram_size = 16ull << 30;
	adev->gmc.visible_vram_size = 16ull << 30;
	adev->gmc.vram_width = 8192;
	adev->gmc.noretry = 1;
	adev->have_atomics_support = true;
	/* two SDMA engines are XGMI's, and no node has a link; MES knows no such queues */
	adev->gmc.xgmi.supported = !model->mes;
	if (model->mes)
		soft_mes_init(adev);
	adev->pm.pcie_gen_mask = CAIL_PCIE_LINK_SPEED_SUPPORT_GEN4;
	adev->pm.pcie_mlw_mask = CAIL_PCIE_LINK_WIDTH_SUPPORT_X16;
	mutex_init(&adev->pm.mutex);
	adev->doorbell.base = virt_to_phys(s->doorbells);
	adev->doorbell.size = SOFT_DOORBELL_BYTES;
	adev->doorbell.num_kernel_doorbells = PAGE_SIZE / sizeof(u32);
	adev->doorbell_index.first_non_cp = AMDGPU_DOORBELL_LAYOUT1_FIRST_NON_CP;
	adev->doorbell_index.last_non_cp = AMDGPU_DOORBELL_LAYOUT1_LAST_NON_CP;
	for (i = 0; i < AMDGPU_MAX_SDMA_INSTANCES; i++)
		adev->doorbell_index.sdma_engine[i] = 0x100 + 20 * i;
	fill_gfx(adev);
	soft_set_functions(adev);
}

static void remove_node(struct soft_dev *s)
{
	struct amdgpu_device *adev = s->adev;

	if (adev) {
		if (adev->kfd.init_complete)
			drm_dev_unplug(adev_to_drm(adev));
		amdgpu_amdkfd_device_fini_sw(adev);
		soft_hws_fini(s);
		amdgpu_reset_put_reset_domain(adev->reset_domain);
		if (adev->mman.initialized)
			ttm_device_fini(&adev->mman.bdev);
#if !SOFT_SINCE(7, 3)
		xa_destroy(&adev->vm_manager.pasids);
#endif
	}
	soft_devs[s->index] = NULL;
	if (!IS_ERR_OR_NULL(s->plat)) {
		pm_runtime_disable(&s->plat->dev);
		platform_device_unregister(s->plat);	/* drops adev */
	}
	if (!IS_ERR_OR_NULL(s->pdev))
		put_device(&s->pdev->dev);
	if (s->doorbells) {
		set_memory_wb((unsigned long)s->doorbells, 1 << SOFT_DOORBELL_ORDER);
		free_pages((unsigned long)s->doorbells, SOFT_DOORBELL_ORDER);
	}
	kfree(s);
}

static struct ttm_device_funcs ttm_funcs;

static int add_node(int index)
{
	struct amdgpu_device *adev;
	struct soft_dev *s;
	int err;

	s = kzalloc(sizeof(*s), GFP_KERNEL);
	if (!s)
		return -ENOMEM;
	s->index = index;
	spin_lock_init(&s->doorbell_lock);
	set_bit(0, s->doorbell_pages);	/* amdgpu's own */
	err = -ENOMEM;
	s->doorbells = (void *)__get_free_pages(GFP_KERNEL | __GFP_ZERO, SOFT_DOORBELL_ORDER);
	if (!s->doorbells)
		goto fail;
	/* programs map them uncached, so the kernel's mapping has to be it too */
	err = set_memory_uc((unsigned long)s->doorbells, 1 << SOFT_DOORBELL_ORDER);
	if (err)
		goto fail;
	s->pdev = pci_create(index);
	err = PTR_ERR_OR_ZERO(s->pdev);
	if (err)
		goto fail;
	s->plat = platform_device_register_simple(soft_ids[index].name, PLATFORM_DEVID_NONE, NULL, 0);
	err = PTR_ERR_OR_ZERO(s->plat);
	if (err)
		goto fail;
	pm_runtime_no_callbacks(&s->plat->dev);
	pm_runtime_set_active(&s->plat->dev);
	pm_runtime_enable(&s->plat->dev);

	adev = devm_drm_dev_alloc(&s->plat->dev, &soft_drm_driver, struct amdgpu_device, ddev);
	err = PTR_ERR_OR_ZERO(adev);
	if (err)
		goto fail;
	s->adev = adev;
	soft_devs[index] = s;
	fill(s);
	/* no buffer of ours is TTM's, but its init sets the limit of GTT memory */
	err = ttm_device_init(&adev->mman.bdev, &ttm_funcs, adev->dev,
			      adev_to_drm(adev)->anon_inode->i_mapping,
#if SOFT_SINCE(7, 2)
			      adev_to_drm(adev)->vma_offset_manager, 0);
#else
			      adev_to_drm(adev)->vma_offset_manager, false, false);
#endif
	if (err)
		goto fail;
	adev->mman.initialized = true;
	err = soft_hws_init(s);
	if (err)
		goto fail;
	adev->reset_domain = amdgpu_reset_create_reset_domain(SINGLE_DEVICE, "softgpu-reset");
	err = -ENOMEM;
	if (!adev->reset_domain)
		goto fail;

	err = -ENODEV;
	amdgpu_amdkfd_device_probe(adev);
	if (!adev->kfd.dev)
		goto fail;
	adev->kfd.dev->kfd2kgd = soft_kfd2kgd(adev);
	amdgpu_amdkfd_device_init(adev);
	if (!adev->kfd.init_complete)
		goto fail;
	/* as kfd_setup_interrupt_bitmap() for the first XCC; since 7.2 only GPUs with partitions get it */
	soft_node(s)->interrupt_bitmap |= 3;
	INIT_WORK(&adev->kfd.reset_work, reset_work);
	err = drm_dev_register(adev_to_drm(adev), 0);
	if (err) {
		adev->kfd.init_complete = false;
		goto fail;
	}
	return 0;

fail:
	remove_node(s);
	return err;
}

static void remove_nodes(void)
{
	int i;

	for (i = SOFT_MAX_NODES - 1; i >= 0; i--)
		if (soft_devs[i])
			remove_node(soft_devs[i]);
	platform_driver_unregister(&soft_driver);	/* it would drop the adevs */
}

SOFT_WRAP(int, amdgpu_amdkfd_init, void)
{
	int i, err;

	err = __real_amdgpu_amdkfd_init();
	if (err || !softgpu)
		return err;
	model = find_model(softgpu_gfx);
	if (softgpu > SOFT_MAX_NODES || !softgpu_xcc ||
	    !model || softgpu_xcc > model->max_xcc) {
		pr_err("softgpu: no nodes: softgpu=%u softgpu_xcc=%u softgpu_gfx=%s is not possible\n",
		       softgpu, softgpu_xcc, softgpu_gfx);
		return 0;
	}
	err = soft_driver_register();
	if (err) {
		pr_err("softgpu: no nodes: the platform driver: error %d\n", err);
		return 0;
	}
	soft_channel_init();
	for (i = 0; i < softgpu; i++) {
		err = add_node(i);
		if (err) {
			pr_err("softgpu: no nodes: node %d: error %d\n", i, err);
			remove_nodes();
			return 0;
		}
	}
	err = soft_channel_register();
	if (err) {
		pr_err("softgpu: no nodes: /dev/softgpu: error %d\n", err);
		remove_nodes();
		return 0;
	}
	soft_control_init();
	return 0;
}

SOFT_WRAP(void, amdgpu_amdkfd_fini, void)
{
	bool nodes = soft_devs[0];

	if (nodes)
		soft_control_fini();
	/* ends processes, so the nodes must still be there */
	__real_amdgpu_amdkfd_fini();
	if (nodes) {
		soft_channel_unregister();
		remove_nodes();
	}
}
