package safety

import (
	"bytes"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
)

var kernels = flag.String("kernels", "", "kernel trees, separated by spaces: classify their messages, and with -update rewrite testdata/messages.list")

// ruleset is testdata/messages.yaml, which explains the fields.
type ruleset struct {
	Reasons []struct{ Reason, Why string }
	Rules   []*struct {
		Reason                         string
		Calls, Files, Functions, Texts string
		calls, files, functions, texts *regexp.Regexp
		used                           bool
	}
	Samples map[string]string
}

func readRules(t *testing.T) (rs ruleset) {
	t.Helper()
	data, err := os.ReadFile("testdata/messages.yaml")
	if err != nil {
		t.Fatal(err)
	}
	d := yaml.NewDecoder(bytes.NewReader(data))
	d.KnownFields(true)
	if err := d.Decode(&rs); err != nil {
		t.Fatal(err)
	}
	for _, r := range rs.Rules {
		r.calls, r.files = regexp.MustCompile(r.Calls), regexp.MustCompile(r.Files)
		r.functions, r.texts = regexp.MustCompile(r.Functions), regexp.MustCompile(r.Texts)
	}
	return rs
}

// verdict says what a message is: the name of its pattern, or the reason why it does
// not report a failure of a GPU, or neither.
type verdict struct {
	pattern, reason string
	// in has a letter for each kernel that has the message, a for the first, and - for others.
	in string
	// where is a place that no rule is about.
	where string
}

// classify returns the verdicts of the messages of kernels, by their texts, and the number of
// those at level debug in each kernel.
func (rs ruleset) classify(t *testing.T, trees [][]message) (verdicts map[string]verdict, debug []int) {
	t.Helper()
	verdicts = map[string]verdict{}
	for k, tree := range trees {
		quiet := map[string]bool{}
		for _, m := range tree {
			if level.MatchString(m.call) {
				quiet[m.text] = true
				continue
			}
			v, ok := verdicts[m.text]
			reason := rs.reason(m)
			if !ok {
				v = verdict{pattern: rs.pattern(m.text), reason: reason, in: strings.Repeat("-", len(trees))}
			}
			if reason == "" {
				v.reason, v.where = "", m.call+" in "+m.function+", "+m.file
			}
			v.in = v.in[:k] + string(rune('a'+k)) + v.in[k+1:]
			verdicts[m.text] = v
		}
		debug = append(debug, len(quiet))
	}
	for _, r := range rs.Rules {
		if !r.used {
			t.Errorf("no message is of this rule: %+v", *r)
		}
	}
	return verdicts, debug
}

// level is a call that prints nothing unless someone asks for it.
var level = regexp.MustCompile(`_(?i:dbg|debug)`)

// reason returns the reason of the first rule that is about a message, "" without one.
func (rs ruleset) reason(m message) string {
	for _, r := range rs.Rules {
		if r.calls.MatchString(m.call) && r.files.MatchString(m.file) && r.functions.MatchString(m.function) && r.texts.MatchString(m.text) {
			r.used = true
			return r.Reason
		}
	}
	return ""
}

// pattern returns the pattern that a line with a format matches, "" without one.
func (rs ruleset) pattern(text string) string {
	if p, _ := match(Record{Text: "amdgpu 0000:c5:00.0: " + rs.sample(text)}); p != nil {
		return p.Name
	}
	return ""
}

// verb is a conversion of printk.
var verb = regexp.MustCompile(`%([-+ #0]*)(?:\*|[0-9]+)?(?:\.(?:\*|[0-9]+))?(?:hh|h|ll|l|L|z)?(p[A-Za-z]*|[a-zA-Z%])`)

// sample returns a line that is printed with a format.
func (rs ruleset) sample(text string) string {
	if s, ok := rs.Samples[text]; ok {
		return s
	}
	text = verb.ReplaceAllStringFunc(text, func(v string) string {
		m := verb.FindStringSubmatch(v)
		switch m[2] {
		case "%":
			return "%"
		case "d", "i", "u":
			return "7"
		case "x", "X":
			if strings.Contains(m[1], "#") {
				return "0x1f"
			}
			return "1f"
		case "s":
			return "word"
		}
		return "00000000e2b0f6a1" // a pointer
	})
	return strings.NewReplacer(`\t`, "\t", `\n`, "\n").Replace(text)
}

const messageFile = "testdata/messages.list"

