package scheduler

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
)

// TestScenarios runs testdata/scenarios/*.txt: scripts of what happens to a core
// and, below each piece of script, what it does about it. Every file begins with
// what it proves. -rewrite rewrites what is below; read the difference then.
//
// Time stands still between commands. The commands:
//
//	policy preset=NAME [knob=value...]   preset=balanced by default; at the first command, or a PolicyChanged
//	gpu ID...
//	target PID@START [class= prio= gpus= job= queues=]   what is left out stays, or is offline 0 1 "" 1
//	attach auto | attach by-hand         whether every Attach, and every Detach that resumes nothing, succeeds at once, as at first
//	attached, detached, lost PID@START [result= failed=GPUS births]
//	born PID@START                       a birth that the mechanism reports
//	gone PID@START
//	lease ID [client= user= gpus= prio= ttl= maxwait= eta= slo= expected= idle request=]   1 1 11 1s 20ms
//	order ID target=PID@START [client= ttl= maxwait=]   a suspension by hand
//	admit [as lease or order]            what Admit says, without announcing
//	renew ID ttl= | complete ID [end=] | clientgone ID [end=] | backlog ID busy|empty
//	suspended, resumed PID@START [took= result= failed=GPUS seq=]   seq is that in flight by default; resumed answers a Detach that resumes, too
//	autoreply suspend= resume= | autoreply off    the mechanism answers by itself from now on
//	alarm GPU | hold PID@START for= | drain on|off | stop
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
			s := &scenario{policy: DefaultPolicy()}
			datadriven.RunTest(t, file, func(t *testing.T, d *datadriven.TestData) string {
				if d.Cmd == "reset" {
					*s = scenario{policy: DefaultPolicy()}
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
	policy   Policy
	core     *Core
	observer *observer
	now      Time
	reply    map[ActionKind]time.Duration
	due      []arrival
	byHand   bool // an Attach or a Detach is answered by the script
	out      strings.Builder
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

func (s *scenario) run(cmd string, a arguments) error {
	if cmd == "policy" {
		return s.setPolicy(a)
	}
	if s.core == nil {
		s.core, s.observer = New(s.policy, Limits{LeasesPerClient: 3, LeasesPerUser: 5, LeasesTotal: 8}), newObserver(s.policy)
	}
	switch cmd {
	case "at", "after", "late", "autoreply":
		return s.passTime(cmd, a)
	case "attach":
		s.byHand = a.name() == "by-hand"
		return nil
	case "explain", "dump", "admit", "ended", "owned", "next":
		return s.look(cmd, a)
	case "gpu":
		for _, arg := range a.args {
			id, err := number[gpreempt.GPUID](arg.Key)
			if err != nil {
				return err
			}
			if err := s.step(GPUAdded{id}); err != nil {
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

func (s *scenario) setPolicy(a arguments) error {
	p := s.policy
	err := errors.Join(
		fill(a, "preset", &p, PresetByName),
		fill(a, "suspend_when", &p.SuspendWhen, named[SuspendWhen]),
		fill(a, "linger", &p.Linger, named[Linger]),
		fill(a, "linger_max", &p.LingerMax, time.ParseDuration),
		fill(a, "share_floor", &p.ShareFloor, func(s string) (float64, error) { return strconv.ParseFloat(s, 64) }),
		fill(a, "share_window", &p.ShareWindow, time.ParseDuration),
		fill(a, "max_suspend", &p.MaxSuspend, time.ParseDuration),
		fill(a, "min_run", &p.MinRun, time.ParseDuration),
		fill(a, "gang", &p.Gang, named[GangScope]),
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
	return s.step(PolicyChanged{s.policy})
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
		s.reply = map[ActionKind]time.Duration{ActSuspend: suspend, ActResume: resume}
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
			return s.step(Tick{})
		}
		return s.advance(d)
	}
	return nil
}

// advance goes to a time, stopping at each deadline and each automatic answer.
func (s *scenario) advance(until Time) error {
	for range 100_000 {
		due, armed := s.core.NextDeadline()
		switch {
		case armed && due <= until && (len(s.due) == 0 || due <= s.due[0].at):
			if due <= s.now {
				return fmt.Errorf("the deadline %v is past and does not fire", due)
			}
			s.now = due
			if err := s.step(Tick{}); err != nil {
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

func (s *scenario) step(ev Event) error {
	actions := s.core.Step(s.now, ev)
	for _, a := range actions {
		fmt.Fprintf(&s.out, "%-9v %v\n", s.now, a)
		if took, ok := s.reply[a.Kind]; ok {
			var ev Event = Suspended{Target: a.Target, Seq: a.Seq, Took: took}
			if a.Kind == ActResume {
				ev = Resumed{Target: a.Target, Seq: a.Seq, Took: took}
			}
			s.due = append(s.due, arrival{s.now + took, ev})
		}
	}
	actions = slices.Clone(actions) // they are the core's until the next step
	if err := errors.Join(s.observer.watch(s.now, ev, actions), s.core.CheckInvariants()); err != nil || s.byHand {
		s.sortDue()
		return err
	}
	for _, a := range actions {
		var result Event
		switch a.Kind {
		case ActAttach:
			result = Attached{Target: a.Target}
		case ActDetach:
			result = Detached{Target: a.Target}
			if t := s.observer.targets[a.Target]; t != nil && t.detaching {
				took, ok := s.reply[ActResume]
				if ok {
					s.due = append(s.due, arrival{s.now + took, Detached{Target: a.Target, Took: took}})
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

// event builds the event of a command.
func (s *scenario) event(cmd string, a arguments) (Event, error) {
	switch cmd {
	case "lease", "order":
		return s.request(cmd, a)
	case "target", "gone", "hold", "suspended", "resumed", "attached", "detached", "lost", "born":
		return s.targetEvent(cmd, a)
	case "alarm":
		id, err := number[gpreempt.GPUID](a.name())
		return Alarm{id}, err
	case "drain":
		return Drain{a.name() == "on"}, nil
	case "stop":
		return Stopped{}, nil
	}
	id, err := number[LeaseID](a.name())
	if err != nil {
		return nil, err
	}
	end := EndCompleted
	if cmd == "clientgone" {
		end = EndDisconnected
	}
	var ttl time.Duration
	if err := errors.Join(fill(a, "ttl", &ttl, time.ParseDuration), fill(a, "end", &end, named[LeaseEnd])); err != nil {
		return nil, err
	}
	switch cmd {
	case "renew":
		return LeaseRenewed{id, ttl}, nil
	case "complete":
		return LeaseFinished{id, end}, nil
	case "clientgone":
		return ClientGone{ClientID(id), end}, nil
	case "backlog":
		_, busy := a.text("busy")
		return ClientBacklog{ClientID(id), busy}, nil
	}
	return nil, errors.New("no such command")
}

func (s *scenario) request(cmd string, a arguments) (LeaseRequested, error) {
	id, err := number[LeaseID](a.name())
	if err != nil {
		return LeaseRequested{}, err
	}
	req := LeaseRequested{Lease: id, Client: 1, GPUs: []gpreempt.GPUID{1}, Priority: gpreempt.PriorityHigh, TTL: time.Second, MaxWait: 20 * time.Millisecond}
	if cmd == "order" {
		req.Client, req.GPUs, req.Priority = 0, nil, gpreempt.PriorityAdmin
	}
	_, req.OnIdle = a.text("idle")
	return req, errors.Join(
		fill(a, "client", &req.Client, number[ClientID]),
		fill(a, "user", &req.User, func(s string) (UserID, error) { return UserID(s), nil }),
		fill(a, "request", &req.RequestID, func(s string) (string, error) { return s, nil }),
		fill(a, "gpus", &req.GPUs, gpuList),
		fill(a, "prio", &req.Priority, number[gpreempt.Priority]),
		fill(a, "ttl", &req.TTL, time.ParseDuration),
		fill(a, "maxwait", &req.MaxWait, time.ParseDuration),
		fill(a, "eta", &req.ETA, time.ParseDuration),
		fill(a, "slo", &req.SLO, time.ParseDuration),
		fill(a, "expected", &req.Expected, time.ParseDuration),
		fill(a, "target", &req.Target, gpreempt.ParseProcessKey),
	)
}

func (s *scenario) targetEvent(cmd string, a arguments) (Event, error) {
	key, err := gpreempt.ParseProcessKey(a.name())
	if err != nil {
		return nil, err
	}
	switch cmd {
	case "gone":
		return TargetGone{key}, nil
	case "born":
		return QueueBorn{key}, nil
	case "hold":
		ev := Hold{Target: key}
		return ev, fill(a, "for", &ev.For, time.ParseDuration)
	case "target":
		ev := TargetSeen{Target: key, Class: gpreempt.Offline, GPUs: []gpreempt.GPUID{1}, Queues: 1}
		if t := s.observer.targets[key]; t != nil {
			ev = t.TargetSeen
		}
		return ev, errors.Join(
			fill(a, "class", &ev.Class, gpreempt.ParseClass),
			fill(a, "prio", &ev.Priority, number[gpreempt.Priority]),
			fill(a, "gpus", &ev.GPUs, gpuList),
			fill(a, "job", &ev.Job, func(s string) (string, error) { return s, nil }),
			fill(a, "queues", &ev.Queues, number[uint64]),
		)
	}
	ev := Suspended{Target: key, Took: 400 * time.Microsecond}
	if t := s.observer.targets[key]; t != nil {
		ev.Seq = t.flight
		if cmd == "resumed" && t.detaching {
			cmd = "detached"
		}
	}
	err = errors.Join(
		fill(a, "seq", &ev.Seq, number[uint64]),
		fill(a, "took", &ev.Took, time.ParseDuration),
		fill(a, "result", &ev.Result, named[Outcome]),
		fill(a, "failed", &ev.FailedGPUs, gpuList),
	)
	switch cmd {
	case "attached":
		_, births := a.text("births")
		return Attached{key, ev.Result, ev.FailedGPUs, births}, err
	case "detached":
		return Detached{key, ev.Result, ev.FailedGPUs, ev.Took}, err
	case "lost":
		return Lost{key, ev.Result, ev.FailedGPUs}, err
	case "resumed":
		return Resumed(ev), err
	}
	return ev, err
}

// look shows what readers are told.
func (s *scenario) look(cmd string, a arguments) error {
	switch cmd {
	case "dump":
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
		fmt.Fprintf(&s.out, "%s leases=%v\n", e.Verdict, e.Leases)
		for _, check := range e.Checks {
			result := map[CheckResult]string{CheckPass: "pass", CheckRun: "run", CheckSuspend: "suspend"}[check.Result]
			fmt.Fprintf(&s.out, "  %-8s%s%s: %s\n", result, map[bool]string{true: "* "}[check.Decides], check.Name, check.Detail)
		}
		return err
	case "admit":
		kind := "lease"
		if _, ok := a.text("target"); ok {
			kind = "order"
		}
		req, err := s.request(kind, a)
		if err != nil {
			return err
		}
		id, refused := s.core.Admit(&req)
		fmt.Fprintf(&s.out, "admit: %s\n", outcome(id, refused))
		return nil
	}
	id, err := number[LeaseID](a.name())
	if err != nil {
		return err
	}
	if cmd == "owned" {
		var client ClientID
		err := fill(a, "client", &client, number[ClientID])
		fmt.Fprintf(&s.out, "owned: %s\n", outcome(0, s.core.Owned(client, id)))
		return err
	}
	end, held, ok := s.core.Ended(id)
	answer, answered := s.core.Answered(id)
	fmt.Fprintf(&s.out, "ended: %v %v %v; answered: %+v %v\n", ok, end, held, answer, answered)
	return nil
}

func outcome(id LeaseID, err error) string {
	switch {
	case err != nil:
		return fmt.Sprintf("%s: %v", gpreempt.ReasonOf(err), err)
	case id != 0:
		return fmt.Sprintf("that is lease %d", id)
	}
	return "ok"
}

func (s *scenario) dump() {
	for _, t := range s.core.Targets() {
		fmt.Fprintf(&s.out, "target %v %v prio=%d %v gpus=%v ready=%v suspends=%d away=%v learned=%v/%v", t.Key, t.Class, t.Priority, t.State, t.GPUs,
			t.Ready, t.Suspends, t.SuspendedTotal, t.LearnedSuspend, t.LearnedResume)
		if away(t.State) {
			fmt.Fprintf(&s.out, " runs-by=%v", t.RunsBy)
		}
		s.out.WriteByte('\n')
	}
	for _, l := range s.core.Leases() {
		fmt.Fprintf(&s.out, "lease %d client=%d %v gpus=%v prio=%d expires=%v", l.ID, l.Client, l.State, l.GPUs, l.Priority, l.Expires)
		if !l.Target.IsZero() {
			fmt.Fprintf(&s.out, " target=%v", l.Target)
		}
		s.out.WriteByte('\n')
	}
	for _, u := range s.core.GPUs() {
		fmt.Fprintf(&s.out, "gpu %v leases=%d suspended=%d breaker=%v", u.ID, u.Leases, u.Suspended, u.BreakerOpen)
		if u.BreakerOpen {
			fmt.Fprintf(&s.out, " closes=%v", u.BreakerCloses)
		}
		s.out.WriteByte('\n')
	}
}
