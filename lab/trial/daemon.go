package trial

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/spans"
)

// daemon is what a trial asks of gpreemptd.
type daemon struct {
	admin gpreemptv1.AdminServiceClient
	// before is the policy that restore sets, nil when it was not changed.
	before *gpreemptv1.Policy
	// classified are the targets with an override of ours, and when it was set.
	classified map[string]time.Time
	// containers has the IDs of those whose names the daemon does not know.
	containers map[string]string
	// empty is a container in which targets found none, "" without one.
	empty string
}

// setPolicy sets a preset until restore.
func (d *daemon) setPolicy(ctx context.Context, preset string) error {
	now, err := d.admin.GetPolicy(ctx, &gpreemptv1.GetPolicyRequest{})
	if err != nil {
		return err
	}
	if !slices.Contains(now.GetPresets(), preset) {
		return fmt.Errorf("the daemon has no policy %q: use one of %s", preset, strings.Join(now.GetPresets(), ", "))
	}
	d.before = now.GetPolicy()
	_, err = d.admin.SetPolicy(ctx, &gpreemptv1.SetPolicyRequest{Preset: preset})
	return err
}

// overrideTTL is how long an override lasts if this process is killed, and overrideRenew when it
// is renewed.
const (
	overrideTTL   = time.Minute
	overrideRenew = 20 * time.Second
)

// classify overrides the class of targets, and the mechanism if it is not "", until restore. It
// renews the overrides that are old.
func (d *daemon) classify(ctx context.Context, targets []*gpreemptv1.Target, class gpreemptv1.Class, mechanism string) error {
	for _, t := range targets {
		if at, ok := d.classified[t.GetTargetId()]; ok && time.Since(at) < overrideRenew {
			continue
		}
		_, err := d.admin.ClassifyTarget(ctx, &gpreemptv1.ClassifyTargetRequest{
			TargetId: t.GetTargetId(), Class: class, Ttl: durationpb.New(overrideTTL), Mechanism: mechanism,
		})
		if isUnknownTarget(err) {
			continue // it has exited
		}
		if err != nil {
			return fmt.Errorf("cannot classify %s (%d): %w", t.GetComm(), t.GetPid(), err)
		}
		d.classified[t.GetTargetId()] = time.Now()
	}
	return nil
}

// restore removes the overrides and sets the policy that was in force. It tries everything, and
// returns what failed; a target that has exited needs nothing.
func (d *daemon) restore(ctx context.Context) error {
	var failed []string
	for id := range d.classified {
		_, err := d.admin.ClassifyTarget(ctx, &gpreemptv1.ClassifyTargetRequest{TargetId: id})
		if err != nil && !isUnknownTarget(err) {
			failed = append(failed, fmt.Sprintf("target %s keeps its class: gpctl target classify %s auto", id, id))
		}
	}
	d.classified = map[string]time.Time{}
	if d.before != nil {
		req := &gpreemptv1.SetPolicyRequest{Policy: proto.CloneOf(d.before)}
		req.Policy.Preset = ""
		if _, err := d.admin.SetPolicy(ctx, req); err != nil {
			failed = append(failed, fmt.Sprintf("the policy is not %s again: gpctl policy set, or reload the daemon: %v", d.before.GetPreset(), err))
		}
		d.before = nil
	}
	if len(failed) > 0 {
		return fmt.Errorf("not everything was undone: %s", strings.Join(failed, "; "))
	}
	return nil
}

// targets returns the targets of the offline work: those below the processes with the given pids,
// those with one of the pids, and those in the containers.
func (d *daemon) targets(ctx context.Context, roots []int32, o *Offline) ([]*gpreemptv1.Target, error) {
	list, err := d.admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{})
	if err != nil {
		return nil, err
	}
	contained := map[string]bool{}
	d.empty = ""
	for _, name := range o.Containers {
		in, err := d.admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{Container: cmp.Or(d.containers[name], name)})
		if err != nil {
			return nil, err
		}
		if len(in.GetTargets()) == 0 {
			d.empty = name
		}
		for _, t := range in.GetTargets() {
			contained[t.GetTargetId()] = true
		}
	}
	return slices.DeleteFunc(list.GetTargets(), func(t *gpreemptv1.Target) bool {
		return !contained[t.GetTargetId()] && !slices.Contains(o.PIDs, t.GetPid()) && !below(t.GetPid(), roots, readStat)
	}), nil
}

// gpusOf returns the GPUs of targets, sorted.
func gpusOf(targets []*gpreemptv1.Target) []uint32 {
	var gpus []uint32
	for _, t := range targets {
		gpus = append(gpus, t.GetGpuIds()...)
	}
	slices.Sort(gpus)
	return slices.Compact(gpus)
}

