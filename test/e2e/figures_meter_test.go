package e2e

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// meterMain measures what a program gets from an emulated machine, prints that as JSON with times
// in nanoseconds, and returns the exit status:
//
//	ioctl THREADS N  make N calls of the driver on each thread
//	native N         N rounds of work without the driver
func meterMain(measurement string, out io.Writer) int {
	var threads, n int
	var answer any
	_, err := fmt.Sscanf(measurement, "ioctl %d %d", &threads, &n)
	if err == nil {
		answer, err = ioctl(threads, n)
	} else if _, err = fmt.Sscanf(measurement, "native %d", &n); err == nil {
		answer, err = native(n)
	}
	if err == nil {
		err = json.NewEncoder(out).Encode(answer)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "meter %q: %v\n", measurement, err)
		return 1
	}
	return 0
}

// calls has the duration of each call, and of all calls.
type calls struct {
	Each []time.Duration
	All  time.Duration
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

// effort is the elapsed time and the CPU time of work.
type effort struct {
	Wall, CPU time.Duration
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
