package kfdtrace

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

const (
	// instance is the only one of gplab: a host has one recording at a time.
	instance = "instances/gpreempt"
	// kprobeEvents is where probes are defined and removed, for all instances.
	kprobeEvents = "kprobe_events"
	// probeGroup is the group of our probes.
	probeGroup = "gpreempt"
)

// Buffer describes the ring buffers of a recording.
type Buffer struct {
	PerCPUKiB int `json:"per_cpu_kib"`
	CPUs      int `json:"cpus"`
	// Grown is how often the buffers were enlarged because events were lost.
	Grown int `json:"grown"`
	// Limited reports that the kernel refused a larger buffer, or that the buffers
	// have the largest size.
	Limited bool `json:"limited"`
}

// The bounds of the buffers, in KiB. They begin small: KFD reports little, and a
// large buffer on each of hundreds of CPUs is memory that the host may not have.
const (
	firstTotalKiB = 4 << 10
	leastPerCPU   = 8 // two pages, the kernel's minimum
	firstPerCPU   = 1 << 10
	mostTotalKiB  = 256 << 10
)

// session is one recording as the kernel sees it.
type session struct {
	fs     FS
	lock   io.Closer // of the instance, nil without one
	pipe   Pipe      // nil until started
	tally  *tally
	buffer Buffer
	events int // enabled
	// jobs: an event of jobs is enabled.
	jobs bool

	missingEvents, missingFunctions, warnings []string
}

func (s *session) warn(format string, args ...any) {
	s.warnings = append(s.warnings, fmt.Sprintf(format, args...))
}

func (s *session) write(name, data string) error { return s.fs.Write(instance+"/"+name, data) }

// open creates the instance. It removes one whose lock is free: its gplab was killed.
func (s *session) open() error {
	for range 2 {
		err := s.fs.Mkdir(instance)
		made := err == nil
		switch {
		case made || errors.Is(err, fs.ErrExist):
		case noMemory(err): // a new instance gets a buffer of the kernel's default size
			return &Error{What: "the kernel has no memory for another trace buffer", Next: "free memory on the host, then try again", Err: err}
		default:
			return err
		}
		s.lock, err = s.fs.Lock(instance)
		switch {
		case errors.Is(err, ErrLocked):
			return &Error{What: "another gplab trace kfd is recording on this host", Next: "wait until it ends, or end it", Err: err}
		case err != nil && made:
			return errors.Join(err, s.fs.Remove(instance))
		case err != nil:
			return err
		case made:
			return s.setUp()
		}
		if err := s.close(); err != nil {
			return err
		}
	}
	return &Error{What: "another gplab trace kfd is starting on this host", Next: "wait until it ends, or end it"}
}

// plainOptions are the options that change the form of lines. A new instance inherits
// those of the top level, which any program may have changed.
var plainOptions = map[string]string{
	"bin": "0", "hex": "0", "raw": "0", "fields": "0", "verbose": "0", "latency-format": "0", "block": "0",
	"stacktrace": "0", "userstacktrace": "0", "context-info": "1", "irq-info": "1", "markers": "1", "overwrite": "1",
}

