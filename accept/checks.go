package accept

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/accept/conformance"
	"github.com/gpreempt/gpreempt/accept/workload"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// result collects what a stage finds.
type result struct {
	b        *bench
	stage    string
	notes    []string
	controls []string
	measures []Measure
	files    map[string][]byte
}

func (r *result) note(format string, args ...any) {
	r.notes = append(r.notes, fmt.Sprintf(format, args...))
}

// samples adds a measure with its raw samples, a line for each repeat.
func (r *result) samples(name string, repeats [][]float64) Measure {
	file := "samples/" + r.stage + "-" + strings.ReplaceAll(name, " ", "-") + ".txt"
	var b strings.Builder
	for _, samples := range repeats {
		for i, s := range samples {
			if i > 0 {
				b.WriteByte(' ')
			}
			b.WriteString(strconv.FormatFloat(s, 'f', 1, 64))
		}
		b.WriteByte('\n')
	}
	m := measure(name, file, repeats)
	r.files[file], r.measures = []byte(b.String()), append(r.measures, m)
	return m
}

// cycles returns n, or a hundredth of it in a quick acceptance.
func (r *result) cycles(n int) int {
	if r.b.cfg.Quick {
		return max(n/100, 10)
	}
	return n
}

// judge returns an error if a measure of a real GPU is above mostLatency.
func (r *result) judge(m Measure) error {
	if r.b.machine() == hardware && m.P99 > float64(mostLatency.Microseconds()) {
		return fmt.Errorf("%s: the 99th percentile is %.0f µs, more than %v", m.Name, m.P99, mostLatency)
	}
	return nil
}

// heldJob is a job that is held.
type heldJob struct {
	job
	session mechanism.Session
}

// hold starts a job and holds it. The caller calls drop.
func (r *result) hold(ctx context.Context, cfg workload.Config) (heldJob, error) {
	return r.holdBy(ctx, r.b.attach, cfg)
}

func (r *result) holdBy(ctx context.Context, how attach, cfg workload.Config) (heldJob, error) {
	j, err := r.b.start(ctx, cfg)
	if err != nil {
		return heldJob{}, err
	}
	s, err := how(ctx, j.Key())
	if err != nil {
		return heldJob{}, errors.Join(err, j.Kill())
	}
	return heldJob{j, s}, nil
}

// drop ends the session and the job, and adds errors to err.
func (h heldJob) drop(err *error) { *err = errors.Join(*err, h.session.Close(), h.Kill()) }

// The pauses between questions to a job that is waited for.
const (
	shortest = 100 * time.Microsecond
	longest  = 20 * time.Millisecond
)

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// stands reports whether a job that has work makes no progress for a time, and its progress.
func stands(ctx context.Context, j job, window time.Duration) (bool, workload.Reply, error) {
	before, err := j.Ask(ctx, "beats")
	if err != nil {
		return false, before, err
	}
	wait := shortest
	for now := before; now.Pending == 0; wait = min(2*wait, longest) {
		if err := pause(ctx, wait); err != nil {
			return false, before, fmt.Errorf("the job has no work that could stand still: %w", err)
		}
		if now, err = j.Ask(ctx, "beats"); err != nil || now.Beats != before.Beats {
			return false, now, err
		}
	}
	if err := pause(ctx, window); err != nil {
		return false, before, err
	}
	after, err := j.Ask(ctx, "beats")
	return after.Beats == before.Beats, after, err
}

// runs waits until each queue of a job makes progress beyond a reply.
func runs(ctx context.Context, j job, from workload.Reply) error {
	return until(ctx, j, func(now workload.Reply) bool { return beyond(from, now) })
}

// beyond reports whether each queue has made progress since a reply, one that is new has made any.
func beyond(from, now workload.Reply) bool {
	for i, beats := range now.Each {
		if beats == 0 || i < len(from.Each) && beats <= from.Each[i] {
			return false
		}
	}
	return len(now.Each) > 0
}

