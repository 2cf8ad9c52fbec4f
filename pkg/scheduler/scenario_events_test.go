package scheduler_test

import (
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// event builds the event of a command.
func (s *scenario) event(cmd string, a arguments) (scheduler.Event, error) {
	switch cmd {
	case "lease":
		return request(a)
	case "target", "gone", "pin", "suspended", "resumed", "attached", "detached", "lost", "born", "runs":
		return s.targetEvent(cmd, a)
	case "alarm":
		id, err := number[gpreempt.GPUID](a.name())
		return scheduler.Alarm{GPU: id}, err
	case "reset":
		return resetEvent(a)
	case "drain":
		return scheduler.Drain{On: a.name() == "on"}, nil
	case "stop":
		return scheduler.Stopped{}, nil
	}
	id, err := number[scheduler.LeaseID](a.name())
	if err != nil {
		return nil, err
	}
	end := scheduler.EndCompleted
	if cmd == "clientgone" {
		end = scheduler.EndDisconnected
	}
	var ttl time.Duration
	if err := errors.Join(fill(a, "ttl", &ttl, time.ParseDuration), fill(a, "end", &end, named[scheduler.LeaseEnd])); err != nil {
		return nil, err
	}
	switch cmd {
	case "renew":
		return scheduler.LeaseRenewed{Lease: id, TTL: ttl}, nil
	case "complete":
		return scheduler.LeaseFinished{Lease: id, End: end}, nil
	case "clientgone":
		return scheduler.ClientGone{Client: scheduler.ClientID{PID: int32(id)}, End: end}, nil
	case "backlog":
		_, busy := a.text("busy")
		return scheduler.ClientBacklog{Client: scheduler.ClientID{PID: int32(id)}, Busy: busy}, nil
	}
	return nil, errors.New("no such command")
}

func resetEvent(a arguments) (scheduler.Event, error) {
	id, err := number[gpreempt.GPUID](a.name())
	ev := scheduler.QueueReset{GPU: id}
	keys := func(text string) (keys []gpreempt.ProcessKey, err error) {
		for part := range strings.SplitSeq(text, ",") {
			key, bad := gpreempt.ParseProcessKey(part)
			keys, err = append(keys, key), errors.Join(err, bad)
		}
		return keys, err
	}
	err = errors.Join(err, fill(a, "process", &ev.Process, gpreempt.ParseProcessKey), fill(a, "suspects", &ev.Suspects, keys))
	return ev, err
}

func request(a arguments) (scheduler.LeaseRequested, error) {
	id, err := number[scheduler.LeaseID](a.name())
	if err != nil {
		return scheduler.LeaseRequested{}, err
	}
	req := scheduler.LeaseRequested{Lease: id, Client: scheduler.ClientID{PID: 1}, GPUs: []gpreempt.GPUID{1}, Priority: gpreempt.PriorityHigh, TTL: time.Second, MaxWait: 20 * time.Millisecond}
	_, req.OnIdle = a.text("idle")
	return req, errors.Join(
		fill(a, "client", &req.Client, clientID),
		fill(a, "user", &req.User, func(s string) (scheduler.UserID, error) { return scheduler.UserID(s), nil }),
		fill(a, "request", &req.RequestID, func(s string) (string, error) { return s, nil }),
		fill(a, "owner", &req.Owner, gpreempt.ParseProcessKey),
		fill(a, "gpus", &req.GPUs, gpuList),
		fill(a, "prio", &req.Priority, number[gpreempt.Priority]),
		fill(a, "ttl", &req.TTL, time.ParseDuration),
		fill(a, "maxwait", &req.MaxWait, time.ParseDuration),
		fill(a, "eta", &req.ETA, time.ParseDuration),
	)
}

func resistance(s string) (gpreempt.Resistance, error) {
	if s == "stop" {
		return gpreempt.Resistance{Stop: true}, nil
	}
	after, err := number[uint8](s)
	return gpreempt.Resistance{KillAfter: int(after)}, err
}

func (s *scenario) targetEvent(cmd string, a arguments) (scheduler.Event, error) {
	key, err := gpreempt.ParseProcessKey(a.name())
	if err != nil {
		return nil, err
	}
	switch cmd {
	case "gone":
		return scheduler.TargetGone{Target: key}, nil
	case "born":
		ev := scheduler.Running{Target: key, Cause: scheduler.CauseNewQueue}
		return ev, fill(a, "suspended", &ev.Suspended, strconv.Atoi)
	case "runs":
		ev := scheduler.Running{Target: key}
		return ev, fill(a, "cause", &ev.Cause, func(s string) (scheduler.Cause, error) { return scheduler.Cause(s), nil })
	case "pin":
		ev := scheduler.Pin{Target: key}
		for word, cause := range map[string]scheduler.Cause{
			"run": scheduler.CauseHold, "suspend": scheduler.CauseByHand, "park": scheduler.CauseHQDBudget, "busy": scheduler.CauseHQDBusy, "room": scheduler.CauseHQDRoom,
		} {
			if _, ok := a.text(word); ok {
				ev.Cause = cause
			}
		}
		return ev, fill(a, "for", &ev.For, time.ParseDuration)
	case "target":
		ev := scheduler.TargetSeen{Target: key, Class: gpreempt.Offline, GPUs: []gpreempt.GPUID{1}, Queues: 1}
		if t := s.observer.Targets[key]; t != nil {
			ev = t.TargetSeen
		}
		return ev, errors.Join(
			fill(a, "class", &ev.Class, class),
			fill(a, "prio", &ev.Priority, number[gpreempt.Priority]),
			fill(a, "gpus", &ev.GPUs, gpuList),
			fill(a, "job", &ev.Job, func(s string) (string, error) { return s, nil }),
			fill(a, "kin", &ev.Kin, keyList),
			fill(a, "queues", &ev.Queues, number[uint64]),
			fill(a, "on-resist", &ev.OnResist, resistance),
		)
	}
	ev := scheduler.Suspended{Target: key, Took: 400 * time.Microsecond}
	if t := s.observer.Targets[key]; t != nil {
		ev.Seq = t.Flight
		if cmd == "resumed" && t.Detaching {
			cmd = "detached"
		}
	}
	err = errors.Join(
		fill(a, "seq", &ev.Seq, number[uint64]),
		fill(a, "took", &ev.Took, time.ParseDuration),
		fill(a, "result", &ev.Result, result),
		fill(a, "failed", &ev.FailedGPUs, gpuList),
	)
	switch cmd {
	case "attached":
		_, births := a.text("births")
		return scheduler.Attached{Target: key, Result: ev.Result, FailedGPUs: ev.FailedGPUs, ReportsBirths: births}, err
	case "detached":
		return scheduler.Detached{Target: key, Result: ev.Result, FailedGPUs: ev.FailedGPUs, Took: ev.Took}, err
	case "lost":
		return scheduler.Lost{Target: key, Result: ev.Result, FailedGPUs: ev.FailedGPUs}, err
	case "resumed":
		return scheduler.Resumed(ev), err
	}
	return ev, err
}

// look writes what the views of the core return.
func (s *scenario) look(cmd string, a arguments) error {
	switch cmd {
	case "dump":
		if err := s.step(scheduler.Tick{}); err != nil { // as Runner.View does
			return err
		}
		s.dump()
		return nil
	case "next":
		due, ok := s.core.NextDeadline()
		fmt.Fprintf(&s.out, "next deadline %v %v\n", due, ok)
		return nil
	case "explain":
		key, err := gpreempt.ParseProcessKey(a.name())
		e, ok := s.core.Explain(key)
		if !ok {
			s.out.WriteString("unknown\n")
			return err
		}
		fmt.Fprintf(&s.out, "%v suspend=%v cause=%s leases=%v\n", e.State, e.Suspend, e.Cause, e.Leases)
		for _, check := range e.Checks {
			result := map[scheduler.CheckResult]string{scheduler.CheckPass: "pass", scheduler.CheckRun: "run", scheduler.CheckSuspend: "suspend"}[check.Result]
			fmt.Fprintf(&s.out, "  %-8s%s%s\n", result, map[bool]string{true: "* "}[check.Decides], check.Name)
		}
		s.out.WriteString(factsText(&e.Facts))
		return err
	case "admit":
		req, err := request(a)
		if err != nil {
			return err
		}
		id, refused := s.core.Admit(&req)
		fmt.Fprintf(&s.out, "admit: %s\n", outcome(id, refused))
		return nil
	}
	id, err := number[scheduler.LeaseID](a.name())
	if err != nil {
		return err
	}
	if cmd == "owned" {
		var client scheduler.ClientID
		err := fill(a, "client", &client, clientID)
		fmt.Fprintf(&s.out, "owned: %s\n", outcome(0, s.core.Owned(client, id)))
		return err
	}
	end, held, ok := s.core.Ended(id)
	answer, answered := s.core.Answered(id)
	fmt.Fprintf(&s.out, "ended: %v %v %v; answered: %+v %v\n", ok, end, held, answer, answered)
	return nil
}

func outcome(id scheduler.LeaseID, err error) string {
	switch {
	case err != nil:
		return err.Error()
	case id != 0:
		return fmt.Sprintf("that is lease %d", id)
	}
	return "ok"
}

func (s *scenario) dump() {
	for _, t := range s.core.Targets() {
		fmt.Fprintf(&s.out, "target %v %v prio=%d %v gpus=%v ready=%v suspends=%d away=%v learned=%v/%v", t.Key, t.Class, t.Priority, t.State, t.GPUs,
			t.Ready, t.Suspends, t.SuspendedTotal, t.LearnedSuspend, t.LearnedResume)
		if Away(t.State) {
			fmt.Fprintf(&s.out, " runs-by=%v", t.RunsBy)
		}
		s.out.WriteByte('\n')
	}
	for _, j := range s.core.Jobs() {
		fmt.Fprintf(&s.out, "job %s targets=%d ran=%.2f%% over=%v slow=%v\n", j.Name, j.Targets, 100*j.Ran, j.Over, j.Slow)
	}
	for _, l := range s.core.Leases() {
		fmt.Fprintf(&s.out, "lease %d client=%d %v gpus=%v prio=%d expires=%v\n", l.ID, l.Client.PID, l.State, l.GPUs, l.Priority, l.Expires)
	}
	for _, u := range s.core.GPUs() {
		fmt.Fprintf(&s.out, "gpu %v leases=%d suspended=%d breaker=%v", u.ID, u.Leases, u.Suspended, u.BreakerOpen)
		if u.BreakerOpen {
			fmt.Fprintf(&s.out, " closes=%v", u.BreakerCloses)
		}
		s.out.WriteByte('\n')
	}
}

// factsText returns the facts that are not zero, one a line.
func factsText(f *scheduler.Facts) string {
	var b strings.Builder
	for field, value := range reflect.ValueOf(f).Elem().Fields() {
		if !value.IsZero() {
			fmt.Fprintf(&b, "    %s: %+v\n", field.Name, value)
		}
	}
	return b.String()
}

// class parses the name of a class.
func class(s string) (gpreempt.Class, error) {
	for c := gpreempt.Unmanaged; c <= gpreempt.Offline; c++ {
		if s == c.String() {
			return c, nil
		}
	}
	return 0, fmt.Errorf("%q is not a class", s)
}
