package accept

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/accept/workload"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// fingerprint records what the results depend on.
func fingerprint(_ context.Context, r *result) error {
	b := r.b
	device := fmt.Sprintf("sys/class/drm/renderD%d/device/", b.gpu.RenderMinor)
	node := fmt.Sprintf("sys/class/kfd/kfd/topology/nodes/%d/", b.gpu.Node)
	facts := map[string]string{"KFD interface": b.device.Version().String(), "profile": b.device.Profile()}
	for _, pattern := range []string{
		"proc/version", "etc/os-release", "sys/module/amdgpu/version", "sys/module/amdgpu/srcversion", "sys/module/amdgpu/parameters/*",
		node + "name", node + "properties", device + "fw_version/*", device + "vbios_version", device + "current_compute_partition",
		device + "current_memory_partition", device + "unique_id", device + "pp_features",
	} {
		names, err := fs.Glob(b.cfg.Root, pattern)
		if err != nil {
			return err
		}
		for _, name := range names {
			if text, err := fs.ReadFile(b.cfg.Root, name); err == nil { // some parameters can only be written
				facts[name] = strings.TrimSpace(string(text))
			}
		}
	}
	for _, required := range []string{"proc/version", node + "properties"} {
		if facts[required] == "" {
			return fmt.Errorf("%s cannot be read", required)
		}
	}
	text, err := json.MarshalIndent(facts, "", "  ")
	r.files["fingerprint.json"] = append(text, '\n')
	r.note("%s, %s, %d XCCs, %d CUs, KFD %s", b.gpu.Name, gpreempt.GFXName(b.gpu.GFX), b.gpu.XCCs, b.gpu.CUs, b.device.Version())
	return err
}

// latency measures the four calls for different jobs.
func latency(ctx context.Context, r *result) error {
	type shape struct {
		name      string
		processes int
		work      workload.Config
	}
	shapes := []shape{
		{"1 queue", 1, workload.Config{Queues: 1}},
		{"4 queues", 1, workload.Config{Queues: 4}},
		{"16 queues", 1, workload.Config{Queues: 16}},
		{"4 processes", 4, workload.Config{Queues: 2}},
	}
	if waves(r.b) == "" {
		for _, waves := range []int{1, 4, 16} {
			shapes = append(shapes, shape{fmt.Sprintf("%d workgroups on each CU", waves), 1, workload.Config{Queues: 1, Kernel: true, Groups: waves * r.b.gpu.CUs}})
		}
	}
	var judged []error
	for _, s := range shapes {
		samples := map[string][][]float64{}
		for range repeats {
			if err := r.timed(ctx, s.processes, s.work, r.cycles(1000), samples); err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
		}
		for _, call := range []string{"ENABLE", "DISABLE"} {
			r.samples(call+" of "+s.name, samples[call])
		}
		for _, call := range []string{"SUSPEND", "RESUME"} {
			judged = append(judged, r.judge(r.samples(call+" of "+s.name, samples[call])))
		}
	}
	return errors.Join(judged...)
}

// timed holds some processes, and suspends and resumes them all n times; then it releases them and
// holds them again, a tenth as often. A sample is the time for all of them; each call gets a list.
func (r *result) timed(ctx context.Context, processes int, cfg workload.Config, n int, samples map[string][][]float64) (err error) {
	var jobs []heldJob
	defer func() {
		for _, h := range jobs {
			h.drop(&err)
		}
	}()
	for range processes {
		h, err := r.hold(ctx, cfg)
		if err != nil {
			return err
		}
		jobs = append(jobs, h)
	}
	took := map[string][]float64{}
	all := func(call string, do func(*heldJob) error) error {
		began := time.Now()
		for i := range jobs {
			if err := do(&jobs[i]); err != nil {
				return fmt.Errorf("%s: %w", call, err)
			}
		}
		took[call] = append(took[call], micros(began))
		return nil
	}
	for i := range n {
		err := errors.Join(
			all("SUSPEND", func(h *heldJob) error { return h.session.Suspend(ctx, nil) }),
			all("RESUME", func(h *heldJob) error { return h.session.Resume(ctx) }),
		)
		if err == nil && i%10 == 0 {
			err = errors.Join(
				all("DISABLE", func(h *heldJob) error { return h.session.Close() }),
				all("ENABLE", func(h *heldJob) error {
					s, err := r.b.attach(ctx, h.Key())
					if err == nil {
						h.session = s // else drop closes the old one again
					}
					return err
				}),
			)
		}
		if err != nil {
			return err
		}
	}
	for call, list := range took {
		samples[call] = append(samples[call], list)
	}
	return nil
}

// gaps measures how long a process stands still when another one is suspended and resumed.
func gaps(ctx context.Context, r *result) error {
	var all [][]float64
	for range repeats {
		_, gap, err := r.gaps(ctx, r.b.attach, workload.Config{Queues: 2})
		if err != nil {
			return err
		}
		all = append(all, gap)
	}
	return r.judge(r.samples("gap of another process", all))
}

