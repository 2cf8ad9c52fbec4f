package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/gpreempt/gpreempt/internal/stat"
)

// Arm is one of the ways in which the two kinds of work share the GPU.
type Arm string

// The arms.
const (
	OfflineAlone Arm = "offline alone"
	OnlineAlone  Arm = "online alone"
	Shared       Arm = "both, without gpreempt"
	Protected    Arm = "both, with gpreempt"
)

// Run is one repeat of one arm.
type Run struct {
	Arm    Arm `json:"arm"`
	Repeat int `json:"repeat"`
	// Seconds is how long it lasted on the wall clock.
	Seconds float64 `json:"seconds"`
	// LatencyMS is the raw sample of each request, in milliseconds from the moment
	// it was due to the moment its result was there.
	LatencyMS []float64 `json:"latency_ms,omitempty"`
	// OfflineWork is GPU seconds of offline work done per second.
	OfflineWork float64 `json:"offline_work,omitempty"`
	Executed    uint64  `json:"offline_packets_executed,omitempty"`
	Lost        uint64  `json:"offline_packets_lost"`
	Repeated    uint64  `json:"offline_packets_repeated"`
	// LateMS is the 99th percentile of how late a thread was that only waits for a timer,
	// in milliseconds; OwnCPU is the share of all CPUs the demo itself used.
	LateMS float64 `json:"late_ms"`
	OwnCPU float64 `json:"own_cpu"`
	// NotQuiesced counts announcements answered before the GPU was quiet, and Unanswered
	// those that the daemon did not answer in time.
	NotQuiesced int `json:"not_quiesced"`
	Unanswered  int `json:"unanswered"`
}

// ArmSummary summarizes the repeats of an arm.
type ArmSummary struct {
	Arm    Arm     `json:"arm"`
	Online Summary `json:"online"`
	// OfflineShare is offline throughput as a share of offline alone.
	OfflineShare float64 `json:"offline_share"`
}

// Summary describes latencies in milliseconds: nearest-rank percentiles over all
// repeats, and how far the repeats' own p99 lie apart.
type Summary struct {
	N         int     `json:"n"`
	P50       float64 `json:"p50_ms"`
	P95       float64 `json:"p95_ms"`
	P99       float64 `json:"p99_ms"`
	Max       float64 `json:"max_ms"`
	P99Spread float64 `json:"p99_spread_ms"`
}

// Expectation is a target of the demo and whether it was met.
type Expectation struct {
	What  string  `json:"what"`
	Got   float64 `json:"got"`
	Limit float64 `json:"limit"`
	// AtLeast: Got must be Limit or more; else Limit or less.
	AtLeast bool `json:"at_least"`
	Kept    bool `json:"kept"`
	// Tail: it is about the slowest in a hundred, which a busy machine makes slow by
	// itself. Not checked when Result.NoiseMS is above maxNoise.
	Tail bool `json:"tail,omitempty"`
	// Timed: it is a latency. Not checked on an emulated machine.
	Timed bool `json:"timed,omitempty"`
}

// maxNoise is how late the machine may be by itself once in a hundred times, in
// milliseconds, for the demo to check that gpreempt adds at most that.
const maxNoise = 2

// Result is what the demo measured, as build/demo.json has it.
type Result struct {
	// Either Simulated or Emulated is true: no figure here was measured on a GPU. Backend
	// is what the daemon served, such as "emulated mi300x x1 with the rules of 6.12 (kfdemu)".
	Simulated bool   `json:"simulated"`
	Emulated  bool   `json:"emulated"`
	Backend   string `json:"backend"`
	Machine   string `json:"machine"`
	Version   string `json:"version"`
	Seed      uint64 `json:"seed"`
	// What the workload was.
	RequestsPerSecond float64 `json:"requests_per_second"`
	RequestMS         float64 `json:"request_gpu_ms"`
	OfflineQueues     int     `json:"offline_queues"`
	OfflineKernelMS   float64 `json:"offline_kernel_ms"`
	// ModelledSuspendMS is the modelled time of a suspend of the offline job.
	ModelledSuspendMS float64 `json:"modelled_suspend_ms"`
	Suspends          uint64  `json:"suspends"`
	Resumes           uint64  `json:"resumes"`
	LearnedSuspendMS  float64 `json:"learned_suspend_ms"`
	LearnedResumeMS   float64 `json:"learned_resume_ms"`

	// NoiseMS is how late this machine is by itself once in a hundred times: see noise.
	NoiseMS float64 `json:"noise_ms"`

	Arms         []ArmSummary  `json:"arms"`
	Expectations []Expectation `json:"expectations"`
	Runs         []Run         `json:"runs"`
}

