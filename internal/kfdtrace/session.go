package kfdtrace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	instances = "instances"
	// prefix begins the names of our instances; the pid follows.
	prefix = "gpreempt-"
	// kprobeEvents is where probes are made and removed, for all instances.
	kprobeEvents = "kprobe_events"
	// cleanFor bounds the waiting for another process that is making an instance.
	cleanFor = 5 * time.Second
	// maxNames is how many instances of the same pid there may be: processes of
	// different pid namespaces share tracefs.
	maxNames = 9
)

// session is one recording as the kernel sees it. Whatever it changes it puts on
// the list of what has to be undone first.
type session struct {
	fs  FS
	dir string // the instance, below the root of tracefs
	// symbols is the path of the kernel's symbols.
	symbols string

	undo []func() error
	lock io.Closer // of the instance

	tally  *tally
	groups map[string]string // of the functions that are followed
	by     string
	buffer Buffer
	// overrun is what the CPUs' buffers counted in the end.
	overrun uint64

	missingEvents, missingFunctions, warnings []string
}

func (s *session) warn(format string, args ...any) {
	s.warnings = append(s.warnings, fmt.Sprintf(format, args...))
}

// later has fn called at the end, before what was named earlier.
func (s *session) later(fn func() error) { s.undo = append(s.undo, fn) }

// undoAll leaves nothing of ours in the kernel. All is tried, whatever fails.
func (s *session) undoAll() error {
	var failed error
	for _, fn := range slices.Backward(s.undo) {
		failed = errors.Join(failed, fn())
	}
	s.undo = nil
	if failed == nil {
		return nil
	}
	return &Error{
		What: "something of the recording is left in the kernel's tracing, in " + s.dir, Err: failed,
		Next: "run gpctl trace again, which clears away what dead runs left; or rmdir the instance",
	}
}

func (s *session) write(name, data string) error { return s.fs.Write(s.dir+"/"+name, data) }

// open makes the instance, and clears away those of dead processes. Both are done
// under the lock of all instances: nobody takes a new one for a dead one.
func (s *session) open(ctx context.Context, pid int) error {
	all, err := s.lockInstances(ctx)
	if err != nil {
		return err
	}
	err = s.clearDead()
	if err == nil {
		err = s.make(pid)
	}
	if err := errors.Join(err, all.Close()); err != nil {
		return err
	}
	// Off until all is set up.
	if err := s.write("tracing_on", "0"); err != nil {
		return err
	}
	if err := s.setOptions(); err != nil {
		return err
	}
	if err := s.write("trace_clock", "mono"); err != nil {
		return fmt.Errorf("the clock mono: %w", err)
	}
	return s.sizeBuffer()
}

