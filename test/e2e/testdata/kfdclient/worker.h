/*
 * A worker of kfdclient: it feeds one queue, and with churn one after the other, and
 * proves what each did.
 */
#ifndef KFDCLIENT_WORKER_H
#define KFDCLIENT_WORKER_H

#include "queue.h"

static bool stops(void)
{
	bool s;

	pthread_mutex_lock(&all_mu);
	s = stopping;
	pthread_mutex_unlock(&all_mu);
	return s;
}

static bool leaves(struct worker *w)
{
	bool s;

	pthread_mutex_lock(&all_mu);
	s = w->abandon;
	pthread_mutex_unlock(&all_mu);
	return s;
}

/* step gives the step of the histogram a duration falls in: 16 to each power of two. */
static int step(uint64_t ns)
{
	int shift = ns < 32 ? 0 : 64 - __builtin_clzll(ns) - 5;

	return (shift << 4) + (int)(ns >> shift);
}

static double quantile(const uint64_t *steps, uint64_t n, double q)
{
	uint64_t rest = (uint64_t)(q * (double)n);

	for (int i = 0; i < STEPS; i++) {
		int shift = i < 32 ? 0 : (i >> 4) - 1;

		if (steps[i] > rest)
			return (double)((uint64_t)(i - (shift << 4) + 1) << shift) / 1000;
		rest -= steps[i];
	}
	return 0;
}

/* turn retires what is over and submits at most one packet, if there is more and it is
 * due. It tells how many are in the queue then. */
static bool turn(struct worker *w, int64_t at, bool more, int64_t due, bool *pushed, uint64_t *flying)
{
	enum state s = OVER;

	*pushed = false;
	pthread_mutex_lock(&w->mu);
	while (w->retired < w->pushed && (s = over(w, w->retired)) == OVER) {
		int64_t took = at - w->begun[w->retired % w->depth];

		w->latency[step(took > 0 ? (uint64_t)took : 0)]++;
		w->latencies++;
		w->retired++;
	}
	if (s != WRONG && more && w->pushed - w->retired < w->depth && due <= at && room(w)) {
		uint64_t value = packet_value(w->index, w->total.packets + w->pushed);
		uint64_t hash = w->hashes[w->pushed % (w->depth + 1)];

		w->begun[w->pushed % w->depth] = due > 0 ? due : at;
		if (w->copies)
			value = push_copy(w, value);
		else
			push_kernel(w, value);
		w->pushed++;
		w->hashes[w->pushed % (w->depth + 1)] = fold(hash, value);
		*pushed = true;
	}
	*flying = w->pushed - w->retired;
	pthread_mutex_unlock(&w->mu);
	return s != WRONG;
}

static bool oldest_over(struct worker *w)
{
	enum state s = OVER;

	pthread_mutex_lock(&w->mu);
	if (w->retired < w->pushed)
		s = over(w, w->retired);
	else if (!w->copies)
		s = signalled(w, w->written - 1);
	pthread_mutex_unlock(&w->mu);
	return s != FLYING;
}

static void nap(int64_t ns)
{
	struct timespec t = {.tv_sec = ns / SECOND, .tv_nsec = ns % SECOND};

	nanosleep(&t, NULL); /* a signal may cut it short */
}

/* wait_turn waits until the oldest packet is over, if any is flying, or the next is due,
 * if due is positive, or somebody wakes the worker. It may come back earlier. */