// summarize aggregates the runs by arm and checks the expectations.
func (r *Result) summarize() {
	alone := mean(r.of(OfflineAlone), func(run Run) float64 { return run.OfflineWork })
	arms := map[Arm]ArmSummary{}
	for _, arm := range []Arm{OnlineAlone, Shared, Protected} {
		runs := r.of(arm)
		s := ArmSummary{Arm: arm, Online: summary(runs)}
		if arm != OnlineAlone && alone > 0 {
			s.OfflineShare = mean(runs, func(run Run) float64 { return run.OfflineWork }) / alone
		}
		arms[arm] = s
		r.Arms = append(r.Arms, s)
	}
	var lost, repeated uint64
	unanswered := 0
	for _, run := range r.Runs {
		lost += run.Lost
		repeated += run.Repeated
		unanswered += run.Unanswered
	}
	r.noise(arms[OnlineAlone].Online)
	duty := r.RequestsPerSecond * r.RequestMS / 1000
	r.Expectations = nil
	r.expect(Expectation{
		What: "online p50 with gpreempt, ms", Got: arms[Protected].Online.P50, Limit: arms[OnlineAlone].Online.P50 + r.ModelledSuspendMS + 2, Timed: true,
	})
	r.expect(Expectation{
		What: "online p99 with gpreempt, ms", Got: arms[Protected].Online.P99, Limit: arms[OnlineAlone].Online.P99 + r.ModelledSuspendMS + 2, Tail: true,
	})
	r.expect(Expectation{
		What: "offline throughput with gpreempt", Got: arms[Protected].OfflineShare, Limit: 1 - duty - 0.05,
		AtLeast: true, Tail: true,
	})
	r.expect(Expectation{What: "announcements not answered in time", Got: float64(unanswered), Tail: true})
	r.expect(Expectation{What: "offline packets lost", Got: float64(lost)})
	r.expect(Expectation{What: "offline packets run twice", Got: float64(repeated)})
	r.expect(Expectation{What: "suspends", Got: float64(r.Suspends), Limit: 1, AtLeast: true})
}

// noise determines how late this machine is by itself once in a hundred times: by how much
// the requests differ where nothing but the inference server runs or, if that is more, how
// late a wake-up was in the worst run of all. A run in which the demo itself used half of
// the CPUs does not count for that: then the demo itself may be the reason.
func (r *Result) noise(alone Summary) {
	r.NoiseMS = alone.P99 - alone.P50
	for _, run := range r.Runs {
		if run.OwnCPU < 0.5 {
			r.NoiseMS = max(r.NoiseMS, run.LateMS)
		}
	}
}

func (r *Result) expect(e Expectation) {
	e.Kept = e.Got <= e.Limit
	if e.AtLeast {
		e.Kept = e.Got >= e.Limit
	}
	r.Expectations = append(r.Expectations, e)
}

// checked reports whether e can be checked: latencies only where the GPU is simulated,
// because on an emulated one the emulator's own work is in them, and tails only on a
// machine that is quiet by itself.
func (r *Result) checked(e Expectation) bool {
	return !(r.Emulated && (e.Tail || e.Timed)) && !(e.Tail && r.NoiseMS > maxNoise)
}

// Broken names the expectations that were not met, of those that can be checked.
func (r *Result) Broken() []string {
	var broken []string
	for _, e := range r.Expectations {
		if !e.Kept && r.checked(e) {
			broken = append(broken, fmt.Sprintf("%s: %.3g, limit %.3g", e.What, e.Got, e.Limit))
		}
	}
	return broken
}

func (r *Result) of(arm Arm) []Run {
	var runs []Run
	for _, run := range r.Runs {
		if run.Arm == arm {
			runs = append(runs, run)
		}
	}
	return runs
}

