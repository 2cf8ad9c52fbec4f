// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * /dev/softgpu: the packet processor, a program, learns here which queues may
 * execute, and says when one has stopped. Without it queues are mapped and
 * unmapped and nothing executes.
 *
 * Locks: soft_hws.lock, then channel.lock.
 */
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/mmu_notifier.h>
#include <linux/poll.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/stacktrace.h>
#include <linux/task_work.h>
#include <linux/uaccess.h>

#include "softgpu.h"

enum soft_kind { SOFT_MAP = 1, SOFT_UNMAP, SOFT_REMOVE };
enum soft_answer { SOFT_ACK = 1, SOFT_INTERRUPT };

#define SOFT_FLAG_RESET	1	/* in an UNMAP: the queue is reset and does not go on later */

struct soft_event {
	u32 size, kind;
	u64 seq;
	u32 gpu_id;
	s32 pid;
	u32 type, flags;
	u64 mqd;
	u64 ring, ring_bytes, rptr, wptr;
	u64 doorbell;
	u64 reserved[2];
};

static_assert(sizeof(struct soft_event) == 96);

struct soft_reply {
	u32 kind;
	u32 gpu_id;
	u64 seq;
	s32 pid;
	u32 event;
};

static_assert(sizeof(struct soft_reply) == 24);

struct soft_record {
	struct list_head list;
	struct soft_event event;
};

static struct {
	spinlock_t lock;	/* guards the next five */
	bool busy;		/* somebody has it open */
	bool open;		/* and takes records */
	pid_t program;		/* that has it open */
	u64 seq;
	struct list_head records;
	wait_queue_head_t wait;
	struct mutex read;	/* one reader at a time, so that records stay in order */
} channel;

static void fill_event(struct soft_event *e, struct soft_dev *s, const struct soft_queue *q)
{
	e->gpu_id = soft_node(s)->id;
	e->pid = q->pid;
	e->type = q->type;
	e->mqd = q->mqd;
	e->ring = q->ring;
	e->ring_bytes = q->ring_bytes;
	e->rptr = q->rptr;
	e->wptr = q->wptr;
	e->doorbell = s->index * SOFT_DOORBELL_BYTES + (u64)q->doorbell * sizeof(u32);
}

/* send returns the number of the record, or 0 if nobody reads it. */
static u64 send(struct soft_event *e, enum soft_kind kind)
{
	struct soft_record *r;
	u64 seq = 0;

	r = kmalloc(sizeof(*r), GFP_ATOMIC);
	if (!r)
		pr_err("softgpu: out of memory: a record is lost\n");
	spin_lock(&channel.lock);
	if (r && channel.open) {
		seq = ++channel.seq;
		e->size = sizeof(*e);
		e->kind = kind;
		e->seq = seq;
		r->event = *e;
		list_add_tail(&r->list, &channel.records);
	}
	spin_unlock(&channel.lock);
	if (seq)
		wake_up_interruptible(&channel.wait);
	else
		kfree(r);
	return seq;
}

void soft_channel_map(struct soft_dev *s, struct soft_queue *q)
{
	struct soft_event e = {};

	lockdep_assert_held(&s->hws.lock);
	if (q->told || !q->mapped || q->stuck)
		return;
	fill_event(&e, s, q);
	q->told = send(&e, SOFT_MAP);
}

/* soft_channel_unmap returns the number to be acknowledged, or 0. */
u64 soft_channel_unmap(struct soft_dev *s, struct soft_queue *q, bool reset)
{
	struct soft_event e = { .flags = reset ? SOFT_FLAG_RESET : 0 };

	lockdep_assert_held(&s->hws.lock);
	if (!q->told)
		return 0;
	fill_event(&e, s, q);
	return send(&e, SOFT_UNMAP);
}

void soft_channel_remove(struct soft_dev *s, struct soft_queue *q)
{
	struct soft_event e = {};

	lockdep_assert_held(&s->hws.lock);
	if (!READ_ONCE(channel.open))
		return;
	fill_event(&e, s, q);
	send(&e, SOFT_REMOVE);
}

static int channel_open(struct inode *inode, struct file *file)
{
	struct soft_queue *q;
	int i, err = 0;

	spin_lock(&channel.lock);
	if (channel.busy)
		err = -EBUSY;
	else
		channel.open = true;
	channel.busy = true;
	if (!err)
		channel.program = current->tgid;
	spin_unlock(&channel.lock);
	if (err)
		return err;
	for (i = 0; i < SOFT_MAX_NODES && soft_devs[i]; i++) {
		spin_lock(&soft_devs[i]->hws.lock);
		list_for_each_entry(q, &soft_devs[i]->hws.queues, list)
			soft_channel_map(soft_devs[i], q);
		spin_unlock(&soft_devs[i]->hws.lock);
	}
	return nonseekable_open(inode, file);
}

