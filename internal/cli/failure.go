package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// The exit codes. Scripts rely on them: they do not change.
const (
	ExitOK          = 0
	ExitFailure     = 1
	ExitUsage       = 2
	ExitUnreachable = 3
	ExitNotFound    = 4
	ExitDenied      = 5
	ExitRefused     = 6
	// Those of gpctl doctor.
	ExitNotReady = 7
	ExitNoGPU    = 8
	// ExitCannotTell: a run has no verdict.
	ExitCannotTell = 9
	// ExitPartial: some hosts of --hosts failed, or a rollout stopped.
	ExitPartial = 10
)

// failure is an error with its exit code.
type failure struct {
	code int
	// message is "" when the output already contains it.
	message string
	// next is the advice, or "".
	next string
}

func (f *failure) Error() string { return f.message }

func (f *failure) print(w io.Writer) {
	if f.message == "" {
		return
	}
	fmt.Fprintf(w, "gpctl: %s\n", printable(f.message))
	if f.next != "" {
		fmt.Fprintf(w, "  try: %s\n", printable(f.next))
	}
}

// usage returns the failure for an invalid command line of cmd.
func usage(cmd *cobra.Command, format string, args ...any) error {
	return &failure{code: ExitUsage, message: fmt.Sprintf(format, args...), next: cmd.CommandPath() + " --help"}
}

// fromDaemon returns the failure for the error of a request.
func (a *app) fromDaemon(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if f, ok := errors.AsType[*failure](err); ok {
		return f
	}
	code := status.Code(err)
	if code == codes.DeadlineExceeded || errors.Is(err, context.DeadlineExceeded) {
		return &failure{
			code:    ExitUnreachable,
			message: fmt.Sprintf("the daemon at %s did not answer within %s", a.daemonAt(), duration(a.timeout)),
			next:    "systemctl status gpreemptd, or a longer --timeout",
		}
	}
	e, ok := errors.AsType[*gpreempt.Error](api.FromStatus(err))
	if !ok {
		return err
	}
	f := &failure{code: ExitFailure, message: e.Message, next: e.Next}
	switch e.Code {
	case gpreempt.CodeNotFound:
		f.code = ExitNotFound
	case gpreempt.CodePermissionDenied, gpreempt.CodeUnauthenticated:
		f.code = ExitDenied
	case gpreempt.CodeInvalidArgument, gpreempt.CodeAlreadyExists, gpreempt.CodeResourceExhausted,
		gpreempt.CodeFailedPrecondition, gpreempt.CodeOutOfRange:
		f.code = ExitRefused
	case gpreempt.CodeUnavailable:
		switch {
		case e.Reason == gpreempt.ReasonDaemonUnavailable && a.address != "":
			return remoteUnreachable(a.address, status.Convert(err).Message())
		case e.Reason == gpreempt.ReasonDaemonUnavailable:
			return a.diagnose(ctx)
		}
		f.code = ExitUnreachable
	case gpreempt.Code(codes.Unimplemented):
		f.message = "the daemon does not know this command: " + e.Message
		f.next = "gpctl status and gpctl version show the versions of both"
	case gpreempt.CodeInternal:
	}
	return f
}

// diagnose returns why the daemon cannot be reached.
func (a *app) diagnose(ctx context.Context) *failure {
	return unreachable(a.socket, a.probe(ctx), groupOf(a.socket))
}

// remoteUnreachable returns the failure for a daemon on another host that cannot be
// reached. text is gRPC's error of the last attempt.
func remoteUnreachable(address, text string) *failure {
	if _, quoted, ok := strings.Cut(text, "desc = "); ok {
		if plain, err := strconv.Unquote(strings.TrimSpace(quoted)); err == nil {
			text = plain
		}
	}
	f := &failure{
		code: ExitUnreachable, message: fmt.Sprintf("cannot reach the daemon at %s: %s", address, text),
		next: "check the address, and tcp.address in the config file of that daemon",
	}
	switch {
	case strings.Contains(text, "remote error: tls:"):
		f.code = ExitDenied
		f.next = "check the dates, the CA and the usage (client) of the certificate in --cert; the daemon's log has details"
	case strings.Contains(text, "x509:"):
		f.next = "the daemon's certificate must be signed by the CA in --ca, for the host in --address"
	}
	return f
}

// unreachable returns the failure for the error of connecting to socket. group owns the
// socket or the directory that hides it, "" when unknown.
func unreachable(socket string, err error, group string) *failure {
	f := &failure{code: ExitUnreachable, next: "systemctl status gpreemptd"}
	switch {
	case err == nil:
		f.message = fmt.Sprintf("the daemon at %s closed the connection", socket)
	case errors.Is(err, fs.ErrNotExist):
		f.message = fmt.Sprintf("cannot reach the daemon: socket %s does not exist", socket)
		f.next += ", or use --socket"
	case errors.Is(err, fs.ErrPermission):
		f.code = ExitDenied
		f.message = fmt.Sprintf("permission denied on the daemon's socket %s", socket)
		switch group {
		case "", "root":
			f.next = "run gpctl as root"
		default:
			f.message += ", which needs the group " + group
			f.next = fmt.Sprintf("sudo usermod -aG %s $USER, then log in again; or run gpctl as root", group)
		}
	case errors.Is(err, syscall.ECONNREFUSED):
		f.message = fmt.Sprintf("cannot reach the daemon: no process listens on %s", socket)
	default:
		f.message = fmt.Sprintf("cannot reach the daemon at %s: %v", socket, err)
	}
	return f
}

// groupOf returns the group of the file at path, or of the nearest directory above it
// that is accessible.
func groupOf(path string) string {
	for ; ; path = filepath.Dir(path) {
		if info, err := os.Stat(path); err == nil {
			st, ok := info.Sys().(*syscall.Stat_t)
			if !ok {
				return ""
			}
			id := strconv.FormatUint(uint64(st.Gid), 10)
			if g, err := user.LookupGroupId(id); err == nil {
				return g.Name
			}
			return id
		}
		if path == filepath.Dir(path) {
			return ""
		}
	}
}
