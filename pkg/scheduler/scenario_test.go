package scheduler_test

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// TestScenarios runs testdata/scenarios/*.txt: scripts of what happens to a core
// and, below each piece of script, what it does about it. Every file begins with
// what it proves. -rewrite rewrites what is below; read the difference then.
//
// Time stands still between commands. The commands:
//
//	policy preset=NAME [knob=value...]   preset=balanced by default, always with attach_after=0s; at the first command, or a PolicyChanged
//	gpu ID...
//	pin PID@START run|suspend|park|busy|room [for=]
//	target PID@START [class= prio= gpus= job= queues= on-resist=stop|N]   what is left out stays, or is offline 0 1 "" 1
//	attach auto | attach by-hand         whether every Attach, and every Detach that resumes nothing, succeeds at once, as at first
//	attached, detached, lost PID@START [result= failed=GPUS births]
//	inspect stuck|unknown|nothing        how an Inspect is answered from now on, at once; unknown at first
//	born PID@START                       a birth that the mechanism reports
//	runs PID@START cause=                it runs although it was suspended
//	gone PID@START
//	lease ID [client= user= gpus= prio= ttl= maxwait= eta= slo= expected= idle request=]   1 1 11 1s 20ms
//	admit [as lease]                     what Admit says, without announcing
//	renew ID ttl= | complete ID [end=] | clientgone ID [end=] | backlog ID busy|empty
//	suspended, resumed PID@START [took= result= failed=GPUS seq=]   seq is that in flight by default; resumed answers a Detach that resumes, too
//	autoreply suspend= resume= | autoreply off    the mechanism answers by itself from now on
//	reset GPU [process=PID@START suspects=PID@START,...]   a queue that the driver has reset
//	alarm GPU | drain on|off | stop
//	at TIME | after DURATION             every deadline and answer in between fires on time
//	late TIME                            as a busy machine: one Tick, long after the deadlines
//	explain PID@START | dump | ended ID | owned ID client= | next
func TestScenarios(t *testing.T) {
	files, err := filepath.Glob("testdata/scenarios/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("no scenarios", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			s := newScenario()
			datadriven.RunTest(t, file, func(t *testing.T, d *datadriven.TestData) string {
				if d.Cmd == "reset" {
					*s = *newScenario()
					return ""
				}
				s.out.Reset()
				for line := range strings.Lines(join(d.Cmd, d.CmdArgs) + "\n" + d.Input) {
					cmd, args, err := datadriven.ParseLine(line)
					if err == nil && cmd != "" && cmd != "#" {
						err = s.run(cmd, arguments{args})
					}
					if err != nil {
						d.Fatalf(t, "%s: %v\n%s", strings.TrimSpace(line), err, &s.out)
					}
				}
				return s.out.String()
			})
		})
	}
}

func join(cmd string, args []datadriven.CmdArg) string {
	for _, a := range args {
		cmd += " " + a.String()
	}
	return cmd
}

// scenario is a core under a script.
type scenario struct {
	policy   scheduler.Policy
	core     *scheduler.Core
	observer *Observer
	now      scheduler.Time
	reply    map[scheduler.ActionKind]time.Duration
	due      []arrival
	byHand   bool // an Attach or a Detach is answered by the script
	inspect  string
	out      strings.Builder
}

// newScenario has the default policy, but attaches at once.
func newScenario() *scenario {
	s := &scenario{policy: scheduler.DefaultPolicy()}
	s.policy.AttachAfter = 0
	return s
}

type arguments struct{ args []datadriven.CmdArg }

func (a arguments) name() string {
	if len(a.args) == 0 {
		return ""
	}
	return a.args[0].Key
}

func (a arguments) text(key string) (string, bool) {
	for _, arg := range a.args {
		if arg.Key == key {
			return strings.Join(arg.Vals, ","), true
		}
	}
	return "", false
}

