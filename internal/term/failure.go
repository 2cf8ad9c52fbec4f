package term

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

	"github.com/gpreempt/gpreempt/pkg/client"
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
	// ExitPartial: some hosts of --hosts failed.
	ExitPartial = 10
)

// Failure is an error with its exit code.
type Failure struct {
	Code int
	// Message is "" when the output already contains it.
	Message string
	// Next is the advice, or "".
	Next string
}

func (f *Failure) Error() string { return f.Message }

// Print writes the failure of a program. The other lines of a message, as of errors that are joined, are
// indented: none of them looks like a remedy.
func (f *Failure) Print(w io.Writer, program string) {
	if f.Message == "" {
		return
	}
	prefix := program + ": "
	for line := range strings.SplitSeq(f.Message, "\n") {
		fmt.Fprintf(w, "%s%s\n", prefix, Printable(line))
		prefix = "    "
	}
	if f.Next != "" {
		fmt.Fprintf(w, "  try: %s\n", Printable(f.Next))
	}
}

// Usage returns the failure for an invalid command line of cmd.
func Usage(cmd *cobra.Command, format string, args ...any) error {
	return &Failure{Code: ExitUsage, Message: fmt.Sprintf(format, args...), Next: cmd.CommandPath() + " --help"}
}

// FromDaemon returns the failure for the error of a request.
func (a *App) FromDaemon(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if f, ok := errors.AsType[*Failure](err); ok {
		return f
	}
	code := status.Code(err)
	if code == codes.DeadlineExceeded || errors.Is(err, context.DeadlineExceeded) {
		return &Failure{
			Code:    ExitUnreachable,
			Message: fmt.Sprintf("the daemon at %s did not answer within %s", a.DaemonAt(), Duration(a.Timeout)),
			Next:    "systemctl status gpreemptd, or a longer --timeout",
		}
	}
	e, ok := errors.AsType[*gpreempt.Error](client.FromStatus(err))
	if !ok {
		return err
	}
	f := &Failure{Code: ExitFailure, Message: e.Message, Next: e.Next}
	switch e.Code {
	case gpreempt.CodeNotFound:
		f.Code = ExitNotFound
	case gpreempt.CodePermissionDenied, gpreempt.CodeUnauthenticated:
		f.Code = ExitDenied
	case gpreempt.CodeInvalidArgument, gpreempt.CodeAlreadyExists, gpreempt.CodeResourceExhausted,
		gpreempt.CodeFailedPrecondition, gpreempt.CodeOutOfRange:
		f.Code = ExitRefused
	case gpreempt.CodeUnavailable:
		switch {
		case e.Reason == gpreempt.ReasonDaemonUnavailable && a.Address != "":
			return remoteUnreachable(a.Address, status.Convert(err).Message())
		case e.Reason == gpreempt.ReasonDaemonUnavailable:
			return a.diagnose(ctx)
		}
		f.Code = ExitUnreachable
	case gpreempt.Code(codes.Unimplemented):
		f.Message = "the daemon does not know this command: " + e.Message
		f.Next = fmt.Sprintf("gpctl status and %s version show the versions of both", a.Program.Name)
	case gpreempt.CodeInternal:
	}
	return f
}

// diagnose returns why the daemon cannot be reached.
func (a *App) diagnose(ctx context.Context) *Failure {
	return Unreachable(a.Socket, a.Probe(ctx), GroupOf(a.Socket))
}

// remoteUnreachable returns the failure for a daemon on another host that cannot be
// reached. text is gRPC's error of the last attempt.
func remoteUnreachable(address, text string) *Failure {
	if _, quoted, ok := strings.Cut(text, "desc = "); ok {
		if plain, err := strconv.Unquote(strings.TrimSpace(quoted)); err == nil {
			text = plain
		}
	}
	f := &Failure{
		Code: ExitUnreachable, Message: fmt.Sprintf("cannot reach the daemon at %s: %s", address, text),
		Next: "check the address, and tcp.address in the config file of that daemon",
	}
	switch {
	case strings.Contains(text, "remote error: tls:"):
		f.Code = ExitDenied
		f.Next = "check the dates, the CA and the usage (client) of the certificate in --cert; the daemon's log has details"
	case strings.Contains(text, "x509:"):
		f.Next = "the daemon's certificate must be signed by the CA in --ca, for the host in --address"
	}
	return f
}

// Unreachable returns the failure for the error of connecting to socket. group owns the
// socket or the directory that hides it, "" when unknown.
func Unreachable(socket string, err error, group string) *Failure {
	f := &Failure{Code: ExitUnreachable, Next: "systemctl status gpreemptd"}
	info, statErr := os.Stat(socket)
	switch {
	case statErr == nil && info.Mode().Type() != fs.ModeSocket:
		f.Code, f.Message = ExitUsage, socket+" is not a socket"
		f.Next = "--socket with the path of the daemon's, such as " + DefaultSocket
	case strings.Contains(socket, ":") && !strings.Contains(socket, "/"):
		f.Code, f.Message = ExitUsage, socket+" is not the path of a socket"
		f.Next = "--address tcp://" + socket + ", with --cert, --key and --ca"
	case err == nil:
		f.Message = fmt.Sprintf("the daemon at %s closed the connection", socket)
	case errors.Is(err, fs.ErrNotExist):
		f.Message = fmt.Sprintf("cannot reach the daemon: socket %s does not exist", socket)
		f.Next += ", or use --socket"
	case errors.Is(err, fs.ErrPermission):
		f.Code = ExitDenied
		f.Message = fmt.Sprintf("permission denied on the daemon's socket %s", socket)
		switch group {
		case "", "root":
			f.Next = "join the group of the socket (gpreempt by default), or run this as root"
		default:
			f.Message += ", which needs the group " + group
			f.Next = fmt.Sprintf("sudo usermod -aG %s $USER, then log in again; or run this as root", group)
		}
	case errors.Is(err, syscall.ECONNREFUSED):
		f.Message = fmt.Sprintf("cannot reach the daemon: no process listens on %s", socket)
	default:
		f.Message = fmt.Sprintf("cannot reach the daemon at %s: %v", socket, err)
	}
	return f
}

// GroupOf returns the group of the file at path, or of the nearest directory above it
// that is accessible.
func GroupOf(path string) string {
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
