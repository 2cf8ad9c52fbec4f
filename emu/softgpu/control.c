// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * debugfs "softgpu": what the nodes and queues are like, and commands that
 * make faults, interrupts, evictions and resets.
 */
#include <linux/debugfs.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "softgpu.h"
#include "amdgpu_reset.h"
#include "kfd_debug.h"
#include "kfd_device_queue_manager.h"

static struct dentry *directory;
static bool tracing;

void soft_trace(struct soft_dev *s, const char *fmt, ...)
{
	struct va_format vaf = { .fmt = fmt };
	va_list args;

	if (!READ_ONCE(tracing))
		return;
	va_start(args, fmt);
	vaf.va = &args;
	dev_info(s->adev->dev, "softgpu: %pV\n", &vaf);
	va_end(args);
}

/* "grace" is the register's value at the last unmap, "default" the one without a request. */
static int nodes_show(struct seq_file *m, void *v)
{
	struct soft_queue *q;
	int i, mapped;

	for (i = 0; i < SOFT_MAX_NODES && soft_devs[i]; i++) {
		struct soft_hws *h = &soft_devs[i]->hws;
		struct kfd_node *node = soft_node(soft_devs[i]);

		spin_lock(&h->lock);
		mapped = 0;
		list_for_each_entry(q, &h->queues, list)
			mapped += q->mapped;
		seq_printf(m, "gpu %u index %d adds %u removes %u maps %u unmaps %u fences %u hung %u resets %u grace %#x default %#x mapped %d\n",
			   node->id, i, h->adds, h->removes, h->maps, h->unmaps, h->fences,
			   h->hung, h->resets,
			   h->unmaps ? h->last[(h->unmaps - 1) % SOFT_UNMAPS].grace : h->grace,
			   node->dqm->wait_times, mapped);
		spin_unlock(&h->lock);
	}
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(nodes);

static void show_unmap(struct seq_file *m, u32 gpu, u32 number, const struct soft_unmap *u)
{
	u32 i;

	seq_printf(m, "gpu %u unmap %u action %u select %u param %#x grace %#x queues %u usec %lld pids ",
		   gpu, number, u->action, u->select, u->param, u->grace, u->queues, u->usec);
	for (i = 0; i < u->npids; i++)
		seq_printf(m, "%s%d", i ? "," : "", u->pids[i]);
	seq_puts(m, u->npids ? "\n" : "-\n");
}

static int unmaps_show(struct seq_file *m, void *v)
{
	int i;
	u32 n;

	for (i = 0; i < SOFT_MAX_NODES && soft_devs[i]; i++) {
		struct soft_hws *h = &soft_devs[i]->hws;

		spin_lock(&h->lock);
		for (n = h->unmaps > SOFT_UNMAPS ? h->unmaps - SOFT_UNMAPS : 0; n < h->unmaps; n++)
			show_unmap(m, soft_node(soft_devs[i])->id, n + 1,
				   &h->last[n % SOFT_UNMAPS]);
		spin_unlock(&h->lock);
	}
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(unmaps);

static void show_queues(struct seq_file *m, struct kfd_process_device *pdd)
{
	struct soft_dev *s = soft_of(pdd->dev->adev);
	struct soft_queue *hq;
	struct queue *q;

	if (!s)
		return;
	dqm_lock(pdd->dev->dqm);
	list_for_each_entry(q, &pdd->qpd.queues_list, list) {
		struct queue_properties *p = &q->properties;
		bool running;
		u32 cycled;

		spin_lock(&s->hws.lock);
		hq = soft_hws_find(&s->hws, q->gart_mqd_addr, soft_pasid(s, q->process));
		running = hq && hq->mapped && !hq->stuck;
		cycled = hq ? hq->cycled : 0;
		spin_unlock(&s->hws.lock);
		seq_printf(m, "pid %d gpu %u queue %u suspended=%d active=%d running=%d evicted=%d destroying=%d status=%#llx cycled=%u type=%u doorbell=%#x ring=%#llx\n",
			   q->process->lead_thread->pid, pdd->dev->id, p->queue_id, p->is_suspended,
			   p->is_active, running, p->is_evicted, p->is_being_destroyed,
			   p->exception_status, cycled, p->type, p->doorbell_off, p->queue_address);
	}
	dqm_unlock(pdd->dev->dqm);
}

static int queues_show(struct seq_file *m, void *v)
{
	struct kfd_process *p;
	unsigned int bucket;
	int i, index;

	index = srcu_read_lock(&kfd_processes_srcu);
	hash_for_each_rcu(kfd_processes_table, bucket, p, kfd_processes)
		for (i = 0; i < p->n_pdds; i++)
			show_queues(m, p->pdds[i]);
	srcu_read_unlock(&kfd_processes_srcu, index);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(queues);

/* find_queue finds the queue of a process by its ID, and returns both its doorbells. */
static int find_queue(struct soft_dev *s, pid_t pid, u32 id, u32 *index, u32 *in_process)
{
	struct kfd_process *p = soft_process(pid);
	struct queue *q;
	int err = -ENOENT;

	if (!p)
		return -ESRCH;
	mutex_lock(&p->mutex);
	q = pqm_get_user_queue(&p->pqm, id);
	if (q && q->device == soft_node(s)) {
		*index = q->properties.doorbell_off;
		*in_process = q->doorbell_id;
		err = 0;
	}
	mutex_unlock(&p->mutex);
	kfd_unref_process(p);
	return err;
}

/* parse_queue reads "pid:id" or a doorbell. */
static int parse_queue(struct soft_dev *s, const char *text, u32 *doorbell)
{
	u32 id, ignored;
	int pid;

	if (sscanf(text, "%d:%u", &pid, &id) == 2)
		return find_queue(s, pid, id, doorbell, &ignored);
	return kstrtou32(text, 0, doorbell);
}

static int add_fault(struct soft_dev *s, const char *queue, bool refuses)
{
	struct soft_fault *f;
	u32 doorbell;
	int err;

	err = parse_queue(s, queue, &doorbell);
	if (err)
		return err;
	f = kzalloc(sizeof(*f), GFP_KERNEL);
	if (!f)
		return -ENOMEM;
	f->doorbell = doorbell;
	f->refuses = refuses;
	spin_lock(&s->hws.lock);
	list_add(&f->list, &s->hws.faults);
	spin_unlock(&s->hws.lock);
	return 0;
}

static int do_keep(struct soft_dev *s, char *rest)
{
	return add_fault(s, rest, false);
}

static int do_refuse(struct soft_dev *s, char *rest)
{
	return add_fault(s, rest, true);
}

static int do_release(struct soft_dev *s, char *rest)
{
	u32 doorbell = 0;
	int err;

	if (*rest) {
		err = parse_queue(s, rest, &doorbell);
		if (err)
			return err;
	}
	soft_hws_release(s, !*rest, doorbell);
	return 0;
}

static int do_hang(struct soft_dev *s, char *rest)
{
	u32 n;
	int err;

	err = kstrtou32(rest, 0, &n);
	if (err)
		return err;
	spin_lock(&s->hws.lock);
	s->hws.hang = n;
	spin_unlock(&s->hws.lock);
	return 0;
}

static int do_slow(struct soft_dev *s, char *rest)
{
	u32 usec;
	int err;

	err = kstrtou32(rest, 0, &usec);
	if (err)
		return err;
	spin_lock(&s->hws.lock);
	s->hws.slow_us = usec;
	spin_unlock(&s->hws.lock);
	return 0;
}

/* The driver asks for the version each time that something depends on it. */
static int do_firmware(struct soft_dev *s, char *rest)
{
	u32 version;
	int err;

	err = kstrtou32(rest, 0, &version);
	if (err)
		return err;
	if (!s->adev->enable_mes)
		s->adev->kfd.dev->mec_fw_version = version;
	else if (version <= AMDGPU_MES_VERSION_MASK)
		s->adev->mes.sched_version = SOFT_MES_API << AMDGPU_MES_API_VERSION_SHIFT | version;
	else
		return -EINVAL;
	return 0;
}

static int do_reset(struct soft_dev *s, char *rest)
{
	if (*rest)
		return -EINVAL;
	amdgpu_amdkfd_gpu_reset(s->adev);
	flush_work(&s->adev->kfd.reset_work);
	return 0;
}

static int do_interrupt(struct soft_dev *s, char *rest)
{
	u32 event;
	int pid;

	if (sscanf(rest, "%d %u", &pid, &event) != 2)
		return -EINVAL;
	return soft_interrupt_event(s, pid, event);
}

static int do_fault(struct soft_dev *s, char *rest)
{
	u64 addr;
	int pid;

	if (sscanf(rest, "%d %llx", &pid, &addr) != 2)
		return -EINVAL;
	return soft_interrupt_fault(s, pid, addr);
}

/* The commands whose first word is a GPU ID. */
static const struct {
	const char *name;
	int (*do_it)(struct soft_dev *s, char *rest);
} node_commands[] = {
	{ "keep", do_keep },
	{ "refuse", do_refuse },
	{ "release", do_release },
	{ "hang", do_hang },
	{ "slow", do_slow },
	{ "firmware", do_firmware },
	{ "reset", do_reset },
	{ "interrupt", do_interrupt },
	{ "fault", do_fault },
};

/* is_evicted reports whether the queues of all nodes are. */
static bool is_evicted(struct kfd_process *p)
{
	int i;

	for (i = 0; i < p->n_pdds; i++)
		if (!READ_ONCE(p->pdds[i]->qpd.evicted))
			return false;
	return true;
}

static int do_evict(pid_t pid, bool restore)
{
	struct kfd_process *p = soft_process(pid);
	int err;

	if (!p)
		return -ESRCH;
	/* as for a userptr buffer whose pages move */
	if (!restore)
		err = kfd_process_evict_queues(p, KFD_QUEUE_EVICTION_TRIGGER_USERPTR);
	else if (is_evicted(p))
		err = kfd_process_restore_queues(p);
	else
		err = -EINVAL;	/* the driver would warn */
	kfd_unref_process(p);
	return err;
}

static int do_raise(char *rest)
{
	struct kfd_process *p;
	u32 gpu, doorbell, in_process = -1;
	struct soft_dev *s;
	int pid, queue, err;
	u64 mask;

	if (sscanf(rest, "%d %u %d %llx", &pid, &gpu, &queue, &mask) != 4)
		return -EINVAL;
	s = soft_by_gpu_id(gpu);
	if (!s)
		return -ENODEV;
	if (queue >= 0) {
		err = find_queue(s, pid, queue, &doorbell, &in_process);
		if (err)
			return err;
	}
	p = soft_process(pid);
	if (!p)
		return -ESRCH;
	kfd_set_dbg_ev_from_interrupt(soft_node(s), soft_pasid(s, p), in_process, mask, NULL, 0);
	flush_work(&p->debug_event_workarea);	/* the debugger has its byte */
	kfd_unref_process(p);
	return 0;
}

static int command(char *text)
{
	char *name = strsep(&text, " "), *word;
	struct soft_dev *s;
	int i, err;
	u32 n;

	if (!text)
		return -EINVAL;
	if (!strcmp(name, "raise"))
		return do_raise(text);
	for (i = 0; i < ARRAY_SIZE(node_commands); i++)
		if (!strcmp(name, node_commands[i].name))
			break;
	word = strsep(&text, " ");
	err = kstrtou32(word, 0, &n);
	if (err)
		return err;
	if (i < ARRAY_SIZE(node_commands)) {
		s = soft_by_gpu_id(n);
		return s ? node_commands[i].do_it(s, text ? text : "") : -ENODEV;
	}
	if (text)
		return -EINVAL;
	if (!strcmp(name, "evict") || !strcmp(name, "restore"))
		return do_evict(n, *name == 'r');
	if (!strcmp(name, "trace")) {
		WRITE_ONCE(tracing, n);
		return 0;
	}
	return -EINVAL;
}

static ssize_t control_write(struct file *file, const char __user *buf, size_t size, loff_t *pos)
{
	char *text;
	int err;

	if (size > 256)
		return -EINVAL;
	text = memdup_user_nul(buf, size);
	if (IS_ERR(text))
		return PTR_ERR(text);
	err = command(strim(text));
	kfree(text);
	return err ? err : size;
}

static const struct file_operations control_fops = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.write = control_write,
};

void soft_control_init(void)
{
	directory = debugfs_create_dir("softgpu", NULL);
	debugfs_create_file("nodes", 0444, directory, NULL, &nodes_fops);
	debugfs_create_file("queues", 0444, directory, NULL, &queues_fops);
	debugfs_create_file("unmaps", 0444, directory, NULL, &unmaps_fops);
	debugfs_create_file("control", 0200, directory, NULL, &control_fops);
}

void soft_control_fini(void)
{
	debugfs_remove_recursive(directory);
}