// until asks a job for its progress until that is enough.
func until(ctx context.Context, j job, enough func(workload.Reply) bool) error {
	const most = 30 * time.Second
	limited, cancel := context.WithTimeoutCause(ctx, most, fmt.Errorf("no progress within %v", most))
	defer cancel()
	for wait := shortest; ; wait = min(2*wait, longest) {
		reply, err := j.Ask(limited, "beats")
		if err != nil || enough(reply) {
			return err
		}
		if err := pause(limited, wait); err != nil {
			return err
		}
	}
}

// gap waits until a job has made progress. It returns the longest time without any since the last
// reply, in microseconds.
func gap(ctx context.Context, j job) (float64, error) {
	before, err := j.Ask(ctx, "beats")
	if err != nil {
		return 0, err
	}
	most := before.Gap
	err = until(ctx, j, func(now workload.Reply) bool {
		most = max(most, now.Gap)
		return beyond(before, now)
	})
	return float64(most.Nanoseconds()) / 1e3, err
}

// cycle suspends and resumes a job, and checks that it stands still in between and runs
// after. It returns the durations of the two calls in microseconds.
func (h heldJob) cycle(ctx context.Context, window time.Duration) (suspend, resume float64, err error) {
	began := time.Now()
	if err := h.session.Suspend(ctx, nil); err != nil {
		return 0, 0, fmt.Errorf("SUSPEND: %w", err)
	}
	suspend = micros(began)
	still, then, err := stands(ctx, h, window)
	if err == nil && !still {
		err = errors.New("the job went on after SUSPEND")
	}
	if err != nil {
		return 0, 0, err
	}
	began = time.Now()
	if err := h.session.Resume(ctx); err != nil {
		return 0, 0, fmt.Errorf("RESUME: %w", err)
	}
	resume = micros(began)
	if err := runs(ctx, h, then); err != nil {
		return 0, 0, fmt.Errorf("after RESUME: %w", err)
	}
	return suspend, resume, nil
}

func micros(began time.Time) float64 { return float64(time.Since(began).Nanoseconds()) / 1e3 }

// control leaves SUSPEND out: a check that cannot see that the job goes on proves nothing. It
// returns the time for which a job must stand still to count as suspended: the shortest one,
// doubled from a millisecond on, in which every control noticed progress.
func (r *result) control(ctx context.Context, j job) (time.Duration, error) {
	for window := time.Millisecond; window <= mostWindow; window *= 2 {
		noticed := 0
		for ; noticed < controls; noticed++ {
			still, _, err := stands(ctx, j, window)
			if err != nil {
				return 0, fmt.Errorf("control: %w", err)
			}
			if still {
				break
			}
		}
		if noticed == controls {
			r.controls = append(r.controls, fmt.Sprintf("SUSPEND left out: noticed %d times of %d, in windows of %v", noticed, controls, window))
			return window, nil
		}
	}
	return 0, fmt.Errorf("the check cannot fail: with SUSPEND left out, a running job stood still for %v", mostWindow)
}

func (r *result) heartbeat(ctx context.Context, cfg workload.Config) (err error) {
	var suspends, resumes [][]float64
	for range repeats {
		s, c, err := r.repeat(ctx, cfg, r.cycles(10_000)/repeats+1, 0)
		if err != nil {
			return err
		}
		suspends, resumes = append(suspends, s), append(resumes, c)
	}
	r.samples("SUSPEND", suspends)
	r.samples("RESUME", resumes)
	return nil
}

// repeat starts a job, makes the control, and n cycles, or as many as a time has.
func (r *result) repeat(ctx context.Context, cfg workload.Config, n int, long time.Duration) (suspends, resumes []float64, err error) {
	h, err := r.hold(ctx, cfg)
	if err != nil {
		return nil, nil, err
	}
	defer h.drop(&err)
	window, err := r.control(ctx, h)
	if err != nil {
		return nil, nil, err
	}
	for began := time.Now(); len(suspends) < n || time.Since(began) < long; {
		s, c, err := h.cycle(ctx, window)
		if err != nil {
			return nil, nil, fmt.Errorf("cycle %d: %w", len(suspends), err)
		}
		suspends, resumes = append(suspends, s), append(resumes, c)
	}
	reply, err := h.Ask(ctx, "beats")
	if err == nil && reply.Wrong > 0 {
		err = fmt.Errorf("%d checksums were wrong", reply.Wrong)
	}
	return suspends, resumes, err
}

