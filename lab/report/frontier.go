package report

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"gonum.org/v1/plot/plotter"

	"github.com/gpreempt/gpreempt/lab/evidence"
)

// choice is a point of the frontier: an arm in which online and offline work ran together.
type choice struct {
	arm          *arm
	group        string
	latency      evidence.Distribution
	work         float64 // share of alone, or rate
	dominated    bool
	byFirstToken bool
}

// choices returns the points. The work is a share of that alone when share is true, else a rate.
func choices(all []arm) (found []choice, share bool) {
	share = true
	for i := range all {
		if a := &all[i]; a.together() {
			_, known := kept(all, a)
			share = share && known
		}
	}
	for i := range all {
		a := &all[i]
		if !a.together() || len(a.latencies) == 0 || a.sum.Seconds <= 0 {
			continue
		}
		c := choice{arm: a, group: string(a.Kind), work: a.sum.WorkRate, latency: a.sum.Latency}
		switch swept := group(a.Arm.Name); {
		case len(a.settings) > 1:
			c.group = a.name
		case swept != a.Arm.Name:
			c.group = clean(swept)
		case a.Policy != "":
			c.group = clean(a.Policy)
		case a.Mechanism != "":
			c.group = clean(a.Mechanism)
		}
		if share {
			c.work, _ = kept(all, a)
		}
		if a.sum.TTFT.N > 0 {
			c.latency, c.byFirstToken = a.sum.TTFT, true
		}
		found = append(found, c)
	}
	for i := range found {
		c := &found[i]
		c.dominated = slices.ContainsFunc(found, func(o choice) bool {
			return o.work >= c.work && o.latency.P99 <= c.latency.P99 && (o.work > c.work || o.latency.P99 < c.latency.P99)
		})
	}
	return found, share
}

// together reports whether online and offline work ran together in an arm.
func (a *arm) together() bool {
	return a.Kind != evidence.OnlineAlone && a.Kind != evidence.OfflineAlone
}

// group returns the name of an arm without the value of a knob, as plans and sweeps add it:
// "balanced, share floor 0.20", "balanced share_floor=0.2".
func group(name string) string {
	name, _, _ = strings.Cut(name, ",")
	return strings.Join(slices.DeleteFunc(strings.Fields(name), func(word string) bool { return strings.Contains(word, "=") }), " ")
}

// frontierSection shows what each way to share the GPUs costs and gains.
func frontierSection(all []arm, origin string) section {
	s := section{ID: "frontier", Title: "Frontier"}
	found, share := choices(all)
	if len(found) < 2 {
		s.text("A frontier needs two arms in which online and offline work run together.")
		return s
	}
	f := frontier(found, share, origin)
	s.text("Latency against offline work. An arm is dominated when another one has both a lower p99 and more offline work, or one of them at the same other.")
	t := table{Head: []string{">#", "arm", "group", ">p50 ms", ">p99 ms", ">offline work", "dominated"}}
	for i, c := range found {
		work := number(c.work) + " " + c.arm.unit() + "/s"
		if share {
			work = percent(c.work)
		}
		dominated := "no"
		if c.dominated {
			dominated = "yes"
		}
		t.Rows = append(t.Rows, []string{fmt.Sprint(i + 1), c.arm.name, c.group, number(c.latency.P50), number(c.latency.P99), work, dominated})
	}
	if found[0].byFirstToken {
		s.text("The latency is the time to first token.")
	}
	s.Charts, s.Tables = append(s.Charts, f.draw()), append(s.Tables, t)
	for _, c := range references(all) {
		s.text("%s: p99 %s ms without offline work.", c.name, number(c.sum.Latency.P99))
	}
	return s
}

// references are the arms of online work alone.
func references(all []arm) []*arm {
	var found []*arm
	for i := range all {
		if all[i].Kind == evidence.OnlineAlone && len(all[i].latencies) > 0 {
			found = append(found, &all[i])
		}
	}
	return found
}

// frontier is the figure of the choices, whose numbers are those of the table.
func frontier(found []choice, share bool, origin string) *figure {
	f := &figure{
		title: origin + ": p99 of latency against offline work",
		alt:   "A point for each arm, with its number in the table below. Points further right do more offline work, lower points answer faster.",
		x:     axis{label: "offline work (units/s)"}, y: axis{label: "p99 (ms)", log: true},
	}
	if share {
		f.x.label = "offline work (% of alone)"
	}
	groups := map[string]int{}
	for i, c := range found {
		n, ok := groups[c.group]
		if !ok {
			n = len(f.series)
			groups[c.group] = n
			f.series = append(f.series, series{name: c.group, number: n, marks: true})
		}
		x := c.work
		if share {
			x *= 100
		}
		f.series[n].points = append(f.series[n].points, plotter.XY{X: x, Y: max(c.latency.P99, least)})
		f.series[n].labels = append(f.series[n].labels, fmt.Sprint(i+1))
	}
	return f
}

// Frontier writes the chart of the p99 of latency against offline work as a file of SVG,
// for light and dark pages. The runs need two arms in which online and offline work run
// together.
func (r *Report) Frontier(w io.Writer) error {
	found, share := choices(arms(r.runs))
	if len(found) < 2 {
		return errors.New("a frontier needs two arms in which online and offline work run together")
	}
	c := frontier(found, share, r.doc.Origin).draw()
	_, err := io.WriteString(w, picture(&c))
	return err
}
