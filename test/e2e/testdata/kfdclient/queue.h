/*
 * A queue of kfdclient, of kernels or of copies: what the GPU and the process do in its
 * memory.
 */
#ifndef KFDCLIENT_QUEUE_H
#define KFDCLIENT_QUEUE_H

#include "driver.h"

static char *signal_of(struct worker *w, uint64_t n) { return w->mem + w->at_signals + n % w->slots * SIGNAL; }
static char *slot_of(struct worker *w, uint64_t n) { return w->mem + AT_RING + n % w->slots * PACKET; }
static char *progress_of(struct worker *w, uint64_t n) { return w->mem + w->at_progress + n % w->slots * 8; }
static char *fence_of(struct worker *w, uint64_t n) { return w->mem + AT_FENCES + n % MAX_COPIES * 64; }
static char *source_of(struct worker *w, uint64_t n) { return w->mem + AT_COPIES + n % MAX_COPIES * 2 * COPY; }

static size_t pages(size_t n) { return (n + PAGE - 1) & ~(size_t)(PAGE - 1); }

/* prepare_memory maps the memory of a worker, and each buffer of its queue on its GPU: a
 * page of pointers, the ring, the rest, and for kernels what end-of-pipe events need and
 * the save area. */
static bool prepare_memory(struct worker *w)
{
	size_t ring;

	if (w->copies) {
		w->mem_bytes = AT_COPIES + 2 * MAX_COPIES * COPY;
		return (w->mem = map(w->mem_bytes, -1, 0)) != NULL && map_on_gpu(w, w->mem, AT_COPY_RING) &&
		       map_on_gpu(w, w->mem + AT_COPY_RING, COPY_RING) && map_on_gpu(w, w->mem + AT_FENCES, w->mem_bytes - AT_FENCES);
	}
	for (w->slots = MIN_SLOTS; w->slots < 2 * cfg.depth; w->slots *= 2)
		;
	w->at_signals = AT_RING + w->slots * PACKET;
	w->at_args = w->at_signals + w->slots * SIGNAL;
	w->at_progress = w->at_args + w->slots * MIX;
	w->mem_bytes = pages(w->at_progress + w->slots * 8);
	w->save_bytes = pages(w->gpu->xccs * ((size_t)w->gpu->save + w->gpu->debug));
	ring = w->slots * PACKET;
	if ((w->mem = map(w->mem_bytes, -1, 0)) == NULL || (w->save = map(w->save_bytes, -1, 0)) == NULL)
		return false;
	if (!map_on_gpu(w, w->mem, AT_EOP) || !map_on_gpu(w, w->mem + AT_EOP, AT_RING - AT_EOP) || !map_on_gpu(w, w->mem + AT_RING, ring) ||
	    !map_on_gpu(w, w->mem + AT_RING + ring, w->mem_bytes - AT_RING - ring) || !map_on_gpu(w, w->save, w->save_bytes))
		return false;
	memcpy(w->mem + AT_KERNEL, "KFDEMUK1", 8);
	put32(w->mem + AT_KERNEL + 8, OP_MIX);
	put32(w->mem + AT_KERNEL + 12, (uint32_t)cfg.occupancy);
	put64(w->mem + AT_KERNEL + 16, cfg.duration * 1000);
	return true;
}

/* result is how many packets ran and what they came to. */
static void result(struct worker *w, uint64_t *count, uint64_t *hash)
{
	*count = w->copies ? w->copied : get64(w->mem + AT_RESULT);
	*hash = w->copies ? w->copied_hash : get64(w->mem + AT_RESULT + 8);
}

