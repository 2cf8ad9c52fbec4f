package cli

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/stat"
	"github.com/gpreempt/gpreempt/internal/term"
)

// topScreen is the content of gpctl top: the last reading, what the daemon's events add, and
// what the user has chosen. It does no input or output.
type topScreen struct {
	monitor
	a        *term.App
	next     string // the remedy for lost
	paused   bool
	sort     int // index of topOrders
	filter   string
	typing   bool   // keys change the filter
	selected string // target_id; "" if no target is listed
	moved    bool   // the user chose it: it stays selected when the order changes
	view     topView
	scroll   int // lines of a view other than the targets that are above the screen
	// explained is the target_id of viewExplain; explanation and failed are the answer, both nil before it.
	explained   string
	explanation *gpreemptv1.ExplainTargetResponse
	failed      error
	stale       bool // the screen must be painted
}

// topView is what the screen shows.
type topView int

const (
	viewTargets topView = iota
	viewExplain
	viewHelp
	viewWarnings
)

func newTopScreen(a *term.App) *topScreen { return &topScreen{a: a, monitor: newMonitor()} }

// read replaces the reading.
func (s *topScreen) read(r reading) {
	s.monitor.read(r)
	s.choose(0)
}

// lose notes why there is no reading.
func (s *topScreen) lose(err error) {
	s.lost, s.next = err.Error(), ""
	if f, ok := errors.AsType[*term.Failure](err); ok {
		s.next = f.Next
	}
}

// choose selects the target that is by lines below the selected one. The first one is selected where
// that is not listed, or the user has not chosen one.
func (s *topScreen) choose(by int) {
	list := s.listed()
	if len(list) == 0 {
		s.selected = ""
		return
	}
	i := slices.IndexFunc(list, func(t *gpreemptv1.Target) bool { return t.GetTargetId() == s.selected })
	switch {
	case i < 0:
		i, by, s.moved = 0, 0, false
	case by != 0:
		s.moved = true
	case !s.moved:
		i = 0
	}
	s.selected = list[min(max(0, i+by), len(list)-1)].GetTargetId()
}

// topOrders are the orders of the targets, and how the one or the other comes first.
var topOrders = []struct {
	name string
	less func(s *topScreen, a, b *gpreemptv1.Target) int
}{
	{"suspended share", func(s *topScreen, a, b *gpreemptv1.Target) int {
		x, _, _ := s.rates(a.GetTargetId())
		y, _, _ := s.rates(b.GetTargetId())
		return cmp.Compare(y, x)
	}},
	{"suspends a second", func(s *topScreen, a, b *gpreemptv1.Target) int {
		_, x, _ := s.rates(a.GetTargetId())
		_, y, _ := s.rates(b.GetTargetId())
		return cmp.Compare(y, x)
	}},
	{"backlog", func(s *topScreen, a, b *gpreemptv1.Target) int {
		x, _ := s.backlog(a.GetTargetId())
		y, _ := s.backlog(b.GetTargetId())
		return cmp.Compare(y, x)
	}},
	{"state", func(_ *topScreen, a, b *gpreemptv1.Target) int { return cmp.Compare(b.GetState(), a.GetState()) }},
	{"pid", func(*topScreen, *gpreemptv1.Target, *gpreemptv1.Target) int { return 0 }},
}

// listed returns the targets that the filter selects, in order.
func (s *topScreen) listed() []*gpreemptv1.Target {
	var list []*gpreemptv1.Target
	for _, t := range s.now.targets {
		text := strings.Join([]string{fmt.Sprint(t.GetPid()), t.GetComm(), api.EnumName(t.GetClass()), api.EnumName(t.GetState()), container(t)}, " ")
		if strings.Contains(strings.ToLower(text), strings.ToLower(s.filter)) {
			list = append(list, t)
		}
	}
	slices.SortStableFunc(list, func(a, b *gpreemptv1.Target) int {
		return cmp.Or(topOrders[s.sort].less(s, a, b), cmp.Compare(a.GetPid(), b.GetPid()))
	})
	return list
}

// container names the container of a target.
func container(t *gpreemptv1.Target) string {
	c := t.GetContainer()
	if c.GetPod() != "" {
		return c.GetNamespace() + "/" + c.GetPod()
	}
	return term.Or(c.GetName(), term.Cut(c.GetContainerId(), 12))
}

