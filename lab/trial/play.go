package trial

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/pkg/client"
)

// play is one repeat of an arm.
type play struct {
	*trial
	arm    Arm
	repeat int
	name   string // of the logs, instead of the arm and the repeat

	jobs   []*job
	server *server
	events *watcher
	// measured are the offline processes at the beginning of the window, except those whose pid
	// is not that of this pid namespace, and simulated ones.
	measured []*gpreemptv1.Target

	result    evidence.Repeat
	faults    []evidence.Fault
	alarms    []evidence.Alarm
	pids      []pidRow
	mechanism string
}

// job is an offline command that this trial started.
type job struct {
	*process
	progress *progress
}

// fault records why no verdict may be given, or that the run failed.
func (p *play) fault(fails bool, format string, args ...any) {
	p.faults = append(p.faults, evidence.Fault{Arm: p.arm.Name(), Repeat: p.repeat, What: fmt.Sprintf(format, args...), Fails: fails})
}

// play runs the repeat. It undoes everything it did, also when ctx has ended.
func (p *play) play(ctx context.Context) (err error) {
	p.say("starting")
	endTrace := p.traceKFD(ctx)
	defer func() {
		err = p.undo(ctx, err)
		endTrace()
	}()
	if err := p.daemon.awaitBreakers(ctx); err != nil {
		return err
	}
	if err := p.begin(ctx); err != nil {
		return err
	}
	if p.arm.Kind != evidence.OfflineAlone {
		if err := p.startOnline(ctx); err != nil {
			return err
		}
	}
	targets, err := p.warmUp(ctx)
	if err != nil {
		return err
	}
	if err := p.measure(ctx, targets); err != nil {
		return err
	}
	if err := p.noteOnlinePIDs(ctx); err != nil {
		return err
	}
	return p.verify(ctx)
}

// say reports what is being done.
func (p *play) say(text string) { p.report(cmp.Or(p.name, p.arm.Name())+": "+text, 0, 0) }

// undo undoes what the repeat did, which may have failed with err.
func (p *play) undo(ctx context.Context, err error) error {
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	// What is suspended is resumed first: a stopped process does not end by SIGTERM.
	err = errors.Join(err, p.daemon.restore(undo))
	p.stopWork()
	if p.events != nil {
		err = errors.Join(err, p.events.end())
	}
	return err
}

// setPolicy sets the policy of the arm, if it has one.
func (p *play) setPolicy(ctx context.Context) error {
	if p.arm.Policy == "" {
		return nil
	}
	return p.daemon.setPolicy(ctx, p.arm.Policy)
}

// startOnline starts the online command, and waits until it is ready.
func (p *play) startOnline(ctx context.Context) error {
	env, err := p.environment("online")
	if err != nil {
		return err
	}
	if p.server, err = startServer(&p.plan, p.log("online"), env); err != nil {
		return err
	}
	return p.server.await(ctx, p.bound(readyTime, quickReadyTime), func() {
		p.say("waiting for the server to be ready, with a line that matches " + p.plan.Online.Ready)
	})
}

func (p *play) log(name string) string { return p.path(evidence.LogsDir, "-"+name+".log") }

// roots are the pids of the jobs.
func (p *play) roots() (pids []int32) {
	for _, j := range p.jobs {
		pids = append(pids, j.pid())
	}
	return pids
}

// class is that of the offline processes in the arm.
func (p *play) class() gpreemptv1.Class {
	if p.arm.Kind == evidence.Protected {
		return gpreemptv1.Class_CLASS_OFFLINE
	}
	return gpreemptv1.Class_CLASS_UNMANAGED
}

// hintAfter is how long a job may take to have queues before the trial says what it waits for.
const hintAfter = 5 * time.Second

