package term

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/pkg/client"
)

// Call runs fn with a client; --timeout bounds all its requests together.
func (a *App) Call(cmd *cobra.Command, fn func(context.Context, AdminClient) error) error {
	ctx, cancel := context.WithTimeout(cmd.Context(), a.Timeout)
	defer cancel()
	if err := a.Stream(ctx, fn); err != nil {
		return err
	}
	a.NoteSimulation()
	return nil
}

// AdminClient is the daemon's service for gpctl.
type AdminClient = gpreemptv1.AdminServiceClient

// Ask sends one request and shows the answer, to people by calling show.
func Ask[Req any, Resp proto.Message](
	cmd *cobra.Command, a *App, method func(AdminClient, context.Context, Req, ...grpc.CallOption) (Resp, error), req Req, show func(*Printer, Resp),
) error {
	return a.Call(cmd, func(ctx context.Context, admin AdminClient) error {
		resp, err := method(admin, ctx, req)
		if err != nil {
			return err
		}
		return a.Show(resp, func(p *Printer) { show(p, resp) })
	})
}

// NoteSimulation tells people that no hardware is involved. Programs read it in the
// status.
func (a *App) NoteSimulation() {
	if note := a.Simulation(); note != "" && !a.ForPrograms() {
		fmt.Fprintln(a.Err, note)
	}
}

// Simulation returns the note that no hardware is involved, "" for hardware.
func (a *App) Simulation() string {
	machine := a.Simulated.Load()
	if machine == nil {
		return ""
	}
	return fmt.Sprintf("(%s: no hardware is involved)", Printable(*machine))
}

// noteSimulated keeps the daemon's description of its machine.
func (a *App) noteSimulated(header metadata.MD) {
	if values := header.Get(api.SimulatedHeader); len(values) > 0 && values[0] != "" {
		a.Simulated.Store(&values[0])
	}
}

// Stream is call without --timeout: until ctx ends.
func (a *App) Stream(ctx context.Context, fn func(context.Context, AdminClient) error) error {
	c, err := a.dial()
	if err != nil {
		return err
	}
	defer c.Close()
	return a.FromDaemon(ctx, fn(ctx, gpreemptv1.NewAdminServiceClient(noting{c.Conn(), a})))
}

// dial prepares a connection to the daemon. The first request establishes it.
func (a *App) dial() (*client.Client, error) {
	if a.Address == "" {
		path, err := filepath.Abs(a.Socket)
		if err != nil {
			return nil, err
		}
		return client.Dial(path)
	}
	wrong := func(message string) error {
		return &Failure{Code: ExitUsage, Message: message, Next: "set --address, --cert, --key and --ca, or their environment variables"}
	}
	for _, file := range a.tlsFiles() {
		if *file.path == "" {
			return nil, wrong(fmt.Sprintf("missing --%s for %s", file.flag, a.Address))
		}
	}
	c, err := client.Dial(a.Address, client.Certificate(a.Cert, a.Key, a.Ca))
	if err != nil {
		return nil, wrong(err.Error())
	}
	return c, nil
}

// tlsFile is a file that a connection to another host needs.
type tlsFile struct {
	flag, env, what string
	path            *string
}

func (a *App) tlsFiles() []tlsFile {
	return []tlsFile{
		{"cert", CertEnv, "client certificate", &a.Cert},
		{"key", KeyEnv, "key of the certificate", &a.Key},
		{"ca", CAEnv, "CA of the daemon's certificate", &a.Ca},
	}
}

// DaemonAt names the daemon for people.
func (a *App) DaemonAt() string { return Or(a.Address, a.Socket) }

// daemonFlags name daemons.
var daemonFlags = []string{"hosts", "address", "socket"}

// checkEmpty refuses flags that are given and empty, as with a variable of a script that is not set:
// the command would reach the daemon of this host, or list everything, which was not meant. A flag
// that is given takes precedence over the environment.
func (a *App) checkEmpty(cmd *cobra.Command) (err error) {
	if a.Rec != nil { // runOnHost has replaced --hosts
		return nil
	}
	cmd.Flags().Visit(func(f *pflag.Flag) {
		_, isName := f.Value.(pflag.SliceValue)
		empty := f.Value.Type() == "string" && f.Value.String() == ""
		if isName {
			empty = slices.Contains(f.Value.(pflag.SliceValue).GetSlice(), "")
		}
		switch {
		case err != nil || !empty:
		case slices.Contains(daemonFlags, f.Name):
			err = Usage(cmd, "--%s is empty: name a daemon, or leave it out for the daemon of this host", f.Name)
		default:
			err = Usage(cmd, "--%s is empty: name one, or leave it out; is a variable not set?", f.Name)
		}
	})
	if err != nil {
		return err
	}
	given := false
	for _, name := range daemonFlags {
		given = given || cmd.Flags().Changed(name)
	}
	if given || a.Environ == nil {
		return nil
	}
	for _, name := range []string{AddressEnv, SocketEnv} {
		if slices.Contains(a.Environ(), name+"=") {
			return Usage(cmd, "%s is set and empty: name a daemon, or unset it for the daemon of this host", name)
		}
	}
	return nil
}

// checkAddress refuses flags that contradict each other. A flag takes precedence over the
// environment: --socket selects the daemon of this host.
func (a *App) checkAddress(cmd *cobra.Command) error {
	if path, ok := strings.CutPrefix(a.Socket, "unix:"); ok { // as gRPC writes it
		a.Socket = "/" + strings.TrimLeft(path, "/")
	}
	given := cmd.Flags().Changed
	switch {
	case given("socket") && given("address"):
		return Usage(cmd, "--socket and --address select two daemons")
	case given("socket"):
		a.Address = ""
	}
	for _, file := range a.tlsFiles() {
		if a.Address == "" && a.Hosts == "" && given(file.flag) && *file.path != "" {
			return Usage(cmd, "--%s needs %s: on a socket the kernel identifies the caller", file.flag, strings.ReplaceAll(a.Program.remote(), "and", "or"))
		}
	}
	return nil
}

// noting is a connection that keeps the daemon's description of its machine.
type noting struct {
	grpc.ClientConnInterface
	a *App
}

func (n noting) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	var header metadata.MD
	err := n.ClientConnInterface.Invoke(ctx, method, args, reply, append(opts, grpc.Header(&header))...)
	n.a.noteSimulated(header)
	return err
}

// Each calls fn for each message of a stream until it ends.
func Each[M any](stream grpc.ServerStreamingClient[M], fn func(*M) error) error {
	for {
		m, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		if err := fn(m); err != nil {
			return err
		}
	}
}

// Probe connects to the daemon's socket and returns the error.
func (a *App) Probe(ctx context.Context) error {
	d := net.Dialer{Timeout: time.Second}
	conn, err := d.DialContext(ctx, "unix", a.Socket)
	if err != nil {
		return err
	}
	return conn.Close()
}
