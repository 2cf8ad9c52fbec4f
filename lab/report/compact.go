package report

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/lab/evidence"
)

// merged returns the arms with protected arms that have the same figures, to the digits that are
// shown, as one with the names of all: settings that make no difference.
func merged(all []arm) []arm {
	var out []arm
	for i := range all {
		a := all[i]
		same := func(o arm) bool {
			return a.Kind == evidence.Protected && o.Kind == a.Kind && o.run == a.run && len(a.Repeats) > 0 && slices.Equal(o.shown(all), a.shown(all))
		}
		if j := slices.IndexFunc(out, same); j >= 0 {
			out[j].settings = append(out[j].settings, a.name)
			continue
		}
		a.settings = []string{a.name}
		out = append(out, a)
	}
	for i := range out {
		out[i].name = evidence.NameSettings(out[i].settings)
	}
	return out
}

// shown are the figures of an arm as the tables show them.
func (a *arm) shown(all []arm) []string {
	share, _ := kept(all, a)
	f := []string{a.Mechanism, a.Missing, strconv.Itoa(len(a.Repeats)), strconv.Itoa(a.sum.Failed), number(a.sum.WorkRate), percent(share)}
	for _, d := range []evidence.Distribution{
		a.sum.Latency, a.sum.Announce, a.sum.Start, a.sum.Service, a.sum.TTFT, a.sum.TPOT, a.sum.Suspends, a.sum.Resumes,
	} {
		f = append(f, cells(d)...)
	}
	for _, name := range slices.Sorted(maps.Keys(a.sum.Readings)) {
		f = append(f, name, number(a.sum.Readings[name]))
	}
	return f
}

// chartedArms is how many arms have charts of their own.
const chartedArms = 6

// chooseCharted leaves charts to the arms to compare with and the first protected ones, and returns
// how many others there are.
func chooseCharted(all []arm) (left int) {
	n := 0
	for _, kind := range []evidence.ArmKind{evidence.OnlineAlone, evidence.Shared, evidence.OfflineAlone, evidence.Protected, evidence.StreamPriority, evidence.Baseline} {
		for i := range all {
			if all[i].Kind == kind {
				all[i].uncharted = n >= chartedArms
				n++
			}
		}
	}
	return max(0, n-chartedArms)
}

// compact makes a table short. Rows that differ in the arm only become one, and what is the same in
// every row is said once above the table.
func (t *table) compact() {
	if t.Whole {
		return
	}
	if at := slices.Index(t.Head, "arm"); at >= 0 && len(t.Head) > 1 {
		t.join(at)
	}
	if len(t.Rows) < 2 {
		return
	}
	var above []string
	for i := range slices.Backward(t.Head) {
		value := t.Rows[0][i]
		if len(t.Head) < 2 || slices.ContainsFunc(t.Rows, func(row []string) bool { return row[i] != value }) {
			continue
		}
		if value != "-" {
			above = append(above, strings.TrimPrefix(t.Head[i], ">")+" = "+value)
		}
		t.Head = slices.Delete(slices.Clone(t.Head), i, i+1)
		for n, row := range t.Rows {
			t.Rows[n] = slices.Delete(slices.Clone(row), i, i+1)
		}
	}
	slices.Reverse(above)
	if len(above) > 0 {
		t.Above = "In every row: " + strings.Join(above, "; ") + "." + t.Above
	}
}

// join makes rows that differ in the column of arms only one.
func (t *table) join(at int) {
	index := map[string]int{}
	var rows [][]string
	var names [][]string
	for _, row := range t.Rows {
		key := fmt.Sprintf("%q", slices.Concat(row[:at], row[at+1:]))
		i, found := index[key]
		if !found {
			i = len(rows)
			index[key] = i
			rows, names = append(rows, slices.Clone(row)), append(names, nil)
		}
		if !slices.Contains(names[i], row[at]) {
			names[i] = append(names[i], row[at])
		}
	}
	if len(rows) == len(t.Rows) {
		return
	}
	for i := range rows {
		rows[i][at] = evidence.NameSettings(names[i])
	}
	t.Rows = rows
	t.Above += " Arms with the same figures are one row: these settings make no difference here."
}
