package cli

import (
	"context"
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/words"
)

// maxAnswer bounds an answer of the daemon, in bytes: thousands of targets with
// their command lines.
const maxAnswer = 64 << 20

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
	if values := header.Get(words.SimulatedHeader); len(values) > 0 {
		a.simulated = values[0]
	}
}

// stream is call for as long as ctx lasts.
func (a *app) stream(ctx context.Context, fn func(context.Context, gpreemptv1.AdminServiceClient) error) error {
	conn, err := dial(a.socket, grpc.WithUnaryInterceptor(
		func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			var header metadata.MD
			err := invoke(ctx, method, req, reply, cc, append(opts, grpc.Header(&header))...)
			a.noteSimulated(header)
			return err
		}))
	if err != nil {
		return a.fromDaemon(ctx, err)
	}
	defer conn.Close()
	return a.fromDaemon(ctx, fn(ctx, gpreemptv1.NewAdminServiceClient(conn)))
}

// dial prepares a connection to the daemon's socket; the first call makes it.
func dial(socket string, more ...grpc.DialOption) (*grpc.ClientConn, error) {
	path, err := filepath.Abs(socket)
	if err != nil {
		return nil, err
	}
	return grpc.NewClient("unix://"+path, append(more,
		// The socket is local: the kernel tells each side who the other is.
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)),
	)...)
}
