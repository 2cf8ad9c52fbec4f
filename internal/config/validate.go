package config

import (
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/hazard"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// maxSocketPath is the size of sockaddr_un's sun_path less its final zero.
const maxSocketPath = 107

// Validate checks every range. The error is an Errors with every mistake found.
func (c Config) Validate() error {
	if es := c.problems(); len(es) > 0 {
		return es
	}
	return nil
}

// problems finds what is wrong with the values, whoever wrote them.
func (c Config) problems() Errors {
	var es Errors
	add := func(key, problem, remedy string) {
		es = append(es, &Error{Key: key, Problem: problem, Remedy: remedy})
	}

	if c.Socket != filepath.Clean(c.Socket) || !filepath.IsAbs(c.Socket) {
		add("socket", quoted(c.Socket)+" is not a clean absolute path", "write it from / on, without // or ..")
	} else if len(c.Socket) > maxSocketPath || strings.ContainsRune(c.Socket, 0) {
		add("socket", fmt.Sprintf("the path is longer than %d bytes", maxSocketPath), "choose a shorter one, such as "+Default().Socket)
	}
	for _, f := range fields {
		switch v := f.at(&c).(type) {
		case *int:
			if *v < f.min || *v > f.max {
				add(f.key, fmt.Sprintf("%d is outside %d to %d", *v, f.min, f.max), "choose a number in that range")
			}
		case *[]string:
			for _, name := range *v {
				if problem := nameProblem(name); problem != "" {
					add(f.key, problem, "write a name as in /etc/passwd or /etc/group, or a decimal id")
				}
			}
		}
	}
	es = append(es, mechanismProblems(c.Mechanisms)...)
	if l := c.Limits; l.LeasesPerClient > l.LeasesTotal {
		add("limits.leases_per_client", fmt.Sprintf("%d is more than leases_total, %d", l.LeasesPerClient, l.LeasesTotal),
			"lower it or raise leases_total")
	}
	es = append(es, policyProblems(c.Policy)...)
	if d := c.Discovery.Interval; d < 50*time.Millisecond || d > 10*time.Second {
		add("discovery.interval", durationText(d)+" is outside 50ms to 10s", "choose a duration in that range; 250ms suits most hosts")
	}
	if levels := []string{"debug", "info", "warn", "error"}; !slices.Contains(levels, c.Log.Level) {
		add("log.level", quoted(c.Log.Level)+" is no level", "write debug, info, warn or error")
	}
	return append(es, ruleProblems(c.Rules)...)
}

func mechanismProblems(ms Mechanisms) Errors {
	var es Errors
	known := hazard.Mechanisms()
	for i, m := range ms {
		key := fmt.Sprintf("mechanisms[%d]", i)
		switch {
		case !slices.Contains(known, m):
			remedy := "choose from " + strings.Join(known, ", ")
			if near := nearest(m, known); near != "" {
				remedy = "did you mean " + near + "?"
			}
			es = append(es, &Error{Key: key, Problem: quoted(m) + " is no mechanism", Remedy: remedy})
		case slices.Contains(ms[:i], m):
			es = append(es, &Error{Key: key, Problem: m + " is given twice", Remedy: "keep the one where it belongs: the first that works is taken"})
		}
	}
	return es
}

func nameProblem(name string) string {
	switch {
	case name == "":
		return "a name is empty"
	case strings.ContainsFunc(name, func(r rune) bool {
		return !unicode.IsPrint(r) || unicode.IsSpace(r) || strings.ContainsRune(":,[]", r)
	}):
		return quoted(name) + " is not a name"
	case strings.Trim(name, "0123456789") == "":
		if _, err := strconv.ParseUint(name, 10, 32); err != nil {
			return cut(name) + " is too large for an id"
		}
	}
	return ""
}

// policyProblems asks the scheduler about the policy until it is content,
// putting what it names back to the preset's value: it tells one thing at a time.
func policyProblems(p scheduler.Policy) Errors {
	var es Errors
	base, err := scheduler.PresetByName(p.Preset)
	if err != nil {
		base = scheduler.DefaultPolicy()
	}
	for {
		var ke *scheduler.KnobError
		if err := p.Validate(); !errors.As(err, &ke) {
			return es
		}
		key := policyPrefix + ke.Knob
		remedy := "remove it to have the preset's value"
		if ke.Knob == "default_ttl" {
			remedy = "default_ttl may be at most max_ttl"
		}
		i := slices.IndexFunc(fields, func(f field) bool { return f.key == key })
		if slices.ContainsFunc(es, func(e *Error) bool { return e.Key == key }) {
			return es // the preset's value does not help: another knob stands against it
		}
		es = append(es, &Error{Key: key, Problem: ke.Problem, Remedy: remedy})
		if i < 0 {
			return es
		}
		c, b := Config{Policy: p}, Config{Policy: base}
		reflect.ValueOf(fields[i].at(&c)).Elem().Set(reflect.ValueOf(fields[i].at(&b)).Elem())
		p = c.Policy
	}
}

// globProblems asks the classifier about the globs of rules[i]; what it says holds
// the remedy too.
func globProblems(i int, m classify.Match) Errors {
	_, err := classify.New([]classify.Rule{{Name: "x", Match: m}})
	var es Errors
	for _, field := range []string{"comm", "cmdline", "cgroup"} {
		for _, e := range ruleErrors(err) {
			if e.Field == field {
				es = append(es, &Error{Key: fmt.Sprintf("rules[%d].match.%s", i, field), Problem: e.Problem})
			}
		}
	}
	return es
}

func ruleErrors(err error) []*classify.RuleError {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return nil
	}
	var all []*classify.RuleError
	for _, one := range joined.Unwrap() {
		if e, ok := errors.AsType[*classify.RuleError](one); ok {
			all = append(all, e)
		}
	}
	return all
}

func ruleProblems(rules []classify.Rule) Errors {
	var es Errors
	first := map[string]int{}
	for i, r := range rules {
		add := func(key, problem, remedy string) {
			es = append(es, &Error{Key: fmt.Sprintf("rules[%d].%s", i, key), Problem: problem, Remedy: remedy})
		}
		switch j, twice := first[r.Name]; {
		case r.Name == "":
			add("name", "is missing", "give the rule a name of its own")
		case len(r.Name) > 64 || strings.ContainsFunc(r.Name, func(c rune) bool { return !unicode.IsPrint(c) }):
			add("name", quoted(r.Name)+" is not a name", "use at most 64 printable characters")
		case twice:
			add("name", fmt.Sprintf("%s is the name of rules[%d] too", quoted(r.Name), j), "give each rule a name of its own")
		default:
			first[r.Name] = i
		}
		if r.Match == (classify.Match{}) {
			add("match", "is empty, which would match every process",
				`give comm, cmdline, cgroup or uid; comm: "*" if every process is meant`)
		}
		if r.Class > gpreempt.Offline {
			add("class", r.Class.String()+" is not known", "say online, offline or unmanaged")
		}
		if r.Priority != nil && *r.Priority > gpreempt.MaxPriority {
			add("priority", fmt.Sprintf("%d is outside 0 to %d", *r.Priority, gpreempt.MaxPriority), "choose a number in that range")
		}
		es = append(es, globProblems(i, r.Match)...)
	}
	return es
}
