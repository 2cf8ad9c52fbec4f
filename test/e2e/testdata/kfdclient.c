/*
 * kfdclient is a GPU program for tests, on the kernel's header and pthreads alone: it
 * makes queues of /dev/kfd, has them run packets, and proves that each ran exactly once
 * and in order. It is for the emulator, which runs packets out of plain memory; package
 * kfdwork says what the flags, the commands and the lines it writes mean, and is the
 * same program in Go. Build it with:
 *
 *	cc -O2 -Wall -Wextra -Werror -pthread -o kfdclient kfdclient.c
 */
#define _GNU_SOURCE
#include <getopt.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>

#include "kfdclient/worker.h"

/* What is told of the queues. */

static int by_index(const void *a, const void *b)
{
	const struct worker *x = *(struct worker *const *)a, *y = *(struct worker *const *)b;

	return x->index < y->index ? -1 : x->index > y->index;
}

static void print_queue(FILE *f, struct worker *w)
{
	uint64_t count = 0, hash = 0;

	pthread_mutex_lock(&w->mu);
	if (w->alive)
		result(w, &count, &hash);
	fprintf(f, "{\"id\":%u,\"gpu\":%u,\"kind\":\"%s\",\"packets\":%lu,\"count\":%lu", w->id, w->gpu->id, w->copies ? "sdma" : "compute",
		w->total.packets + (w->alive ? w->pushed : 0), w->total.count + count);
	if (w->total.abandoned > 0)
		fprintf(f, ",\"abandoned\":%lu", w->total.abandoned);
	if (!w->alive)
		fprintf(f, ",\"hash\":\"0x%016lx\",\"want\":\"0x%016lx\"", w->total.hash, w->total.want);
	fprintf(f, ",\"read\":%lu,\"write\":%lu", get64(w->mem + AT_READ), get64(w->mem + AT_WRITE));
	if (w->alive && !w->copies && w->retired < w->pushed && get64(progress_of(w, w->retired)) > 0)
		fprintf(f, ",\"progress\":%lu", get64(progress_of(w, w->retired)));
	fputc('}', f);
	pthread_mutex_unlock(&w->mu);
}

/* print_all tells of all queues, and if asked adds up what they did. It tells whether all
 * is proved. Called with all_mu held. */
static bool print_all(FILE *f, bool tally)
{
	static uint64_t latency[STEPS];
	uint64_t latencies = 0, hash = 0;
	struct totals sum = {0};
	bool ok = !__atomic_load_n(&failed, __ATOMIC_RELAXED);

	memset(latency, 0, sizeof latency);
	qsort(workers, nworkers, sizeof *workers, by_index);
	fputs(",\"queues\":[", f);
	for (uint64_t i = 0; i < nworkers; i++) {
		struct worker *w = workers[i];
		uint64_t count = 0, current;

		if (i > 0)
			fputc(',', f);
		print_queue(f, w);
		pthread_mutex_lock(&w->mu);
		if (w->alive)
			result(w, &count, &current);
		sum.made += w->total.made + w->alive;
		sum.packets += w->total.packets + (w->alive ? w->pushed : 0);
		sum.count += w->total.count + count;
		sum.abandoned += w->total.abandoned;
		hash = fold(hash, w->total.hash);
		for (int s = 0; s < STEPS; s++)
			latency[s] += w->latency[s];
		latencies += w->latencies;
		pthread_mutex_unlock(&w->mu);
	}
	fputc(']', f);
	if (!tally)
		return ok;
	fprintf(f, ",\"packets\":%lu,\"count\":%lu", sum.packets, sum.count);
	if (sum.abandoned > 0)
		fprintf(f, ",\"abandoned\":%lu", sum.abandoned);
	fprintf(f, ",\"hash\":\"0x%016lx\",\"ok\":%s,\"p50_us\":%.3f,\"p99_us\":%.3f,\"made\":%lu,\"interrupted\":%lu", hash,
		ok ? "true" : "false", quantile(latency, latencies, 0.50), quantile(latency, latencies, 0.99), sum.made,
		__atomic_load_n(&interrupted, __ATOMIC_RELAXED));
	return ok;
}

