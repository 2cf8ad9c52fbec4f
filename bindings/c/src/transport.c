/*
 * One HTTP/2 connection, and gRPC's unary calls on it.
 *
 * The calling threads do the input and output. All state is guarded by one mutex, which
 * is never held while a thread waits: one waiting thread polls the socket, and the others
 * wait until it has handled what arrived.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <nghttp2/nghttp2.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

#define DEFAULT_SOCKET "/run/gpreempt/gpreemptd.sock"
/* The prefix of a gRPC message: a flag and its length. */
#define PREFIX 5
/* HTTP/2 windows: a list of queues arrives without waiting for window updates. */
#define WINDOW (1 << 20)
/* What is read before the time is checked again. */
#define READS 16
#define READ_BYTES 16384
/* The pause after a call without an answer, during which calls fail at once. */
#define AWAY_MIN 100000
#define AWAY_MAX 2000000

static struct {
	pthread_mutex_t mutex;
	pthread_cond_t changed; /* a call is done, or nobody polls any more */
	pid_t pid;              /* the process of the connection */
	int fd;                 /* -1 without a connection */
	int wake;               /* an eventfd for the polling thread */
	nghttp2_session *session;
	struct gp_call *calls;  /* in flight */
	bool broken;            /* to be disposed of, when nobody polls */
	bool polling;
	uint64_t number;        /* of the connection, 0 before the first */
	int64_t away_until, away_pause;
	uint64_t answers;       /* calls that the daemon answered */
} c = { .mutex = PTHREAD_MUTEX_INITIALIZER, .fd = -1, .wake = -1 };

static pthread_once_t once = PTHREAD_ONCE_INIT;

static int64_t now_us(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static struct timespec timespec_of(int64_t us)
{
	return (struct timespec){ .tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000 };
}

static void new_cond(void)
{
	pthread_condattr_t attr;

	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&c.changed, &attr);
	pthread_condattr_destroy(&attr);
}

/* A child has the parent's socket. Closing it here does not affect the parent; a shutdown
 * would. The session's memory is released when the child connects. */
static void forget_parent(void)
{
	if (c.fd >= 0)
		close(c.fd);
	if (c.wake >= 0)
		close(c.wake);
	c.fd = c.wake = -1;
	c.calls = NULL;
	c.broken = c.session != NULL;
	c.polling = false;
	c.pid = getpid();
	new_cond();
}

/* The mutex is held for a short time only, so fork does not wait for calls. */
static void before_fork(void) { pthread_mutex_lock(&c.mutex); }
static void after_fork(void) { pthread_mutex_unlock(&c.mutex); }

static void after_fork_in_child(void)
{
	forget_parent();
	pthread_mutex_unlock(&c.mutex);
}

static void initialise(void)
{
	c.pid = getpid();
	new_cond();
	pthread_atfork(before_fork, after_fork, after_fork_in_child);
}

static void lock(void)
{
	pthread_once(&once, initialise);
	pthread_mutex_lock(&c.mutex);
	if (c.pid != getpid()) /* by a clone that runs no handlers */
		forget_parent();
}

static void unlock(void) { pthread_mutex_unlock(&c.mutex); }

static void notify(void)
{
	pthread_cond_broadcast(&c.changed);
	if (c.polling)
		(void)!write(c.wake, &(uint64_t){ 1 }, sizeof(uint64_t));
}

static void finish(struct gp_call *call, int err)
{
	if (!call->done) {
		call->done = true;
		call->err = err;
	}
}

/* dispose releases a broken connection. Nobody polls. */
static void dispose(void)
{
	if (c.fd >= 0)
		close(c.fd);
	if (c.wake >= 0)
		close(c.wake);
	nghttp2_session_del(c.session);
	c.fd = c.wake = -1;
	c.session = NULL;
	c.broken = false;
	pthread_cond_broadcast(&c.changed);
}

/* fail_connection ends the connection and every call on it. */
static void fail_connection(int err)
{
	if (c.session == NULL || c.broken)
		return;
	for (struct gp_call *k = c.calls; k != NULL; k = k->next)
		finish(k, err);
	c.broken = true;
	shutdown(c.fd, SHUT_RDWR); /* wakes the polling thread, which disposes of it */
	if (c.polling)
		notify();
	else
		dispose();
}

/* call_of returns the call of a stream, or NULL when its caller has left. nghttp2 has no
 * pointer to a call: it would keep one of a call that it has not sent yet. */
