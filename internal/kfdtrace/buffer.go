package kfdtrace

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"syscall"
)

// Buffer is what the recording had room in.
type Buffer struct {
	PerCPUKiB int `json:"per_cpu_kib"`
	CPUs      int `json:"cpus"`
	// Grown is how often it was made larger because events were lost.
	Grown int `json:"grown"`
	// Limited: it could not be made as large as was asked for.
	Limited bool `json:"limited"`
}

// The bounds of the buffer, in KiB. It begins small: what KFD tells is little, and
// a buffer that is large on each of hundreds of CPUs is memory the host may not have.
const (
	firstTotalKiB = 4 << 10
	leastPerCPU   = 8 // two pages, the least the kernel works with
	firstPerCPU   = 1 << 10
	mostTotalKiB  = 256 << 10
)

// firstSize is the buffer of one CPU to begin with.
func firstSize(cpus int) int {
	return min(max(firstTotalKiB/cpus, leastPerCPU), firstPerCPU)
}

// nextSize is the buffer of one CPU after a loss; perCPU itself when it may not grow.
func nextSize(perCPU, cpus int) int {
	return max(perCPU, min(2*perCPU, mostTotalKiB/cpus))
}

// noMemory tells that the kernel had not enough memory, or not at once.
func noMemory(err error) bool {
	return errors.Is(err, syscall.ENOMEM) || errors.Is(err, syscall.EAGAIN)
}

const sizeFile = "/buffer_size_kb"

// sizeBuffer returns the instance the buffer to begin with, or the half of it that
// the kernel has memory for, or the half of that.
func (s *session) sizeBuffer() error {
	names, err := s.fs.List(s.dir + "/per_cpu")
	if err != nil {
		return err
	}
	s.buffer.CPUs = max(len(names), 1)
	for want := firstSize(s.buffer.CPUs); ; want /= 2 {
		err := s.fs.Write(s.dir+sizeFile, strconv.Itoa(want))
		if err == nil {
			return s.readSize(want)
		}
		if !noMemory(err) {
			return err
		}
		s.buffer.Limited = true
		if want/2 < leastPerCPU {
			return &Error{
				What: fmt.Sprintf("the kernel has no memory for a trace buffer of %d KiB on each of %d CPUs", want, s.buffer.CPUs),
				Next: "free memory on the host, then try again", Err: err,
			}
		}
	}
}

// readSize asks for the size, which the kernel rounds.
func (s *session) readSize(want int) error {
	s.buffer.PerCPUKiB = want
	text, err := s.fs.ReadFile(s.dir + sizeFile)
	if err != nil {
		return err
	}
	if kib, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && kib > 0 { // X: not the same on all CPUs
		s.buffer.PerCPUKiB = kib
	}
	return nil
}

// grow makes the buffer larger after a loss. That there is no memory for it is no
// error: the loss is counted.
func (s *session) grow() error {
	want := nextSize(s.buffer.PerCPUKiB, s.buffer.CPUs)
	if want == s.buffer.PerCPUKiB || s.buffer.Limited {
		s.buffer.Limited = true
		return nil
	}
	err := s.fs.Write(s.dir+sizeFile, strconv.Itoa(want))
	if noMemory(err) {
		s.buffer.Limited = true
		return nil
	}
	if err != nil {
		return fmt.Errorf("making the trace buffer larger: %w", err)
	}
	s.buffer.Grown++
	return s.readSize(want)
}

// lost is how many events found no room: as the buffers of the CPUs count, or the
// lines of the trace when those cannot be read.
func (s *session) lost() uint64 { return max(s.tally.lost, s.overrun) }

// countLost sums what the buffers of the CPUs say that they had no room for
// (kernel/trace/trace.c: tracing_stats_read).
func (s *session) countLost() error {
	names, err := s.fs.List(s.dir + "/per_cpu")
	if err != nil {
		return err
	}
	s.overrun = 0
	for _, name := range names {
		text, err := s.fs.ReadFile(s.dir + "/per_cpu/" + name + "/stats")
		if err != nil {
			return err
		}
		s.overrun += parseStats(string(text))
	}
	return nil
}

// parseStats returns the lost events out of a CPU's stats.
func parseStats(text string) uint64 {
	var lost uint64
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(line, ":")
		switch name {
		case "overrun", "commit overrun", "dropped events":
			n, _ := strconv.ParseUint(strings.TrimSpace(value), 10, 64) // no number is no loss
			lost += n
		}
	}
	return lost
}
