// Command inference announces each batch of a loop.
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"os/signal"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/pkg/client"
)

func main() {
	address := ""
	if path := os.Getenv("GPREEMPT_SOCKET"); path != "" {
		address = "unix://" + path
	}
	c, err := client.Dial(address)
	if err != nil {
		log.Fatal(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := errors.Join(serve(ctx, c), c.Close()); err != nil {
		log.Fatal(err)
	}
}

// serve answers each line of standard input.
func serve(ctx context.Context, c *client.Client) error {
	// The GPUs of the work; client.OwnGPUs() in a process that runs the model itself.
	batch := client.Request{GPUs: client.AllGPUs(), Label: "example"}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		lease, err := c.Acquire(ctx, batch)
		if err != nil {
			return err // of ctx; without a daemon the lease is unprotected
		}
		answer := model(lines.Text())
		fmt.Printf("%s protected=%t quiet=%t\n", answer, lease.Protected(), lease.Quiet())
		if err := lease.Release(ctx); err != nil {
			return err
		}
	}
	return nil
}

// model is your GPU work.
func model(text string) string {
	time.Sleep(5 * time.Millisecond)
	return strings.ToUpper(text)
}