static struct gp_call *call_of(int32_t stream)
{
	for (struct gp_call *k = c.calls; k != NULL; k = k->next)
		if (k->stream == stream && k->connection == c.number)
			return k;
	return NULL;
}

/* reset ends a call by an error of ours. */
static void reset(struct gp_call *call, int err)
{
	finish(call, err);
	nghttp2_submit_rst_stream(c.session, NGHTTP2_FLAG_NONE, call->stream, NGHTTP2_CANCEL);
}

static ssize_t on_send(nghttp2_session *s, const uint8_t *data, size_t n, int flags, void *user)
{
	ssize_t sent;

	(void)s, (void)flags, (void)user;
	do
		sent = send(c.fd, data, n, MSG_NOSIGNAL | MSG_DONTWAIT);
	while (sent < 0 && errno == EINTR);
	if (sent >= 0)
		return sent;
	return errno == EAGAIN || errno == EWOULDBLOCK ? NGHTTP2_ERR_WOULDBLOCK : NGHTTP2_ERR_CALLBACK_FAILURE;
}

static ssize_t on_read(nghttp2_session *s, int32_t stream, uint8_t *buf, size_t n, uint32_t *flags,
		       nghttp2_data_source *source, void *user)
{
	struct gp_call *call = call_of(stream);
	size_t done = 0;

	(void)s, (void)source, (void)user;
	if (call == NULL) /* its caller has left */
		return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;
	const uint8_t prefix[PREFIX] = { 0, (uint8_t)(call->out_len >> 24), (uint8_t)(call->out_len >> 16),
					 (uint8_t)(call->out_len >> 8), (uint8_t)call->out_len };
	for (; done < n && call->sent < PREFIX; done++)
		buf[done] = prefix[call->sent++];
	if (call->sent >= PREFIX) {
		size_t rest = call->out_len - (call->sent - PREFIX);

		if (rest > n - done)
			rest = n - done;
		memcpy(buf + done, call->out + (call->sent - PREFIX), rest);
		done += rest;
		call->sent += rest;
		if (call->sent == PREFIX + call->out_len)
			*flags |= NGHTTP2_DATA_FLAG_EOF;
	}
	return (ssize_t)done;
}

/* number returns a decimal number of at most three digits, or -1. */
static int number(const uint8_t *s, size_t n)
{
	int value = 0;

	if (n == 0 || n > 3)
		return -1;
	for (size_t i = 0; i < n; i++) {
		if (s[i] < '0' || s[i] > '9')
			return -1;
		value = value * 10 + (s[i] - '0');
	}
	return value;
}

static bool is(const uint8_t *s, size_t n, const char *name)
{
	return n == strlen(name) && memcmp(s, name, n) == 0;
}

static void keep(char *to, size_t room, const uint8_t *s, size_t n)
{
	if (n >= room)
		n = room - 1;
	memcpy(to, s, n);
	to[n] = 0;
}

static int on_header(nghttp2_session *s, const nghttp2_frame *frame, const uint8_t *name, size_t name_len,
		     const uint8_t *value, size_t n, uint8_t flags, void *user)
{
	struct gp_call *call = call_of(frame->hd.stream_id);

	(void)s, (void)flags, (void)user;
	if (call == NULL || call->done)
		return 0;
	if (is(name, name_len, ":status"))
		call->http_status = number(value, n);
	else if (is(name, name_len, "grpc-status"))
		call->grpc_status = number(value, n);
	else if (is(name, name_len, "grpc-message"))
		keep(call->message, sizeof(call->message), value, n);
	else if (is(name, name_len, "grpc-status-details-bin") && n < sizeof(call->details))
		keep(call->details, sizeof(call->details), value, n);
	return 0;
}

/* room makes room for n more bytes of an answer. */
static int room(struct gp_call *call, size_t n)
{
	size_t capacity = call->capacity == 0 ? 1024 : call->capacity;

	while (capacity < call->received + n)
		capacity *= 2;
	if (capacity > call->capacity) {
		uint8_t *grown = realloc(call->memory, capacity);

		if (grown == NULL)
			return -ENOMEM;
		call->memory = grown;
		call->capacity = capacity;
	}
	return 0;
}

