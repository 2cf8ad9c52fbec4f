package report

import (
	"encoding/csv"
	"errors"
	"io"
	"maps"
	"slices"
	"strconv"

	"github.com/gpreempt/gpreempt/lab/evidence"
)

// CSV writes all samples of the runs in long form, one value a line: run, origin, arm, kind, repeat
// (from 1), what (request, suspend, resume, work, sample or span), of which service or job where that is
// known, the time in ms from the beginning of the repeat, the name of the value, and the value. Names of durations end in _ms.
func (r *Report) CSV(w io.Writer) error {
	out := csv.NewWriter(w)
	err := out.Write([]string{"run", "origin", "arm", "kind", "repeat", "what", "of", "at_ms", "name", "value"})
	for _, run := range r.runs {
		for _, a := range run.Arms {
			for i := range a.Repeats {
				line := func(what, of string, at float64, name, value string) {
					err = errors.Join(err, out.Write([]string{run.Name, string(run.Origin), a.Name, string(a.Kind), strconv.Itoa(i + 1), what, of, exact(at), name, value}))
				}
				samples(&a.Repeats[i], line)
				if err != nil {
					return err
				}
			}
		}
	}
	out.Flush()
	return errors.Join(err, out.Error())
}

// samples calls line for each value of a repeat.
func samples(r *evidence.Repeat, line func(what, of string, at float64, name, value string)) {
	line("work", "", 0, "seconds", exact(r.Seconds))
	line("work", "", 0, "work", exact(r.Work))
	line("work", "", 0, "lost", strconv.FormatUint(r.Lost, 10))
	line("work", "", 0, "repeated", strconv.FormatUint(r.Repeated, 10))
	for _, job := range slices.Sorted(maps.Keys(r.Steps)) {
		line("work", job, 0, "steps", exact(r.Steps[job]))
	}
	for _, q := range r.Requests {
		if q.Failed != "" {
			line("request", q.Server, q.At, "failed", q.Failed)
			continue
		}
		line("request", q.Server, q.At, "total_ms", exact(q.Total))
		for _, v := range []struct {
			name  string
			value float64
		}{
			{"announce_ms", q.Announce},
			{"start_ms", q.Start},
			{"service_ms", q.Service},
			{"ttft_ms", q.TTFT},
			{"tpot_ms", q.TPOT},
			{"preemptions", float64(q.Preemptions)},
		} {
			if v.value != 0 {
				line("request", q.Server, q.At, v.name, exact(v.value))
			}
		}
	}
	for _, d := range r.Suspends {
		line("suspend", "", d.At, "suspend_ms", exact(d.MS))
	}
	for _, d := range r.Resumes {
		line("resume", "", d.At, "resume_ms", exact(d.MS))
	}
	for _, s := range r.Samples {
		for _, name := range slices.Sorted(maps.Keys(s.Values)) {
			line("sample", "", s.At, name, exact(s.Values[name]))
		}
	}
	for _, s := range r.Spans {
		line("span", s.Name, s.From, "gpu "+strconv.Itoa(s.GPU)+" "+s.What+"_ms", exact(s.To-s.From))
	}
}

// exact formats a value without loss.
func exact(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }
