/* Errors: texts, and what a gRPC status is as an errno value. */
#include <errno.h>
#include <pb_decode.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "internal.h"
#include "status.pb.h"

static _Thread_local char text[768];

int gp_fail(int err, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	for (char *s = text; *s != 0; s++) /* the daemon's words, too: nothing that a terminal would interpret */
		if ((unsigned char)*s < ' ' || *s == 0x7f)
			*s = '?';
	return err;
}

void gp_clear_error(void) { text[0] = 0; }

const char *gpreempt_last_error(void) { return text; }

/* base64 decodes with and without padding, and returns the number of bytes. */
static size_t base64(const char *s, uint8_t *to, size_t room)
{
	static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
	uint32_t bits = 0;
	int count = 0;
	size_t n = 0;

	for (; *s != 0 && n < room; s++) {
		const char *digit = strchr(digits, *s);

		if (digit == NULL)
			break;
		bits = bits << 6 | (uint32_t)(digit - digits);
		count += 6;
		if (count >= 8) {
			count -= 8;
			to[n++] = (uint8_t)(bits >> count);
		}
	}
	return n;
}

static int hex(char digit)
{
	const char *digits = "0123456789ABCDEF0123456789abcdef", *at = digit == 0 ? NULL : strchr(digits, digit);

	return at == NULL ? -1 : (int)(at - digits) % 16;
}

/* unescape decodes %XX in place. */
static void unescape(char *s)
{
	char *to = s;

	for (; *s != 0; s++) {
		char byte = *s;

		if (*s == '%' && hex(s[1]) >= 0 && hex(s[2]) >= 0) {
			byte = (char)(hex(s[1]) * 16 + hex(s[2]));
			s += 2;
		}
		*to++ = byte == 0 ? '?' : byte;
	}
	*to = 0;
}

/* on_detail is called for each detail of a status. */
static bool on_detail(pb_istream_t *stream, const pb_field_t *field, void **arg)
{
	google_rpc_Detail detail = google_rpc_Detail_init_zero;
	google_rpc_ErrorInfo info = google_rpc_ErrorInfo_init_zero;

	(void)field;
	if (!pb_decode(stream, google_rpc_Detail_fields, &detail))
		return false;
	if (strcmp(detail.type_url, "type.googleapis.com/google.rpc.ErrorInfo") != 0)
		return true;
	pb_istream_t value = pb_istream_from_buffer(detail.value.bytes, detail.value.size);
	if (pb_decode(&value, google_rpc_ErrorInfo_fields, &info) && strcmp(info.domain, "gpreempt") == 0)
		strcpy(*arg, info.reason);
	return true;
}

static int errno_of(int status, const char *reason)
{
	static const struct {
		const char *reason;
		int err;
	} reasons[] = {
		{ "UNKNOWN_LEASE", ESTALE },      { "FOREIGN_LEASE", EPERM },
		{ "UNKNOWN_TARGET", ESRCH },      { "TARGET_NOT_OFFLINE", EOPNOTSUPP },
		{ "gpu-without-vm", EOPNOTSUPP }, { "MESSAGE_TOO_LARGE", EMSGSIZE },
		{ "SHUTTING_DOWN", ESHUTDOWN },
	};

	for (size_t i = 0; i < sizeof(reasons) / sizeof(*reasons); i++)
		if (strcmp(reason, reasons[i].reason) == 0)
			return -reasons[i].err;
	switch (status) {
	case 3: /* INVALID_ARGUMENT */
	case 11: /* OUT_OF_RANGE */
		return -EINVAL;
	case 1: /* CANCELLED */
	case 4: /* DEADLINE_EXCEEDED */
		return -ETIMEDOUT;
	case 5: /* NOT_FOUND */
		return -ENOENT;
	case 6: /* ALREADY_EXISTS */
		return -EEXIST;
	case 7: /* PERMISSION_DENIED */
	case 16: /* UNAUTHENTICATED */
		return -EACCES;
	case 8: /* RESOURCE_EXHAUSTED */
		return -EBUSY;
	case 9: /* FAILED_PRECONDITION */
	case 12: /* UNIMPLEMENTED */
		return -EOPNOTSUPP;
	case 14: /* UNAVAILABLE */
		return -ESHUTDOWN;
	default:
		return -EREMOTEIO;
	}
}

int gp_refused(const struct gp_call *call)
{
	google_rpc_Status status = google_rpc_Status_init_zero;
	uint8_t bytes[sizeof(call->details)];
	char reason[sizeof(((google_rpc_ErrorInfo *)0)->reason)] = "", message[sizeof(call->message)];
	pb_istream_t stream = pb_istream_from_buffer(bytes, base64(call->details, bytes, sizeof(bytes)));

	status.details.funcs.decode = on_detail;
	status.details.arg = reason;
	(void)pb_decode(&stream, google_rpc_Status_fields, &status); /* without details the code decides */
	unescape(reason);
	strcpy(message, call->message);
	unescape(message);
	if (*reason == 0)
		snprintf(reason, sizeof(reason), "gRPC status %d", call->grpc_status);
	return gp_fail(errno_of(call->grpc_status, reason), "%s: %s", reason, message);
}