/* tell writes an event about one queue, or about all if w is NULL. */
static bool tell(const char *event, struct worker *w)
{
	char *line;
	size_t n;
	bool ok = true, ready = strcmp(event, "ready") == 0;
	FILE *f = open_memstream(&line, &n);

	if (f == NULL)
		abort();
	fprintf(f, "{\"event\":\"%s\"", event);
	if (ready)
		fprintf(f, ",\"pid\":%d", getpid());
	if (w == NULL) {
		pthread_mutex_lock(&all_mu);
		ok = print_all(f, !ready);
		pthread_mutex_unlock(&all_mu);
	} else {
		fputs(",\"queues\":[", f);
		print_queue(f, w);
		fputc(']', f);
	}
	fputs("}\n", f);
	if (fclose(f) != 0)
		abort();
	write_line(line, n);
	free(line);
	return ok;
}

/* Commands. Those that may wait for somebody have a thread of their own. */

struct command {
	void (*run)(uint64_t argument);
	uint64_t argument;
};

static void *run_command(void *arg)
{
	struct command c = *(struct command *)arg;

	free(arg);
	c.run(c.argument);
	pthread_mutex_lock(&all_mu);
	asked--;
	pthread_cond_broadcast(&all_cond);
	pthread_mutex_unlock(&all_mu);
	return NULL;
}

static void ask(void (*run)(uint64_t), uint64_t argument)
{
	struct command *c = malloc(sizeof *c);
	pthread_t thread;

	if (c == NULL)
		abort();
	*c = (struct command){run, argument};
	pthread_mutex_lock(&all_mu);
	asked++;
	pthread_mutex_unlock(&all_mu);
	if (pthread_create(&thread, NULL, run_command, c) != 0 || pthread_detach(thread) != 0)
		abort();
}

static void do_create(uint64_t unused)
{
	struct worker *w;

	(void)unused;
	if (stops())
		fail(0, "the work is being stopped: no queue is made any more");
	else if ((w = add_worker(NULL, false)) != NULL)
		tell("created", w);
}

static void do_destroy(uint64_t id)
{
	struct worker *w = NULL;

	pthread_mutex_lock(&all_mu);
	for (uint64_t i = 0; i < nworkers && w == NULL; i++) {
		pthread_mutex_lock(&workers[i]->mu);
		if (workers[i]->alive && workers[i]->id == id && !workers[i]->abandon)
			w = workers[i];
		pthread_mutex_unlock(&workers[i]->mu);
	}
	if (w != NULL) {
		w->abandon = true;
		pthread_cond_broadcast(&all_cond);
	}
	pthread_mutex_unlock(&all_mu);
	if (w == NULL) {
		fail(0, "there is no queue %lu", id);
		return;
	}
	if (!cfg.poll && !raise_event(w))
		return;
	pthread_mutex_lock(&all_mu);
	while (!w->ended)
		pthread_cond_wait(&all_cond, &all_mu);
	pthread_mutex_unlock(&all_mu);
	tell("destroyed", w);
}

static void do_runtime(uint64_t on)
{
	if (set_runtime(on != 0))
		say("{\"event\":\"%s\"}\n", on != 0 ? "rtenabled" : "rtdisabled");
}

/* do_fork makes a child that tries the inherited descriptor, tells what the driver said
 * and lives on for ms. Other threads hold locks, so it does nothing but system calls. */
