package report

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"gonum.org/v1/plot/plotter"

	"github.com/gpreempt/gpreempt/internal/stat"
	"github.com/gpreempt/gpreempt/lab/evidence"
)

// Answer is what a reader looks for first: three numbers, a verdict with its reason, and what would
// change it.
type Answer struct {
	// Run is the name of the run.
	Run string
	// Columns are the work alone, sharing the GPUs, and protected. Row says which latency they have.
	Columns [3]Column
	Row     string
	Result  evidence.Result
	Profile string
	// Why is the rest of the sentence that begins with the result.
	Why string
	// Change says what would change the result.
	Change string
	// Protected says which arms the column protected is of.
	Protected string
	// limit is the one of the latency in ms, NaN for none.
	limit float64
}

// Column is one of the three ways to run the work.
type Column struct {
	Name string
	// Within is a percentile of the latency in ms, and Kept the offline work as a part of that alone.
	// NaN: not measured.
	Within, Kept float64
}

// The names of the rows of an Answer's numbers.
const (
	RowP99  = "99 of 100 requests within"
	RowP50  = "half of the requests within"
	RowWork = "offline work keeps"
)

// Latency formats Within.
func (c Column) Latency() string {
	switch {
	case math.IsNaN(c.Within):
		return "-"
	case c.Within >= 10_000:
		return number(c.Within/1000) + " s"
	}
	return number(c.Within) + " ms"
}

// Work formats Kept.
func (c Column) Work() string {
	if math.IsNaN(c.Kept) {
		return "-"
	}
	return percent(c.Kept)
}

// AnswerOf returns the answer of a run with a verdict on it.
func AnswerOf(run *evidence.Run, v *evidence.Verdict) Answer {
	all := arms([]evidence.Run{*run})
	a := Answer{Run: clean(run.Name), Result: v.Result, Profile: clean(v.Profile), limit: math.NaN()}
	for i, name := range []string{"alone", "shared", "protected"} {
		a.Columns[i] = Column{Name: name, Within: math.NaN(), Kept: math.NaN()}
	}
	chosen, equal, others := headline(all, v)
	row, q := rowOf(all, v)
	a.Row = row
	for i := range all {
		arm := &all[i]
		switch {
		case arm.Kind == evidence.OnlineAlone:
			a.Columns[0].latency(arm, q)
		case arm.Kind == evidence.OfflineAlone && arm.sum.WorkRate > 0:
			a.Columns[0].Kept = 1
		case arm.Kind == evidence.Shared:
			a.Columns[1].latency(arm, q)
			a.Columns[1].kept(all, arm)
		}
	}
	if chosen != nil {
		a.Columns[2].latency(chosen, q)
		a.Columns[2].kept(all, chosen)
		a.Protected = evidence.NameSettings(equal)
		if n := len(equal); n > 1 {
			a.Protected += fmt.Sprintf(". These %d settings make no difference here", n)
		}
		switch {
		case others == 1:
			a.Protected += ". One other setting is below"
		case others > 1:
			a.Protected += fmt.Sprintf(". %d other settings are below", others)
		}
		if a.Columns[2].Within >= a.Columns[1].Within {
			a.Protected += ". Its requests are no faster than shared"
		}
		a.limit = latencyLimit(v, chosen.Arm.Name, q, a.Columns[0].Within)
	}
	a.Why = why(v)
	a.Change = change(v, slowness(all, v))
	return a
}

// ProtectedIs is the sentence about the column protected, "" without one.
func (a *Answer) ProtectedIs() string {
	if a.Protected == "" || a.Protected == a.Columns[2].Name {
		return ""
	}
	return "Protected is " + a.Protected + "."
}

// rowOf chooses the percentile that is shown: the 99th, unless an arm has too few requests for it or
// the limits are of the median.
func rowOf(all []arm, v *evidence.Verdict) (name string, q float64) {
	limited := func(part string) bool {
		return slices.ContainsFunc(v.Criteria, func(c evidence.Criterion) bool { return strings.HasPrefix(c.Name, "online_"+part) })
	}
	few := slices.ContainsFunc(all, func(a arm) bool { return len(a.latencies) > 0 && len(a.latencies) < 100 })
	if (few || limited("p50")) && !limited("p99") {
		return RowP50, 0.5
	}
	return RowP99, 0.99
}

// latency sets the latency to that of an arm, unless it is known already.
func (c *Column) latency(a *arm, q float64) {
	if math.IsNaN(c.Within) && len(a.latencies) > 0 {
		c.Within = stat.Quantile(a.latencies, q)
	}
}

func (c *Column) kept(all []arm, a *arm) {
	if share, known := kept(all, a); math.IsNaN(c.Kept) && known && usable(share) {
		c.Kept = share
	}
}