static int on_data(nghttp2_session *s, uint8_t flags, int32_t stream, const uint8_t *data, size_t n, void *user)
{
	struct gp_call *call = call_of(stream);

	(void)s, (void)flags, (void)user;
	if (call == NULL || call->done)
		return 0;
	if (n > call->limit + PREFIX - call->received) {
		reset(call, -EMSGSIZE);
	} else if (room(call, n) < 0) {
		reset(call, -ENOMEM);
	} else {
		memcpy(call->memory + call->received, data, n);
		call->received += n;
	}
	return 0;
}

/* on_goaway ends the calls that the daemon has not taken when it refuses the connection: the text is
 * the name of the limit, ": " and what is the matter. */
static void on_goaway(const nghttp2_goaway *frame)
{
	const uint8_t *text = frame->opaque_data;
	size_t n = frame->opaque_data_len, name = 0;

	while (name < n && ((text[name] >= 'A' && text[name] <= 'Z') || text[name] == '_'))
		name++;
	if (frame->error_code != NGHTTP2_ENHANCE_YOUR_CALM || name == 0 || n - name < 2 || memcmp(text + name, ": ", 2) != 0)
		return;
	for (struct gp_call *k = c.calls; k != NULL; k = k->next)
		if (k->connection == c.number && k->stream > frame->last_stream_id && !k->done) {
			keep(k->message, sizeof(k->message), text, n);
			finish(k, -EBUSY);
		}
}

/* on_frame ends a call at the end of its answer, which may precede that of the request. */
static int on_frame(nghttp2_session *s, const nghttp2_frame *frame, void *user)
{
	struct gp_call *call;

	(void)s, (void)user;
	if (frame->hd.type == NGHTTP2_GOAWAY)
		on_goaway(&frame->goaway);
	if ((frame->hd.type != NGHTTP2_HEADERS && frame->hd.type != NGHTTP2_DATA) || !(frame->hd.flags & NGHTTP2_FLAG_END_STREAM))
		return 0;
	call = call_of(frame->hd.stream_id);
	if (call != NULL && !call->done) {
		c.answers++;
		c.away_until = c.away_pause = 0;
		finish(call, 0);
	}
	return 0;
}

static int on_close(nghttp2_session *s, int32_t stream, uint32_t code, void *user)
{
	struct gp_call *call = call_of(stream);

	(void)s, (void)user;
	if (call == NULL)
		return 0;
	if (code == NGHTTP2_CANCEL && now_us() >= call->deadline) /* the daemon has noticed first that its time is over */
		finish(call, -ETIMEDOUT);
	else
		finish(call, code == NGHTTP2_REFUSED_STREAM ? -ECONNRESET : -EPROTO);
	return 0;
}

static int new_session(void)
{
	static const nghttp2_settings_entry settings[] = {
		{ NGHTTP2_SETTINGS_ENABLE_PUSH, 0 },
		{ NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, WINDOW },
		{ NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE, 16384 },
	};
	nghttp2_session_callbacks *callbacks;
	int err = nghttp2_session_callbacks_new(&callbacks);

	if (err == 0) {
		nghttp2_session_callbacks_set_send_callback(callbacks, on_send);
		nghttp2_session_callbacks_set_on_header_callback(callbacks, on_header);
		nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, on_data);
		nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks, on_frame);
		nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, on_close);
		err = nghttp2_session_client_new(&c.session, callbacks, NULL);
		nghttp2_session_callbacks_del(callbacks);
	}
	if (err == 0)
		err = nghttp2_submit_settings(c.session, NGHTTP2_FLAG_NONE, settings, sizeof(settings) / sizeof(*settings));
	if (err == 0)
		err = nghttp2_session_set_local_window_size(c.session, NGHTTP2_FLAG_NONE, 0, WINDOW);
	return err == 0 ? 0 : -ENOMEM;
}

/* pump sends what is waiting and handles what has arrived, a bounded part of it. It
 * may fail the connection. */
static void pump(void)
{
	uint8_t buf[READ_BYTES];
	bool lost = nghttp2_session_send(c.session) != 0;

	for (int i = 0; i < READS; i++) {
		ssize_t n = recv(c.fd, buf, sizeof(buf), MSG_DONTWAIT);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
			break;
		if (n <= 0) { /* what arrived before the end has been handled */
			fail_connection(-ECONNRESET);
			return;
		}
		if (nghttp2_session_mem_recv(c.session, buf, (size_t)n) < 0) {
			fail_connection(-EPROTO);
			return;
		}
	}
	if (lost || nghttp2_session_send(c.session) != 0)
		fail_connection(-ECONNRESET);
	else if (!nghttp2_session_want_read(c.session) && !nghttp2_session_want_write(c.session))
		fail_connection(-EPROTO); /* nghttp2 ended it, after what it received */
}