// startJobs starts the offline commands, and waits until each has queues and its class.
func (p *play) startJobs(ctx context.Context) error {
	if p.arm.Kind == evidence.OnlineAlone || p.plan.Offline.none() {
		return nil
	}
	pattern, err := regexp.Compile(p.plan.Offline.Progress)
	if err != nil {
		return err
	}
	for i, command := range p.plan.Offline.Commands {
		for n := range max(1, p.arm.Processes) {
			name := fmt.Sprintf("job-%d-%d", i+1, n+1)
			command := strings.ReplaceAll(command, "{queues}", strconv.Itoa(max(1, p.arm.Queues)))
			env, err := p.environment(name)
			if err != nil {
				return err
			}
			j := &job{progress: &progress{pattern: pattern}}
			if j.process, err = startProcess("job "+strconv.Itoa(i+1), command, p.log(name), env, j.progress.line); err != nil {
				return err
			}
			p.jobs = append(p.jobs, j)
		}
	}
	began, most := time.Now(), p.bound(readyTime, quickReadyTime)
	for {
		targets, err := p.offlineTargets(ctx)
		if err != nil {
			return err
		}
		missing := ""
		for _, j := range p.jobs {
			if !slices.ContainsFunc(targets, func(t *gpreemptv1.Target) bool {
				return t.GetQueueCount() > 0 && below(t.GetPid(), []int32{j.pid()}, readStat)
			}) {
				missing = j.name
			}
		}
		for _, pid := range p.plan.Offline.PIDs {
			if !slices.ContainsFunc(targets, func(t *gpreemptv1.Target) bool { return t.GetPid() == pid && t.GetQueueCount() > 0 }) {
				missing = fmt.Sprintf("process %d", pid)
			}
		}
		if p.daemon.empty != "" {
			missing = "container " + p.daemon.empty
		}
		switch {
		case missing == "":
			return p.daemon.classify(ctx, targets, p.class(), p.arm.Mechanism)
		case time.Since(began) > most:
			return &PreflightError{
				fmt.Sprintf("%s has no GPU queue after %v", missing, most),
				"it must use a GPU of this daemon, whose processes gpctl target list shows" + p.output(missing),
			}
		case time.Since(began) > hintAfter:
			p.say(fmt.Sprintf("waiting up to %v for a GPU queue of %s", most, missing))
		}
		if err := p.jobsRun(); err != nil {
			return err
		}
		if err := sleep(ctx, pollTime); err != nil {
			return err
		}
	}
}

// output says where the output of a job is, "" for a process that this trial did not start.
func (p *play) output(name string) string {
	for _, j := range p.jobs {
		if j.name == name {
			return "; its output is in " + j.log.Name()
		}
	}
	return ""
}

// jobsRun returns an error when a job has ended.
func (p *play) jobsRun() error {
	for _, j := range p.jobs {
		if j.hasEnded() {
			return fmt.Errorf("offline %s ended early, with %s: it must run for the whole repeat; its output is in %s", j.name, j.how(), j.log.Name())
		}
	}
	for _, t := range p.measured {
		if s, here := readStat(t.GetPid()); !here || s.MainEnded() {
			return fmt.Errorf("the offline process %s (%d) ended early: it must run for the whole repeat", t.GetComm(), t.GetPid())
		}
	}
	return nil
}

func (p *play) offlineTargets(ctx context.Context) ([]*gpreemptv1.Target, error) {
	if p.arm.Kind == evidence.OnlineAlone {
		return nil, nil
	}
	targets, err := p.daemon.targets(ctx, p.roots(), &p.plan.Offline)
	p.events.add(targets)
	return targets, err
}

// announce returns how requests are announced, nil for not at all.
func (p *play) announce(targets []*gpreemptv1.Target) func(context.Context) (*client.Lease, error) {
	if p.arm.Kind != evidence.Protected || p.plan.Online.AnnouncedByCommand || p.plan.Online.Request == "" && p.plan.Online.Hold == 0 {
		return nil
	}
	gpus := p.plan.GPUs
	if len(gpus) == 0 {
		gpus = gpusOf(targets)
	}
	return announcer(p.Client, gpus, p.plan.Online.MaxWait)
}

