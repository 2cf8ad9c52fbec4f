package scenario

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
	"github.com/gpreempt/gpreempt/internal/spell"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// The bounds of a scenario.
const (
	// MaxGPUs bounds the GPUs of a host.
	MaxGPUs = 64
	// MaxDuration bounds how long requests arrive.
	MaxDuration = 7 * 24 * time.Hour
	// maxKernels bounds the kernels of a work, and maxKernel the time of one and of all.
	maxKernels, maxKernel = 1_000_000, time.Hour
	// maxOwners bounds the services, and the jobs.
	maxOwners = 1000
	// maxName bounds a name, in bytes.
	maxName = 64
)

// kinds are the kinds of arrivals, and uses has the keys that each uses.
var (
	kinds = []string{string(Constant), string(Poisson), string(Gamma), string(Bursts), string(Closed), string(Trace)}
	uses  = map[ArrivalKind][]string{
		Constant: {"rate"},
		Poisson:  {"rate"},
		Gamma:    {"rate", "cv"},
		Bursts:   {"rate", "cv", "burst", "burst_gap"},
		Closed:   {"clients", "think"},
		Trace:    {"trace", "speed"},
	}
)

// Normalize sets the defaults of what is not set: GPU 0, one process with one queue, one client,
// and the figures of Work.Model. Parse has done it.
func (s *Scenario) Normalize() {
	for i := range s.Online {
		o := &s.Online[i]
		if len(o.GPUs) == 0 {
			o.GPUs = []int{0}
		}
		o.Request.fill()
		if l := o.LLM; l != nil {
			l.KernelsPerStep = max(l.KernelsPerStep, 1)
		}
	}
	for i := range s.Offline {
		j := &s.Offline[i]
		if len(j.GPUs) == 0 {
			j.GPUs = []int{0}
		}
		j.Processes, j.Queues = max(j.Processes, 1), max(j.Queues, 1)
		j.Step.fill()
	}
	for _, a := range s.arrivals() {
		switch {
		case a.Kind == Bursts && a.CV == 0:
			a.CV = 1
		case a.Kind == Closed && a.Clients == 0:
			a.Clients = 1
		case a.Kind == Trace && a.Speed == 0:
			a.Speed = 1
		}
	}
}

// Validate checks every range, after Normalize. The error is a yamlfile.Errors without places.
func (s *Scenario) Validate() error {
	if errs := s.problems(); errs != nil {
		return errs
	}
	return nil
}

// checker collects the errors of a scenario.
type checker struct{ errs yamlfile.Errors }

func (c *checker) fail(key, remedy, format string, args ...any) {
	c.errs = append(c.errs, &yamlfile.Error{Key: key, Problem: fmt.Sprintf(format, args...), Remedy: remedy})
}

// between adds an error unless v is least to most; NaN is not.
func between[T int | float64 | time.Duration](c *checker, key string, v, least, most T) {
	if !(v >= least && v <= most) {
		c.fail(key, fmt.Sprintf("choose %v to %v", least, most), "%v is out of range", v)
	}
}

func (s *Scenario) problems() yamlfile.Errors {
	c := &checker{}
	if s.Version != Version {
		c.fail("version", fmt.Sprintf("write version: %d, or use a later gplab", Version), "version %d of the format is not known", s.Version)
	}
	c.name("name", s.Name)
	between(c, "gpus", s.GPUs, 1, MaxGPUs)
	between(c, "duration", s.Duration, time.Millisecond, MaxDuration)
	if len(s.Online)+len(s.Offline) == 0 {
		c.fail("", "add a service under online: or a job under offline:", "there is no work")
	}
	between(c, "online", len(s.Online), 0, maxOwners)
	between(c, "offline", len(s.Offline), 0, maxOwners)
	names := map[string]string{}
	for i := range s.Online {
		key := fmt.Sprintf("online[%d]", i)
		o := &s.Online[i]
		c.owner(names, key, o.Name, o.GPUs, s.GPUs, o.Priority)
		between(c, key+".prepare", o.Prepare, 0, maxKernel)
		between(c, key+".slo", o.SLO, 0, maxKernel)
		c.arrivals(key+".arrivals", o.Arrivals, s.Duration)
		switch {
		case o.LLM == nil:
			c.work(key+".request", o.Request)
		case o.Request != (Work{}):
			c.fail(key+".request", "keep request: or llm:", "a service with llm has no other work")
		default:
			c.llm(key+".llm", o.LLM, o.Arrivals.Kind != Trace)
		}
	}
	for i := range s.Offline {
		key := fmt.Sprintf("offline[%d]", i)
		j := &s.Offline[i]
		c.owner(names, key, j.Name, j.GPUs, s.GPUs, j.Priority)
		between(c, key+".processes", j.Processes, 1, 1024)
		between(c, key+".queues", j.Queues, 1, 1024)
		c.work(key+".step", j.Step)
		if a := j.Arrivals; a != nil {
			c.arrivals(key+".arrivals", *a, s.Duration)
			if a.Kind == Closed {
				c.fail(key+".arrivals.kind", "remove arrivals: then steps follow each other", "a job has no clients")
			}
		}
	}
	return c.errs
}

func (c *checker) name(key, name string) {
	if name == "" || len(name) > maxName || strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }) {
		c.fail(key, fmt.Sprintf("write 1 to %d printable characters", maxName), "%s is not a name", yamlfile.Quoted(name))
	}
}

