// Package kfdtrace has the kernel record what its KFD driver does with queues, and
// summarizes the recording: how long the driver's functions took, which of its events
// occurred, and which queues were created and destroyed meanwhile.
//
// A recording is made in a tracefs instance of its own, so that other tracing on the
// host does not change. Functions are followed by two kprobe events each, which every
// kernel with KFD has. These are defined globally and enabled in the instance only.
package kfdtrace

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/gpreempt/gpreempt/pkg/discovery"
)

// Error describes why a recording could not be made, and what to do about it.
type Error struct {
	What string
	Next string // "" without advice
	Err  error  // may be nil
	// Request reports that the options are invalid, on any host.
	Request bool
}

func (e *Error) Error() string {
	if e.Err == nil {
		return e.What
	}
	return e.What + ": " + e.Err.Error()
}

func (e *Error) Unwrap() error { return e.Err }

// ErrNoDriver is returned when the amdgpu driver is not loaded.
var ErrNoDriver = errors.New("the amdgpu driver is not loaded")

// Options select what to record.
type Options struct {
	// FS is the tracefs, as Find returns it.
	FS FS
	// Symbols is the path of the kernel's symbols: /proc/kallsyms.
	Symbols string
	// Duration is how long to record; the end of the context ends it earlier.
	Duration time.Duration
	// Events are SYSTEM:EVENT or SYSTEM, Functions names or patterns of path.Match.
	// Without either, the events and functions of KFD's queues are recorded.
	Events, Functions []string
	// Host is where queues are read; nil disables it.
	Host *discovery.FS
	// Raw receives the text of the trace as the kernel wrote it; nil discards it.
	Raw io.Writer
	// Started is called when the recording begins; nil is ignored.
	Started func()
}

// Report is the summary of a recording.
type Report struct {
	// Began is the wall clock at the beginning. BeganClock is the trace's clock,
	// CLOCK_MONOTONIC, at the same time, 0 when its marker was lost.
	Began      time.Time     `json:"began"`
	BeganClock time.Duration `json:"began_monotonic_ns"`
	Duration   time.Duration `json:"duration_ns"`
	// Interrupted reports that the recording ended before its duration.
	Interrupted bool `json:"interrupted"`
	// Followed is the number of functions with different names that were followed.
	Followed int    `json:"functions_followed"`
	Buffer   Buffer `json:"buffer"`
	// Lost is the number of events that did not fit into the buffer.
	Lost uint64 `json:"lost_events"`
	// Unknown is the number of lines that were not understood.
	Unknown uint64 `json:"unknown_lines"`

	Functions []FunctionCalls `json:"functions"`
	Events    []EventCount    `json:"events"`
	// KernelCompute is the number of jobs that ran on compute queues of the kernel (KCQ), whose
	// rings are called comp_*; nil when the kernel has no event for it. KFD's queues have none.
	KernelCompute *uint64       `json:"kernel_compute_jobs"`
	Queues        []QueueChange `json:"queues"`

	// MissingEvents and MissingFunctions were selected, but this kernel does not have
	// them.
	MissingEvents    []string `json:"missing_events"`
	MissingFunctions []string `json:"missing_functions"`
	// Warnings describe what else is incomplete.
	Warnings []string `json:"warnings"`
}

const (
	// readEvery is the pause before the next read when little was there. Where the
	// recording includes system calls, each read produces events: without the pause
	// reading would never end.
	readEvery = 20 * time.Millisecond
	// little is less than a page of text, which is the most that one read returns.
	little   = 2 << 10
	readSize = 64 << 10
	// drainReads bounds the reading of what remains in the buffer at the end.
	drainReads = 1 << 20
)

// Record records until the duration is over or ctx ends, and restores the kernel's
// tracing in all cases. When only that fails, it returns the report with the error.
func Record(ctx context.Context, o Options) (report *Report, err error) {
	events, functions, err := wanted(o)
	if err != nil {
		return nil, err
	}
	s := &session{fs: o.FS, tally: newTally(), missingEvents: []string{}, missingFunctions: []string{}, warnings: []string{}}
	defer func() { err = errors.Join(err, s.close()) }()
	if err := s.open(); err != nil {
		return nil, setupError(err)
	}
	if err := s.enableEvents(events); err != nil {
		return nil, setupError(err)
	}
	if err := s.follow(functions, o.Symbols); err != nil {
		return nil, setupError(err)
	}
	if err := s.checkEnabled(len(o.Events)+len(o.Functions) == 0); err != nil {
		return nil, err
	}
	return s.record(ctx, o)
}