func (s *session) setUp() error {
	if err := s.write("tracing_on", "0"); err != nil {
		return err
	}
	for name, value := range plainOptions {
		// A kernel may not have the option.
		if err := s.write("options/"+name, value); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := s.write("trace_clock", "mono"); err != nil {
		return fmt.Errorf("the clock mono: %w", err)
	}
	return s.sizeBuffer()
}

// close removes everything of the recording from the kernel. All steps are tried.
func (s *session) close() error {
	if s.lock == nil {
		return nil
	}
	var failed error
	if s.pipe != nil { // an instance with an open trace cannot be removed
		failed = s.pipe.Close()
	}
	failed = errors.Join(
		failed, s.write("tracing_on", "0"),
		s.write("events/enable", "0"), // enabled probes cannot be removed
		s.removeProbes(), s.fs.Remove(instance), s.lock.Close(),
	)
	s.lock, s.pipe = nil, nil
	if failed == nil {
		return nil
	}
	return &Error{
		What: "parts of the recording remain in the kernel's tracing, in " + instance, Err: failed,
		Next: "run gplab trace kfd again, which removes them; or rmdir the instance",
	}
}

// noMemory reports whether the kernel had too little memory, or too little at once.
func noMemory(err error) bool {
	return errors.Is(err, syscall.ENOMEM) || errors.Is(err, syscall.EAGAIN)
}

// sizeBuffer sets the first size of the buffers: halved until the kernel has memory.
func (s *session) sizeBuffer() error {
	names, err := s.fs.List(instance + "/per_cpu")
	if err != nil {
		return err
	}
	s.buffer.CPUs = max(len(names), 1)
	for kib := min(max(firstTotalKiB/s.buffer.CPUs, leastPerCPU), firstPerCPU); kib >= leastPerCPU; kib /= 2 {
		if err = s.resizeBuffer(kib); !noMemory(err) {
			return err
		}
		s.buffer.Limited = true
	}
	return &Error{
		What: fmt.Sprintf("the kernel has no memory for a trace buffer of %d KiB on each of %d CPUs", leastPerCPU, s.buffer.CPUs),
		Next: "free memory on the host, then try again", Err: err,
	}
}

func (s *session) resizeBuffer(kib int) error {
	err := s.write("buffer_size_kb", strconv.Itoa(kib))
	if err == nil {
		s.buffer.PerCPUKiB = kib
	}
	return err
}

// growBuffer doubles the buffers after a loss. Missing memory is not an error: the
// report counts the losses.
func (s *session) growBuffer() error {
	if s.buffer.Limited {
		return nil
	}
	kib := min(2*s.buffer.PerCPUKiB, mostTotalKiB/s.buffer.CPUs)
	if kib <= s.buffer.PerCPUKiB {
		s.buffer.Limited = true
		return nil
	}
	err := s.resizeBuffer(kib)
	if noMemory(err) {
		s.buffer.Limited = true
		return nil
	}
	s.buffer.Grown++
	return err
}

// enableEvents enables those of the events that exist.
func (s *session) enableEvents(events []wantedEvent) error {
	for _, names := range events {
		found := false
		for _, name := range names {
			err := s.write("events/"+strings.ReplaceAll(name, ":", "/")+"/enable", "1")
			// EINVAL: it exists, and cannot be recorded in an instance.
			if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.EINVAL) {
				return fmt.Errorf("the event %s: %w", name, err)
			}
			if found = err == nil; found {
				s.events++
				s.jobs = s.jobs || reportsJobs(name)
				break
			}
		}
		if !found {
			s.missingEvents = append(s.missingEvents, names[0])
		}
	}
	return nil
}

// checkEnabled returns an error when there is nothing to record.
func (s *session) checkEnabled(byDefault bool) error {
	if s.events > 0 || len(s.tally.groups) > 0 {
		return nil
	}
	// Each module with trace events has a directory of them.
	if names, err := s.fs.List("events"); byDefault && (err != nil || !slices.Contains(names, driver)) {
		return &Error{
			What: "there is nothing to record", Err: ErrNoDriver,
			Next: "gpctl doctor checks this host; --events and --functions select something else",
		}
	}
	var why []string
	if len(s.missingEvents) > 0 {
		why = append(why, "the kernel has no event "+strings.Join(s.missingEvents, ", "))
	}
	if len(s.missingFunctions) > 0 {
		why = append(why, "the kernel has no function "+strings.Join(s.missingFunctions, ", "))
	}
	return &Error{What: "there is nothing to record", Err: errors.New(strings.Join(append(why, s.warnings...), "; "))}
}

// start opens the trace and turns it on.
func (s *session) start() (err error) {
	if s.pipe, err = s.fs.OpenPipe(instance + "/trace_pipe"); err != nil {
		return err
	}
	if err := s.write("tracing_on", "1"); err != nil {
		return err
	}
	return s.write("trace_marker", marker+"\n")
}