func (r *result) cycleFor(ctx context.Context, cfg workload.Config, long time.Duration) error {
	suspends, resumes, err := r.repeat(ctx, cfg, 1, long)
	if err != nil {
		return err
	}
	r.samples("SUSPEND", [][]float64{suspends})
	r.samples("RESUME", [][]float64{resumes})
	r.note("%d cycles in %v", len(suspends), long)
	return nil
}

// conform plays the conformance table.
func conform(ctx context.Context, r *result) error {
	host := conformance.Host{Version: r.b.device.Version()}
	if _, rules, emulated := strings.Cut(r.b.machine(), " with the rules of "); emulated {
		host.Profile, _, _ = strings.Cut(rules, " ")
	}
	for _, g := range r.b.gpus {
		host.GFX, host.GPUs = append(host.GFX, g.GFX), append(host.GPUs, uint32(g.ID))
	}
	var differ []string
	var first error
	var list strings.Builder
	agree, left := 0, 0
	err := conformance.Play(ctx, host, os.TempDir(), func(c conformance.Result) {
		switch {
		case c.NotRun != "":
			left++
			fmt.Fprintf(&list, "NOT RUN  %s: %s\n", c.Name, c.NotRun)
		case c.Err != nil:
			differ, first = append(differ, c.Name), cmp.Or(first, c.Err)
			fmt.Fprintf(&list, "DIFFERS  %s: %v\n", c.Name, c.Err)
		default:
			agree++
			fmt.Fprintf(&list, "agrees   %s\n", c.Name)
		}
	})
	r.files["conformance.txt"] = []byte(list.String())
	r.note("%d expectations agree, %d differ, %d not run", agree, len(differ), left)
	if err == nil && len(differ) > 0 {
		err = fmt.Errorf("the driver differs in %s; the first: %w", strings.Join(differ, ", "), first)
	}
	return err
}

// attachments enables and disables debugging.
func attachments(ctx context.Context, r *result) (err error) {
	var enables, disables [][]float64
	for range repeats {
		j, err := r.b.start(ctx, workload.Config{Queues: 2})
		if err != nil {
			return err
		}
		var e, d []float64
		for range r.cycles(100) {
			began := time.Now()
			s, err := r.b.attach(ctx, j.Key())
			if err != nil {
				return errors.Join(fmt.Errorf("ENABLE: %w", err), j.Kill())
			}
			e = append(e, micros(began))
			began = time.Now()
			if err := s.Close(); err != nil {
				return errors.Join(fmt.Errorf("DISABLE: %w", err), j.Kill())
			}
			d = append(d, micros(began))
			reply, err := j.Ask(ctx, "beats")
			if err == nil {
				err = runs(ctx, j, reply)
			}
			if err != nil {
				return errors.Join(err, j.Kill())
			}
		}
		if err := j.End(); err != nil {
			return err
		}
		enables, disables = append(enables, e), append(disables, d)
	}
	r.samples("ENABLE", enables)
	r.samples("DISABLE", disables)
	return nil
}

// copies verifies copies across cycles, and that a corrupted one is found.
func copies(ctx context.Context, r *result, peer gpreempt.GPUID) (err error) {
	cfg := workload.Config{Copiers: 1, Peer: uint(peer)}
	if peer != 0 { // not every GPU reaches every other one
		j, err := r.b.start(ctx, cfg)
		if err != nil {
			return skipped(fmt.Sprintf("no copies through GPU %d: %v", peer, err))
		}
		if err := j.Kill(); err != nil {
			return err
		}
	}
	h, err := r.hold(ctx, cfg)
	if err != nil {
		return err
	}
	defer h.drop(&err)
	var reply workload.Reply
	for range r.cycles(10_000) {
		if err := h.session.Suspend(ctx, nil); err != nil {
			return fmt.Errorf("SUSPEND: %w", err)
		}
		if reply, err = h.Ask(ctx, "beats"); err != nil {
			return err
		}
		if err := h.session.Resume(ctx); err != nil {
			return fmt.Errorf("RESUME: %w", err)
		}
		if err := runs(ctx, h, reply); err != nil {
			return err
		}
	}
	if reply, err = h.Ask(ctx, "corrupt"); err != nil {
		return err
	}
	r.note("%d MiB to the GPU and back, %d wrong", reply.Beats, reply.Wrong)
	if reply.Wrong > 0 {
		return fmt.Errorf("%d of %d copies had a wrong checksum", reply.Wrong, reply.Beats)
	}
	return r.corrupted(ctx, h, reply.Beats+2, 1)
}

