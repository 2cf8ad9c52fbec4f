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
	// Serving is the share of the GPU's time in which requests had a lease.
	Serving float64 `json:"serving"`
	// NotQuiesced counts announcements answered before the GPU was quiet.
	NotQuiesced int `json:"not_quiesced"`
	// Late counts requests that began late: nothing but the host delays their beginning.
	Late int `json:"late"`
	// served counts the requests that were answered, and unprotected those without a lease.
	served, unprotected int
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

// Target is a figure and the limit that it should keep.
type Target struct {
	What  string  `json:"what"`
	Got   float64 `json:"got"`
	Limit float64 `json:"limit"`
	// AtLeast: Got must be Limit or more; else Limit or less.
	AtLeast bool `json:"at_least"`
	Met     bool `json:"met"`
}

func (t Target) String() string {
	relation := "<="
	if t.AtLeast {
		relation = ">="
	}
	return fmt.Sprintf("%s: %.4g (target %s %.4g)", t.What, t.Got, relation, t.Limit)
}

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

	Arms []ArmSummary `json:"arms"`
	// Figures decide nothing, for the reason in NotJudged. The demo fails when one of Checks is
	// not met.
	NotJudged string   `json:"not_judged"`
	Figures   []Target `json:"figures"`
	Checks    []Target `json:"checks"`
	Runs      []Run    `json:"runs"`
}

// summarize aggregates the runs by arm and compares with the targets.
func (r *Result) summarize() {
	whole := mean(r.of(OfflineAlone), func(run Run) float64 { return run.OfflineWork })
	arms := map[Arm]ArmSummary{}
	for _, arm := range []Arm{OnlineAlone, Shared, Protected} {
		runs := r.of(arm)
		s := ArmSummary{Arm: arm, Online: summary(runs)}
		if arm != OnlineAlone && whole > 0 {
			s.OfflineShare = mean(runs, func(run Run) float64 { return run.OfflineWork }) / whole
		}
		arms[arm] = s
		r.Arms = append(r.Arms, s)
	}
	var lost, repeated uint64
	for _, run := range r.Runs {
		lost += run.Lost
		repeated += run.Repeated
	}
	serving := mean(r.of(Protected), func(run Run) float64 { return run.Serving })
	late := 0
	for _, run := range r.of(Protected) {
		late += run.Late
	}
	online, added := arms[Protected].Online, r.ModelledSuspendMS+2
	alone := arms[OnlineAlone].Online
	p50 := atMost("online p50 with gpreempt, ms", online.P50, alone.P50+added)
	p99 := atMost("online p99 with gpreempt, ms", online.P99, alone.P99+added)
	work := atLeast("offline throughput with gpreempt", arms[Protected].OfflineShare, 1-serving-0.05)
	r.Checks = []Target{
		atMost("offline packets lost", float64(lost), 0),
		atMost("offline packets run twice", float64(repeated), 0),
		atLeast("suspends", float64(r.Suspends), 1),
	}
	r.Figures = []Target{p50, p99, work}
	switch {
	case online.N < enoughRequests:
		r.NotJudged = fmt.Sprintf("%d requests are fewer than %d", online.N, enoughRequests)
	case alone.P95 > 1.5*alone.P50:
		r.NotJudged = fmt.Sprintf("this host is too busy to measure (without other work on the GPU the p95 is %.3g ms, and the p50 %.3g ms)", alone.P95, alone.P50)
	case 20*late > online.N: // it stood still meanwhile
		r.NotJudged = fmt.Sprintf("this host is too busy to measure (with gpreempt, %d of %d requests began more than %v late)", late, online.N, lateAfter)
	case r.LearnedSuspendMS > r.ModelledSuspendMS+1:
		r.NotJudged = fmt.Sprintf("this host is too busy to measure (a suspend took %s, and %s of that on the modelled GPU)", ms(r.LearnedSuspendMS), ms(r.ModelledSuspendMS))
	default:
		r.Figures, r.Checks = []Target{p99}, append(r.Checks, p50, work)
		r.NotJudged = "other programs on this host can delay a few requests"
	}
}

// enoughRequests is the number of requests from which the median and the throughput count.
const enoughRequests = 100

func atMost(what string, got, limit float64) Target {
	return Target{What: what, Got: got, Limit: limit, Met: got <= limit}
}

func atLeast(what string, got, limit float64) Target {
	return Target{What: what, Got: got, Limit: limit, AtLeast: true, Met: got >= limit}
}

// Failed returns the checks that were not met.
func (r *Result) Failed() []string {
	var failed []string
	for _, c := range r.Checks {
		if !c.Met {
			failed = append(failed, c.String())
		}
	}
	return failed
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
	b.WriteString(r.bars() + "\n")
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
	for _, c := range r.Checks {
		mark := "ok"
		if !c.Met {
			mark = "FAIL"
		}
		fmt.Fprintf(&b, "%-5s %v\n", mark, c)
	}
	for _, f := range r.Figures {
		fmt.Fprintf(&b, "%-5s %v\n", "skip", f)
	}
	fmt.Fprintf(&b, "\n%s\n", r.verdict())
	_, err := io.WriteString(w, b.String())
	return err
}

// verdict returns the result in one line.
func (r *Result) verdict() string {
	all, end := len(r.Checks)+len(r.Figures), "."
	if len(r.Figures) > 0 {
		end = fmt.Sprintf("; %d not judged: %s.", len(r.Figures), r.NotJudged)
	}
	if failed := r.Failed(); len(failed) > 0 {
		return fmt.Sprintf("FAIL: %d of %d checks failed%s", len(failed), all, end)
	}
	return fmt.Sprintf("PASS: %d of %d checks%s", len(r.Checks), all, end)
}

func ms(v float64) string {
	return time.Duration(v * float64(time.Millisecond)).Round(time.Microsecond).String()
}