/* create_queue makes a new, empty queue. */
static bool create_queue(struct worker *w)
{
	struct kfd_ioctl_create_queue_args args = {
		.ring_base_address = addr(w->mem + (w->copies ? AT_COPY_RING : AT_RING)),
		.write_pointer_address = addr(w->mem + AT_WRITE),
		.read_pointer_address = addr(w->mem + AT_READ),
		.ring_size = w->copies ? COPY_RING : (uint32_t)w->slots * PACKET,
		.gpu_id = w->gpu->id,
		.queue_type = w->copies ? KFD_IOC_QUEUE_TYPE_SDMA : KFD_IOC_QUEUE_TYPE_COMPUTE_AQL,
		.queue_percentage = KFD_MAX_QUEUE_PERCENTAGE,
		.queue_priority = NORMAL,
	};
	int err;

	if (!w->copies) {
		args.eop_buffer_address = addr(w->mem + AT_EOP);
		args.eop_buffer_size = 4096;
		args.ctx_save_restore_address = addr(w->save);
		args.ctx_save_restore_size = w->gpu->save;
		args.ctl_stack_size = w->gpu->stack;
	}
	pthread_mutex_lock(&w->mu);
	put64(w->mem + AT_WRITE, 0);
	put64(w->mem + AT_READ, 0);
	for (uint64_t n = 0; w->copies && n < MAX_COPIES; n++)
		put32(fence_of(w, n), 0);
	for (uint64_t n = 0; !w->copies && n < w->slots; n++) {
		put32(slot_of(w, n), TYPE_INVALID);
		put64(signal_of(w, n) + SIGNAL_VALUE, 0);
	}
	if (!w->copies) {
		put64(w->mem + AT_RESULT, 0);
		put64(w->mem + AT_RESULT + 8, 0);
	}
	w->written = w->pushed = w->retired = w->copied = w->copied_hash = w->hashes[0] = 0;
	pthread_mutex_unlock(&w->mu);

	if ((err = call(AMDKFD_IOC_CREATE_QUEUE, &args)) != 0)
		return fail(err, "CREATE_QUEUE GPU %u", w->gpu->id);
	pthread_mutex_lock(&map_mu);
	if (w->gpu->doorbells == NULL)
		w->gpu->doorbells = map(DOORBELLS, kfd, args.doorbell_offset & ~(uint64_t)(DOORBELLS - 1));
	pthread_mutex_unlock(&map_mu);
	if (w->gpu->doorbells == NULL)
		return false;
	w->doorbell = (uint64_t *)(w->gpu->doorbells + (args.doorbell_offset & (DOORBELLS - 1)));
	pthread_mutex_lock(&w->mu);
	w->id = args.queue_id;
	w->alive = true;
	pthread_mutex_unlock(&w->mu);
	return true;
}

/* submit gives a packet to the GPU, written but for its first word, which comes last:
 * until then the GPU stops there. */
static void submit(struct worker *w, uint32_t first)
{
	char *signal = signal_of(w, w->written), *slot = slot_of(w, w->written);

	memset(signal, 0, SIGNAL);
	put64(signal + SIGNAL_KIND, SIGNAL_USER);
	put64(signal + SIGNAL_MAILBOX, w->mailbox);
	put32(signal + SIGNAL_EVENT, w->event);
	put64(signal + SIGNAL_VALUE, 1);
	put64(slot + 56, addr(signal));
	put32(slot, first | HEADER);
	w->written++;
	put64(w->mem + AT_WRITE, w->written);
	put64((char *)w->doorbell, w->written - 1);
}

static void push_kernel(struct worker *w, uint64_t value)
{
	uint64_t n = w->written;
	char *slot = slot_of(w, n), *args = w->mem + w->at_args + n % w->slots * MIX;

	put64(progress_of(w, n), 0);
	put64(args, addr(w->mem + AT_RESULT));
	put64(args + 8, value);
	put64(args + 16, addr(progress_of(w, n)));
	memset(slot + 4, 0, PACKET - 4);
	for (int i = 0; i < 3; i++) {
		slot[4 + 2 * i] = 1;       /* work group */
		put32(slot + 12 + 4 * i, 1); /* grid */
	}
	put64(slot + 32, addr(w->mem + AT_KERNEL));
	put64(slot + 40, addr(args));
	submit(w, TYPE_DISPATCH | 1 << 16);
}

/* seal submits what is behind the last packet: a barrier that depends on that one. */
static void seal(struct worker *w)
{
	char *slot = slot_of(w, w->written);

	if (w->copies)
		return;
	memset(slot + 4, 0, PACKET - 4);
	if (w->written > 0)
		put64(slot + 8, addr(signal_of(w, w->written - 1)));
	submit(w, TYPE_BARRIER_AND);
}

