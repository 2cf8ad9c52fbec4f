package trial

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/scenario"
)

// Bounds of what is waited for before the arms begin, on hardware and elsewhere, where nothing is loaded.
const (
	progressTime, quickProgressTime = time.Minute, 15 * time.Second
	suspendTime                     = 15 * time.Second
	// quickAnswerTime bounds the first requests where nothing is loaded.
	quickAnswerTime = 15 * time.Second
	// slowTime is after how long it is said what is waited for.
	slowTime       = 5 * time.Second
	quickReadyTime = 40 * time.Second
	// whyTime is how long a mechanism may take to be ready, and whyPause that between two looks.
	whyTime, whyPause = time.Second, 100 * time.Millisecond
	// reportedTime is how long a command that makes its requests itself may take for the first.
	reportedTime = time.Minute
	// strayTime is how long a server is given to write a line that nobody asked for.
	strayTime = 200 * time.Millisecond
)

// PreflightError is why a trial would end without figures, and what to do. Nothing was measured.
type PreflightError struct{ Problem, Remedy string }

func (e *PreflightError) Error() string { return e.Problem + ": " + e.Remedy }

// bound is long on hardware, where models are loaded, and quick elsewhere.
func (t *trial) bound(long, quick time.Duration) time.Duration {
	if t.run.Origin == evidence.Hardware {
		return long
	}
	return quick
}

// begin watches the daemon, sets the policy of the arm and starts the offline jobs.
func (p *play) begin(ctx context.Context) (err error) {
	if p.events, err = p.daemon.watch(ctx); err != nil {
		return err
	}
	if err := p.setPolicy(ctx); err != nil {
		return err
	}
	return p.startJobs(ctx)
}

// preflight runs the work once before the arms begin: each job has a queue and reports its progress,
// a request is answered, it gets a lease, and the jobs are suspended for it. It chooses a rate of
// requests for a plan without one.
func (t *trial) preflight(ctx context.Context) (err error) {
	p := &play{trial: t, arm: t.hardest(), name: "preflight", repeat: -1}
	defer func() {
		if err = p.undo(ctx, err); ctx.Err() != nil {
			err = fmt.Errorf("it was interrupted before its arms: %w", context.Cause(ctx))
		}
	}()
	p.say("looking whether the work runs")
	if err := p.begin(ctx); err != nil {
		return err
	}
	if err := p.seeProgress(ctx); err != nil {
		return err
	}
	if p.arm.Kind == evidence.OfflineAlone {
		return nil
	}
	if err := p.startOnline(ctx); err != nil {
		return err
	}
	took, err := p.seeRequest(ctx)
	if err != nil {
		return err
	}
	if p.plan.chosenRate() {
		p.plan.Arrivals = scenario.Arrivals{Kind: scenario.Constant, Rate: rateFor(took)}
		p.run.ChosenRate = p.plan.Arrivals.Rate
	}
	if p.arm.Kind == evidence.Protected && !p.plan.Offline.none() {
		if err := p.seeSuspension(ctx); err != nil {
			return err
		}
	}
	return p.jobsRun()
}

// hardest is the arm that needs most of the work: a protected one, or shared, or what the plan has.
func (t *trial) hardest() Arm {
	for _, kind := range []evidence.ArmKind{evidence.Protected, evidence.Shared} {
		for i, arm := range t.plan.Arms {
			if arm.Kind == kind && t.run.Arms[i].Missing == "" {
				return arm
			}
		}
	}
	if t.plan.wants(evidence.OfflineAlone) && t.plan.wants(evidence.OnlineAlone) {
		return Arm{Kind: evidence.Shared}
	}
	return t.plan.Arms[0]
}

// rateFor chooses a rate at which requests that take so long keep the server busy for a quarter of the
// time, with at most highestRate.
func rateFor(took time.Duration) float64 {
	rate := min(highestRate, 0.25/max(took.Seconds(), 1e-3))
	if rate < 1 {
		return max(0.01, math.Floor(100*rate)/100)
	}
	return math.Floor(rate)
}

