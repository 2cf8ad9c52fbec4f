// Package kfdtrace hides how the kernel is made to record what its KFD driver
// does, and what a recording tells about queues.
//
// A recording is made in an instance of tracefs of its own: the buffers, events,
// filters and clock of everybody else stay as they are. Functions are followed by
// the function graph tracer where instances can have it (Linux 6.11 and later),
// else by kprobe events, which exist on all kernels KFD is used with.
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

// Error says what kept a recording from being made, and what to do about it.
type Error struct {
	What string
	Next string // "" when there is nothing to do
	Err  error  // nil when What has said all
	// Request: what was asked for is wrong, on any host.
	Request bool
}

func (e *Error) Error() string {
	if e.Err == nil {
		return e.What
	}
	return e.What + ": " + e.Err.Error()
}

func (e *Error) Unwrap() error { return e.Err }

// ErrNoDriver says that the kernel has no amdgpu driver loaded.
var ErrNoDriver = errors.New("the amdgpu driver is not loaded")

// Options says what to record.
type Options struct {
	// FS is the tracefs; Find finds it.
	FS FS
	// Symbols is the path of the kernel's symbols: /proc/kallsyms.
	Symbols string
	// Duration is how long; the end of the context ends it earlier.
	Duration time.Duration
	// Events are SYSTEM:EVENT or SYSTEM, Functions names or patterns as of
	// path.Match. With neither, what tells of KFD's queues is recorded.
	Events, Functions []string
	// Host is where queues are looked for; nil is not to look.
	Host *discovery.FS
	// Raw gets the text of the trace as the kernel wrote it; nil is nobody.
	Raw io.Writer
	// PID is this process.
	PID int
	// Started is called when the recording begins, with the way functions are
	// followed; nil is not to be told.
	Started func(by string)
}

// The ways to follow functions.
const (
	ByGraph  = "function_graph" // durations are the kernel's own
	ByProbes = "kprobes"        // durations are between two events, whole microseconds
	ByNone   = "none"
)

// Report is what a recording found.
type Report struct {
	// Began is the wall clock at the beginning; BeganClock is the trace's clock,
	// CLOCK_MONOTONIC, at the same time, 0 when its marker was lost.
	Began      time.Time     `json:"began"`
	BeganClock time.Duration `json:"began_monotonic_ns"`
	Duration   time.Duration `json:"duration_ns"`
	// Interrupted: it was ended before its time.
	Interrupted bool `json:"interrupted"`
	// FunctionsBy is ByGraph, ByProbes or ByNone.
	FunctionsBy string `json:"functions_by"`
	// Followed is how many functions of different names were followed.
	Followed int    `json:"functions_followed"`
	Buffer   Buffer `json:"buffer"`
	// Lost is how many events found no room in the buffer.
	Lost uint64 `json:"lost_events"`
	// Lines were read; Unknown ones of them not understood.
	Lines   uint64 `json:"lines"`
	Unknown uint64 `json:"unknown_lines"`

	Functions []FunctionCalls `json:"functions"`
	Events    []EventCount    `json:"events"`
	Queues    []QueueChange   `json:"queues"`

	// MissingEvents and MissingFunctions were wanted, but this kernel has none
	// of that name.
	MissingEvents    []string `json:"missing_events"`
	MissingFunctions []string `json:"missing_functions"`
	// Warnings say what else is less than whole.
	Warnings []string `json:"warnings"`
}

const (
	// readEvery is the pause before reading again when little was there. Where the
	// recording includes system calls, reading makes events: reading at once again
	// would never end.
	readEvery = 20 * time.Millisecond
	// little is less than a page of text, which is what one read gives at most.
	little   = 2 << 10
	readSize = 64 << 10
	// drainReads bounds the reading of what is left in the buffer at the end.
	drainReads = 1 << 20
)