// watcher collects the events of the offline targets.
type watcher struct {
	cancel context.CancelFunc
	ended  chan struct{}

	mu sync.Mutex // guards all below
	// after is the revision before the first event, and ours are the targets of the trial.
	after  uint64
	ours   map[string]bool
	events []*gpreemptv1.Event
	err    error
}

// watch begins to collect events.
func (d *daemon) watch(ctx context.Context) (*watcher, error) {
	status, err := d.admin.GetStatus(ctx, &gpreemptv1.GetStatusRequest{})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	stream, err := d.admin.WatchEvents(ctx, &gpreemptv1.WatchEventsRequest{AfterRevision: status.GetEventRevision()})
	if err != nil {
		cancel()
		return nil, err
	}
	w := &watcher{cancel: cancel, ended: make(chan struct{}), ours: map[string]bool{}, after: status.GetEventRevision()}
	go func() {
		defer close(w.ended)
		for {
			m, err := stream.Recv()
			w.mu.Lock()
			if err != nil {
				if ctx.Err() == nil {
					w.err = err
				}
				w.mu.Unlock()
				return
			}
			w.events = append(w.events, m.GetEvent())
			w.mu.Unlock()
		}
	}()
	return w, nil
}

// add makes targets ours.
func (w *watcher) add(targets []*gpreemptv1.Target) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, t := range targets {
		w.ours[t.GetTargetId()] = true
	}
}

// await returns when all events until now have arrived.
func (w *watcher) await(ctx context.Context, d *daemon) error {
	status, err := d.admin.GetStatus(ctx, &gpreemptv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	for {
		w.mu.Lock()
		n := len(w.events)
		over := w.err != nil || status.GetEventRevision() == w.after || n > 0 && w.events[n-1].GetRevision() >= status.GetEventRevision()
		w.mu.Unlock()
		if over {
			return nil // end returns w.err
		}
		if err := sleep(ctx, pollTime); err != nil {
			return err
		}
	}
}

// end stops the watcher. The error is why events may be missing.
func (w *watcher) end() error {
	w.cancel()
	<-w.ended
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return fmt.Errorf("the daemon's events were lost: %w", w.err)
	}
	return nil
}

// collect adds what the events between two times of the daemon's clock say to a repeat.
func (w *watcher) collect(r *evidence.Repeat, from, to time.Duration) (alarms []evidence.Alarm) {
	const quarantined = gpreemptv1.TargetState_TARGET_STATE_QUARANTINED
	w.mu.Lock()
	defer w.mu.Unlock()
	var builder spans.Builder
	var all []spans.Span
	for _, e := range w.events {
		all = builder.Add(e, all)
		alarm := func(from, text string) {
			if e.GetMessage() != "" {
				text += ": " + e.GetMessage()
			}
			alarms = append(alarms, evidence.Alarm{At: e.GetAt().AsTime(), From: from, Text: text})
		}
		switch {
		case e.GetKind() == gpreemptv1.EventKind_EVENT_KIND_BREAKER:
			alarm("breaker of GPU "+strconv.FormatUint(uint64(e.GetGpuId()), 10), e.GetCause())
		case w.ours[e.GetTargetId()] && e.GetToTarget() == quarantined && e.GetFromTarget() != quarantined:
			alarm("target "+e.GetTargetId(), "quarantined, "+e.GetCause())
		}
	}
	within := func(at time.Duration) bool { return at >= from && at <= to }
	for _, s := range builder.Open(to, all) {
		moved := evidence.Timed{At: ms(s.End - s.Took - from), MS: ms(s.Took)}
		switch {
		case !w.ours[s.Target]:
		case s.Kind == spans.Suspending && s.Done() && within(s.End):
			r.Suspends = append(r.Suspends, moved)
		case s.Kind == spans.Resuming && s.Done() && within(s.End-s.Took):
			r.Resumes = append(r.Resumes, moved)
		case s.Kind == spans.Suspended && s.Begin <= to && s.End >= from:
			r.Spans = append(r.Spans, evidence.Span{From: ms(max(s.Begin, from) - from), To: ms(min(s.End, to) - from), What: "suspended", Name: s.Target})
		}
	}
	const most = 5000
	slices.SortFunc(r.Spans, func(a, b evidence.Span) int { return compareSpans(&a, &b) })
	r.Spans = r.Spans[:min(len(r.Spans), most)]
	return alarms
}

