package evidence

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// finding is why a run does not pass: what was found in a repeat of an arm.
type finding struct {
	result Result
	// name is that of a criterion: one of the profile if limit is set.
	name  string
	limit bool
	// arm and repeat, from 1, are where it was found; "" and 0 for no place.
	arm    string
	repeat int
	// leftOut: the arm was not run, and say is why.
	leftOut bool
	// n counts what was found, of so many; 0 if it is nothing that is counted. say has {n} and {of}
	// in their places, so that findings in several places are one reason.
	n, of int
	say   string
}

// findings are in the order in which they were found.
type findings []finding

func (f *findings) add(one finding) { *f = append(*f, one) }

// result is the worst of all.
func (f findings) result() Result {
	switch {
	case len(f) == 0:
		return Pass
	case slices.ContainsFunc(f, func(one finding) bool { return one.result == Fail }):
		return Fail
	}
	return CannotTell
}

// reasons returns a sentence for each reason, those of a failure first. A reason in several arms
// and repeats is one sentence.
func (f findings) reasons(run *Run) (all []string) {
	type reason struct {
		result  Result
		leftOut bool
		say     string
	}
	for _, result := range []Result{Fail, CannotTell} {
		said := map[reason]bool{}
		for _, one := range f {
			key := reason{one.result, one.leftOut, one.say}
			if one.result != result || said[key] {
				continue
			}
			said[key] = true
			same := slices.DeleteFunc(slices.Clone(f), func(o finding) bool { return reason{o.result, o.leftOut, o.say} != key })
			all = append(all, same.sentence(run))
		}
	}
	return all
}

// sentence says a reason with all its places.
func (f findings) sentence(run *Run) string {
	n, of := 0, 0
	var arms, names []string
	repeats := map[string][]int{}
	limits := true
	for _, one := range f {
		n, of, limits = n+one.n, of+one.of, limits && one.limit
		if one.arm != "" && !slices.Contains(arms, one.arm) {
			arms = append(arms, one.arm)
		}
		if one.repeat > 0 {
			repeats[one.arm] = append(repeats[one.arm], one.repeat)
		}
		if !slices.Contains(names, one.name) {
			names = append(names, one.name)
		}
	}
	for i, arm := range arms {
		if numbers := repeats[arm]; len(numbers) > 0 && (len(numbers) < run.repeats(arm) || len(numbers) == 1) {
			arms[i] = arm + ", repeat " + listed(numbers)
		}
	}
	say := strings.NewReplacer("{n}", strconv.Itoa(n), "{of}", strconv.Itoa(of)).Replace(f[0].say)
	where := and(arms)
	switch {
	case f[0].leftOut:
		return where + " was left out: " + say
	case limits:
		return where + ": " + and(names) + ": " + say
	case where != "":
		return where + ": " + say
	}
	return say
}

// repeats returns how many repeats of an arm were run.
func (run *Run) repeats(name string) int {
	if i := slices.IndexFunc(run.Arms, func(a Arm) bool { return a.Name == name }); i >= 0 {
		return len(run.Arms[i].Repeats)
	}
	return 0
}

// criteria returns an entry for each arm in which something was found that no profile limits.
func (f findings) criteria() (all []Criterion) {
	for _, one := range f {
		if one.limit {
			continue
		}
		i := slices.IndexFunc(all, func(c Criterion) bool { return c.Arm == one.arm && c.Name == one.name && c.Result == one.result })
		if i < 0 {
			i = len(all)
			all = append(all, Criterion{Arm: one.arm, Name: one.name, Always: true, Result: one.result, Why: strings.NewReplacer("{n} of {of} ", "", "{n} ", "").Replace(one.say)})
		}
		if one.n > 0 {
			if all[i].Figure == nil {
				all[i].Figure = new(0.0)
			}
			*all[i].Figure += float64(one.n)
		}
	}
	return all
}

// listed is 1, or 1 and 2, or 1, 2 and 3.
func listed(numbers []int) string {
	texts := make([]string, len(numbers))
	for i, n := range numbers {
		texts[i] = fmt.Sprint(n)
	}
	return and(texts)
}

func and(texts []string) string {
	if len(texts) < 2 {
		return strings.Join(texts, "")
	}
	return strings.Join(texts[:len(texts)-1], ", ") + " and " + texts[len(texts)-1]
}

// after returns a text with what introduces it, "" without a text.
func after(introduction, text string) string {
	if text == "" {
		return ""
	}
	return introduction + text
}