// Record records until the time is over or ctx ends, and leaves the kernel's
// tracing as it was, whatever happens. With an error about the leaving the report
// is there too.
func Record(ctx context.Context, o Options) (report *Report, err error) {
	events, functions := driverEvents(), driverFunctions()
	byDefault := len(o.Events)+len(o.Functions) == 0
	if !byDefault {
		if events, err = namedEvents(o.Events); err != nil {
			return nil, err
		}
		if functions, err = namedFunctions(o.Functions); err != nil {
			return nil, err
		}
	}
	s := &session{fs: o.FS, symbols: o.Symbols, tally: newTally(), groups: map[string]string{}}
	defer func() { err = errors.Join(err, s.undoAll()) }()
	if err := s.open(ctx, o.PID); err != nil {
		return nil, refused(err)
	}
	if err := s.choose(events, functions, byDefault); err != nil {
		return nil, refused(err)
	}
	return s.record(ctx, o)
}

// refused makes what the kernel refused readable.
func refused(err error) error {
	if _, ok := errors.AsType[*Error](err); ok || errors.Is(err, context.Canceled) {
		return err
	}
	return &Error{What: "the kernel's tracing cannot be set up", Err: err, Next: "run gpctl as root on the host; a kernel in lockdown does not trace"}
}

func (s *session) record(ctx context.Context, o Options) (*Report, error) {
	pipe, err := s.start()
	if err != nil {
		return nil, refused(err)
	}
	began := time.Now()
	if o.Started != nil {
		o.Started(s.by)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	queues := &nursery{changes: []QueueChange{}}
	looked := make(chan error, 1)
	if o.Host == nil {
		looked <- nil
	} else {
		go func() { looked <- queues.watch(ctx, o.Host, began) }()
	}
	reader := &reader{pipe: pipe, raw: o.Raw, tally: s.tally, buf: make([]byte, readSize)}
	readErr := s.follow(ctx, reader, began.Add(o.Duration))
	took := time.Since(began)
	interrupted := ctx.Err() != nil
	cancel()
	if err := <-looked; err != nil {
		s.warn("queues were not watched all the time: %v", err)
	}
	stopErr := s.stop(reader)
	s.tally.tear()
	return &Report{
		Began: began, BeganClock: s.tally.began, Duration: took, Interrupted: interrupted,
		FunctionsBy: s.by, Followed: len(s.groups), Buffer: s.buffer, Lost: s.lost(),
		Lines: s.tally.lines, Unknown: s.tally.unknown,
		Functions: s.tally.functionCalls(s.groups), Events: s.tally.eventCounts(), Queues: queues.changes,
		MissingEvents: orEmpty(s.missingEvents), MissingFunctions: orEmpty(s.missingFunctions), Warnings: orEmpty(s.warnings),
	}, errors.Join(readErr, stopErr)
}

// orEmpty keeps lists from being null for programs.
func orEmpty(list []string) []string {
	if list == nil {
		return []string{}
	}
	return list
}

// follow reads until the deadline, and returns the trace a larger buffer when it
// loses events.
func (s *session) follow(ctx context.Context, r *reader, deadline time.Time) error {
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
			if err := s.grow(); err != nil {
				return err
			}
			lost = s.tally.lost
		}
		if n < little {
			pause(ctx, min(left, readEvery))
		}
	}
	return nil
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// reader takes the trace out of the pipe, line by line.
type reader struct {
	pipe  Pipe
	raw   io.Writer // nil is nobody
	tally *tally
	buf   []byte
	rest  []byte // the beginning of a line whose end has not come
}

// maxLine is where a line is cut: the kernel's are at most a few pages long.
const maxLine = 64 << 10

// read reads once and describes how much came.
func (r *reader) read() (int, error) {
	n, err := r.pipe.ReadSome(r.buf)
	if err != nil {
		return 0, fmt.Errorf("reading the trace: %w", err)
	}
	if r.raw != nil && n > 0 {
		if _, err := r.raw.Write(r.buf[:n]); err != nil {
			return n, fmt.Errorf("writing the trace: %w", err)
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

// drain reads what is left, the end of a line cut short included.
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
