package kfdtrace

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
)

const (
	graphTracer   = "function_graph"
	currentTracer = "current_tracer"
	// functionsFile lists what function tracers can follow, by line the index of
	// functionFilter.
	functionsFile  = "available_filter_functions"
	functionFilter = "set_ftrace_filter"
)

// graphOptions give each line of the graph its time, its thread and its function.
// Before Linux 6.19 one value holds for all instances: it is put back at the end.
var graphOptions = []string{"funcgraph-abstime", "funcgraph-proc", "funcgraph-tail"}

// followFunctions has the calls of functions recorded in the way this kernel has.
// That it has none is a warning.
func (s *session) followFunctions(want []wantedFunction) error {
	byGraph, err := s.try(s.graph, want)
	if err != nil || byGraph == nil {
		return err
	}
	byProbes, err := s.try(s.probe, want)
	if err != nil || byProbes == nil {
		return err
	}
	s.warn("functions are not followed: not by %s, because %v; not by kprobes, because %v", graphTracer, byGraph, byProbes)
	return nil
}

// try follows functions in one way, and undoes what was begun of it when it does
// not work: the first error says why.
func (s *session) try(way func([]wantedFunction) error, want []wantedFunction) (why, failed error) {
	mark := len(s.undo)
	why = way(want)
	if e, ok := errors.AsType[*Error](why); ok {
		return nil, e
	}
	if why == nil {
		return nil, nil
	}
	for _, fn := range slices.Backward(s.undo[mark:]) {
		failed = errors.Join(failed, fn())
	}
	s.undo = s.undo[:mark]
	return why, failed
}

// found takes what of the functions exists.
func (s *session) found(c *chooser) error {
	if len(c.found) > maxFunctions {
		return &Error{
			What: fmt.Sprintf("the names stand for %d functions of the kernel, more than the %d one recording takes", len(c.found), maxFunctions),
			Next: "name fewer, or without wildcards", Request: true,
		}
	}
	s.missingFunctions = c.missing()
	return nil
}

// follows notes that functions are followed.
func (s *session) follows(by string, list []function) {
	for _, f := range list {
		s.groups[f.name()] = f.group
	}
	if len(list) > 0 {
		s.by = by
	}
}

// graph has the function graph tracer follow functions. They are named to the
// function filter, which is the instance's own; set_graph_function, which would add
// what they call, is everybody's.
func (s *session) graph(want []wantedFunction) error {
	tracers, err := s.fs.ReadFile(s.dir + "/available_tracers")
	if err != nil {
		return err
	}
	if !slices.Contains(strings.Fields(string(tracers)), graphTracer) {
		return errors.New("instances of this kernel do not have it")
	}
	text, err := s.fs.ReadFile(functionsFile)
	if err != nil {
		return err
	}
	c := newChooser(want)
	index := 0
	for line := range strings.Lines(string(text)) {
		index++
		symbol, module, _ := strings.Cut(strings.TrimSpace(line), " ")
		c.see(function{symbol: symbol, module: strings.Trim(module, "[]"), index: index})
	}
	if err := s.found(c); err != nil || len(c.found) == 0 {
		return err
	}
	if err := s.filter(c.found); err != nil {
		return err
	}
	if err := s.formatGraph(); err != nil {
		return err
	}
	s.later(func() error { return s.write(currentTracer, "nop") })
	if err := s.write(currentTracer, graphTracer); err != nil {
		return err
	}
	s.follows(ByGraph, c.found)
	return nil
}

// filter limits the tracer to functions, by index: the kernel needs a tenth of a
// second to find one by name. Without a filter it would follow every function of
// the kernel, so what it says it has is looked at before.
func (s *session) filter(list []function) error {
	var indexes strings.Builder
	want := make([]string, len(list))
	for i, f := range list {
		fmt.Fprintln(&indexes, f.index)
		want[i] = f.symbol
	}
	if err := s.write(functionFilter, indexes.String()); err != nil {
		return err
	}
	text, err := s.fs.ReadFile(s.dir + "/" + functionFilter)
	if err != nil {
		return err
	}
	var got []string
	for line := range strings.Lines(string(text)) {
		symbol, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		got = append(got, symbol)
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(want, got) {
		return errors.New("the kernel's list of functions changed while it was read")
	}
	return nil
}

// formatGraph sets the options of the graph. Where they would have to change, and
// somebody else looks at a graph, they stay.
func (s *session) formatGraph() error {
	for _, name := range graphOptions {
		text, err := s.fs.ReadFile(s.dir + "/options/" + name)
		if err != nil {
			return err
		}
		if strings.TrimSpace(string(text)) == "1" {
			continue
		}
		if user := s.graphUser(); user != "" {
			return fmt.Errorf("%s uses it, and would see it in another format", user)
		}
		s.later(func() error { return s.write("options/"+name, "0") })
		if err := s.write("options/"+name, "1"); err != nil {
			return err
		}
	}
	return nil
}

// graphUser names who else has the function graph tracer on, "" for nobody.
func (s *session) graphUser() string {
	uses := func(dir string) bool {
		text, err := s.fs.ReadFile(dir + currentTracer)
		return err == nil && strings.TrimSpace(string(text)) == graphTracer
	}
	if uses("") {
		return "somebody"
	}
	names, err := s.fs.List(instances)
	if err != nil {
		return "" // nobody that can be seen
	}
	for _, name := range names {
		if dir := instances + "/" + name; dir != s.dir && uses(dir+"/") {
			return "the instance " + name
		}
	}
	return ""
}

// probe has a pair of kprobe events follow each function. The definitions are
// everybody's to see, but on in our instance only.
func (s *session) probe(want []wantedFunction) error {
	if _, err := s.fs.ReadFile(kprobeEvents); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return errors.New("this kernel has no kprobe events")
		}
		return err
	}
	c, err := chooseSymbols(s.symbols, want)
	if err != nil {
		return err
	}
	if err := s.found(c); err != nil || len(c.found) == 0 {
		return err
	}
	group := probeGroup(strings.TrimPrefix(s.dir, instances+"/"))
	s.later(func() error { return removeProbes(s.fs, func(of string) bool { return of == group }) })
	var probed []function
	var refused error
	for i, p := range nameProbes(c.found) {
		f := c.found[i]
		if err := s.define(group, p, f); err != nil {
			s.missingFunctions = append(s.missingFunctions, f.symbol)
			refused = cmp.Or(refused, err)
			continue
		}
		probed = append(probed, f)
		s.tally.enter[p.enter], s.tally.leave[p.leave] = f.name(), f.name()
	}
	if len(probed) == 0 {
		return refused
	}
	if refused != nil {
		s.warn("%d of %d functions could not be probed: %v", len(c.found)-len(probed), len(c.found), refused)
	}
	s.later(func() error { return s.write("events/"+group+"/enable", "0") })
	if err := s.write("events/"+group+"/enable", "1"); err != nil {
		return err
	}
	s.follows(ByProbes, probed)
	return nil
}