static void do_fork(uint64_t ms)
{
	struct timespec linger = {.tv_sec = (time_t)(ms / 1000), .tv_nsec = (long)(ms % 1000) * 1000000};
	struct kfd_ioctl_get_version_args version;
	unsigned char answer;
	int answers[2];
	pid_t pid;
	ssize_t n;

	if (pipe2(answers, O_CLOEXEC) != 0) {
		fail(errno, "make a pipe");
		return;
	}
	pid = fork();
	if (pid == 0) {
		int r;

		while ((r = ioctl(kfd, AMDKFD_IOC_GET_VERSION, &version)) < 0 && errno == EINTR)
			;
		answer = r < 0 ? (unsigned char)errno : 0;
		(void)!write(answers[1], &answer, 1);
		while (nanosleep(&linger, &linger) < 0 && errno == EINTR)
			;
		_exit(0);
	}
	close(answers[1]);
	if (pid < 0) {
		fail(errno, "fork");
		close(answers[0]);
		return;
	}
	while ((n = read(answers[0], &answer, 1)) < 0 && errno == EINTR)
		;
	close(answers[0]);
	if (n != 1)
		fail(0, "child %d ended without saying what the driver told it", pid);
	else if (answer == 0)
		say("{\"event\":\"fork\",\"pid\":%d}\n", pid);
	else
		say("{\"event\":\"fork\",\"pid\":%d,\"errno\":%d}\n", pid, answer);
	while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
		;
}

static volatile int *volatile nowhere;

/* crashed is a handler as programs have to tell where they crashed; it makes a call of
 * the driver, and crashes again. */
static void crashed(int sig)
{
	static const char line[] = "{\"event\":\"crash\"}\n";
	struct kfd_ioctl_get_version_args version;

	(void)sig;
	(void)!write(STDOUT_FILENO, line, sizeof line - 1);
	ioctl(kfd, AMDKFD_IOC_GET_VERSION, &version);
	*nowhere = 0;
}

static void do_crash(void)
{
	struct sigaction act = {.sa_handler = crashed, .sa_flags = (int)(SA_RESETHAND | SA_NODEFER)};

	sigaction(SIGSEGV, &act, NULL);
	*nowhere = 0;
}

/* do_exec becomes this program anew, by its own name. */
static void do_exec(char *self, char *rest)
{
	char *argv[MAX_ARGS + 2] = {self}, *save = NULL, path[4096];
	ssize_t len = readlink("/proc/self/exe", path, sizeof path - 1);
	int n = 1;

	for (char *word = strtok_r(rest, " \t", &save); word != NULL && n <= MAX_ARGS; word = strtok_r(NULL, " \t", &save))
		argv[n++] = word;
	if (len > 0) {
		path[len] = 0;
		execv(path, argv);
	}
	fail(errno, "exec this program");
}

static void halt(void)
{
	pthread_mutex_lock(&all_mu);
	stopping = true;
	pthread_cond_broadcast(&all_cond);
	pthread_mutex_unlock(&all_mu);
}

static void carry_out(char *self, char *line)
{
	char *rest = line + strcspn(line, " \t"), *end;
	uint64_t n;

	if (*rest != 0)
		*rest++ = 0;
	n = strtoull(rest, &end, 10);
	if (strcmp(line, "create") == 0)
		ask(do_create, 0);
	else if (strcmp(line, "destroy") == 0 && end != rest)
		ask(do_destroy, n);
	else if (strcmp(line, "rtenable") == 0)
		ask(do_runtime, 1);
	else if (strcmp(line, "rtdisable") == 0)
		ask(do_runtime, 0);
	else if (strcmp(line, "fork") == 0 && end != rest)
		ask(do_fork, n);
	else if (strcmp(line, "report") == 0)
		tell("report", NULL);
	else if (strcmp(line, "stop") == 0)
		halt();
	else if (strcmp(line, "crash") == 0)
		do_crash();
	else if (strcmp(line, "exit") == 0)
		_exit(0);
	else if (strcmp(line, "exec") == 0)
		do_exec(self, rest);
	else if (*line != 0)
		fail(0, "not a command, or not its arguments: %.40s", line);
}

/* finished tells whether all workers have ended, and there will be no more. */
static bool finished(void)
{
	bool all;

	pthread_mutex_lock(&all_mu);
	all = stopping || (cfg.packets > 0 && nworkers > 0);
	for (uint64_t i = 0; i < nworkers; i++)
		all = all && workers[i]->ended;
	pthread_mutex_unlock(&all_mu);
	return all;
}