// table returns the text of messageFile: for each kernel a line with counts, then the messages
// of each pattern, of each reason, and of neither.
func (rs ruleset) table(names []string, verdicts map[string]verdict, debug []int) string {
	var b strings.Builder
	b.WriteString("# The messages of amdgpu in the kernel log, by pattern and then by reason: make kernel-strings\n# KERNEL_TREES=... writes this file. A letter says that the kernel has the message.\n\n")
	groups := map[string][]string{}
	for _, text := range slices.Sorted(maps.Keys(verdicts)) {
		v := verdicts[text]
		group := "unmatched"
		switch {
		case v.pattern != "":
			group = "pattern " + v.pattern
		case v.reason != "":
			group = "reason " + v.reason
		}
		groups[group] = append(groups[group], v.in+" "+text)
	}
	for k, name := range names {
		letter := string(rune('a' + k))
		count := map[string]int{}
		for group, rows := range groups {
			kind, _, _ := strings.Cut(group, " ")
			for _, row := range rows {
				if row[k:k+1] == letter {
					count[kind]++
				}
			}
		}
		fmt.Fprintf(&b, "%s %s: %d messages: matched %d, excluded %d, unmatched %d; and %d at level debug\n",
			letter, name, count["pattern"]+count["reason"]+count["unmatched"], count["pattern"], count["reason"], count["unmatched"], debug[k])
	}
	write := func(group, why string) {
		if rows := groups[group]; rows != nil {
			fmt.Fprintf(&b, "\n[%s]%s\n%s\n", group, why, strings.Join(rows, "\n"))
		}
	}
	for _, p := range patterns {
		write("pattern "+p.Name, "")
	}
	for _, r := range rs.Reasons {
		write("reason "+r.Reason, " "+r.Why)
	}
	write("unmatched", "")
	return b.String()
}

var (
	kernelLine = regexp.MustCompile(`(?m)^([a-z]) (\S+): .* and ([0-9]+) at level debug$`)
	groupLine  = regexp.MustCompile(`^\[(pattern|reason|unmatched) ?(\S*)\]`)
)

// readTable is the inverse of table.
func readTable(t *testing.T, text string) (names []string, verdicts map[string]verdict, debug []int) {
	t.Helper()
	for _, m := range kernelLine.FindAllStringSubmatch(text, -1) {
		n, err := strconv.Atoi(m[3])
		if err != nil {
			t.Fatal(err)
		}
		names, debug = append(names, m[2]), append(debug, n)
	}
	verdicts = map[string]verdict{}
	var group []string
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		if m := groupLine.FindStringSubmatch(line); m != nil {
			group = m
		} else if group != nil && line != "" {
			v := verdict{in: line[:len(names)]}
			switch group[1] {
			case "pattern":
				v.pattern = group[2]
			case "reason":
				v.reason = group[2]
			}
			verdicts[line[len(names)+1:]] = v
		}
	}
	return names, verdicts, debug
}

// version returns the version of a kernel tree.
func version(t *testing.T, tree fs.FS) string {
	t.Helper()
	makefile, err := fs.ReadFile(tree, "Makefile")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^VERSION = (\d+)\nPATCHLEVEL = (\d+)\nSUBLEVEL = (\d+)$`).FindStringSubmatch(string(makefile))
	if m == nil {
		t.Fatal("the Makefile of the tree has no version")
	}
	return strings.Join(m[1:], ".")
}

// With -kernels it classifies the messages of these trees, prints what is new, gone and unmatched
// since messages.list was written, and with -update writes it.
func TestEveryMessageOfTheDriverIsClassified(t *testing.T) {
	rs := readRules(t)
	data, err := os.ReadFile(messageFile)
	if err != nil {
		t.Fatal(err)
	}
	names, verdicts, debug := readTable(t, string(data))
	if *kernels != "" {
		before := verdicts
		names = nil
		var trees [][]message
		for _, dir := range strings.Fields(*kernels) {
			tree := os.DirFS(dir)
			all, err := extract(tree)
			if err != nil {
				t.Fatal(err)
			}
			names, trees = append(names, version(t, tree)), append(trees, all)
		}
		verdicts, debug = rs.classify(t, trees)
		text := rs.table(names, verdicts, debug)
		list(before, verdicts)
		fmt.Print(strings.Join(kernelLine.FindAllString(text, -1), "\n"), "\n")
		if *update {
			if err := os.WriteFile(messageFile, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		} else if text != string(data) {
			t.Errorf("%s is stale: run make kernel-strings", messageFile)
		}
	} else if diff := cmp.Diff(rs.table(names, verdicts, debug), string(data)); diff != "" {
		t.Errorf("%s is not sorted, or its counts are wrong (-want +got):\n%s", messageFile, diff)
	}

	seen := map[string]bool{}
	for text, v := range verdicts {
		seen[v.pattern] = true
		if got := rs.pattern(text); got != v.pattern {
			t.Errorf("%q matches %q, want %q", rs.sample(text), got, v.pattern)
		}
		if v.pattern == "" && v.reason == "" {
			t.Errorf("unmatched: %q (%s)", text, v.where)
		}
	}
	for _, p := range patterns {
		// The first is of older kernels, the second of drivers/gpu/drm.
		if !seen[p.Name] && p.Name != "preemption-timeout" && p.Name != "device-wedged" {
			t.Errorf("no message of the driver is of pattern %s", p.Name)
		}
	}
}

// list prints what differs between two tables.
func list(before, now map[string]verdict) {
	for _, text := range slices.Sorted(maps.Keys(now)) {
		v := now[text]
		if _, ok := before[text]; !ok {
			fmt.Printf("new       %s %s%s: %s\n", v.in, v.pattern, v.reason, text)
		}
		if v.pattern == "" && v.reason == "" {
			fmt.Printf("unmatched %s %s: %s\n", v.in, v.where, text)
		}
	}
	for _, text := range slices.Sorted(maps.Keys(before)) {
		if _, ok := now[text]; !ok {
			fmt.Printf("gone      %s%s: %s\n", before[text].pattern, before[text].reason, text)
		}
	}
}