// missing returns for each arm why the daemon cannot run it, "" if it can.
func (d *daemon) missing(ctx context.Context, arms []Arm) ([]string, error) {
	status, err := d.admin.GetStatus(ctx, &gpreemptv1.GetStatusRequest{})
	if err != nil {
		return nil, err
	}
	why := make([]string, len(arms))
	for i, arm := range arms {
		if has := status.GetMechanisms(); arm.Mechanism != "" && !slices.Contains(has, arm.Mechanism) {
			why[i] = fmt.Sprintf("the daemon has no mechanism %q: it has %s", arm.Mechanism, cmp.Or(strings.Join(has, ", "), "none"))
		}
	}
	return why, nil
}

// clock returns the daemon's clock.
func (d *daemon) clock(ctx context.Context) (time.Duration, error) {
	status, err := d.admin.GetStatus(ctx, &gpreemptv1.GetStatusRequest{})
	return status.GetClock().AsDuration(), err
}

// environment returns what may make two runs unlike, and which machine the daemon serves.
func (d *daemon) environment(ctx context.Context, version string) (env map[string]string, backend string, err error) {
	status, err := d.admin.GetStatus(ctx, &gpreemptv1.GetStatusRequest{})
	if err != nil {
		return nil, "", err
	}
	gpus, err := d.admin.ListGpus(ctx, &gpreemptv1.ListGpusRequest{})
	if err != nil {
		return nil, "", err
	}
	policy, err := d.admin.GetPolicy(ctx, &gpreemptv1.GetPolicyRequest{})
	if err != nil {
		return nil, "", err
	}
	doctor, err := d.admin.Diagnose(ctx, &gpreemptv1.DiagnoseRequest{})
	if err != nil {
		return nil, "", err
	}
	env = map[string]string{"gplab": version, "gpreemptd": status.GetVersion(), "policy": policy.GetPolicy().GetPreset(), "processors": processors()}
	models := map[string]int{}
	for _, g := range gpus.GetGpus() {
		models[fmt.Sprintf("%s gfx%d, %d XCC, %d slots", g.GetName(), g.GetGfxTargetVersion(), g.GetXccCount(), g.GetQueueSlots())]++
	}
	for model, n := range models {
		env["gpu "+model] = strconv.Itoa(n)
	}
	for _, c := range doctor.GetChecks() {
		if slices.Contains([]string{"kernel", "kfd-interface", "debug-firmware", "sched-policy", "cwsr", "cgroup"}, c.GetId()) {
			env["doctor "+c.GetId()] = strings.TrimSpace(api.EnumName(c.GetStatus()) + " " + c.GetFound())
		}
	}
	return env, status.GetBackend(), nil
}

// originOf returns the origin of the figures of a daemon.
func originOf(backend string) evidence.Origin {
	for _, origin := range []evidence.Origin{evidence.Simulated, evidence.Emulated} {
		if strings.HasPrefix(backend, string(origin)) {
			return origin
		}
	}
	return evidence.Hardware
}

// suspendedFor reports whether the targets have been suspended for at least some time.
func (d *daemon) suspendedFor(ctx context.Context, targets []*gpreemptv1.Target, least time.Duration) (bool, error) {
	list, err := d.admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{})
	if err != nil {
		return false, err
	}
	n := 0
	for _, t := range list.GetTargets() {
		if t.GetState() == gpreemptv1.TargetState_TARGET_STATE_SUSPENDED && t.GetInState().AsDuration() >= least &&
			slices.ContainsFunc(targets, func(o *gpreemptv1.Target) bool { return o.GetTargetId() == t.GetTargetId() }) {
			n++
		}
	}
	return n == len(targets), nil
}

// awaitBreakers waits until no breaker is open, which an earlier repeat may have caused, or until
// breakerTime is over: nothing would be suspended in this one.
func (d *daemon) awaitBreakers(ctx context.Context) error {
	for end := time.Now().Add(breakerTime); ; {
		gpus, err := d.admin.ListGpus(ctx, &gpreemptv1.ListGpusRequest{})
		if err != nil || !slices.ContainsFunc(gpus.GetGpus(), (*gpreemptv1.Gpu).GetBreakerOpen) || time.Now().After(end) {
			return err
		}
		if err := sleep(ctx, pollTime); err != nil {
			return err
		}
	}
}

const (
	// breakerTime is longer than a breaker stays open.
	breakerTime = 40 * time.Second
	// slotTime is how long the offline processes are suspended at most while slots are read: the
	// daemon's reading may be a second old.
	slotTime = 8 * time.Second
	// slotAge is how long the daemon may answer with the same reading, and some time to make one.
	slotAge = 1200 * time.Millisecond
	// slotSettle is how long the slots may take to show a change: an emulated machine writes them
	// as files, a few times a second.
	slotSettle = 200 * time.Millisecond
)
