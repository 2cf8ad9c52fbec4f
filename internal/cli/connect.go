package cli

import (
	"context"
	"path/filepath"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// maxAnswer bounds an answer of the daemon, in bytes: thousands of targets with
// their command lines.
const maxAnswer = 64 << 20

// call runs fn with a client, which has --timeout for all it asks.
func (a *app) call(cmd *cobra.Command, fn func(context.Context, gpreemptv1.AdminServiceClient) error) error {
	ctx, cancel := context.WithTimeout(cmd.Context(), a.timeout)
	defer cancel()
	return a.stream(ctx, fn)
}

// stream is call for as long as ctx lasts.
func (a *app) stream(ctx context.Context, fn func(context.Context, gpreemptv1.AdminServiceClient) error) error {
	conn, err := dial(a.socket)
	if err != nil {
		return a.fromDaemon(ctx, err)
	}
	defer conn.Close()
	return a.fromDaemon(ctx, fn(ctx, gpreemptv1.NewAdminServiceClient(conn)))
}

// dial prepares a connection to the daemon's socket; the first call makes it.
func dial(socket string) (*grpc.ClientConn, error) {
	path, err := filepath.Abs(socket)
	if err != nil {
		return nil, err
	}
	return grpc.NewClient("unix://"+path,
		// The socket is local: the kernel tells each side who the other is.
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)),
	)
}
