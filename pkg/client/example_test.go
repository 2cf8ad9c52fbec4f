package client_test

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/gpreempt/gpreempt/pkg/client"
)

// An inference server has one client and wraps each batch. Without a daemon, as here,
// the work runs unprotected.
func Example() {
	ctx := context.Background()
	c, err := client.Dial("unix:///run/gpreempt/example.sock", client.OnUnprotected(func(err error) {
		fmt.Println("protected:", err == nil)
	}))
	if err != nil {
		slog.Error("no client", "error", err)
		return
	}
	defer c.Close()

	batch := client.Request{GPUs: client.OwnGPUs(), Label: "chat", MaxWait: 20 * time.Millisecond}
	for i := range 2 {
		err := c.Do(ctx, batch, func(context.Context) error {
			fmt.Println("batch", i)
			return nil
		})
		if err != nil {
			slog.Error("batch failed", "error", err)
		}
	}
	// Output:
	// protected: false
	// batch 0
	// batch 1
}

// FailClosed is for programs that must not run beside offline work.
func ExampleFailClosed() {
	ctx := context.Background()
	c, err := client.Dial("unix:///run/gpreempt/example.sock", client.FailClosed())
	if err != nil {
		slog.Error("no client", "error", err)
		return
	}
	defer c.Close()
	lease, err := c.Acquire(ctx, client.Request{GPUs: client.OwnGPUs(), TTL: time.Second})
	if err != nil {
		fmt.Println("no lease: the daemon is not running")
		return
	}
	defer lease.Release(ctx)
	fmt.Println("quiet:", lease.Quiet())
	// Output: no lease: the daemon is not running
}