static bool wait_turn(struct worker *w, bool flying, int64_t due)
{
	int64_t most = due > 0 && due < SECOND ? due : SECOND, end = now() + most, pause = 20000;
	bool raised;

	if (!flying) {
		struct timespec t = {.tv_sec = end / SECOND, .tv_nsec = end % SECOND};

		pthread_mutex_lock(&all_mu);
		if (!stopping && !w->abandon)
			pthread_cond_timedwait(&all_cond, &all_mu, &t);
		pthread_mutex_unlock(&all_mu);
		return true;
	}
	if (cfg.poll) {
		while (!oldest_over(w) && !leaves(w) && now() < end) {
			nap(pause);
			pause = pause < 500000 ? 2 * pause : 1000000;
		}
		return true;
	}
	if (!wait_event(w, most, &raised))
		return false;
	if (raised || most < SECOND || !oldest_over(w))
		return true;
	/* The GPU writes first and raises the event then, so it may be about to. */
	if (!wait_event(w, SECOND, &raised))
		return false;
	return raised || wrong("queue %u: packet %lu is over, and its event was never raised", w->id, w->retired);
}

/* drain seals the queue and waits until everything in it is over: *drained is false when
 * the worker was told to leave before. */
static bool drain(struct worker *w, bool *drained)
{
	uint64_t flying;
	bool pushed;

	pthread_mutex_lock(&w->mu);
	seal(w);
	pthread_mutex_unlock(&w->mu);
	for (*drained = false; !leaves(w);) {
		if (!turn(w, now(), false, 0, &pushed, &flying))
			return false;
		if (flying == 0) {
			enum state s = w->copies ? OVER : signalled(w, w->written - 1);

			*drained = s == OVER;
			if (s != FLYING)
				return s == OVER;
		}
		if (!wait_turn(w, true, 0))
			return false;
	}
	return true;
}

/* check compares what ran with what was to run: everything if it was drained. Called
 * with mu held. */
static bool check(struct worker *w, bool drained)
{
	uint64_t count, hash, want;
	bool ok = true;

	for (uint64_t n = w->retired; w->copies && n < w->pushed && over(w, n) == OVER; n++)
		;
	result(w, &count, &hash);
	for (uint64_t n = w->retired; !w->copies && n < w->pushed; n++) {
		enum state s = signalled(w, n);

		if (s == WRONG || (s == OVER) != (n < count))
			ok = wrong("queue %u: %lu packets ran before it was destroyed, and packet %lu is %s", w->id, count, n,
				   s == OVER ? "over" : "not over");
	}
	if (count > w->pushed || w->pushed - count > w->depth || (drained && count < w->pushed))
		ok = wrong("queue %u: %lu packets ran, of %lu", w->id, count, w->pushed);
	want = w->hashes[(count < w->pushed ? count : w->pushed) % (w->depth + 1)];
	if (hash != want)
		ok = wrong("queue %u: %lu packets ran and came to 0x%016lx: they come to 0x%016lx when each runs once and in order",
			   w->id, count, hash, want);
	w->last = count;
	w->last_hash = hash;
	w->total.made++;
	w->total.packets += w->pushed;
	w->total.count += count;
	w->total.abandoned += w->pushed - (count < w->pushed ? count : w->pushed);
	w->total.hash = fold(w->total.hash, hash);
	w->total.want = fold(w->total.want, want);
	return ok;
}

/* destroy_queue destroys the queue and proves what it did. */
static bool destroy_queue(struct worker *w, bool drained)
{
	struct kfd_ioctl_destroy_queue_args args = {.queue_id = w->id};
	bool ok = true;
	int err;

	for (int64_t end = now() + 30 * SECOND; drained && get64(w->mem + AT_READ) != w->written; nap(1000000)) {
		if (now() > end) {
			ok = wrong("queue %u: every packet is over and the read index stays at %lu: the write index is %lu", w->id,
				   get64(w->mem + AT_READ), w->written);
			break;
		}
	}
	if ((err = call(AMDKFD_IOC_DESTROY_QUEUE, &args)) != 0) {
		__atomic_store_n(&failed, true, __ATOMIC_RELAXED);
		ok = fail(err, "DESTROY_QUEUE %u", w->id);
	}
	pthread_mutex_lock(&w->mu);
	w->alive = false;
	ok = check(w, drained) && ok;
	pthread_mutex_unlock(&w->mu);
	return ok;
}

