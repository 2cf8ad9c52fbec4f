// Command meter measures, for tests, what a program on an emulated machine gets: what it
// prints is one line of JSON, with times in nanoseconds.
package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/client"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

func main() {
	answer, err := run(context.Background(), os.Args[1:]) //nolint:forbidigo // main makes it
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(answer)
	}
	if err == nil && os.Args[1] == "machine" {
		_, err = io.Copy(io.Discard, os.Stdin)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "meter:", err)
		os.Exit(1)
	}
}

// run carries out what its arguments say:
//
//	machine            give the socket of the machine, and keep that until stdin ends
//	ioctl THREADS N    make N calls of the driver on each thread
//	native N           N rounds of work that is none of the driver's business
//	announce SOCKET N  announce to gpreemptd N times, and give each lease back
func run(ctx context.Context, args []string) (any, error) {
	if len(args) == 0 {
		return nil, errors.New("say what to measure")
	}
	numbers := make([]int, len(args))
	for i, arg := range args {
		numbers[i], _ = strconv.Atoi(arg) // what is none is not used as one
	}
	switch {
	case args[0] == "machine" && len(args) == 1:
		return os.Getenv("KFDEMU_SOCKET"), nil
	case args[0] == "ioctl" && len(args) == 3:
		return ioctl(numbers[1], numbers[2])
	case args[0] == "native" && len(args) == 2:
		return native(numbers[1])
	case args[0] == "announce" && len(args) == 3:
		return announce(ctx, args[1], numbers[2])
	}
	return nil, fmt.Errorf("%q is nothing to measure", args)
}

// calls is how long each call took, and all of them.
type calls struct {
	Each []time.Duration `json:"each"`
	All  time.Duration   `json:"all"`
}

// ioctl makes GET_VERSION calls, as the driver has hardly anything to do for them.
func ioctl(threads, n int) (calls, error) {
	device, err := kfd.Open()
	if err != nil {
		return calls{}, err
	}
	defer device.Close()
	each, errs := make([][]time.Duration, threads), make([]error, threads)
	var wg sync.WaitGroup
	began := time.Now()
	for i := range threads {
		wg.Go(func() {
			runtime.LockOSThread()
			for range n {
				last := time.Now()
				_, err := device.GetVersion()
				if err != nil {
					errs[i] = err
					return
				}
				each[i] = append(each[i], time.Since(last))
			}
		})
	}
	wg.Wait()
	return calls{slices.Concat(each...), time.Since(began)}, errors.Join(errs...)
}

// effort is what work took: Wall by the clock, and CPU of the processors.
type effort struct {
	Wall time.Duration `json:"wall"`
	CPU  time.Duration `json:"cpu"`
}

// native computes, and makes system calls that the filter looks at and lets pass.
func native(n int) (effort, error) {
	const callsPerRound, block = 200, 64 << 10
	data := make([]byte, block)
	began := time.Now()
	for range n {
		sum := sha256.Sum256(data)
		copy(data, sum[:])
		for range callsPerRound {
			syscall.Getpid()
			fd, err := syscall.Open("/proc/self/stat", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
			if err != nil {
				return effort{}, err
			}
			_, err = syscall.Pread(fd, data[:512], 0)
			if err := errors.Join(err, syscall.Close(fd)); err != nil {
				return effort{}, err
			}
		}
	}
	wall := time.Since(began)
	var usage syscall.Rusage
	err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage)
	return effort{wall, time.Duration(usage.Utime.Nano() + usage.Stime.Nano())}, err
}

// announce gives how long NotifyOnline took each time. Each has to suspend something.
func announce(ctx context.Context, socket string, n int) (calls, error) {
	c, err := client.Dial(socket, client.FailClosed())
	if err != nil {
		return calls{}, err
	}
	defer c.Close()
	var all calls
	began := time.Now()
	for range n {
		start := time.Now()
		lease, err := c.Online().NotifyOnline(ctx, &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute), MaxWait: durationpb.New(10 * time.Second)})
		all.Each = append(all.Each, time.Since(start))
		if err != nil {
			return calls{}, err
		}
		if !lease.GetQuiesced() || lease.GetSuspendedTargets() == 0 {
			return calls{}, fmt.Errorf("nothing was suspended: %v", lease)
		}
		if _, err := c.Online().Complete(ctx, &gpreemptv1.CompleteRequest{LeaseId: lease.GetLeaseId()}); err != nil {
			return calls{}, err
		}
		if err := resumed(ctx, c.Admin()); err != nil {
			return calls{}, err
		}
	}
	all.All = time.Since(began)
	return all, nil
}

// resumed waits until everything runs, which Complete does not.
func resumed(ctx context.Context, admin gpreemptv1.AdminServiceClient) error {
	for ; ; time.Sleep(time.Millisecond) {
		list, err := admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{})
		if err != nil || !slices.ContainsFunc(list.GetTargets(), func(t *gpreemptv1.Target) bool {
			return t.GetState() != gpreemptv1.TargetState_TARGET_STATE_RUNNING
		}) {
			return err
		}
	}
}