// warmUp runs the work without measuring, makes a request, and checks that a protected arm has the
// mechanism that it should.
func (p *play) warmUp(ctx context.Context) ([]*gpreemptv1.Target, error) {
	p.say("warming up")
	targets, err := p.offlineTargets(ctx)
	if err != nil {
		return nil, err
	}
	if p.server != nil && (p.plan.Online.Request != "" || p.plan.Online.Hold > 0) {
		now := time.Now()
		if q, _ := p.server.request(ctx, now, now, p.announce(targets)); q.Failed != "" {
			return nil, fmt.Errorf("the first request failed: %s", q.Failed)
		}
	}
	if err := sleep(ctx, p.plan.WarmUp); err != nil {
		return nil, err
	}
	if targets, err = p.offlineTargets(ctx); err != nil {
		return nil, err
	}
	if err := p.daemon.classify(ctx, targets, p.class(), p.arm.Mechanism); err != nil {
		return nil, err
	}
	for _, t := range targets {
		if _, here := readStat(t.GetPid()); here && p.run.Origin != evidence.Simulated {
			p.measured = append(p.measured, t)
		}
	}
	p.notePIDs("offline", targets)
	if err := p.noteOnlinePIDs(ctx); err != nil {
		return nil, err
	}
	return targets, p.jobsRun()
}

// measure runs the window.
func (p *play) measure(ctx context.Context, targets []*gpreemptv1.Target) error {
	from, err := p.daemon.clock(ctx)
	if err != nil {
		return err
	}
	began := time.Now()
	for _, j := range p.jobs {
		j.progress.window(true)
	}
	sampling, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	s := &sampler{play: p, began: began, stop: stop}
	var sampled sync.WaitGroup
	sampled.Go(func() { s.run(sampling) })

	times := p.plan.times(p.repeat)
	made := 0
	done := func() {
		made++
		p.report(p.arm.Name(), made, max(p.plan.Count, len(times)))
	}
	switch {
	case p.arm.Kind == evidence.OfflineAlone:
		err = p.wait(sampling, p.plan.window())
	case p.plan.Online.Request != "" || p.plan.Online.Hold > 0:
		err = p.server.play(sampling, began, times, p.announce(targets), &p.result, done, p.more(began, from))
		if rest := p.plan.Duration - time.Since(began); err == nil && rest > 0 && p.plan.Count == 0 {
			err = sleep(sampling, rest)
		}
	default:
		err = p.server.listen(sampling, began, p.plan.Count, p.plan.Duration, &p.result, done)
		if n := len(p.result.Requests); err == nil && p.plan.Count > n && p.plan.Duration == 0 {
			p.fault(false, "the online command made %d of %d requests", n, p.plan.Count)
		}
	}
	p.result.Seconds = time.Since(began).Seconds()
	for _, j := range p.jobs {
		j.progress.window(false)
	}
	stop(errors.New("measured"))
	sampled.Wait()
	if s.err != nil {
		return s.err
	}
	if err != nil {
		return err
	}
	p.countWork(s)
	p.settle(ctx, targets)
	if err := p.events.await(ctx, p.daemon); err != nil {
		return err
	}
	to := from + time.Duration(p.result.Seconds*float64(time.Second))
	p.alarms = append(p.alarms, p.events.collect(&p.result, from, to)...)
	return nil
}

// more returns whether another request is made after those of the plan: a limit needs more samples than
// the repeat has, and not yet half as many again were made.
func (p *play) more(began time.Time, from time.Duration) func(r *evidence.Repeat) bool {
	most := p.plan.Count + p.plan.Count/2
	if p.plan.Duration > 0 || p.limits.Least(p.arm.Kind, p.plan.Repeats) > most {
		return func(*evidence.Repeat) bool { return false }
	}
	return func(r *evidence.Repeat) bool {
		if len(r.Requests) >= most {
			return false
		}
		now := *r
		p.events.collect(&now, from, from+time.Since(began))
		return p.limits.Short(p.arm.Kind, &now, p.plan.Repeats)
	}
}

// wait waits for the end of a window without requests.
func (p *play) wait(ctx context.Context, d time.Duration) error {
	end := time.Now().Add(d)
	for {
		left := time.Until(end)
		if left <= 0 {
			return nil
		}
		p.report(p.arm.Name(), 0, 0)
		if err := sleep(ctx, min(left, time.Second)); err != nil {
			return err
		}
	}
}