// peer returns another GPU.
func (r *result) peer() gpreempt.GPUID {
	for _, g := range r.b.gpus {
		if g.ID != r.b.gpu.ID {
			return g.ID
		}
	}
	return 0
}

// xnack keeps values in registers with both modes. Not every GPU has both.
func xnack(ctx context.Context, r *result) error {
	for _, mode := range []string{"off", "on"} {
		j, err := r.b.start(ctx, workload.Config{XNACK: mode})
		if err != nil {
			return skipped(fmt.Sprintf("no process with XNACK %s: %v", mode, err))
		}
		if err := j.Kill(); err != nil {
			return err
		}
		if err := r.waves(ctx, workload.Kernels[0].Name, mode, workload.Kernels[0].Rounds); err != nil {
			return fmt.Errorf("XNACK %s: %w", mode, err)
		}
	}
	return nil
}

// corrupted checks that a corruption that was asked for is noticed by the progress beats.
func (r *result) corrupted(ctx context.Context, j job, beats, want uint64) error {
	if err := until(ctx, j, func(now workload.Reply) bool { return now.Beats > beats }); err != nil {
		return err
	}
	reply, err := j.Ask(ctx, "beats")
	if err != nil {
		return err
	}
	r.controls = append(r.controls, fmt.Sprintf("one corruption: %d noticed", reply.Wrong))
	if reply.Wrong != want {
		return fmt.Errorf("the check cannot fail: one corruption was made and %d noticed", reply.Wrong)
	}
	return nil
}

// waves runs a kernel that keeps values for seconds while it is suspended again and again.
func (r *result) waves(ctx context.Context, kernel, xnack string, rounds int) (err error) {
	h, err := r.hold(ctx, workload.Config{Queues: 1, Groups: r.b.gpu.CUs, XNACK: xnack})
	if err != nil {
		return err
	}
	defer h.drop(&err)
	total, kernels := 0, r.cycles(20)
	for range kernels {
		type answer struct {
			reply workload.Reply
			err   error
		}
		done := make(chan answer, 1)
		go func() {
			reply, err := h.Ask(ctx, fmt.Sprintf("verify %s %d", kernel, rounds))
			done <- answer{reply, err}
		}()
		for ended := false; !ended; {
			select {
			case a := <-done:
				if a.err != nil {
					return a.err
				}
				if a.reply.Wrong > 0 {
					return fmt.Errorf("after %d cycles %d lanes are wrong", total, a.reply.Wrong)
				}
				ended = true
			default:
				// The pause is the kernel's: without one it would hardly run.
				if err := errors.Join(h.session.Suspend(ctx, nil), h.session.Resume(ctx), pause(ctx, time.Millisecond)); err != nil {
					return err
				}
				total++
			}
		}
	}
	r.note("%d cycles during %d kernels", total, kernels)
	if _, err := h.Ask(ctx, "corrupt"); err != nil {
		return err
	}
	reply, err := h.Ask(ctx, fmt.Sprintf("verify %s 1", kernel))
	if err != nil {
		return err
	}
	r.controls = append(r.controls, fmt.Sprintf("one corrupted word: %d lanes noticed", reply.Wrong))
	if reply.Wrong != 1 {
		return fmt.Errorf("the check cannot fail: one word was corrupted and %d lanes noticed", reply.Wrong)
	}
	return nil
}