// headline returns the protected arm that the first screen shows: of those whose criteria have the
// result of the verdict, the one with the lowest p99, and then with the most offline work. equal are
// the names of the arms with its samples, and others is how many have other ones.
func headline(all []arm, v *evidence.Verdict) (chosen *arm, equal []string, others int) {
	result := map[string]evidence.Result{}
	for _, c := range v.Criteria {
		if before, ok := result[c.Arm]; !ok || before == evidence.Pass || c.Result == evidence.Fail {
			result[c.Arm] = c.Result
		}
	}
	rank := func(a *arm) []float64 {
		r := []float64{1, math.MaxFloat64, -a.sum.WorkRate}
		if result[a.Arm.Name] == v.Result {
			r[0] = 0
		}
		if a.sum.Latency.N > 0 {
			r[1] = a.sum.Latency.P99
		}
		return r
	}
	for _, a := range merged(all) {
		if a.Kind != evidence.Protected || len(a.Repeats) == 0 {
			continue
		}
		others += len(a.settings)
		if chosen == nil || slices.Compare(rank(&a), rank(chosen)) < 0 {
			chosen = &a
		}
	}
	if chosen == nil {
		return nil, nil, 0
	}
	return chosen, chosen.settings, others - len(chosen.settings)
}

// latencyLimit is the limit of a percentile of the latency of an arm in ms, NaN for none.
func latencyLimit(v *evidence.Verdict, arm string, q, alone float64) float64 {
	limit := math.NaN()
	for _, c := range v.Criteria {
		if c.Arm != arm {
			continue
		}
		switch c.Name {
		case fmt.Sprintf("online_p%.0f_ms", 100*q):
			return c.Limit
		case fmt.Sprintf("online_p%.0f_ratio", 100*q):
			limit = c.Limit * alone
		}
	}
	return limit
}

// plain are the criteria in words for a sentence.
var plain = map[string]string{
	"online_mean_ms": "mean latency of requests", "online_p95_ms": "latency of 95 of 100 requests", "online_p99_ms": "latency of 99 of 100 requests",
	"online_max_ms": "slowest request", "online_mean_ratio": "mean latency of requests against that alone",
	"online_p99_ratio": "latency of 99 of 100 requests against that alone",
	"ttft_p99_ms":      "time to the first token", "tpot_p99_ms": "time for each further token",
	"online_p50_ratio": "latency of half of the requests against that alone", "suspend_p50_ms": "median time to suspend", "resume_p50_ms": "median time to resume",
	"daemon_cpu_percent": "processor time of the daemon", "daemon_growth_mib": "growth of the daemon's memory",
	"suspend_mean_ms": "mean time to suspend", "suspend_p99_ms": "time to suspend", "suspend_max_ms": "longest suspend",
	"resume_mean_ms": "mean time to resume", "resume_p99_ms": "time to resume", "resume_max_ms": "longest resume",
	"offline_loss_percent": "offline work lost", "offline_overhead_percent": "offline work lost beyond the time that requests need",
	"utilisation_percent": "utilisation of the GPU", "protected_seconds": "measured time",
}

// words returns a criterion in words.
func words(c *evidence.Criterion) string { return cmp.Or(plain[c.Name], c.Name) }

// amount formats a figure of a criterion.
func amount(v float64, unit string) string {
	format := "%.3g %s"
	if v >= 1000 && v < 1e9 {
		format = "%.0f %s"
	}
	return strings.TrimSpace(fmt.Sprintf(format, v, unit))
}

// why returns the reason of a verdict in a sentence.
func why(v *evidence.Verdict) string {
	if v.Result == evidence.Pass {
		c := nearest(v)
		return fmt.Sprintf("every limit is kept. %s; the limit is %s.", sentence(c), limitOf(c))
	}
	text := clean(v.Reasons[0])
	more := len(v.Reasons) - 1
	if c := deciding(v); c != nil {
		of, equal := 0, 0
		for i := range v.Criteria {
			if o := &v.Criteria[i]; o.Name == c.Name {
				of++
				if o.Result == c.Result {
					equal++
				}
			}
		}
		said, ofFigure := strings.CutPrefix(clean(c.Why), "it ")
		switch {
		case c.Busy:
			text = said
		case c.Figure != nil && c.Result == evidence.Fail:
			text = fmt.Sprintf("%s: %s (limit %s)", words(c), shown(c), amount(c.Limit, c.Unit))
		case ofFigure:
			text = words(c) + " " + said
		default:
			text = words(c) + ": " + said
		}
		if of > 1 && !c.Busy {
			text += fmt.Sprintf(", in %d of %d settings", equal, of)
		}
	}
	text = strings.TrimRight(text, ".") + "."
	switch {
	case more == 1:
		text += " One more reason is below."
	case more > 1:
		text += fmt.Sprintf(" %d more reasons are below.", more)
	}
	return text
}

// sentences say a figure of a criterion, of which they have the amount. Other criteria are said by their words.
var sentences = map[string]string{
	"online_mean_ms":           "The mean latency of requests was %s",
	"online_p95_ms":            "95 of 100 requests took at most %s",
	"online_p99_ms":            "99 of 100 requests took at most %s",
	"online_max_ms":            "The slowest request took %s",
	"online_mean_ratio":        "Requests took %s times as long as alone in the mean",
	"online_p50_ratio":         "Half of the requests took at most %s times as long as alone",
	"online_p99_ratio":         "99 of 100 requests took at most %s times as long as alone",
	"suspend_mean_ms":          "A suspend took %s in the mean",
	"suspend_p50_ms":           "Half of the suspends took at most %s",
	"suspend_p99_ms":           "99 of 100 suspends took at most %s",
	"suspend_max_ms":           "The longest suspend took %s",
	"resume_mean_ms":           "A resume took %s in the mean",
	"resume_p50_ms":            "Half of the resumes took at most %s",
	"resume_p99_ms":            "99 of 100 resumes took at most %s",
	"resume_max_ms":            "The longest resume took %s",
	"offline_loss_percent":     "%s of the offline work was lost",
	"offline_overhead_percent": "%s of the offline work was lost beyond the time that requests need",
}