// bar draws a share as a bar of n cells.
func bar(share float64, n int) string {
	full := min(n, int(share*float64(n)+0.5))
	return strings.Repeat("█", full) + strings.Repeat("·", n-full)
}

// sparkline draws durations, the newest last, in at most n cells.
func sparkline(list []time.Duration, n int) string {
	const levels = "▁▂▃▄▅▆▇█"
	list = list[max(0, len(list)-n):]
	most := time.Duration(1)
	for _, d := range list {
		most = max(most, d)
	}
	var b strings.Builder
	for _, d := range list {
		b.WriteRune([]rune(levels)[min(7, int(8*max(0, d)/most))])
	}
	return b.String()
}

// lines returns what is shown in a terminal of the given size: at most height lines, each at most
// width cells wide, with the SGR sequences of printer if it has colour.
func (s *topScreen) lines(width, height int) []string {
	var out bytes.Buffer
	p := s.a.Printer()
	p.W, p.Wide, p.Width = &out, width >= 140, width
	var list []string
	s.head(p, width)
	if s.view == viewTargets && s.now.status != nil {
		s.overview(p, &out, width, height-1)
		list = linesOf(&out)
	} else {
		list = linesOf(&out)
		s.page(p)
		body := linesOf(&out)
		s.scroll = min(s.scroll, max(0, len(body)-(height-len(list)-1)))
		list = append(list, body[s.scroll:]...)
	}
	list = list[:max(0, min(len(list), height-1))]
	for len(list) < height-1 {
		list = append(list, "")
	}
	s.foot(p, width)
	list = append(list, linesOf(&out)...)
	for i, line := range list {
		list[i] = cutStyled(line, width)
	}
	return list
}

// linesOf takes the lines that were written.
func linesOf(out *bytes.Buffer) []string {
	defer out.Reset()
	return strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
}

// page writes a view other than the targets, or why no target is known.
func (s *topScreen) page(p *term.Printer) {
	var text bytes.Buffer
	inner := *p
	inner.W = &text
	switch {
	case s.view == viewHelp:
		inner.Lines(topKeys)
	case s.view == viewExplain && s.failed != nil:
		inner.Line(term.Cell{Text: s.failed.Error(), Style: term.StyleBad})
	case s.view == viewExplain && s.explanation != nil:
		printExplanation(s.a, &inner, s.explanation, s.now.gpus)
	case s.view == viewWarnings && s.now.status != nil:
		printWarnings(&inner, s.now.status.GetWarnings())
	case s.lost == "" || s.now.status != nil:
		inner.Linef("Asking the daemon...")
	default:
		inner.Linef("%s", s.lost)
		if s.next != "" {
			inner.Linef("  try: %s", s.next)
		}
	}
	for _, line := range linesOf(&text) {
		for _, part := range term.Wrap(line, p.Width) {
			p.Write(part + "\n")
		}
	}
}

const topKeys = `
q        quit; back from another view
up down  select a target, or scroll
enter    explain the selected target
w        the warnings with their remedies
s        change the order
/        filter; enter ends it, esc clears it
space    pause, and continue
?        this help

HIP is the GPU's index in a process that sees all GPUs.
QUEUES: hardware slots; █ queues that may run, ░ suspended ones, · free slots, and queues/slots.
SUSPENDED: the share of the last 10 s of the target that was suspended most.
SUSP% and /S: the share of the last 10 s in which a target was suspended, and its suspends a second.
BACKLOG: work in its rings that the GPU has not read.
WHY: why nothing can suspend it, or why it last came into its state.
quiet: the time from an announcement until its GPUs were quiet.`

// head writes the first line: what the whole screen depends on is on the left, in reverse video.
func (s *topScreen) head(p *term.Printer, width int) {
	st := s.now.status
	line := []any{term.Cell{Text: "gpreempt", Style: term.StyleBold}}
	used := utf8.RuneCountInString("gpreempt")
	add := func(c term.Cell) {
		line = append(line, "  ", c)
		used += 2 + utf8.RuneCountInString(c.Text)
	}
	state := func(text string) { add(term.Cell{Text: text, Style: term.StyleState}) }
	if s.lost != "" {
		state("NO DAEMON")
	}
	if s.paused {
		state("PAUSED")
	}
	if s.filter != "" || s.typing {
		state("FILTER " + s.filter)
	}
	if st.GetDraining() {
		state("DRAINING")
	}
	if st != nil {
		well := health(st)
		if s.lost != "" {
			well = term.Cell{Text: "last known state"}
		}
		if len(st.GetWarnings()) > 0 {
			well.Style = term.StyleState
		}
		add(well)
		if model := modelOf(st); model != "" {
			add(term.Cell{Text: strings.ToUpper(model), Style: term.StyleNote})
		}
		var codes []string
		for _, w := range st.GetWarnings() {
			codes = append(codes, w.GetCode())
		}
		for _, about := range []string{strings.Join(codes, " "), "policy " + st.GetPolicy(), "up " + s.a.Age(st.GetStartedAt()), st.GetBackend()} {
			if about != "" && used+2+utf8.RuneCountInString(about) <= width {
				add(term.Cell{Text: about})
			}
		}
	}
	p.Line(line...)
}