func mean(runs []Run, value func(Run) float64) float64 {
	if len(runs) == 0 {
		return 0
	}
	sum := 0.0
	for _, run := range runs {
		sum += value(run)
	}
	return sum / float64(len(runs))
}

func summary(runs []Run) Summary {
	var all, p99s []float64
	for _, run := range runs {
		if len(run.LatencyMS) == 0 {
			continue
		}
		all = append(all, run.LatencyMS...)
		p99s = append(p99s, stat.Quantile(slices.Sorted(slices.Values(run.LatencyMS)), 0.99))
	}
	slices.Sort(all)
	return Summary{
		N: len(all), P50: stat.Quantile(all, 0.5), P95: stat.Quantile(all, 0.95), P99: stat.Quantile(all, 0.99),
		Max: stat.Quantile(all, 1), P99Spread: stat.Spread(p99s),
	}
}

// kind returns the word for every figure.
func (r *Result) kind() string {
	if r.Emulated {
		return "emulated"
	}
	return "simulated"
}

// made describes what the figures were measured on.
func (r *Result) made() string {
	if r.Emulated {
		return "modelled GPU, real processes and\nsystem calls, real daemon, real gRPC (" + r.Backend + ")"
	}
	return "modelled GPU, real daemon, real gRPC"
}

// Print writes the result for people.
func (r *Result) Print(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "\n%s %s: an inference server at %.0f requests/s (%.1f ms of GPU each) and a training job of %d queues\n",
		strings.ToUpper(r.kind()), r.Machine, r.RequestsPerSecond, r.RequestMS, r.OfflineQueues)
	fmt.Fprintf(&b, "(%.0f ms kernels, always busy) on one GPU. Every figure is %s: %s.\n\n", r.OfflineKernelMS, r.kind(), r.made())
	tw := tabwriter.NewWriter(&b, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, strings.ToUpper(r.kind())+"\tn\tp50 ms\tp95 ms\tp99 ms\tmax ms\tp99 spread\toffline work\t")
	for _, a := range r.Arms {
		share := "-"
		if a.Arm != OnlineAlone {
			share = fmt.Sprintf("%.1f %%", 100*a.OfflineShare)
		}
		fmt.Fprintf(tw, "%s\t%d\t%.2f\t%.2f\t%.2f\t%.2f\t±%.2f\t%s\t\n", a.Arm, a.Online.N, a.Online.P50, a.Online.P95,
			a.Online.P99, a.Online.Max, a.Online.P99Spread/2, share)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(&b, "\n%d suspends, %d resumes; learned %s per suspend, %s per resume (model: %s).\n\n", r.Suspends, r.Resumes,
		ms(r.LearnedSuspendMS), ms(r.LearnedResumeMS), ms(r.ModelledSuspendMS))
	skipped := 0
	for _, e := range r.Expectations {
		mark, relation := "ok  ", "<="
		switch {
		case !e.Kept && r.checked(e):
			mark = "FAIL"
		case !e.Kept:
			mark = "SKIP"
			skipped++
		}
		if e.AtLeast {
			relation = ">="
		}
		fmt.Fprintf(&b, "%s  %s: %.4g (target %s %.4g)\n", mark, e.What, e.Got, relation, e.Limit)
	}
	fmt.Fprintf(&b, "\n%s\n", r.verdict(skipped))
	_, err := io.WriteString(w, b.String())
	return err
}

// verdict returns the conclusion in a line. skipped is how many targets were missed and
// not checked.
func (r *Result) verdict(skipped int) string {
	text := "PASS: every target that can be checked was met."
	if broken := r.Broken(); len(broken) > 0 {
		text = fmt.Sprintf("FAIL: %d of %d targets were missed.", len(broken), len(r.Expectations))
	}
	switch {
	case skipped == 0:
	case r.Emulated:
		text += fmt.Sprintf(" SKIP (%d): the emulator's own work is in these figures; kfdemu demo --sim checks them.", skipped)
	default:
		text += fmt.Sprintf(" SKIP (%d): other load makes this machine %.1f ms late once in a hundred times; up to %d ms can be checked.",
			skipped, r.NoiseMS, maxNoise)
	}
	return text
}

func ms(v float64) string {
	return time.Duration(v * float64(time.Millisecond)).Round(time.Microsecond).String()
}
