package cli

import (
	"context"
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/pkg/client"
)

// call runs fn with a client, which has --timeout for all it asks.
func (a *app) call(cmd *cobra.Command, fn func(context.Context, gpreemptv1.AdminServiceClient) error) error {
	ctx, cancel := context.WithTimeout(cmd.Context(), a.timeout)
	defer cancel()
	if err := a.stream(ctx, fn); err != nil {
		return err
	}
	a.sayIfSimulated()
	return nil
}

// sayIfSimulated tells people that what they have read is of no hardware. Programs
// read it in the status.
func (a *app) sayIfSimulated() {
	if a.simulated == "" || a.forPrograms() {
		return
	}
	fmt.Fprintf(a.Err, "(%s: no hardware is involved)\n", printable(a.simulated))
}

// noteSimulated keeps what the daemon says of itself.
func (a *app) noteSimulated(header metadata.MD) {
	if values := header.Get(api.SimulatedHeader); len(values) > 0 {
		a.simulated = values[0]
	}
}

// stream is call for as long as ctx lasts.
func (a *app) stream(ctx context.Context, fn func(context.Context, gpreemptv1.AdminServiceClient) error) error {
	c, err := a.dial()
	if err != nil {
		return err
	}
	defer c.Close()
	return a.fromDaemon(ctx, fn(ctx, gpreemptv1.NewAdminServiceClient(noting{c.Conn(), a})))
}

// dial prepares a connection to the daemon; the first call makes it.
func (a *app) dial() (*client.Client, error) {
	if a.address == "" {
		path, err := filepath.Abs(a.socket)
		if err != nil {
			return nil, err
		}
		return client.Dial(path)
	}
	wrong := func(message string) error {
		return &failure{code: ExitUsage, message: message, next: "give --address, --cert, --key and --ca, or set " + AddressEnv + " and its like"}
	}
	for _, file := range []struct{ flag, path string }{{"cert", a.cert}, {"key", a.key}, {"ca", a.ca}} {
		if file.path == "" {
			return nil, wrong(fmt.Sprintf("--%s is missing for %s", file.flag, a.address))
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

// checkAddress reports which flags contradict each other. A flag goes before the
// environment: --socket means the daemon of this host.
func (a *app) checkAddress(cmd *cobra.Command) error {
	given := cmd.Flags().Changed
	switch {
	case given("socket") && given("address"):
		return usage(cmd, "--socket and --address name two daemons")
	case given("socket"):
		a.address = ""
	}
	for _, flag := range []string{"cert", "key", "ca"} {
		if a.address == "" && given(flag) {
			return usage(cmd, "--%s needs --address: on a socket the kernel tells the daemon who calls", flag)
		}
	}
	return nil
}

// noting keeps what the daemon says of itself beside its answers.
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