// define makes the two probes of a function, or none.
func (s *session) define(group string, p probeNames, f function) error {
	at := "0x" + strconv.FormatUint(f.address, 16)
	if f.address == 0 {
		if p.number > 1 {
			return fmt.Errorf("several functions are called %s, and the kernel hides their addresses: set kernel.kptr_restrict to 1 or less", f.symbol)
		}
		at = f.symbol
		if f.module != "" {
			at = f.module + ":" + f.symbol
		}
	}
	if err := s.fs.Write(kprobeEvents, fmt.Sprintf("p:%s/%s %s\n", group, p.enter, at)); err != nil {
		return err
	}
	if err := s.fs.Write(kprobeEvents, fmt.Sprintf("r:%s/%s %s\n", group, p.leave, at)); err != nil {
		return errors.Join(err, s.fs.Write(kprobeEvents, fmt.Sprintf("-:%s/%s\n", group, p.enter)))
	}
	return nil
}

// probeGroup is the group of the probes of an instance, as an event's name.
func probeGroup(instance string) string { return strings.ReplaceAll(instance, "-", "_") }

// removeProbes removes the probes of the groups that are meant. They must be off.
func removeProbes(tracing FS, meant func(group string) bool) error {
	text, err := tracing.ReadFile(kprobeEvents)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var failed error
	for line := range strings.Lines(string(text)) {
		definition, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		_, name, _ := strings.Cut(definition, ":")
		group, _, _ := strings.Cut(name, "/")
		if !meant(group) {
			continue
		}
		if err := tracing.Write(kprobeEvents, "-:"+name+"\n"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			failed = errors.Join(failed, err)
		}
	}
	return failed
}

// probeNames are the names of the two events of a function, which is the number-th
// of its name.
type probeNames struct {
	enter, leave string
	number       int
}

// longestProbe leaves room for what is put around a function's name: the kernel
// takes 63 bytes.
const longestProbe = 50

// nameProbes returns the events of each function different names, also where
// functions share one.
func nameProbes(list []function) []probeNames {
	used := map[string]int{}
	names := make([]probeNames, len(list))
	for i := range list {
		name := list[i].name()
		name = name[:min(len(name), longestProbe)]
		used[name]++
		n := used[name]
		if n > 1 {
			name += "__" + strconv.Itoa(n)
		}
		names[i] = probeNames{enter: "enter_" + name, leave: "leave_" + name, number: n}
	}
	return names
}

// chooseSymbols picks functions out of the kernel's symbols, as of /proc/kallsyms.
// Their addresses tell apart functions of the same name, which probes cannot.
func chooseSymbols(path string, want []wantedFunction) (c *chooser, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return readSymbols(f, want)
}

func readSymbols(r io.Reader, want []wantedFunction) (*chooser, error) {
	c := newChooser(want)
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		address, rest, _ := strings.Cut(lines.Text(), " ")
		kind, rest, ok := strings.Cut(rest, " ")
		if !ok || !slices.Contains([]string{"t", "T", "w", "W"}, kind) {
			continue
		}
		symbol, module, _ := strings.Cut(rest, "\t")
		if strings.HasPrefix(module, "[bpf") || strings.HasPrefix(module, "[__") { // made at run time
			continue
		}
		// Without the right to see addresses they are 0.
		at, err := strconv.ParseUint(address, 16, 64)
		if err != nil {
			return nil, fmt.Errorf("the kernel's symbols: %w", err)
		}
		c.see(function{symbol: symbol, module: strings.Trim(module, "[]"), address: at})
	}
	return c, lines.Err()
}