// foot writes the last line.
func (s *topScreen) foot(p *term.Printer, width int) {
	if s.typing {
		p.Linef("filter: %s_   enter ends it  esc clears it", s.filter)
		return
	}
	keys := []string{"q back", "up/down scroll"}
	after := map[topView]string{viewExplain: "explanation of " + strings.SplitN(s.explained, "@", 2)[0], viewHelp: "help", viewWarnings: "warnings"}[s.view]
	if s.view == viewTargets {
		keys = []string{"q quit", "? help", "enter explain", "w warnings", "/ filter", "s order", "space pause"}
		after = "order: " + topOrders[s.sort].name
	}
	for len(keys) > 1 && utf8.RuneCountInString(strings.Join(keys, "  ")+"   "+after) > width {
		keys = keys[:len(keys)-1]
	}
	p.Linef("%s   %s", strings.Join(keys, "  "), after)
}

// roomy is the least number of lines of a screen with space between its tables.
const roomy = 16

// overview writes the tables; the targets get the lines that the others leave, and at least those of a few
// of them, before leases and preemptions have any.
func (s *topScreen) overview(p *term.Printer, out *bytes.Buffer, width, height int) {
	space := func(p *term.Printer) {
		if height >= roomy {
			p.Linef("")
		}
	}
	if s.lost != "" {
		p.Line(term.Cell{Text: s.lost, Style: term.StyleBad})
		if s.next != "" && height >= roomy {
			p.Linef("  try: %s", s.next)
		}
	}
	if height >= roomy {
		quiet := "no announcement seen yet"
		if len(s.quiet) > 0 {
			sorted := slices.Sorted(slices.Values(s.quiet))
			quiet = fmt.Sprintf("p50 %s  p99 %s of the last %d  %s", term.Duration(stat.Quantile(sorted, 0.5)), term.Duration(stat.Quantile(sorted, 0.99)), len(s.quiet), sparkline(s.quiet, min(len(s.quiet), max(10, width-60))))
		}
		p.Linef("quiet  %s", quiet)
	}
	space(p)
	s.gpuTable(p, width, max(2, 2*height/5))

	var leases, last bytes.Buffer
	side := *p
	side.W = &leases
	if n := len(s.now.leases); n > 0 {
		space(&side)
		printLeases(s.a, &side, s.now.leases[:min(n, max(2, height/8))], s.now.gpus)
	}
	side.W = &last
	if len(s.last) > 0 {
		space(&side)
		t := side.Table("", term.Columns{"LAST PREEMPTIONS", "->PID", "COMMAND", ">TOOK", "FOR"})
		for _, l := range s.last[:min(len(s.last), max(3, height/8))] {
			e := l.event
			pid, _, _ := strings.Cut(e.GetTargetId(), "@")
			t.Row(e.GetAt().AsTime().Local().Format("15:04:05.000"), pid, term.Or(l.comm, "-"), term.Took(e.GetTook()), l.why)
		}
		t.Flush()
	}
	space(p)
	rest := height - bytes.Count(out.Bytes(), []byte("\n"))
	few := min(len(s.listed()), 5) + 2 // with the heading and the line that counts
	for _, less := range []*bytes.Buffer{&last, &leases} {
		if rest-bytes.Count(leases.Bytes(), []byte("\n"))-bytes.Count(last.Bytes(), []byte("\n")) < few {
			less.Reset()
		}
	}
	s.targetTable(p, max(2, rest-bytes.Count(leases.Bytes(), []byte("\n"))-bytes.Count(last.Bytes(), []byte("\n"))))
	p.Write(leases.String())
	p.Write(last.String())
}