/* feed feeds a queue after the worker sent packets, destroys it and proves it. *last
 * tells whether it was the last. */
static bool feed(struct worker *w, int64_t start, uint64_t *sent, bool *last)
{
	uint64_t most = cfg.packets > 0 ? cfg.packets - *sent : UINT64_MAX, flying;
	bool drained = true, ok = true, pushed;

	if (cfg.churn) {
		uint64_t random = mix64(w->random += STEP64);

		if (1 + random % 64 < most)
			most = 1 + random % 64;
		drained = random >> 63 != 0;
	}
	while (ok && most > 0 && !stops() && !leaves(w)) {
		int64_t at = now(), due = cfg.rate > 0 ? start + (int64_t)((double)*sent / cfg.rate * SECOND) : 0;

		ok = turn(w, at, true, due, &pushed, &flying);
		if (pushed) {
			(*sent)++;
			most--;
		} else if (ok) {
			ok = wait_turn(w, flying > 0, due - at);
		}
	}
	*last = !ok || stops() || leaves(w) || (cfg.packets > 0 && *sent == cfg.packets);
	if (*last)
		drained = true;
	if (!ok || leaves(w))
		drained = false;
	if (drained)
		ok = drain(w, &drained);
	return destroy_queue(w, ok && drained) && ok;
}

static void *run_worker(void *arg)
{
	struct worker *w = arg;
	int64_t start = now();
	uint64_t sent = 0;
	bool last = false;

	while (feed(w, start, &sent, &last) && !last && create_queue(w))
		;
	if (!last)
		__atomic_store_n(&failed, true, __ATOMIC_RELAXED);
	pthread_mutex_lock(&all_mu);
	w->ended = true;
	pthread_cond_broadcast(&all_cond);
	pthread_mutex_unlock(&all_mu);
	(void)!write(wakeup[1], "e", 1);
	return NULL;
}

/* close_up gives back what a worker has, without a queue. */
static bool close_up(struct worker *w)
{
	struct kfd_ioctl_destroy_event_args args = {.event_id = w->event};
	int err;

	if (w->mailbox != 0 && (err = call(AMDKFD_IOC_DESTROY_EVENT, &args)) != 0)
		return fail(err, "DESTROY_EVENT");
	if (!unmap_on_gpu(w))
		return false; /* the GPU may still write to it */
	if ((w->mem != NULL && munmap(w->mem, w->mem_bytes) != 0) || (w->save != NULL && munmap(w->save, w->save_bytes) != 0))
		return fail(errno, "unmap memory");
	return true;
}

/* add_worker makes a worker with its queue, on the next of the GPUs if g is NULL; it
 * begins at once if the others have. */
static struct worker *add_worker(struct gpu *g, bool copies)
{
	struct worker *w = calloc(1, sizeof *w);

	if (w == NULL)
		abort();
	pthread_mutex_init(&w->mu, NULL);
	pthread_mutex_lock(&all_mu);
	w->index = made_workers++;
	pthread_mutex_unlock(&all_mu);
	w->gpu = g != NULL ? g : &gpus[w->index % (uint64_t)ngpus];
	w->copies = copies;
	w->random = w->index;
	w->depth = copies && cfg.depth > MAX_COPIES ? MAX_COPIES : cfg.depth;
	if (w->index >= MAX_WORKERS)
		fail(0, "%d queues in one life are the most", MAX_WORKERS);
	if (w->index >= MAX_WORKERS || (!cfg.poll && !create_event(w)) || !prepare_memory(w) || !create_queue(w)) {
		close_up(w);
		free(w);
		return NULL;
	}
	pthread_mutex_lock(&all_mu);
	workers[nworkers++] = w;
	if (begun && pthread_create(&w->thread, NULL, run_worker, w) != 0)
		abort();
	pthread_mutex_unlock(&all_mu);
	return w;
}

#endif
