package kfdtrace

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
)

// maxFunctions bounds a recording: more would change the timing that is measured.
const maxFunctions = 500

// function is one of the kernel's. Static functions may share a name: each is listed.
type function struct {
	name    string // in the source; the symbol may have a suffix such as .constprop.0
	module  string // "" for the kernel itself
	group   string
	address uint64 // of its first instruction; 0 when the kernel hides it
}

// follow has two kprobe events follow each function. It is a warning when this kernel
// cannot.
func (s *session) follow(wanted []wantedFunction, symbols string) error {
	if len(wanted) == 0 {
		return nil
	}
	if _, err := s.fs.ReadFile(kprobeEvents); errors.Is(err, fs.ErrNotExist) {
		s.warn("functions are not followed: this kernel has no kprobe events")
		return nil
	}
	found, missing, err := findFunctions(symbols, wanted)
	if err != nil {
		s.warn("functions are not followed: %v", err)
		return nil
	}
	if len(found) > maxFunctions {
		return &Error{
			What: fmt.Sprintf("the names match %d functions of the kernel; a recording follows at most %d", len(found), maxFunctions),
			Next: "name fewer functions, or leave out wildcards", Request: true,
		}
	}
	s.missingFunctions = append(s.missingFunctions, missing...)
	if slices.ContainsFunc(found, func(f function) bool { return f.address == 0 }) {
		s.warn("functions are not followed: the kernel hides their addresses; set kernel.kptr_restrict to 1 or less")
		return nil
	}
	var failed error
	defined := 0
	for i, probe := range probeNames(found) {
		if err := s.define(probe, found[i].address); err != nil {
			s.missingFunctions = append(s.missingFunctions, found[i].name)
			failed = cmp.Or(failed, err)
			continue
		}
		defined++
		s.tally.follow(probe, found[i])
	}
	if failed != nil {
		s.warn("%d of %d functions could not be probed: %v", len(found)-defined, len(found), failed)
	}
	if defined == 0 {
		return nil
	}
	return s.write("events/"+probeGroup+"/enable", "1")
}

// define makes the two probes of a function, or neither.
func (s *session) define(probe string, address uint64) error {
	if err := s.fs.Write(kprobeEvents, fmt.Sprintf("p:%s/%s%s 0x%x\n", probeGroup, enterPrefix, probe, address)); err != nil {
		return err
	}
	err := s.fs.Write(kprobeEvents, fmt.Sprintf("r:%s/%s%s 0x%x\n", probeGroup, leavePrefix, probe, address))
	if err != nil {
		return errors.Join(err, s.fs.Write(kprobeEvents, fmt.Sprintf("-:%s/%s%s\n", probeGroup, enterPrefix, probe)))
	}
	return nil
}

// removeProbes removes all probes of our group, which must not be enabled.
func (s *session) removeProbes() error {
	text, err := s.fs.ReadFile(kprobeEvents)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for line := range strings.Lines(string(text)) {
		definition, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		_, name, _ := strings.Cut(definition, ":")
		if strings.HasPrefix(name, probeGroup+"/") {
			err = errors.Join(err, s.fs.Write(kprobeEvents, "-:"+name+"\n"))
		}
	}
	return err
}

const (
	enterPrefix = "enter_"
	leavePrefix = "leave_"
	// longestProbe leaves room for what is put around a function's name: the kernel
	// takes 63 bytes.
	longestProbe = 50
)

// probeNames returns a different name for each function, even where functions share
// one.
func probeNames(list []function) []string {
	used := map[string]int{}
	names := make([]string, len(list))
	for i, f := range list {
		name := f.name[:min(len(f.name), longestProbe)]
		used[name]++
		if n := used[name]; n > 1 {
			name += "__" + strconv.Itoa(n)
		}
		names[i] = name
	}
	return names
}

// findFunctions reads the kernel's symbols, in the form of /proc/kallsyms, and returns the
// functions that match, and the patterns without a match.
func findFunctions(symbols string, wanted []wantedFunction) (found []function, missing []string, err error) {
	f, err := os.Open(symbols)
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if found, err = readSymbols(f, wanted); err != nil {
		return nil, nil, err
	}
	for _, w := range wanted {
		if !slices.ContainsFunc(found, w.matches) {
			missing = append(missing, w.pattern)
		}
	}
	return found, missing, nil
}

func readSymbols(r io.Reader, wanted []wantedFunction) ([]function, error) {
	var found []function
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		address, rest, _ := strings.Cut(lines.Text(), " ")
		kind, rest, ok := strings.Cut(rest, " ")
		if !ok || !strings.Contains("tTwW", kind) { //nolint:gocritic // the set of kinds contains this one
			continue
		}
		symbol, module, _ := strings.Cut(rest, "\t")
		// bpf and __builtin symbols are made at run time. Parts of a function that the
		// compiler moved away are not calls of it.
		if strings.HasPrefix(module, "[bpf") || strings.HasPrefix(module, "[__") ||
			strings.Contains(symbol, ".part.") || strings.Contains(symbol, ".cold") {
			continue
		}
		f := function{module: strings.Trim(module, "[]")}
		f.name, _, _ = strings.Cut(symbol, ".")
		i := slices.IndexFunc(wanted, func(w wantedFunction) bool { return w.matches(f) })
		if i < 0 {
			continue
		}
		var err error
		if f.address, err = strconv.ParseUint(address, 16, 64); err != nil {
			return nil, fmt.Errorf("the kernel's symbols: %w", err)
		}
		f.group = wanted[i].group
		found = append(found, f)
	}
	return found, lines.Err()
}

// matches reports whether f is wanted.
func (w wantedFunction) matches(f function) bool {
	if w.module != "" && w.module != f.module {
		return false
	}
	ok, err := path.Match(w.pattern, f.name)
	return ok && err == nil
}
