package cli

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/pkg/client"
)

// call runs fn with a client; --timeout bounds all its requests together.
func (a *app) call(cmd *cobra.Command, fn func(context.Context, adminClient) error) error {
	ctx, cancel := context.WithTimeout(cmd.Context(), a.timeout)
	defer cancel()
	if err := a.stream(ctx, fn); err != nil {
		return err
	}
	a.noteSimulation()
	return nil
}

// adminClient is the daemon's service for gpctl.
type adminClient = gpreemptv1.AdminServiceClient

// ask sends one request and shows the answer, to people by calling show.
func ask[Req any, Resp proto.Message](
	cmd *cobra.Command, a *app, method func(adminClient, context.Context, Req, ...grpc.CallOption) (Resp, error), req Req, show func(*printer, Resp),
) error {
	return a.call(cmd, func(ctx context.Context, admin adminClient) error {
		resp, err := method(admin, ctx, req)
		if err != nil {
			return err
		}
		return a.show(resp, func(p *printer) { show(p, resp) })
	})
}

// noteSimulation tells people that no hardware is involved. Programs read it in the
// status.
func (a *app) noteSimulation() {
	if note := a.simulation(); note != "" && !a.forPrograms() {
		fmt.Fprintln(a.Err, note)
	}
}

// simulation returns the note that no hardware is involved, "" for hardware.
func (a *app) simulation() string {
	machine := a.simulated.Load()
	if machine == nil {
		return ""
	}
	return fmt.Sprintf("(%s: no hardware is involved)", printable(*machine))
}

// noteSimulated keeps the daemon's description of its machine.
func (a *app) noteSimulated(header metadata.MD) {
	if values := header.Get(api.SimulatedHeader); len(values) > 0 && values[0] != "" {
		a.simulated.Store(&values[0])
	}
}

// stream is call without --timeout: until ctx ends.
func (a *app) stream(ctx context.Context, fn func(context.Context, adminClient) error) error {
	c, err := a.dial()
	if err != nil {
		return err
	}
	defer c.Close()
	return a.fromDaemon(ctx, fn(ctx, gpreemptv1.NewAdminServiceClient(noting{c.Conn(), a})))
}

// dial prepares a connection to the daemon. The first request establishes it.
func (a *app) dial() (*client.Client, error) {
	if a.address == "" {
		path, err := filepath.Abs(a.socket)
		if err != nil {
			return nil, err
		}
		return client.Dial(path)
	}
	wrong := func(message string) error {
		return &failure{code: ExitUsage, message: message, next: "set --address, --cert, --key and --ca, or their environment variables"}
	}
	for _, file := range []struct{ flag, path string }{{"cert", a.cert}, {"key", a.key}, {"ca", a.ca}} {
		if file.path == "" {
			return nil, wrong(fmt.Sprintf("missing --%s for %s", file.flag, a.address))
		}
	}
	c, err := client.Dial(a.address, client.Certificate(a.cert, a.key, a.ca))
	if err != nil {
		return nil, wrong(err.Error())
	}
	return c, nil
}

// daemonAt names the daemon for people.
func (a *app) daemonAt() string { return or(a.address, a.socket) }

// checkEmpty refuses what should name daemons and is empty, as with a variable of a script that is
// not set: the command would reach the daemon of this host, which was not meant. A flag that is
// given takes precedence over the environment.
func (a *app) checkEmpty(cmd *cobra.Command) error {
	if a.rec != nil { // runOnHost has replaced --hosts
		return nil
	}
	given := false
	for _, name := range []string{"hosts", "address", "socket"} {
		flag := cmd.Flags().Lookup(name)
		if flag.Changed && flag.Value.String() == "" {
			return usage(cmd, "--%s is empty: name a daemon, or leave it out for the daemon of this host", name)
		}
		given = given || flag.Changed
	}
	if given || a.Environ == nil {
		return nil
	}
	for _, name := range []string{AddressEnv, SocketEnv} {
		if slices.Contains(a.Environ(), name+"=") {
			return usage(cmd, "%s is set and empty: name a daemon, or unset it for the daemon of this host", name)
		}
	}
	return nil
}

// checkAddress refuses flags that contradict each other. A flag takes precedence over the
// environment: --socket selects the daemon of this host.
func (a *app) checkAddress(cmd *cobra.Command) error {
	given := cmd.Flags().Changed
	switch {
	case given("socket") && given("address"):
		return usage(cmd, "--socket and --address select two daemons")
	case given("socket"):
		a.address = ""
	}
	for _, flag := range []string{"cert", "key", "ca"} {
		if a.address == "" && a.hosts == "" && given(flag) && cmd.Flags().Lookup(flag).Value.String() != "" {
			return usage(cmd, "--%s needs --address or --hosts: on a socket the kernel identifies the caller", flag)
		}
	}
	return nil
}

// noting is a connection that keeps the daemon's description of its machine.
type noting struct {
	grpc.ClientConnInterface
	a *app
}

func (n noting) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	var header metadata.MD
	err := n.ClientConnInterface.Invoke(ctx, method, args, reply, append(opts, grpc.Header(&header))...)
	n.a.noteSimulated(header)
	return err
}