static int channel_release(struct inode *inode, struct file *file)
{
	struct soft_record *r, *next;
	struct soft_queue *q;
	LIST_HEAD(unread);
	int i;

	spin_lock(&channel.lock);
	list_splice_init(&channel.records, &unread);
	channel.open = false;
	spin_unlock(&channel.lock);
	list_for_each_entry_safe(r, next, &unread, list)
		kfree(r);
	/* Whatever was asked of the program counts as done. */
	for (i = 0; i < SOFT_MAX_NODES && soft_devs[i]; i++) {
		struct soft_hws *h = &soft_devs[i]->hws;

		spin_lock(&h->lock);
		list_for_each_entry(q, &h->queues, list) {
			q->told = false;
			q->wait_seq = 0;
		}
		spin_unlock(&h->lock);
		wake_up_all(&h->wait);
	}
	spin_lock(&channel.lock);
	channel.busy = false;
	spin_unlock(&channel.lock);
	return 0;
}

static struct soft_record *take(void)
{
	struct soft_record *r;

	spin_lock(&channel.lock);
	r = list_first_entry_or_null(&channel.records, struct soft_record, list);
	if (r)
		list_del(&r->list);
	spin_unlock(&channel.lock);
	return r;
}

static void put_back(struct soft_record *r)
{
	spin_lock(&channel.lock);
	list_add(&r->list, &channel.records);
	spin_unlock(&channel.lock);
}

static bool unread(void)
{
	return !list_empty_careful(&channel.records);
}

static ssize_t channel_read(struct file *file, char __user *buf, size_t size, loff_t *pos)
{
	struct soft_record *r;
	ssize_t done = 0;

	if (size < sizeof(r->event))
		return -EINVAL;
	if (mutex_lock_interruptible(&channel.read))
		return -ERESTARTSYS;
	while (size - done >= sizeof(r->event)) {
		r = take();
		if (!r) {
			if (done)
				break;
			if (file->f_flags & O_NONBLOCK)
				done = -EAGAIN;
			else if (wait_event_interruptible(channel.wait, unread()))
				done = -ERESTARTSYS;
			else
				continue;
			break;
		}
		if (copy_to_user(buf + done, &r->event, sizeof(r->event))) {
			put_back(r);
			if (!done)
				done = -EFAULT;
			break;
		}
		done += sizeof(r->event);
		kfree(r);
	}
	mutex_unlock(&channel.read);
	return done;
}

/*
 * The program accesses the memory of processes, and may be the last to do so. Then
 * a process that ends is released in the program's name. Since 7.2 the driver waits
 * there until the queues of the process are unmapped, and then the kernel waits for
 * all such releases in progress (__mmu_notifier_release). A program cannot acknowledge
 * an unmap while it waits in the kernel, so nobody waits for it then. Nor while a process
 * executes another program, once its memory is released: it holds a lock without which
 * nobody gets access to the memory of a process (exec_update_lock).
 */
static atomic_t away = ATOMIC_INIT(0);	/* threads that have not returned to user mode */
static const struct mmu_notifier_ops *driver_ops;
static struct mmu_notifier_ops ops;

bool soft_channel_away(void)
{
	return atomic_read(&away) > 0;
}

static void back(struct callback_head *work)
{
	atomic_dec(&away);
	kfree(work);
}

static void release(struct mmu_notifier *mn, struct mm_struct *mm)
{
	struct callback_head *work;
	int i, err;

	if (!READ_ONCE(channel.open) ||
	    (READ_ONCE(channel.program) != current->tgid && !current->in_execve)) {
		driver_ops->release(mn, mm);
		return;
	}
	work = kmalloc(sizeof(*work), GFP_KERNEL | __GFP_NOFAIL);
	init_task_work(work, back);
	atomic_inc(&away);
	for (i = 0; i < SOFT_MAX_NODES && soft_devs[i]; i++)
		wake_up_all(&soft_devs[i]->hws.wait);
	err = task_work_add(current, work, TWA_RESUME);
	driver_ops->release(mn, mm);
	if (err)	/* the thread ends */
		back(work);
}

/* soft_channel_watch puts release() in the place of the driver's function for a process. */
void soft_channel_watch(struct kfd_process *p)
{
	spin_lock(&channel.lock);
	if (!driver_ops) {
		driver_ops = p->mmu_notifier.ops;
		ops = *driver_ops;
		ops.release = release;
	}
	p->mmu_notifier.ops = &ops;
	spin_unlock(&channel.lock);
}