// gaps suspends a job again and again. It returns the durations of that, and the gaps of
// another process.
func (r *result) gaps(ctx context.Context, how attach, work workload.Config) (suspends, samples []float64, err error) {
	online, err := r.b.start(ctx, workload.Config{Queues: 1, Poll: true})
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, online.Kill()) }()
	h, err := r.holdBy(ctx, how, work)
	if err != nil {
		return nil, nil, err
	}
	defer h.drop(&err)
	if err := r.measured(ctx, online); err != nil {
		return nil, nil, err
	}
	for range r.cycles(1000) {
		if _, err := gap(ctx, online); err != nil { // that of the cycle before
			return nil, nil, err
		}
		began := time.Now()
		if err := h.session.Suspend(ctx, nil); err != nil {
			return nil, nil, err
		}
		suspends = append(suspends, micros(began))
		if err := h.session.Resume(ctx); err != nil {
			return nil, nil, err
		}
		g, err := gap(ctx, online)
		if err != nil {
			return nil, nil, err
		}
		samples = append(samples, g)
	}
	return suspends, samples, nil
}

// measured checks that a gap is measured: that of a process that is suspended itself for a time.
func (r *result) measured(ctx context.Context, j job) (err error) {
	const long = 50 * time.Millisecond
	s, err := r.b.attach(ctx, j.Key())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	if err := errors.Join(s.Suspend(ctx, nil), pause(ctx, long), s.Resume(ctx)); err != nil {
		return err
	}
	g, err := gap(ctx, j)
	// Half: the job may have seen its last packet late, and then sees a shorter gap.
	if err == nil && g < float64(long.Microseconds())/2 {
		err = fmt.Errorf("the check cannot fail: the process was suspended for %v, and its longest gap is %.0f µs", long, g)
	}
	if err == nil {
		r.controls = append(r.controls, fmt.Sprintf("the other process suspended itself for %v: a gap of %.0f µs", long, g))
	}
	return err
}

// held compares the rates of a process that is held with those of one that is not.
func held(ctx context.Context, r *result) (err error) {
	commands := map[string]string{"launch": fmt.Sprint("launch ", r.cycles(10_000))}
	if waves(r.b) == "" {
		commands["matrix"] = "verify mfma 4194304"
	}
	j, err := r.b.start(ctx, workload.Config{Groups: r.b.gpu.CUs})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, j.Kill()) }()
	for name, command := range commands {
		var free, bound [][]float64
		for range repeats {
			one := func() ([]float64, error) {
				reply, err := j.Ask(ctx, command)
				return []float64{float64(reply.Took.Nanoseconds()) / 1e3}, err
			}
			without, err := one()
			if err != nil {
				return err
			}
			s, err := r.b.attach(ctx, j.Key())
			if err != nil {
				return err
			}
			with, err := one()
			if err = errors.Join(err, s.Close()); err != nil {
				return err
			}
			free, bound = append(free, without), append(bound, with)
		}
		a, b := r.samples(name+" not held", free), r.samples(name+" held", bound)
		r.note("%s: a held process has %.1f %% of the rate", name, 100*a.P50/b.P50)
		if r.b.machine() == hardware && a.P50 < leastRate*b.P50 {
			err = errors.Join(err, fmt.Errorf("%s: a held process has %.1f %% of the rate", name, 100*a.P50/b.P50))
		}
	}
	return err
}

// birth creates a queue while the others are suspended.
func birth(ctx context.Context, r *result) (err error) {
	h, err := r.hold(ctx, workload.Config{Queues: 1})
	if err != nil {
		return err
	}
	defer h.drop(&err)
	window, err := r.control(ctx, h)
	if err != nil {
		return err
	}
	for range r.cycles(20) {
		if err := h.session.Suspend(ctx, nil); err != nil {
			return err
		}
		if _, err := h.Ask(ctx, "create"); err != nil {
			return err
		}
		if _, _, err := h.cycle(ctx, window); err != nil {
			return err
		}
	}
	return nil
}

// destroy destroys a suspended queue.
func destroy(ctx context.Context, r *result) (err error) {
	n := r.cycles(20)
	h, err := r.hold(ctx, workload.Config{Queues: 1 + n})
	if err != nil {
		return err
	}
	defer h.drop(&err)
	for range n {
		before, err := h.Ask(ctx, "beats")
		if err != nil {
			return err
		}
		if err := h.session.Suspend(ctx, nil); err != nil {
			return err
		}
		destroyed := make(chan error, 1)
		go func() {
			_, err := h.Ask(ctx, "destroy")
			destroyed <- err
		}()
		err = errors.Join(pause(ctx, time.Millisecond), h.session.Resume(ctx))
		if err := errors.Join(err, <-destroyed, runs(ctx, h, before)); err != nil {
			return err
		}
	}
	return nil
}

