package nvchannels

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/internal/child"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// Argument is the only argument of a program that is to call Main.
const Argument = "nvidia-supervisor"

const (
	// BeatEvery is the longest time between two calls of Beat.
	BeatEvery = 200 * time.Millisecond
	// Silence is how long the daemon may be silent before everything is resumed, which takes about
	// a second together with the calls.
	Silence = 700 * time.Millisecond
	// silenceParts of it pass one by one, so that a pause of both programs is one, however long it is.
	// While the daemon stays silent, everything is resumed in each: a daemon that hangs in a call may
	// disable channels after the first.
	silenceParts = 4
	// tries is the number of attempts to enable channels after the daemon's death, and again the time
	// between them.
	tries = 50
	again = 200 * time.Millisecond
)

// Main is the program of the supervisor, which outlives the daemon and resumes what the daemon has
// suspended. It returns the exit status.
func Main() int {
	socket, err := child.Main("nvsup")
	if err == nil {
		err = Supervise(socket, nvrm.Kernel(), Silence)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "gpreemptd: %s: %v\n", Argument, err)
		return 1
	}
	return 0
}

// guarded is a process with channels that may be disabled.
type guarded struct {
	process  nvrm.Process
	channels []nvrm.Channel
}

// supervisor is the state of the program.
type supervisor struct {
	sys   nvrm.Sys
	armed map[gpreempt.ProcessKey]guarded
}

// Supervise serves a daemon on a socket until the daemon closes its end, and then resumes everything.
// It also does so after each silence of the daemon.
func Supervise(socket *os.File, sys nvrm.Sys, silence time.Duration) error {
	s := &supervisor{sys: sys, armed: map[gpreempt.ProcessKey]guarded{}}
	daemon := child.Serve[order, answer](socket)
	part := time.NewTicker(max(silence/silenceParts, 1))
	defer part.Stop()
	silent, lapsed := 0, false
	for {
		select {
		case o, more := <-daemon.Requests:
			if !more {
				return errors.Join(daemon.Err(), s.end())
			}
			a := answer{Lapsed: lapsed}
			if err := s.take(o.Body); err != nil {
				a.Err = err.Error()
			}
			daemon.Answer(o, a)
			silent, lapsed = 0, false
		case <-part.C:
			for key, g := range s.armed {
				if g.process.Exited() {
					s.forget(key)
				}
			}
			if silent++; silent > silenceParts && len(s.armed) > 0 {
				lapsed = true
				_ = s.enable(false) // it is tried again
			}
		}
	}
}

// take carries an order out.
func (s *supervisor) take(o order) error {
	g, known := s.armed[o.Target]
	switch {
	case o.Target.IsZero():
		return nil
	case len(o.Channels) == 0:
		s.forget(o.Target)
		return nil
	case !known:
		var err error
		if g.process, err = s.sys.Open(o.Target); errors.Is(err, mechanism.ErrGone) {
			return nil
		} else if err != nil {
			return err
		}
	}
	s.armed[o.Target] = guarded{g.process, o.Channels}
	return nil
}

func (s *supervisor) forget(key gpreempt.ProcessKey) {
	if g, known := s.armed[key]; known {
		g.process.Close()
		delete(s.armed, key)
	}
}

// enable enables every channel that may be disabled, all processes at once. With last it forgets
// the processes that run then, because the next daemon may suspend them.
func (s *supervisor) enable(last bool) error {
	keys := slices.Collect(maps.Keys(s.armed))
	errs := make([]error, len(keys))
	var all sync.WaitGroup
	for i, key := range keys {
		all.Go(func() { errs[i] = restore(s.sys, s.armed[key].process, s.armed[key].channels, every) })
	}
	all.Wait()
	for i, key := range keys {
		if last && errs[i] == nil {
			s.forget(key)
		}
	}
	return errors.Join(errs...)
}

// end resumes everything after the daemon has ended.
func (s *supervisor) end() error {
	err := s.enable(true)
	for n := 0; err != nil && n < tries; n++ {
		time.Sleep(again)
		err = s.enable(true)
	}
	for key := range s.armed {
		s.forget(key)
	}
	return err
}