// setupError explains an error of the kernel.
func setupError(err error) error {
	if _, ok := errors.AsType[*Error](err); ok {
		return err
	}
	return &Error{What: "the kernel's tracing cannot be set up", Err: err, Next: "run gplab as root on the host; a kernel in lockdown does not trace"}
}

func (s *session) record(ctx context.Context, o Options) (*Report, error) {
	if err := s.start(); err != nil {
		return nil, setupError(err)
	}
	began := time.Now()
	if o.Started != nil {
		o.Started()
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	queues := &queueTracker{changes: []QueueChange{}}
	watched := make(chan error, 1)
	if o.Host == nil {
		watched <- nil
	} else {
		go func() { watched <- queues.watch(ctx, o.Host, began) }()
	}
	reader := &reader{pipe: s.pipe, raw: o.Raw, tally: s.tally, buf: make([]byte, readSize)}
	readErr := s.read(ctx, reader, began.Add(o.Duration))
	duration := time.Since(began)
	interrupted := ctx.Err() != nil
	cancel()
	if err := <-watched; err != nil {
		s.warn("queues were not watched all the time: %v", err)
	}
	stopErr := s.write("tracing_on", "0")
	if stopErr == nil {
		stopErr = reader.drain()
	}
	s.tally.tear()
	return &Report{
		Began: began, BeganClock: s.tally.began, Duration: duration, Interrupted: interrupted,
		Followed: len(s.tally.groups), Buffer: s.buffer, Lost: s.tally.lost, Unknown: s.tally.unknown,
		Functions: s.tally.functionCalls(), Events: s.tally.eventCounts(), KernelCompute: s.kernelCompute(), Queues: queues.changes,
		MissingEvents: s.missingEvents, MissingFunctions: s.missingFunctions, Warnings: s.warnings,
	}, errors.Join(readErr, stopErr)
}

// read reads until the deadline, and enlarges the buffer when it loses events.
func (s *session) read(ctx context.Context, r *reader, deadline time.Time) error {
	lost := s.tally.lost
	for ctx.Err() == nil {
		left := time.Until(deadline)
		if left <= 0 {
			return nil
		}
		n, err := r.read()
		if err != nil {
			return err
		}
		if s.tally.lost > lost {
			if err := s.growBuffer(); err != nil {
				return fmt.Errorf("enlarge the trace buffer: %w", err)
			}
			lost = s.tally.lost
		}
		if n < little {
			select {
			case <-ctx.Done():
			case <-time.After(min(left, readEvery)):
			}
		}
	}
	return nil
}

// reader splits the text of the pipe into lines.
type reader struct {
	pipe  Pipe
	raw   io.Writer // may be nil
	tally *tally
	buf   []byte
	rest  []byte // the beginning of a line whose end is not read yet
}

// maxLine is where a line is cut: the kernel's are at most a few pages long.
const maxLine = 64 << 10

// read reads once and returns the number of bytes.
func (r *reader) read() (int, error) {
	n, err := r.pipe.ReadSome(r.buf)
	if err != nil {
		return 0, fmt.Errorf("read the trace: %w", err)
	}
	if r.raw != nil && n > 0 {
		if _, err := r.raw.Write(r.buf[:n]); err != nil {
			return n, fmt.Errorf("write the trace: %w", err)
		}
	}
	text := r.buf[:n]
	for {
		i := bytes.IndexByte(text, '\n')
		if i < 0 {
			break
		}
		whole := text[:i]
		if len(r.rest) > 0 {
			r.rest = append(r.rest, whole...)
			whole = r.rest
		}
		r.tally.add(parseLine(string(whole)))
		r.rest, text = r.rest[:0], text[i+1:]
	}
	r.rest = append(r.rest, text[:min(len(text), maxLine-len(r.rest))]...)
	return n, nil
}

// drain reads what remains, including a last line without its end.
func (r *reader) drain() error {
	for range drainReads {
		n, err := r.read()
		if err != nil {
			return err
		}
		if n == 0 {
			break
		}
	}
	if len(r.rest) > 0 {
		r.tally.add(parseLine(string(r.rest)))
		r.rest = nil
	}
	return nil
}