// register suspends a process while it registers memory.
func register(ctx context.Context, r *result) (err error) {
	mib := r.registered()
	h, err := r.hold(ctx, workload.Config{Queues: 1})
	if err != nil {
		return err
	}
	defer h.drop(&err)
	registered := make(chan error, 1)
	go func() {
		_, err := h.Ask(ctx, fmt.Sprint("register ", mib))
		registered <- err
	}()
	var suspends []float64
	for ended := false; !ended; {
		select {
		case err := <-registered:
			if err != nil {
				return err
			}
			ended = true
		default:
		}
		began := time.Now()
		if err := h.session.Suspend(ctx, nil); err != nil {
			return err
		}
		suspends = append(suspends, micros(began))
		if err := h.session.Resume(ctx); err != nil {
			return err
		}
	}
	r.note("%d MiB registered during %d cycles", mib, len(suspends))
	r.samples("SUSPEND", [][]float64{suspends})
	reply, err := h.Ask(ctx, "beats")
	if err != nil {
		return err
	}
	return runs(ctx, h, reply)
}

// registered returns how many MiB to register: of a real host half of its free memory, at
// most 100 GiB.
func (r *result) registered() uint64 {
	const little, most = 64, 100 << 10
	text, err := fs.ReadFile(r.b.cfg.Root, "proc/meminfo")
	if r.b.machine() != hardware || err != nil {
		return little
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "MemAvailable:"); ok {
			kib, err := strconv.ParseUint(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
			if err == nil {
				return min(kib>>11, most)
			}
		}
	}
	return little
}

// deaths ends a suspended process in every way. The driver must forget it, and the next
// process must run.
func deaths(ctx context.Context, r *result) error {
	for _, how := range []string{"exit", "exec", "kill"} {
		for range r.cycles(10) {
			if err := r.death(ctx, how); err != nil {
				return fmt.Errorf("%s: %w", how, err)
			}
		}
	}
	return nil
}

func (r *result) death(ctx context.Context, how string) (err error) {
	h, err := r.hold(ctx, workload.Config{Queues: 2})
	if err != nil {
		return err
	}
	if err := h.session.Suspend(ctx, nil); err != nil {
		h.drop(&err)
		return err
	}
	switch how {
	case "exit":
		_, _ = h.Ask(ctx, "exit") // it ends instead of an answer
	case "exec":
		// The answer is that of the new program, which has work that nobody suspended.
		reply, err := h.Ask(ctx, "exec")
		if err == nil {
			err = runs(ctx, h, reply)
		}
		if err != nil {
			h.drop(&err)
			return fmt.Errorf("the new program: %w", err)
		}
	}
	if err := errors.Join(h.Kill(), h.session.Close()); err != nil {
		return err
	}
	return r.leftBehind(ctx, h.Key())
}

// leftBehind checks that the driver forgets a process that has ended, and that the next one runs.
func (r *result) leftBehind(ctx context.Context, key gpreempt.ProcessKey) error {
	if err := r.forgotten(ctx, key); err != nil {
		return err
	}
	next, err := r.b.start(ctx, workload.Config{Queues: 1})
	if err != nil {
		return fmt.Errorf("the next process: %w", err)
	}
	return errors.Join(runs(ctx, next, workload.Reply{}), next.End())
}

// forgotten waits until the driver has removed a process.
func (r *result) forgotten(ctx context.Context, key gpreempt.ProcessKey) error {
	const most = 30 * time.Second
	ctx, cancel := context.WithTimeoutCause(ctx, most, fmt.Errorf("the driver keeps process %d for %v", key.PID, most))
	defer cancel()
	for {
		if _, err := discovery.ProcessGPUs(r.b.cfg.Root, key.PID); errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
}

// holderKilled kills a process that has suspended a job.
func holderKilled(ctx context.Context, r *result) (err error) {
	j, err := r.b.start(ctx, workload.Config{Queues: 2})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, j.Kill()) }()
	window, err := r.control(ctx, j)
	if err != nil {
		return err
	}
	for range r.cycles(10) {
		s, err := r.b.attachElsewhere(ctx, j.Key())
		if err != nil {
			return err
		}
		if err := s.Suspend(ctx, nil); err != nil {
			return errors.Join(fmt.Errorf("SUSPEND: %w", err), s.Kill())
		}
		still, then, err := stands(ctx, j, window)
		if err == nil && !still {
			err = errors.New("the job went on after SUSPEND")
		}
		if err = errors.Join(err, s.Kill()); err != nil {
			return err
		}
		if err := runs(ctx, j, then); err != nil {
			return fmt.Errorf("after the death: %w", err)
		}
	}
	return nil
}