// countWork sets how much the offline jobs did.
func (p *play) countWork(s *sampler) {
	if p.arm.Kind == evidence.OnlineAlone || p.plan.Offline.none() {
		return
	}
	rate, known := 0.0, len(p.jobs) > 0
	for _, j := range p.jobs {
		r, ok := j.progress.rate()
		rate += r
		known = known && ok
	}
	switch {
	case known:
		p.result.Work, p.result.WorkUnit = rate*p.result.Seconds, p.plan.Offline.Unit
	case s.slots.readings > 1:
		p.result.Work, p.result.WorkUnit = float64(s.slots.dwords), "dwords"
	default:
		p.result.WorkUnknown = fmt.Sprintf("the jobs wrote fewer than two lines that match %s, and the daemon found their hardware slots less than twice",
			p.plan.Offline.Progress)
	}
}

// settle waits until the offline processes run again, so that the last resume counts.
func (p *play) settle(ctx context.Context, targets []*gpreemptv1.Target) {
	ours := map[string]bool{}
	for _, t := range targets {
		ours[t.GetTargetId()] = true
	}
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); {
		list, err := p.daemon.admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{})
		if err != nil || !slices.ContainsFunc(list.GetTargets(), func(t *gpreemptv1.Target) bool {
			return ours[t.GetTargetId()] && t.GetState() != gpreemptv1.TargetState_TARGET_STATE_RUNNING
		}) {
			return
		}
		if sleep(ctx, pollTime) != nil {
			return
		}
	}
}

// verify reads the slots of a protected arm, ends the work, and takes what the jobs say of their
// packets.
func (p *play) verify(ctx context.Context) error {
	if err := p.jobsRun(); err != nil {
		return err
	}
	targets, err := p.offlineTargets(ctx)
	if err != nil {
		return err
	}
	for _, was := range p.measured {
		if !slices.ContainsFunc(targets, func(t *gpreemptv1.Target) bool { return t.GetTargetId() == was.GetTargetId() && t.GetQueueCount() > 0 }) {
			return fmt.Errorf("the offline process %s (%d) has no queues any more: it must run for the whole repeat", was.GetComm(), was.GetPid())
		}
	}
	if err := p.checkPriorities(ctx, targets); err != nil {
		return err
	}
	if p.arm.Kind == evidence.Protected && len(targets) > 0 {
		p.checkMechanism(targets)
		if err := p.daemon.probeSlots(ctx, targets, time.Duration(p.result.Seconds*float64(time.Second)), &p.result); err != nil {
			return err
		}
	}
	if err := p.jobsRun(); err != nil {
		return err
	}
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	if err := p.daemon.restore(undo); err != nil {
		return err
	}
	p.stopWork()
	return nil
}

// checkMechanism notes the mechanism of the offline processes.
func (p *play) checkMechanism(targets []*gpreemptv1.Target) {
	for _, t := range targets {
		switch got := t.GetMechanism(); {
		case got == "":
			p.fault(false, "%s cannot be suspended: %s", t.GetComm(), cmp.Or(t.GetAttachError(), t.GetMechanismWhy(), "no mechanism holds it"))
		case p.arm.Mechanism != "" && got != p.arm.Mechanism:
			p.fault(false, "%s is suspended by %s and not by %s: gpctl target explain says why", t.GetComm(), got, p.arm.Mechanism)
		default:
			p.mechanism = got
		}
	}
}

// stopWork ends all processes, and takes the proofs of the jobs.
func (p *play) stopWork() {
	var wg sync.WaitGroup
	for _, j := range p.jobs {
		wg.Go(func() { j.stop(stopTime) })
	}
	if p.server != nil && p.server.process != nil {
		wg.Go(func() { p.server.stop(stopTime) })
	}
	wg.Wait()
	if p.server != nil {
		p.server.http.CloseIdleConnections()
	}
	for _, j := range p.jobs {
		if proof := j.progress.packets(); proof != nil {
			p.result.Lost += proof.lost()
			p.result.Repeated += proof.repeated()
			if !proof.OK && proof.lost() == 0 && proof.repeated() == 0 {
				p.fault(true, "%s cannot prove that each packet ran once and in order", j.name)
			}
		}
	}
	p.jobs, p.server = nil, nil
}