/* show prints where a thread is, as an error: a guest's console shows no less. */
static void show(struct task_struct *t)
{
	unsigned long at[32];
	unsigned int i, n = stack_trace_save_tsk(t, at, ARRAY_SIZE(at), 0);

	pr_err("softgpu: thread %d of %s (%d), state %c:\n", t->pid, t->group_leader->comm,
	       t->tgid, task_state_to_char(t));
	for (i = 0; i < n; i++)
		pr_err("softgpu:   %pS\n", (void *)at[i]);
}

/*
 * soft_channel_late says why an unmap takes long, unless that was asked for: the queues that the
 * program has not stopped, and where it and all threads are that run, or wait uninterruptibly.
 */
void soft_channel_late(struct soft_dev *s)
{
	struct task_struct *g, *t;
	struct soft_queue *q;
	bool late = false;

	spin_lock(&s->hws.lock);
	list_for_each_entry(q, &s->hws.queues, list)
		if (q->leaves && q->wait_seq) {
			late = true;
			dev_err(s->adev->dev, "softgpu: a queue of process %d has not stopped: record %llu, doorbell %#x\n",
				q->pid, q->wait_seq, q->doorbell);
		}
	spin_unlock(&s->hws.lock);
	if (!late)
		return;
	pr_err("softgpu: records %llu, %s\n", READ_ONCE(channel.seq),
	       unread() ? "not all read" : "all read");
	rcu_read_lock();
	for_each_process_thread(g, t)
		if (g->tgid == READ_ONCE(channel.program) || strchr("RD", task_state_to_char(t)))
			show(t);
	rcu_read_unlock();
}

static int acknowledge(struct soft_dev *s, u64 seq)
{
	struct soft_hws *h = &s->hws;
	struct soft_queue *q;

	spin_lock(&h->lock);
	list_for_each_entry(q, &h->queues, list)
		if (q->wait_seq == seq)
			q->wait_seq = 0;
	spin_unlock(&h->lock);
	wake_up_all(&h->wait);
	return 0;	/* one that nobody waits for is no error: a reset does not wait */
}

static ssize_t channel_write(struct file *file, const char __user *buf, size_t size, loff_t *pos)
{
	struct soft_reply reply;
	struct soft_dev *s;
	ssize_t done;
	int err;

	if (!size || size % sizeof(reply))
		return -EINVAL;
	for (done = 0; done < size; done += sizeof(reply)) {
		err = -EFAULT;
		if (copy_from_user(&reply, buf + done, sizeof(reply)))
			break;
		err = -ENODEV;
		s = soft_by_gpu_id(reply.gpu_id);
		if (!s)
			break;
		err = -EINVAL;
		if (reply.kind == SOFT_ACK && reply.seq)
			err = acknowledge(s, reply.seq);
		else if (reply.kind == SOFT_INTERRUPT)
			err = soft_interrupt_event(s, reply.pid, reply.event);
		if (err)
			break;
	}
	return done ? done : err;
}

static __poll_t channel_poll(struct file *file, poll_table *wait)
{
	poll_wait(file, &channel.wait, wait);
	return EPOLLOUT | EPOLLWRNORM | (unread() ? EPOLLIN | EPOLLRDNORM : 0);
}

/* The doorbells of all nodes, one after the other; a mapping lies in one node. */
static int channel_mmap(struct file *file, struct vm_area_struct *vma)
{
	unsigned long size = vma->vm_end - vma->vm_start;
	u64 offset = (u64)vma->vm_pgoff << PAGE_SHIFT;
	u64 index = offset / SOFT_DOORBELL_BYTES;

	offset %= SOFT_DOORBELL_BYTES;
	if (index >= SOFT_MAX_NODES || !soft_devs[index] || size > SOFT_DOORBELL_BYTES - offset)
		return -EINVAL;
	offset += virt_to_phys(soft_devs[index]->doorbells);
	vm_flags_set(vma, VM_IO | VM_DONTCOPY | VM_DONTEXPAND | VM_DONTDUMP);
	vma->vm_page_prot = pgprot_noncached(vma->vm_page_prot);
	return io_remap_pfn_range(vma, vma->vm_start, offset >> PAGE_SHIFT, size,
				  vma->vm_page_prot);
}

static const struct file_operations channel_fops = {
	.owner = THIS_MODULE,
	.open = channel_open,
	.release = channel_release,
	.read = channel_read,
	.write = channel_write,
	.poll = channel_poll,
	.mmap = channel_mmap,
};

static struct miscdevice channel_device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "softgpu",
	.mode = 0600,
	.fops = &channel_fops,
};

/* Called before the nodes are made, because their schedulers send records. */
void soft_channel_init(void)
{
	spin_lock_init(&channel.lock);
	INIT_LIST_HEAD(&channel.records);
	init_waitqueue_head(&channel.wait);
	mutex_init(&channel.read);
}

int soft_channel_register(void)
{
	return misc_register(&channel_device);
}

void soft_channel_unregister(void)
{
	misc_deregister(&channel_device);
}
