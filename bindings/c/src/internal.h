/* Between the files of the library. */
#ifndef GP_INTERNAL_H
#define GP_INTERNAL_H

#include <pb.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../gpreempt_poc.h"
#include "google/protobuf/duration.pb.h"

/* The most bytes of an answer's message. */
#define GP_SMALL_ANSWER ((size_t)64 << 10)
#define GP_LIST_ANSWER ((size_t)16 << 20)

/* A unary call and its answer. Zero, with the first fields set, before gp_call. */
struct gp_call {
	const char *path;    /* /SERVICE/METHOD */
	const uint8_t *out;  /* the request */
	size_t out_len;
	size_t limit;        /* of the answer */
	int64_t bound_us;
	int64_t deadline;    /* of gp_call */
	bool urgent;         /* also when the daemon did not answer a moment ago */

	/* The answer without its prefix of 5 bytes; of gp_call's caller, who frees memory. */
	const uint8_t *in;
	size_t in_len;
	uint8_t *memory;
	uint64_t connection; /* the connection that was used */

	/* Of gp_call, under its mutex. */
	struct gp_call *next;
	int32_t stream;
	size_t sent, received, capacity;
	int http_status, grpc_status;
	char message[512];   /* grpc-message or the text of GOAWAY, as received */
	char details[2048];  /* grpc-status-details-bin, as received */
	bool done;
	int err;
};

/* gp_call connects if necessary, calls and waits. It returns 0, or a negative errno value
 * after gp_fail. */
int gp_call(struct gp_call *call);

/* gp_connect connects if necessary: 0, or a negative errno value after gp_fail. */
int gp_connect(void);

/* gp_disconnect closes the connection and fails the calls on it. */
void gp_disconnect(void);

/* gp_connected reports whether the process still has this connection. */
bool gp_connected(uint64_t connection);

/* gp_fail sets the text of gpreempt_last_error, with '?' for control characters, and returns err. */
int gp_fail(int err, const char *format, ...) __attribute__((format(printf, 2, 3)));
void gp_clear_error(void);

/* gp_refused returns gp_fail of a grpc-status other than 0. */
int gp_refused(const struct gp_call *call);

/* A message to encode or decode. */
struct gp_message {
	const pb_msgdesc_t *fields;
	void *m;
};

/* gp_rpc encodes a request, calls, and decodes the answer. */
int gp_rpc(struct gp_call *call, struct gp_message request, struct gp_message answer);

/* Durations of the API. gp_microseconds returns 0 to an hour. */
google_protobuf_Duration gp_duration(int64_t us);
int64_t gp_microseconds(const google_protobuf_Duration *d);

#endif