// seeProgress waits until each job has reported its progress, or until the daemon reads the slots
// of all.
func (p *play) seeProgress(ctx context.Context) error {
	if p.plan.Offline.none() || p.arm.Kind == evidence.OnlineAlone {
		return nil
	}
	p.say("waiting for the progress of the jobs")
	began, most := time.Now(), p.bound(progressTime, quickProgressTime)
	var slots slotCounter
	for {
		silent := slices.IndexFunc(p.jobs, func(j *job) bool { return !j.progress.seen() })
		if silent < 0 && len(p.jobs) > 0 {
			return nil
		}
		if len(p.jobs) == 0 || time.Since(began) > slotsAfter {
			targets, err := p.offlineTargets(ctx)
			if err != nil {
				return err
			}
			if slots.read(ctx, p.daemon.admin, targets); slots.readings > 0 {
				return nil
			}
		}
		if time.Since(began) > most {
			unread := cmp.Or(slots.unread, "it has matched none with their queues")
			if silent < 0 {
				return &PreflightError{
					"the progress of jobs that run already is read from their hardware slots, and the daemon does not find them, because " + unread,
					"gpctl doctor says what is missing",
				}
			}
			j := p.jobs[silent]
			return &PreflightError{
				fmt.Sprintf("%s reported no progress within %v: %s", j.name, most, j.progress.last(p.plan.Offline.Progress)),
				"have it print a line such as step 12, or name yours with --progress",
			}
		}
		if err := errors.Join(p.jobsRun(), sleep(ctx, pollTime)); err != nil {
			return err
		}
	}
}

// seeRequest makes a request without announcing it, or waits for one that the command makes, and
// returns how long the second took: the first may load a model.
func (p *play) seeRequest(ctx context.Context) (took time.Duration, err error) {
	p.say("waiting for the answer to a request")
	if o := &p.plan.Online; o.Hold > 0 {
		return o.Hold, nil
	} else if o.Request == "" {
		var r evidence.Repeat
		if err := p.server.listen(ctx, time.Now(), 1, reportedTime, &r, func() {}); err != nil {
			return 0, err
		}
		switch {
		case len(r.Requests) == 0:
			return 0, &PreflightError{
				fmt.Sprintf("the online command reported no request within %v", reportedTime),
				fmt.Sprintf("have it write a line such as %s total_ms=12.5 for each, or name --request, and the trial makes them", requestWord),
			}
		case r.Requests[0].Failed != "":
			return 0, &PreflightError{"the first request failed: " + r.Requests[0].Failed, "look at the output of the online command in " + evidence.LogsDir}
		}
		return 0, nil
	}
	most := p.bound(requestTime, quickAnswerTime)
	for range 2 {
		now := time.Now()
		within, cancel := context.WithTimeoutCause(ctx, most, fmt.Errorf("no answer within %v", most))
		q, _ := p.server.request(within, now, now, nil)
		cancel()
		if q.Failed != "" {
			return 0, p.server.failed("the first request failed", q.Failed)
		}
		took = time.Since(now)
	}
	if p.plan.Online.Request != RequestByLine {
		return took, nil
	}
	// A line too much would be taken for the answer to the next request.
	if err := sleep(ctx, strayTime); err != nil {
		return 0, err
	}
	select {
	case line := <-p.server.answers:
		return 0, &PreflightError{
			fmt.Sprintf("the online command wrote more lines than it got requests, such as %.80q", line), "name those that are answers with --answer, and that by which it is ready with --ready",
		}
	default:
		return took, nil
	}
}

// failed is the failure of a request, with what to do about it.
func (s *server) failed(what, why string) error {
	remedy := "run the command of --request by hand: it must end with status 0"
	switch o := s.plan.Online; {
	case isURL(o.Request):
		remedy = "have the server listen there before its line of --ready, or give --request its address"
	case o.Request == RequestByLine && o.Answer != "":
		why += fmt.Sprintf("; --answer %q is looked for, and of the online command %s", o.Answer, s.last())
		remedy = "give --answer a part of the lines that answer"
	case o.Request == RequestByLine:
		why += "; of the online command " + s.last()
		remedy = "have the online command answer each line of its standard input with a line"
	}
	return &PreflightError{what + ": " + why, remedy}
}