// targetTable writes at most n lines.
func (s *topScreen) targetTable(p *term.Printer, n int) {
	list, names := s.listed(), term.GPUNames(s.now.gpus)
	t := p.Table("", term.Columns{" ", ">PID", "COMMAND", "-CLASS", "STATE", ">SUSP%", "->/S", "->BACKLOG", "-HIP", "+CONTAINER", "+MECHANISM", "+JOB", "WHY:24"})
	rows := max(1, n-1)
	if len(list) > rows {
		rows = max(1, rows-1) // the last line counts
	}
	first := 0
	if i := slices.IndexFunc(list, func(t *gpreemptv1.Target) bool { return t.GetTargetId() == s.selected }); i >= rows {
		first = i - rows + 1
	}
	for _, g := range list[first:min(len(list), first+rows)] {
		id := g.GetTargetId()
		share, rate := "-", "-"
		if x, y, ok := s.rates(id); ok {
			share, rate = fmt.Sprintf("%.0f", 100*x), fmt.Sprintf("%.1f", y)
		}
		mark := term.Cell{Text: " ", Style: term.StyleNone}
		if id == s.selected {
			mark = term.Cell{Text: ">", Style: term.StyleBold}
		}
		_, behind := s.backlog(id)
		t.Row(mark, g.GetPid(), term.Cut(g.GetComm(), 15), api.EnumName(g.GetClass()), term.State(g.GetState()), share, rate, behind, names.HIP(g.GetGpuIds()...),
			term.Or(container(g), "-"), term.Or(g.GetMechanism(), "-"), term.Or(g.GetJob().GetName(), "-"), s.why(g))
	}
	t.Flush()
	switch {
	case len(s.now.targets) == 0:
		p.Linef("No process has GPU queues.")
	case len(list) == 0:
		p.Linef("No process matches the filter; esc clears it.")
	case len(list) > rows:
		p.Linef("  %d to %d of %s", first+1, min(len(list), first+rows), term.Count(len(list), "target"))
	}
}

// why says why a target is as it is.
func (s *topScreen) why(t *gpreemptv1.Target) string {
	return term.Or(t.GetAttachError(), term.Or(api.Cause(s.causes[entry{t.GetTargetId(), t.GetState()}]), "-"))
}

// key changes what is shown. It returns the target_id to explain, if one is asked for.
func (s *topScreen) key(name string) (explain string, quit bool) {
	if name == "ctrl-c" {
		return "", true
	}
	if s.typing {
		switch {
		case name == "enter":
			s.typing = false
		case name == "esc":
			s.typing, s.filter = false, ""
		case name == "backspace":
			if r := []rune(s.filter); len(r) > 0 {
				s.filter = string(r[:len(r)-1])
			}
		case utf8.RuneCountInString(name) == 1 && len(s.filter) < 64:
			s.filter += name
		}
		s.choose(0)
		return "", false
	}
	lines := map[string]int{"up": -1, "down": 1, "page up": -10, "page down": 10}[name]
	if s.view != viewTargets {
		switch name {
		case "q", "esc", "enter", "?", "w":
			s.view = viewTargets
		}
		s.scroll = max(0, s.scroll+lines)
		return "", false
	}
	switch name {
	case "q":
		return "", true
	case "esc":
		s.filter = ""
	case "?":
		s.view, s.scroll = viewHelp, 0
	case "w":
		s.view, s.scroll = viewWarnings, 0
	case "s":
		s.sort = (s.sort + 1) % len(topOrders)
	case "/":
		s.typing = true
	case " ":
		s.paused = !s.paused
	case "enter":
		if s.selected != "" {
			s.moved = true
			s.view, s.scroll, s.explained, s.explanation, s.failed = viewExplain, 0, s.selected, nil, nil
		}
		return s.selected, false
	}
	s.choose(lines)
	return "", false
}

// cutStyled cuts a line of printer at width cells. Its sequences have no cells.
func cutStyled(line string, width int) string {
	cells, styled := 0, false
	for i := 0; i < len(line); {
		if line[i] == '\x1b' {
			end := strings.IndexByte(line[i:], 'm')
			styled = line[i:i+end+1] != "\x1b[0m"
			i += end + 1
			continue
		}
		if cells == width {
			if styled {
				return line[:i] + "\x1b[0m"
			}
			return line[:i]
		}
		_, n := utf8.DecodeRuneInString(line[i:])
		cells++
		i += n
	}
	return line
}