static uint64_t copy_sum(const char *p)
{
	uint64_t sum = 0, v;

	for (int i = 0; i < COPY; i += 8) {
		memcpy(&v, p + i, 8);
		sum = fold(sum, v);
	}
	return sum;
}

static void put_words(struct worker *w, const uint32_t *words, size_t n)
{
	memcpy(w->mem + AT_COPY_RING + w->written % COPY_RING, words, 4 * n);
	w->written += 4 * n;
}

static uint64_t push_copy(struct worker *w, uint64_t value)
{
	uint64_t n = w->pushed, from = addr(source_of(w, n)), to = from + COPY, fence = addr(fence_of(w, n));
	uint32_t words[17] = {
		SDMA_COPY, COPY - 1, 0, (uint32_t)from, (uint32_t)(from >> 32), (uint32_t)to, (uint32_t)(to >> 32),
		SDMA_FENCE, (uint32_t)fence, (uint32_t)(fence >> 32), (uint32_t)(n + 1),
		SDMA_FENCE, (uint32_t)w->mailbox, (uint32_t)(w->mailbox >> 32), w->event, SDMA_TRAP, w->event,
	};
	size_t len = cfg.poll ? 11 : 17;

	for (int i = 0; i < COPY; i += 8) {
		uint64_t word = mix64(value += STEP64);

		memcpy(source_of(w, n) + i, &word, 8);
	}
	memset(source_of(w, n) + COPY, 0, COPY);
	put32(fence_of(w, n), 0);
	if (COPY_RING - w->written % COPY_RING < 4 * len) /* no command stands across the end */
		while (w->written % COPY_RING != 0)
			put_words(w, (uint32_t[]){SDMA_NOP}, 1);
	put_words(w, words, len);
	put64(w->mem + AT_WRITE, w->written);
	put64((char *)w->doorbell, w->written);
	return copy_sum(source_of(w, n));
}

/* The answers of over: a packet that is not over yet, one that is, and one that is wrong. */
enum state { FLYING, OVER, WRONG };

/* signalled is how a packet's completion signal stands. */
static enum state signalled(struct worker *w, uint64_t n)
{
	int64_t v = (int64_t)get64(signal_of(w, n) + SIGNAL_VALUE);

	if (v == 1)
		return FLYING;
	if (v != 0)
		wrong("queue %u: the completion signal of packet %lu stands at %ld", w->id, n, v);
	else if ((get32(slot_of(w, n)) & 0xff) != TYPE_INVALID)
		wrong("queue %u: packet %lu is over and still in its slot", w->id, n);
	else
		return OVER;
	return WRONG;
}

/* over checks the oldest packet that was not over. */
static enum state over(struct worker *w, uint64_t n)
{
	enum state s;
	uint32_t fence;

	if (!w->copies) {
		if ((s = signalled(w, n)) != OVER)
			return s;
		if (get64(progress_of(w, n)) == WHOLE && get64(w->mem + AT_RESULT) > n)
			return OVER;
		wrong("queue %u: packet %lu is over, its progress is %lu millionths and %lu packets have run", w->id, n,
		      get64(progress_of(w, n)), get64(w->mem + AT_RESULT));
		return WRONG;
	}
	if (n < w->copied)
		return OVER;
	if ((fence = get32(fence_of(w, n))) == 0)
		return FLYING;
	if (fence != (uint32_t)(n + 1)) {
		wrong("queue %u: the fence of copy %lu holds %u", w->id, n, fence);
		return WRONG;
	}
	if (memcmp(source_of(w, n), source_of(w, n) + COPY, COPY) != 0) {
		wrong("queue %u: copy %lu differs from what was copied", w->id, n);
		return WRONG;
	}
	w->copied_hash = fold(w->copied_hash, copy_sum(source_of(w, n) + COPY));
	w->copied = n + 1;
	return OVER;
}

static bool room(struct worker *w)
{
	uint64_t used = w->written - get64(w->mem + AT_READ);

	return w->copies ? used + 256 <= COPY_RING && w->pushed - w->copied < MAX_COPIES : used + 1 < w->slots;
}

#endif