// seeSuspension has a request announced, and waits until all jobs were suspended.
func (p *play) seeSuspension(ctx context.Context) error {
	p.say("waiting for the suspension of the jobs")
	targets, err := p.offlineTargets(ctx)
	if err != nil {
		return err
	}
	if announce := p.announce(targets); announce != nil {
		lease, err := announce(ctx)
		if err == nil {
			err = lease.Cause()
		}
		if err != nil {
			return &PreflightError{"a request got no lease: " + err.Error(), "gpctl doctor says what is missing"}
		}
		defer func() { _ = lease.Release(ctx) }() // it ends with its time to live otherwise
	}
	began := time.Now()
	for {
		announced, suspended := p.events.seen()
		left := slices.DeleteFunc(slices.Clone(targets), func(t *gpreemptv1.Target) bool { return suspended[t.GetTargetId()] })
		if len(left) == 0 {
			return nil
		}
		late := time.Since(began) > suspendTime
		switch {
		case late && !announced:
			return &PreflightError{
				fmt.Sprintf("the online command announced no request within %v, so nothing is suspended for it", suspendTime),
				"use a lease of an SDK in it (docs/integrations.md), or let the trial make the requests with --request and announce them",
			}
		case announced && time.Since(began) > whyTime:
			if err := p.daemon.whyNot(ctx, left[0], late); err != nil {
				return err
			}
		}
		if err := errors.Join(p.jobsRun(), sleep(ctx, whyPause)); err != nil {
			return err
		}
		if p.plan.Online.AnnouncedByCommand && p.plan.Online.Request != "" {
			if q, _ := p.server.request(ctx, time.Now(), time.Now(), nil); q.Failed != "" {
				return p.server.failed("a request failed", q.Failed)
			}
		}
	}
}

// whyNot returns why a target is not suspended while a lease is held, nil if it still may be, unless it
// is late.
func (d *daemon) whyNot(ctx context.Context, was *gpreemptv1.Target, late bool) error {
	status, err := d.admin.GetStatus(ctx, &gpreemptv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	list, err := d.admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{})
	if err != nil {
		return err
	}
	t := was
	if i := slices.IndexFunc(list.GetTargets(), func(t *gpreemptv1.Target) bool { return t.GetTargetId() == was.GetTargetId() }); i >= 0 {
		t = list.GetTargets()[i]
	}
	if known, why := notSuspended(status, t); known || late {
		return why
	}
	return nil
}

// notSuspended is whyNot by what the daemon says. known is false if waiting may help.
func notSuspended(status *gpreemptv1.GetStatusResponse, t *gpreemptv1.Target) (known bool, why error) {
	job := fmt.Sprintf("%s (%d)", t.GetComm(), t.GetPid())
	explain := fmt.Sprintf("gpctl target explain %d", t.GetPid())
	switch said := strings.TrimSpace(strings.Join([]string{t.GetAttachError(), t.GetMechanismWhy()}, " ")); {
	case status.GetDraining():
		return true, &PreflightError{"the daemon is drained and suspends nothing", "gpctl drain off"}
	case status.GetPolicy() == "shadow":
		return true, &PreflightError{"the policy shadow suspends nothing", "gpctl policy set balanced, or name another with --policy"}
	case t.GetClass() != gpreemptv1.Class_CLASS_OFFLINE:
		return true, &PreflightError{
			fmt.Sprintf("%s is not suspended, because it is not offline (decided by %s)", job, cmp.Or(t.GetDecidedBy(), "default")),
			fmt.Sprintf("gpctl target classify %d offline, or give it a rule in the daemon's config", t.GetPid()),
		}
	case len(status.GetMechanisms()) == 0:
		return true, &PreflightError{"the daemon has no mechanism to suspend " + job, "gpctl doctor says what is missing"}
	case t.GetMechanism() == "" && t.GetAttachError() != "":
		return true, &PreflightError{job + " cannot be suspended: " + said, explain + " says what to do"}
	default:
		return false, &PreflightError{
			fmt.Sprintf("%s was not suspended within %v while a lease was held", job, suspendTime) + after(": ", said), explain + " says more",
		}
	}
}

// after returns a text behind what separates it from the one before, "" without a text.
func after(separator, text string) string {
	if text == "" {
		return ""
	}
	return separator + text
}

// seen returns whether a lease was announced, and which targets were suspended, since watch.
func (w *watcher) seen() (announced bool, suspended map[string]bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	suspended = map[string]bool{}
	for _, e := range w.events {
		announced = announced || e.GetKind() == gpreemptv1.EventKind_EVENT_KIND_LEASE
		if e.GetKind() == gpreemptv1.EventKind_EVENT_KIND_TARGET && e.GetToTarget() == gpreemptv1.TargetState_TARGET_STATE_SUSPENDED {
			suspended[e.GetTargetId()] = true
		}
	}
	return announced, suspended
}