/* connect_locked returns 1 for a new connection, 0 for the present one, or a negative
 * errno value. */
static int connect_locked(int64_t deadline)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	const char *path;
	int err;

	if (c.session != NULL && !c.broken) {
		pump(); /* it may have ended long ago */
		notify();
		if (c.session != NULL && !c.broken && !nghttp2_session_check_request_allowed(c.session))
			fail_connection(-ECONNRESET);
	}
	while (c.broken && c.polling) {
		struct timespec until = timespec_of(deadline);

		if (pthread_cond_timedwait(&c.changed, &c.mutex, &until) == ETIMEDOUT)
			return gp_fail(-ETIMEDOUT, "the broken connection is still in use");
	}
	if (c.broken)
		dispose();
	if (c.session != NULL)
		return 0;

	path = secure_getenv("GPREEMPT_SOCKET");
	if (path == NULL || *path == 0)
		path = DEFAULT_SOCKET;
	if (strlen(path) >= sizeof(address.sun_path))
		return gp_fail(-EINVAL, "GPREEMPT_SOCKET has more than %zu bytes", sizeof(address.sun_path) - 1);
	strcpy(address.sun_path, path);
	c.fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (c.fd < 0)
		return gp_fail(-errno, "socket: %s", strerror(errno));
	if (connect(c.fd, (const struct sockaddr *)&address, sizeof(address)) != 0) {
		err = errno == ENOENT ? ECONNREFUSED : errno == EAGAIN ? EBUSY : errno;
		gp_fail(-err, "DAEMON_UNAVAILABLE: connect to %s: %s", path, strerror(errno));
		goto fail;
	}
	c.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (c.wake < 0) {
		err = errno;
		gp_fail(-err, "eventfd: %s", strerror(err));
		goto fail;
	}
	err = -new_session();
	if (err != 0) {
		gp_fail(-err, "no memory for a connection");
		goto fail;
	}
	c.number++;
	return 1;
fail:
	dispose();
	return -err;
}

static int submit(struct gp_call *call)
{
	char timeout[16];
#define FIELD(name, value) { (uint8_t *)(name), (uint8_t *)(value), strlen(name), strlen(value), NGHTTP2_NV_FLAG_NONE }
	snprintf(timeout, sizeof(timeout), "%du", (int)call->bound_us);
	const nghttp2_nv fields[] = {
		FIELD(":method", "POST"), FIELD(":scheme", "http"), FIELD(":path", call->path),
		FIELD(":authority", "localhost"), FIELD("te", "trailers"), FIELD("content-type", "application/grpc"),
		FIELD("user-agent", "libgpreempt"), FIELD("grpc-timeout", timeout),
	};
#undef FIELD
	const nghttp2_data_provider body = { .read_callback = on_read };

	free(call->memory);
	call->memory = NULL;
	call->sent = call->received = call->capacity = 0;
	call->http_status = call->grpc_status = -1;
	call->message[0] = call->details[0] = 0;
	call->done = false;
	call->err = 0;
	call->connection = c.number;
	call->stream = nghttp2_submit_request(c.session, NULL, fields, sizeof(fields) / sizeof(*fields), &body, NULL);
	if (call->stream < 0)
		return gp_fail(-ENOMEM, "no memory for a call");
	call->next = c.calls;
	c.calls = call;
	return 0;
}

static void unlink_call(struct gp_call *call)
{
	for (struct gp_call **at = &c.calls; *at != NULL; at = &(*at)->next) {
		if (*at == call) {
			*at = call->next;
			return;
		}
	}
}

/* poll_once waits for the socket and handles what arrives. The mutex is held before and
 * after, and released in between. */
static void poll_once(int64_t timeout)
{
	struct pollfd fds[2] = {
		{ .fd = c.fd, .events = (short)(POLLIN | (nghttp2_session_want_write(c.session) ? POLLOUT : 0)) },
		{ .fd = c.wake, .events = POLLIN },
	};
	struct timespec left = timespec_of(timeout);

	c.polling = true;
	unlock();
	(void)ppoll(fds, 2, &left, NULL); /* by an error or a signal too early */
	lock();
	c.polling = false;
	if (c.broken) {
		dispose();
		return;
	}
	(void)!read(c.wake, &(uint64_t){ 0 }, sizeof(uint64_t));
	pump();
	notify();
}