func (s *session) lockInstances(ctx context.Context) (io.Closer, error) {
	for waited := time.Duration(0); ; waited += readEvery {
		lock, err := s.fs.Lock(instances)
		if !errors.Is(err, ErrLocked) {
			return lock, err
		}
		if waited >= cleanFor {
			return nil, &Error{What: "another gpctl trace has been starting for " + cleanFor.String(), Next: "end it, then try again", Err: err}
		}
		pause(ctx, readEvery)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
}

// make makes the instance and takes its lock, which says that it is in use.
func (s *session) make(pid int) error {
	for n := 1; ; n++ {
		dir := fmt.Sprintf("%s/%s%d", instances, prefix, pid)
		if n > 1 {
			dir += "-" + strconv.Itoa(n)
		}
		err := s.fs.Mkdir(dir)
		switch {
		case errors.Is(err, fs.ErrExist) && n < maxNames:
			continue // alive: the dead ones have been cleared away
		case noMemory(err):
			// The kernel gives a new instance a buffer of its own default size.
			return &Error{What: "the kernel has no memory for another trace buffer", Next: "free memory on the host, then try again", Err: err}
		case err != nil:
			return err
		}
		s.dir = dir
		break
	}
	s.later(func() error {
		err := s.fs.Remove(s.dir)
		if s.lock != nil {
			err = errors.Join(err, s.lock.Close())
		}
		return err
	})
	var err error
	s.lock, err = s.fs.Lock(s.dir)
	return err
}

// clearDead removes the instances and probes of processes that died before they
// could. What cannot be removed is a warning.
func (s *session) clearDead() error {
	names, err := s.fs.List(instances)
	if err != nil {
		return err
	}
	alive := map[string]bool{}
	for _, name := range names {
		if !ours(name) {
			continue
		}
		lock, err := s.fs.Lock(instances + "/" + name)
		if errors.Is(err, ErrLocked) {
			alive[probeGroup(name)] = true
			continue
		}
		if err == nil {
			err = errors.Join(s.clearInstance(name), lock.Close())
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			s.warn("the instance %s of a dead run could not be removed: %v", name, err)
		}
	}
	// A run has its instance for longer than its probes.
	err = removeProbes(s.fs, func(group string) bool { return ours(strings.ReplaceAll(group, "_", "-")) && !alive[group] })
	if err != nil {
		s.warn("the probes of a dead run could not be removed: %v", err)
	}
	return nil
}

// ours tells the names that make gives: others may have instances of their own for
// gpreempt.
func ours(name string) bool {
	rest, ok := strings.CutPrefix(name, prefix)
	return ok && rest != "" && strings.Trim(rest, "0123456789-") == ""
}

func (s *session) clearInstance(name string) error {
	dir := instances + "/" + name
	return errors.Join(
		s.fs.Write(dir+"/tracing_on", "0"),
		s.fs.Write(dir+"/current_tracer", "nop"),
		s.fs.Write(dir+"/events/enable", "0"), // or its probes cannot go
		s.fs.Remove(dir),
	)
}

// plainOptions are options of the instance that change what lines look like. A new
// instance has those of the top level, where anybody may have changed them.
var plainOptions = map[string]string{
	"bin": "0", "hex": "0", "raw": "0", "fields": "0", "verbose": "0", "latency-format": "0", "block": "0",
	"stacktrace": "0", "userstacktrace": "0", "context-info": "1", "irq-info": "1", "markers": "1", "overwrite": "1",
}

func (s *session) setOptions() error {
	for name, want := range plainOptions {
		path := "options/" + name
		text, err := s.fs.ReadFile(s.dir + "/" + path)
		if errors.Is(err, fs.ErrNotExist) { // this kernel has no such option
			continue
		}
		if err == nil && strings.TrimSpace(string(text)) != want {
			err = s.write(path, want)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// choose sets up events and functions.
func (s *session) choose(events []wantedEvent, functions []wantedFunction, byDefault bool) error {
	enabled, err := s.enableEvents(events)
	if err != nil {
		return err
	}
	s.by = ByNone
	if len(functions) > 0 {
		if err := s.followFunctions(functions); err != nil {
			return err
		}
	}
	if enabled > 0 || len(s.groups) > 0 {
		return nil
	}
	nothing := &Error{What: "there is nothing to record", Err: errors.New(strings.Join(append(s.missing(), s.warnings...), "; "))}
	if byDefault && !s.hasDriver() {
		nothing.Err = ErrNoDriver
		nothing.Next = "gpctl doctor tells about this host; --events and --functions record something else"
	}
	return nothing
}

// hasDriver reports whether the driver's events are there: each module with trace
// events has a directory of them.
func (s *session) hasDriver() bool {
	names, err := s.fs.List("events")
	return err == nil && slices.Contains(names, driver)
}

func (s *session) missing() []string {
	var list []string
	if len(s.missingEvents) > 0 {
		list = append(list, "the kernel has no event "+strings.Join(s.missingEvents, ", "))
	}
	if len(s.missingFunctions) > 0 {
		list = append(list, "the kernel has no function "+strings.Join(s.missingFunctions, ", "))
	}
	return list
}

// enableEvents turns on what exists of the events and describes how many.
func (s *session) enableEvents(events []wantedEvent) (int, error) {
	s.later(func() error { return s.write("events/enable", "0") })
	enabled := 0
	for _, e := range events {
		found := false
		for _, name := range e {
			err := s.write("events/"+strings.ReplaceAll(name, ":", "/")+"/enable", "1")
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil && !errors.Is(err, syscall.EINVAL) {
				return enabled, fmt.Errorf("the event %s: %w", name, err)
			}
			if err != nil { // it exists, and cannot be recorded in an instance
				continue
			}
			found = true
			enabled++
			break
		}
		if !found {
			s.missingEvents = append(s.missingEvents, e[0])
		}
	}
	return enabled, nil
}

// start opens the trace and turns it on.
func (s *session) start() (Pipe, error) {
	pipe, err := s.fs.OpenPipe(s.dir + "/trace_pipe")
	if err != nil {
		return nil, err
	}
	// An instance with an open trace cannot be removed.
	s.later(pipe.Close)
	s.later(func() error { return s.write("tracing_on", "0") })
	if err := s.write("tracing_on", "1"); err != nil {
		return nil, err
	}
	return pipe, s.write("trace_marker", marker+"begin\n")
}

// stop turns the trace off and reads what is left.
func (s *session) stop(r *reader) error {
	if err := s.write("tracing_on", "0"); err != nil {
		return err
	}
	return errors.Join(r.drain(), s.countLost())
}