/* serve carries out commands until all is over. It reads byte by byte: what follows an
 * exec is for the program that comes then. */
static void serve(char *self)
{
	struct pollfd fds[2] = {{.fd = wakeup[0], .events = POLLIN}, {.fd = STDIN_FILENO, .events = POLLIN}};
	char line[1024], b;
	size_t n = 0;

	while (!finished()) {
		if (poll(fds, 2, -1) < 0)
			continue; /* interrupted */
		if (fds[0].revents != 0 && read(wakeup[0], &b, 1) == 1 && b == 's')
			halt();
		if (fds[1].revents == 0)
			continue;
		ssize_t got = read(STDIN_FILENO, &b, 1);
		if (got == 0 || (got < 0 && errno != EINTR && errno != EAGAIN))
			fds[1].fd = -1; /* nobody has anything to say any more */
		if (got != 1)
			continue;
		if (b != '\n') {
			if (n < sizeof line - 1)
				line[n++] = b;
			continue;
		}
		line[n] = 0;
		n = 0;
		carry_out(self, line);
	}
}

/* Signals: SIGTERM and SIGINT stop the client, SIGUSR1 does nothing, and SIGUSR2 does
 * nothing but interrupt system calls. */

static void stop_signal(int sig)
{
	int saved = errno;

	(void)sig;
	(void)!write(wakeup[1], "s", 1);
	errno = saved;
}

static void no_signal(int sig) { (void)sig; }

static bool catch_signals(void)
{
	struct sigaction stop = {.sa_handler = stop_signal};
	struct sigaction restart = {.sa_handler = no_signal, .sa_flags = SA_RESTART};
	struct sigaction interrupt = {.sa_handler = no_signal};

	return pipe2(wakeup, O_CLOEXEC | O_NONBLOCK) == 0 && sigaction(SIGTERM, &stop, NULL) == 0 && sigaction(SIGINT, &stop, NULL) == 0 &&
	       sigaction(SIGUSR1, &restart, NULL) == 0 && sigaction(SIGUSR2, &interrupt, NULL) == 0;
}

static bool set_up(void)
{
	if ((kfd = open_again("/dev/kfd")) < 0)
		return fail(errno, "open /dev/kfd");
	if (!find_gpus() || (cfg.runtime && !set_runtime(true)))
		return false;
	for (int i = 0; i < ngpus; i++) {
		if (!acquire_vm(&gpus[i]))
			return false;
		for (uint64_t n = 0; n < cfg.queues; n++)
			if (add_worker(&gpus[i], false) == NULL)
				return false;
		if (cfg.sdma && add_worker(&gpus[i], true) == NULL)
			return false;
	}
	return true;
}

/* prove looks whether anything ran after the end. */
static void prove(struct worker *w)
{
	uint64_t count, hash;

	result(w, &count, &hash);
	if (count != w->last || hash != w->last_hash)
		wrong("queue %u had run %lu packets when it was destroyed, and then ran on: %lu", w->id, w->last, count);
}

static bool parse_number(const char *text, const char *name, uint64_t least, uint64_t most, uint64_t *n)
{
	char *end;

	errno = 0;
	*n = strtoull(text, &end, 10);
	if (errno == 0 && *text >= '0' && *text <= '9' && *end == 0 && *n >= least && *n <= most)
		return true;
	fprintf(stderr, "--%s %s: %lu to %lu\n", name, text, least, most);
	return false;
}

static bool parse_gpus(char *text)
{
	char *save = NULL;
	uint64_t id;

	if (strcmp(text, "all") == 0)
		return true;
	for (char *word = strtok_r(text, ",", &save); word != NULL; word = strtok_r(NULL, ",", &save)) {
		if (cfg.ngpus == MAX_GPUS || !parse_number(word, "gpus", 1, UINT32_MAX, &id))
			return false;
		cfg.gpus[cfg.ngpus++] = (uint32_t)id;
	}
	return cfg.ngpus > 0;
}