// sentence says the figure of a criterion.
func sentence(c *evidence.Criterion) string {
	switch form := sentences[c.Name]; {
	case c.Name == overhead && *c.Figure < 0:
		return "No overhead was measured"
	case form == "":
		return fmt.Sprintf("The %s was %s", words(c), shown(c))
	case c.Unit == times:
		return fmt.Sprintf(form, amount(*c.Figure, ""))
	default:
		return fmt.Sprintf(form, amount(*c.Figure, c.Unit))
	}
}

// overhead is the criterion whose figure is negative where the repeats differ by more than it.
const overhead = "offline_overhead_percent"

// times is the unit of ratios, which sentences have in their words.
const times = "times"

// shown formats the figure of a criterion.
func shown(c *evidence.Criterion) string {
	if c.Name == overhead && *c.Figure < 0 {
		return "no overhead measured"
	}
	return amount(*c.Figure, c.Unit)
}

// limitOf formats the limit of a criterion after its sentence.
func limitOf(c *evidence.Criterion) string { return amount(c.Limit, strings.TrimPrefix(c.Unit, times)) }

// deciding returns the limit because of which the result is what it is, nil when it is something else.
func deciding(v *evidence.Verdict) *evidence.Criterion {
	if len(v.Reasons) == 0 {
		return nil
	}
	for i := range v.Criteria {
		c := &v.Criteria[i]
		if c.Result == v.Result && c.Result != evidence.Pass && plain[c.Name] != "" && strings.Contains(v.Reasons[0], c.Name) && strings.HasSuffix(v.Reasons[0], c.Why) {
			return c
		}
	}
	return nil
}

// nearest returns the criterion that is nearest to its limit, in proportion. A verdict that is PASS
// has one with a figure.
func nearest(v *evidence.Verdict) *evidence.Criterion {
	distance := func(c *evidence.Criterion) float64 {
		if c.Figure == nil || c.Name == "protected_seconds" { // which says how much was measured
			return math.Inf(1)
		}
		return math.Abs(c.Limit-*c.Figure) / c.Limit
	}
	best := &v.Criteria[0]
	for i := range v.Criteria {
		if distance(&v.Criteria[i]) < distance(best) {
			best = &v.Criteria[i]
		}
	}
	return best
}

// answerChart is the chart of the answers: a bar for each way to run the work, as long as its latency.
func answerChart(answers []Answer, origin string) *figure {
	f := &figure{
		title: fmt.Sprintf("%s: latency (%s), and offline work that is kept", origin, answers[0].Row),
		alt:   "A bar for each way to run the work. The figures are in the table beside it.",
		x:     axis{label: "ms", zero: true},
	}
	limit, longest := math.NaN(), 0.0
	var lanes []string
	var texts series
	type bar struct {
		name, text string
		value      float64
		series     int
	}
	var bars []bar
	for i, a := range answers {
		for n, c := range a.Columns {
			if math.IsNaN(c.Within) || i > 0 && n < 2 {
				continue
			}
			name, text := c.Name, c.Latency()
			if len(answers) > 1 && n == 2 {
				name = a.Run
			}
			if !math.IsNaN(c.Kept) && (n > 0 || c.Kept < 1) {
				text += ", work " + c.Work()
			}
			bars = append(bars, bar{name, text, c.Within, n})
			longest = max(longest, c.Within)
		}
		if math.IsNaN(limit) {
			limit = a.limit
		}
	}
	if len(bars) == 0 {
		return nil
	}
	slices.Reverse(bars) // lanes are from below
	for i, b := range bars {
		y := float64(i)
		lanes = append(lanes, b.name)
		f.boxes = append(f.boxes, box{x1: b.value, y0: y + 0.14, y1: y + 0.86, series: b.series})
		texts.points = append(texts.points, plotter.XY{Y: y + 0.5})
		texts.labels = append(texts.labels, b.text)
	}
	f.y.lanes = lanes
	end := longest
	if limit < 3*longest {
		end = max(end, limit)
		f.series = append(f.series, series{name: "limit " + amount(limit, "ms"), number: limitSeries, points: plotter.XYs{{X: limit, Y: 0}, {X: limit, Y: float64(len(bars))}}})
	}
	for i := range texts.points { // one below the other, where no bar and no limit is
		texts.points[i].X = end
	}
	f.series = append(f.series, texts)
	f.x.low, f.x.high = 0, 1.8*end
	return f
}

// limitSeries is the number of a series whose line differs from the bars.
const limitSeries = 5