// owner checks what services and jobs have in common. names has the key of each name before.
func (c *checker) owner(names map[string]string, key, name string, gpus []int, host, priority int) {
	c.name(key+".name", name)
	if other := names[name]; other != "" {
		c.fail(key+".name", "choose another name", "%s is the name of %s, too", yamlfile.Quoted(name), other)
	}
	names[name] = key
	for i, g := range gpus {
		at := fmt.Sprintf("%s.gpus[%d]", key, i)
		between(c, at, g, 0, host-1)
		if slices.Contains(gpus[:i], g) {
			c.fail(at, "keep one", "GPU %d is given twice", g)
		}
	}
	between(c, key+".priority", priority, 0, int(gpreempt.MaxPriority))
}

func (c *checker) arrivals(key string, a Arrivals, d time.Duration) {
	used, ok := uses[a.Kind]
	if !ok {
		c.fail(key+".kind", "write "+yamlfile.Or(kinds), "%s is not a kind of arrivals", yamlfile.Quoted(string(a.Kind)))
		return
	}
	for _, f := range []struct {
		key   string
		given bool
	}{
		{"rate", a.Rate != 0},
		{"cv", a.CV != 0},
		{"burst", a.Burst != 0},
		{"burst_gap", a.BurstGap != 0},
		{"clients", a.Clients != 0},
		{"think", a.Think != 0},
		{"trace", a.Trace != ""},
		{"speed", a.Speed != 0},
	} {
		if f.given && !slices.Contains(used, f.key) {
			c.fail(key+"."+f.key, "remove it; "+string(a.Kind)+" uses "+strings.Join(used, ", "), "does not apply to kind: %s", a.Kind)
		}
	}
	if slices.Contains(used, "rate") {
		between(c, key+".rate", a.Rate, 1e-6, 1e6)
		if n := a.Rate * d.Seconds(); n > MaxRequests {
			c.fail(key+".rate", fmt.Sprintf("choose a lower rate or a shorter duration, for at most %d", MaxRequests), "these are %.0f requests", n)
		}
	}
	switch a.Kind {
	case Gamma:
		between(c, key+".cv", a.CV, 0.01, 100)
	case Bursts:
		between(c, key+".cv", a.CV, 0.01, 100)
		between(c, key+".burst", a.Burst, 1, 10_000)
		between(c, key+".burst_gap", a.BurstGap, 0, time.Minute)
		if a.Rate > 0 && a.pause() <= 0 {
			c.fail(key+".burst_gap", "choose a lower rate, a smaller burst or a shorter burst_gap", "bursts overlap: %d requests take longer than they may at %v requests per second", a.Burst, a.Rate)
		}
	case Closed:
		between(c, key+".clients", a.Clients, 1, 10_000)
		between(c, key+".think", a.Think, 0, maxKernel)
	case Trace:
		between(c, key+".speed", a.Speed, 1e-6, 1e6)
		if a.Trace == "" {
			c.fail(key+".trace", "write the path of a CSV file", "is missing")
		}
	default:
	}
}

func (c *checker) work(key string, w Work) {
	if w.Model != "" {
		if _, ok := models[w.Model]; !ok {
			remedy := "choose one of " + strings.Join(Models(), ", ")
			if near := spell.Nearest(w.Model, Models()); near != "" {
				remedy = "did you mean " + near + "?"
			}
			c.fail(key+".model", remedy, "%s is not known", yamlfile.Quoted(w.Model))
			return
		}
	}
	if w.Mean == 0 && w.Total == 0 {
		c.fail(key, "set mean, total or model", "the duration of the work is missing")
		return
	}
	between(c, key+".kernels", w.Kernels, 1, maxKernels)
	between(c, key+".total", w.Total, 0, maxKernel)
	between(c, key+".occupancy", w.Occupancy, 0.001, 1)
	between(c, key+".mean", w.Mean, 1, maxKernel)
	if given := w.P50 != 0 || w.P90 != 0 || w.Max != 0; given {
		between(c, key+".p50", w.P50, 1, w.P90)
		between(c, key+".p90", w.P90, 1, w.Max)
		between(c, key+".max", w.Max, 1, maxKernel)
	}
	if w.Kernels > 0 && w.Alone() < time.Duration(w.Kernels) {
		c.fail(key+".kernels", "choose fewer kernels or longer ones", "a kernel takes less than 1ns")
	}
	if float64(w.Kernels)*float64(w.Mean) > float64(24*maxKernel) {
		c.fail(key+".kernels", "choose fewer kernels or shorter ones", "the work takes more than a day")
	}
}

func (c *checker) llm(key string, l *LLM, needTokens bool) {
	between(c, key+".max_batch", l.MaxBatch, 1, 10_000)
	between(c, key+".prefill_base", l.PrefillBase, 0, maxKernel)
	between(c, key+".prefill_token", l.PrefillToken, 0, time.Second)
	between(c, key+".decode_base", l.DecodeBase, 0, maxKernel)
	between(c, key+".decode_sequence", l.DecodeSequence, 0, time.Second)
	between(c, key+".kernels_per_step", l.KernelsPerStep, 1, 100_000)
	between(c, key+".tpot", l.TPOT, 0, maxKernel)
	if l.PrefillBase+l.PrefillToken <= 0 {
		c.fail(key+".prefill_base", "set prefill_base or prefill_token", "a prefill takes no time")
	}
	if l.DecodeBase+l.DecodeSequence <= 0 {
		c.fail(key+".decode_base", "set decode_base or decode_sequence", "a decode step takes no time")
	}
	least := 0
	if needTokens {
		least = 1
	}
	between(c, key+".prompt_tokens", l.PromptTokens, least, maxTokens)
	between(c, key+".output_tokens", l.OutputTokens, least, maxTokens)
}

// maxTokens bounds the tokens of a request.
const maxTokens = math.MaxInt32 / 1024
