package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"github.com/gpreempt/gpreempt/pkg/client"
)

// turn is what the server prints of each turn.
type turn struct {
	Event     string `json:"event"` // turn
	Turn      int    `json:"turn"`
	Protected bool   `json:"protected"`
	Quiet     bool   `json:"quiet"`
	Suspended int    `json:"suspended"`
	Cause     string `json:"cause,omitempty"`
}

// chat announces work, has kfdemu answer do it, and pauses, until SIGTERM. It fails if a packet did
// not run exactly once.
func chat(args []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	c, err := client.Dial("", client.OnUnprotected(func(error) {})) // each turn reports it
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	worker := exec.Command("kfdemu", append([]string{"answer"}, args...)...)
	worker.Stderr = os.Stderr
	in, err := worker.StdinPipe()
	if err != nil {
		return err
	}
	out, err := worker.StdoutPipe()
	if err != nil {
		return err
	}
	if err := worker.Start(); err != nil {
		return err
	}
	answers := bufio.NewScanner(out)
	answers.Buffer(nil, 1<<20)
	err = turns(ctx, c, in, answers)
	if err := in.Close(); err != nil {
		return err
	}
	for answers.Scan() { // with the proof
		fmt.Println(answers.Text())
	}
	return errors.Join(err, answers.Err(), worker.Wait())
}

func turns(ctx context.Context, c *client.Client, in io.Writer, answers *bufio.Scanner) error {
	if !answers.Scan() { // ready
		return errors.New("kfdemu answer ended")
	}
	fmt.Println(answers.Text())
	print := json.NewEncoder(os.Stdout)
	pause := time.NewTicker(300 * time.Millisecond)
	defer pause.Stop()
	for n := 1; ; n++ {
		l, err := c.Acquire(ctx, client.Request{GPUs: client.AllGPUs(), Label: "chat", MaxWait: time.Second})
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		if _, err := io.WriteString(in, "go\n"); err != nil {
			return err
		}
		if !answers.Scan() {
			return errors.New("kfdemu answer ended")
		}
		t := turn{Event: "turn", Turn: n, Protected: l.Protected(), Quiet: l.Quiet(), Suspended: l.SuspendedTargets()}
		if cause := l.Cause(); cause != nil {
			t.Cause = cause.Error()
		}
		if err := errors.Join(l.Release(ctx), print.Encode(t)); err != nil {
			t.Cause = err.Error() // the daemon ended meanwhile; the turn is done
		}
		select {
		case <-ctx.Done():
			return nil
		case <-pause.C:
		}
	}
}