/* await returns when the call is done, or cancels it at the deadline. */
static void await(struct gp_call *call, int64_t deadline)
{
	while (!call->done) {
		int64_t left = deadline - now_us();

		if (left <= 0) {
			reset(call, -ETIMEDOUT);
			pump();
			notify();
		} else if (c.polling) {
			struct timespec until = timespec_of(deadline);

			pthread_cond_timedwait(&c.changed, &c.mutex, &until);
		} else {
			poll_once(left);
		}
	}
}

static int call_locked(struct gp_call *call)
{
	int64_t start = now_us(), deadline = start + call->bound_us;
	uint64_t answers = c.answers;

	call->deadline = deadline;
	if (start < c.away_until && !call->urgent)
		return gp_fail(-ETIMEDOUT, "DAEMON_UNAVAILABLE: gpreemptd did not answer a moment ago");
	for (int attempt = 0;; attempt++) {
		int fresh;

		call->err = 0;
		fresh = connect_locked(deadline);

		if (fresh < 0)
			return fresh;
		if (submit(call) < 0)
			return -ENOMEM;
		pump();
		notify();
		await(call, deadline);
		unlink_call(call);
		/* The lease of a broken connection has ended, and the other calls may be
		 * repeated, so this may be too: the connection may have been closed long ago. */
		if (call->err != -ECONNRESET || fresh || attempt > 0)
			break;
	}
	if (call->err == -ETIMEDOUT && c.answers == answers) {
		c.away_pause = c.away_pause == 0 ? AWAY_MIN : c.away_pause * 2 > AWAY_MAX ? AWAY_MAX : c.away_pause * 2;
		c.away_until = now_us() + c.away_pause;
	}
	return call->err;
}

/* answer checks the answer and sets in and in_len. */
static int answer(struct gp_call *call)
{
	switch (call->err) {
	case 0:
		break;
	case -ETIMEDOUT:
		return gp_fail(call->err, "DAEMON_UNAVAILABLE: gpreemptd did not answer within %lld us", (long long)call->bound_us);
	case -ECONNRESET:
		return gp_fail(call->err, "DAEMON_UNAVAILABLE: gpreemptd closed the connection");
	case -EBUSY:
		return gp_fail(call->err, "%s", call->message);
	case -EMSGSIZE:
		return gp_fail(call->err, "the answer has more than %zu bytes", call->limit);
	default:
		return gp_fail(call->err, "%s", strerror(-call->err));
	}
	if (call->grpc_status > 0)
		return gp_refused(call);
	if (call->http_status != 200 || call->grpc_status != 0)
		return gp_fail(-EPROTO, "HTTP status %d without a gRPC status", call->http_status);
	if (call->received < PREFIX || call->memory[0] != 0)
		return gp_fail(-EPROTO, "the answer has no uncompressed message");
	call->in = call->memory + PREFIX;
	call->in_len = call->received - PREFIX;
	if (call->in_len != ((size_t)call->memory[1] << 24 | (size_t)call->memory[2] << 16 | (size_t)call->memory[3] << 8 | call->memory[4]))
		return gp_fail(-EPROTO, "the answer is not one message");
	return 0;
}

int gp_call(struct gp_call *call)
{
	int cancel, err;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
	lock();
	err = call_locked(call);
	unlock();
	pthread_setcancelstate(cancel, NULL);
	if (err == 0 || call->err != 0)
		err = answer(call);
	return err;
}

int gp_connect(void)
{
	int err;

	lock();
	err = connect_locked(now_us() + GPREEMPT_BOUND_LEASE);
	unlock();
	return err < 0 ? err : 0;
}

void gp_disconnect(void)
{
	lock();
	fail_connection(-ECANCELED);
	while (c.broken && c.polling)
		pthread_cond_wait(&c.changed, &c.mutex);
	if (c.broken)
		dispose();
	c.away_until = c.away_pause = 0;
	unlock();
}

bool gp_connected(uint64_t connection)
{
	bool connected;

	lock();
	connected = c.session != NULL && !c.broken && c.number == connection;
	unlock();
	return connected;
}