static bool parse(int argc, char **argv)
{
	enum { GPUS = 1, QUEUES, RUNTIME, PACKETS, DURATION, OCCUPANCY, RATE, DEPTH, SDMA, CHURN, WAIT };
	static const struct option options[] = {
		{"gpus", required_argument, NULL, GPUS}, {"queues", required_argument, NULL, QUEUES}, {"runtime", no_argument, NULL, RUNTIME},
		{"packets", required_argument, NULL, PACKETS}, {"duration", required_argument, NULL, DURATION},
		{"occupancy", required_argument, NULL, OCCUPANCY}, {"rate", required_argument, NULL, RATE},
		{"depth", required_argument, NULL, DEPTH}, {"sdma", no_argument, NULL, SDMA}, {"churn", no_argument, NULL, CHURN},
		{"wait", required_argument, NULL, WAIT}, {0},
	};
	bool ok = true;
	char *end;
	int c;

	while (ok && (c = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (c) {
		case GPUS: ok = parse_gpus(optarg); break;
		case QUEUES: ok = parse_number(optarg, "queues", 0, 1024, &cfg.queues); break;
		case RUNTIME: cfg.runtime = true; break;
		case PACKETS: ok = parse_number(optarg, "packets", 0, UINT64_MAX, &cfg.packets); break;
		case DURATION: ok = parse_number(optarg, "duration", 0, 3600000000, &cfg.duration); break;
		case OCCUPANCY: ok = parse_number(optarg, "occupancy", 0, WHOLE, &cfg.occupancy); break;
		case RATE:
			cfg.rate = strtod(optarg, &end);
			ok = *end == 0 && (cfg.rate == 0 || (cfg.rate >= 0.001 && cfg.rate <= 1e6));
			break;
		case DEPTH: ok = parse_number(optarg, "depth", 1, MAX_DEPTH, &cfg.depth); break;
		case SDMA: cfg.sdma = true; break;
		case CHURN: cfg.churn = true; break;
		case WAIT:
			cfg.poll = strcmp(optarg, "poll") == 0;
			ok = cfg.poll || strcmp(optarg, "event") == 0;
			break;
		default: ok = false;
		}
	}
	return ok && optind == argc;
}

int main(int argc, char **argv)
{
	pthread_condattr_t attr;
	bool ok = true;

	if (!parse(argc, argv)) {
		fputs("usage: kfdclient [--gpus IDS|all] [--queues N] [--runtime] [--packets N] [--duration US] [--occupancy MILLIONTHS]\n"
		      "                 [--rate PER_SECOND] [--depth N] [--sdma] [--churn] [--wait event|poll]\n", stderr);
		return 2;
	}
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&all_cond, &attr);
	if (!catch_signals()) {
		fail(errno, "catch signals");
		return 1;
	}
	if (!set_up())
		return 1;
	tell("ready", NULL);
	pthread_mutex_lock(&all_mu);
	begun = true;
	for (uint64_t i = 0; i < nworkers; i++)
		if (pthread_create(&workers[i]->thread, NULL, run_worker, workers[i]) != 0)
			abort();
	pthread_mutex_unlock(&all_mu);

	serve(argv[0]);
	pthread_mutex_lock(&all_mu);
	while (asked > 0)
		pthread_cond_wait(&all_cond, &all_mu);
	pthread_mutex_unlock(&all_mu);
	for (uint64_t i = 0; i < nworkers; i++) {
		pthread_join(workers[i]->thread, NULL);
		prove(workers[i]);
	}
	ok = tell("done", NULL);
	if (runtime_on)
		ok = set_runtime(false) && ok;
	for (uint64_t i = 0; i < nworkers; i++)
		ok = close_up(workers[i]) && ok;
	return ok && !out_broken ? 0 : 1;
}