// fill sets v to the argument's value when there is one.
func fill[T any](a arguments, key string, v *T, parse func(string) (T, error)) error {
	text, ok := a.text(key)
	if !ok {
		return nil
	}
	value, err := parse(text)
	if err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	*v = value
	return nil
}

func number[T ~uint8 | ~uint32 | ~uint64](s string) (T, error) {
	n, err := strconv.ParseUint(s, 10, 64)
	return T(n), err
}

func clientID(s string) (scheduler.ClientID, error) {
	pid, err := number[uint32](s)
	return scheduler.ClientID{PID: int32(pid)}, err
}

func gpuList(s string) ([]gpreempt.GPUID, error) {
	var ids []gpreempt.GPUID
	for word := range strings.SplitSeq(s, ",") {
		if word == "" {
			continue
		}
		id, err := number[gpreempt.GPUID](word)
		if err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, nil
}

func keyList(s string) ([]gpreempt.ProcessKey, error) {
	var keys []gpreempt.ProcessKey
	for word := range strings.SplitSeq(s, ",") {
		key, err := gpreempt.ParseProcessKey(word)
		if err != nil {
			return nil, err
		}
		keys = append(keys, key)
	}
	return keys, nil
}

// named finds the value of an enum by its String.
func named[T interface {
	~uint8
	String() string
}](s string) (T, error) {
	for v := range T(20) {
		if v.String() == s {
			return v, nil
		}
	}
	return 0, fmt.Errorf("no such word: %q", s)
}

// result is that of an action that failed.
func result(s string) (scheduler.Cause, error) {
	if why := scheduler.Cause(s); slices.Contains(results, why) || why.Obstacle() != "" {
		return why, nil
	}
	return "", fmt.Errorf("no such result: %q", s)
}

func (s *scenario) run(cmd string, a arguments) error {
	if cmd == "policy" {
		return s.setPolicy(a)
	}
	if s.core == nil {
		s.core, s.observer = scheduler.New(s.policy, scheduler.Limits{LeasesPerClient: 3, LeasesPerUser: 5, LeasesTotal: 8}), NewObserver(s.policy)
	}
	switch cmd {
	case "at", "after", "late", "autoreply":
		return s.passTime(cmd, a)
	case "attach":
		s.byHand = a.name() == "by-hand"
		return nil
	case "inspect":
		s.inspect = a.name()
		return nil
	case "explain", "dump", "admit", "ended", "owned", "next":
		return s.look(cmd, a)
	case "gpu":
		for _, arg := range a.args {
			id, err := number[gpreempt.GPUID](arg.Key)
			if err != nil {
				return err
			}
			if err := s.step(scheduler.GPUAdded{GPU: id}); err != nil {
				return err
			}
		}
		return nil
	}
	ev, err := s.event(cmd, a)
	if err != nil {
		return err
	}
	return s.step(ev)
}

func lingerOf(s string) (time.Duration, error) {
	if s == "learned" {
		return scheduler.LingerLearned, nil
	}
	return time.ParseDuration(s)
}

func (s *scenario) setPolicy(a arguments) error {
	p := s.policy
	err := errors.Join(
		fill(a, "preset", &p, scheduler.PresetByName),
		fill(a, "preset", &p.Linger, func(string) (time.Duration, error) { return 0, nil }),
		fill(a, "preset", &p.AttachAfter, func(string) (time.Duration, error) { return 0, nil }),
		fill(a, "linger", &p.Linger, lingerOf),
		fill(a, "share_floor", &p.ShareFloor, func(s string) (float64, error) { return strconv.ParseFloat(s, 64) }),
		fill(a, "share_cap", &p.ShareCap, func(s string) (float64, error) { return strconv.ParseFloat(s, 64) }),
		fill(a, "share_window", &p.ShareWindow, time.ParseDuration),
		fill(a, "max_suspend", &p.MaxSuspend, time.ParseDuration),
		fill(a, "min_run", &p.MinRun, time.ParseDuration),
		fill(a, "attach_after", &p.AttachAfter, time.ParseDuration),
		fill(a, "shadow", &p.Shadow, strconv.ParseBool),
		fill(a, "max_ttl", &p.MaxTTL, time.ParseDuration),
	)
	if err != nil {
		return err
	}
	s.policy = p.Normalize()
	if err := s.policy.Validate(); err != nil || s.core == nil {
		return err
	}
	return s.step(scheduler.PolicyChanged{Policy: s.policy})
}

func (s *scenario) passTime(cmd string, a arguments) error {
	switch cmd {
	case "autoreply":
		s.reply = nil
		if a.name() == "off" {
			return nil
		}
		var suspend, resume time.Duration
		err := errors.Join(fill(a, "suspend", &suspend, time.ParseDuration), fill(a, "resume", &resume, time.ParseDuration))
		s.reply = map[scheduler.ActionKind]time.Duration{scheduler.ActSuspend: suspend, scheduler.ActResume: resume}
		return err
	case "after", "at", "late":
		d, err := time.ParseDuration(a.name())
		if err != nil {
			return err
		}
		if cmd == "after" {
			d += s.now
		}
		if cmd == "late" {
			s.now = d
			return s.step(scheduler.Tick{})
		}
		return s.advance(d)
	}
	return nil
}

// advance goes to a time, stopping at each deadline and each automatic answer.
func (s *scenario) advance(until scheduler.Time) error {
	for range 100_000 {
		due, armed := s.core.NextDeadline()
		switch {
		case armed && due <= until && (len(s.due) == 0 || due <= s.due[0].at):
			if due <= s.now {
				return fmt.Errorf("the deadline %v is past and does not fire", due)
			}
			s.now = due
			if err := s.step(scheduler.Tick{}); err != nil {
				return err
			}
		case len(s.due) > 0 && s.due[0].at <= until:
			next := s.due[0]
			s.due = s.due[1:]
			s.now = next.at
			if err := s.step(next.ev); err != nil {
				return err
			}
		default:
			s.now = until
			return nil
		}
	}
	return errors.New("it never gets there")
}

func (s *scenario) step(ev scheduler.Event) error {
	actions := s.core.Step(s.now, ev)
	for _, a := range actions {
		fmt.Fprintf(&s.out, "%-9v %v\n", s.now, a)
		if took, ok := s.reply[a.Kind]; ok {
			var ev scheduler.Event = scheduler.Suspended{Target: a.Target, Seq: a.Seq, Took: took}
			if a.Kind == scheduler.ActResume {
				ev = scheduler.Resumed{Target: a.Target, Seq: a.Seq, Took: took}
			}
			s.due = append(s.due, arrival{s.now + took, ev})
		}
	}
	actions = slices.Clone(actions) // they are the core's until the next step
	if err := errors.Join(s.observer.Watch(s.now, ev, actions), s.core.CheckInvariants()); err != nil {
		return err
	}
	for _, a := range actions {
		var result scheduler.Event
		switch {
		case a.Kind == scheduler.ActInspect && s.inspect != "nothing":
			result = scheduler.Inspected{Target: a.Target, Seq: a.Seq, Stuck: s.inspect == "stuck"}
		case s.byHand:
			continue
		case a.Kind == scheduler.ActAttach:
			result = scheduler.Attached{Target: a.Target}
		case a.Kind == scheduler.ActDetach:
			result = scheduler.Detached{Target: a.Target}
			if t := s.observer.Targets[a.Target]; t != nil && t.Detaching {
				took, ok := s.reply[scheduler.ActResume]
				if ok {
					s.due = append(s.due, arrival{s.now + took, scheduler.Detached{Target: a.Target, Took: took}})
				}
				continue // it resumes: the script says how that goes
			}
		default:
			continue
		}
		if err := s.step(result); err != nil {
			return err
		}
	}
	s.sortDue()
	return nil
}

func (s *scenario) sortDue() {
	slices.SortStableFunc(s.due, func(a, b arrival) int { return cmp.Compare(a.at, b.at) })
}
