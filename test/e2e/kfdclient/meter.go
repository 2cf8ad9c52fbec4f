package main

import (
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

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// meter measures what a program gets from an emulated machine, and prints a line of JSON
// with times in nanoseconds. It returns the exit status.
func meter(args []string) int {
	answer, err := measure(args)
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(answer)
	}
	if err == nil && args[0] == "machine" {
		_, err = io.Copy(io.Discard, os.Stdin)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "kfdclient: meter:", err)
		return 1
	}
	return 0
}

// measure runs the measurement that its arguments name:
//
//	machine          print the socket of the machine, and keep it until stdin ends
//	ioctl THREADS N  make N calls of the driver on each thread
//	native N         N rounds of work without the driver
func measure(args []string) (any, error) {
	if len(args) == 0 {
		return nil, errors.New("missing measurement: machine, ioctl or native")
	}
	numbers := make([]int, len(args))
	for i, arg := range args {
		numbers[i], _ = strconv.Atoi(arg) // other arguments are not used as numbers
	}
	switch {
	case args[0] == "machine" && len(args) == 1:
		return os.Getenv("KFDEMU_SOCKET"), nil
	case args[0] == "ioctl" && len(args) == 3:
		return ioctl(numbers[1], numbers[2])
	case args[0] == "native" && len(args) == 2:
		return native(numbers[1])
	}
	return nil, fmt.Errorf("unknown measurement %q", args)
}

// calls has the duration of each call, and of all calls.
type calls struct {
	Each []time.Duration `json:"each"`
	All  time.Duration   `json:"all"`
}

// ioctl makes GET_VERSION calls, which cost the driver almost nothing.
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

// effort has the elapsed time and the CPU time of work.
type effort struct {
	Wall time.Duration `json:"wall"`
	CPU  time.Duration `json:"cpu"`
}

// native computes, and makes system calls that the filter checks and passes on.
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
