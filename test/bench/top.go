package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/discovery"
)

// top is section m: gpctl top as it is shipped, in a terminal of 80 columns, with 80 targets of a
// queue each.
func (b *bench) top(ctx context.Context) (err error) {
	if err := b.build(ctx, "./cmd/gpctl"); err != nil {
		return err
	}
	h, err := b.startHost(ctx, 80, 2, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.close()) }()
	ours, theirs, err := testutil.Terminal(80, 24)
	if err != nil {
		return fmt.Errorf("open a terminal: %w", err)
	}
	defer ours.Close()
	cmd := exec.CommandContext(ctx, b.program("gpctl"), "top", "--every", "500ms")
	cmd.Env = append(os.Environ(), "GPREEMPT_SOCKET="+h.socket, "TERM=xterm-256color")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = theirs, theirs, theirs
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := errors.Join(cmd.Start(), theirs.Close()); err != nil {
		return err
	}
	var drawn atomic.Int64
	shown := make(chan struct{}, 1)
	go func() { // ends with the terminal
		buf := make([]byte, 1<<16)
		for {
			n, err := ours.Read(buf)
			if err != nil {
				return
			}
			drawn.Add(int64(n))
			if bytes.Contains(buf[:n], []byte("train")) {
				select {
				case shown <- struct{}{}:
				default:
				}
			}
		}
	}()
	select {
	case <-shown:
	case <-time.After(time.Minute):
		return errors.Join(errors.New("gpctl top shows no target"), cmd.Process.Kill(), cmd.Wait())
	}
	const window = 12 * time.Second
	var cpu, sent []float64
	for range b.repeats {
		before, err1 := processorTime(cmd.Process.Pid)
		began, drawnBefore := time.Now(), drawn.Load()
		time.Sleep(window)
		after, err2 := processorTime(cmd.Process.Pid)
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
		took := time.Since(began).Seconds()
		cpu = append(cpu, 100*(after-before).Seconds()/took)
		sent = append(sent, float64(drawn.Load()-drawnBefore)/took)
	}
	if _, err := io.WriteString(ours, "q"); err != nil {
		return err
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("gpctl top: %w", err)
	}
	b.figure("m", "gpctl top at 2 Hz, 80 queues, CPU", "% of a core", cpu).atMost(1)
	b.figure("m", "gpctl top at 2 Hz, 80 queues, sent to the terminal", "bytes/s", sent)
	return nil
}

// processorTime returns the processor time of all threads of a process, in steps of 10 ms.
func processorTime(pid int) (time.Duration, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	s, err := discovery.ParseProcStat(stat)
	return time.Duration(s.Ticks) * (time.Second / discovery.ClockTicks), err
}
