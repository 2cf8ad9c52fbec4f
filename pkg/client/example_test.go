package client_test

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/gpreempt/gpreempt/pkg/client"
)

// An inference server makes one client and wraps each batch. This one has no
// daemon to talk to, so its work is not protected, and goes on.
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

	batch := client.Request{Label: "chat", MaxWait: 20 * time.Millisecond}
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

// A session spares each announcement the cost of a call.
func ExampleSession() {
	ctx := context.Background()
	c, err := client.Dial("unix:///run/gpreempt/example.sock", client.FailClosed())
	if err != nil {
		slog.Error("no client", "error", err)
		return
	}
	defer c.Close()
	s, err := c.Session(ctx)
	if err != nil {
		slog.Error("no session", "error", err)
		return
	}
	defer s.Close()

	lease, err := s.Acquire(ctx, client.Request{TTL: time.Second})
	if err != nil {
		fmt.Println("no lease, since there is no daemon here")
		return
	}
	defer lease.Release(ctx)
	fmt.Println("quiet:", lease.Quiesced())
	// Output: no lease, since there is no daemon here
}
