package cli

import (
	"bytes"
	"cmp"
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
	paused   bool
	sort     int // index of topOrders
	filter   string
	typing   bool   // keys change the filter
	selected string // target_id
	detail   []string
	detailOf string // target_id that detail is of, "" for the overview
	scroll   int
	help     bool
	stale    bool // the screen must be painted
}

func newTopScreen(a *term.App) *topScreen { return &topScreen{a: a, monitor: newMonitor()} }

// read replaces the reading.
func (s *topScreen) read(r reading) {
	s.monitor.read(r)
	if _, living := s.usage[s.selected]; !living {
		s.selected = ""
	}
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
	switch {
	case s.help:
		p.Line(term.Cell{Text: "gpctl top", Style: term.StyleBold})
		p.Linef("%s", topKeys)
	case s.detailOf != "":
		for _, line := range s.detail[min(s.scroll, max(0, len(s.detail)-1)):] {
			p.Write(line + "\n")
		}
	case s.now.status == nil:
		p.Linef("%s", term.Or(s.lost, "Asking the daemon..."))
	default:
		s.overview(p, &out, width, height-1)
	}
	list := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	list = list[:max(0, min(len(list), height-1))]
	for len(list) < height-1 {
		list = append(list, "")
	}
	out.Reset()
	s.foot(p, width)
	list = append(list, strings.TrimSuffix(out.String(), "\n"))
	for i, line := range list {
		list[i] = cutStyled(line, width)
	}
	return list
}

const topKeys = `
  up, down   select a target          enter   explain it; q or esc goes back
  s          change the order         /       filter; enter ends it, esc clears it
  space      pause                    ?       this help
  q          quit

HIP is the GPU's index in a process that sees all GPUs. The bar of QUEUES is of hardware slots: █ for queues that
may run, ░ for suspended ones, · for free slots. The bar of SUSPENDED is of the target that was suspended most.
SUSP% and /S are the share of the last 10 s in which the target was suspended, and its suspends a second.
BACKLOG is work in its rings that the GPU has not read. QUIET is the time from an announcement until the GPUs
were quiet.`

// foot writes the last line.
func (s *topScreen) foot(p *term.Printer, width int) {
	switch {
	case s.typing:
		p.Linef("filter: %s_", s.filter)
	case s.help, s.detailOf != "":
		p.Linef("q back   up/down scroll")
	default:
		state := "order: " + topOrders[s.sort].name
		if s.filter != "" {
			state += ", filter: " + s.filter
		}
		if s.paused {
			state += ", PAUSED"
		}
		keys := []string{"q quit", "? help", "enter explain", "s order", "/ filter", "space pause"}
		for len(keys) > 1 && utf8.RuneCountInString(strings.Join(keys, "  ")+"   "+state) > width {
			keys = keys[:len(keys)-1]
		}
		p.Linef("%s   %s", strings.Join(keys, "  "), state)
	}
}

// overview writes the tables; the targets get the lines that the others leave.
func (s *topScreen) overview(p *term.Printer, out *bytes.Buffer, width, height int) {
	st := s.now.status
	about := []string{"policy " + st.GetPolicy(), "up " + s.a.Age(st.GetStartedAt()), st.GetBackend()}
	for len(about) > 0 && utf8.RuneCountInString("gpreempt    "+health(st).Text+strings.Join(about, "  ")) > width {
		about = about[:len(about)-1]
	}
	p.Line(term.Cell{Text: "gpreempt", Style: term.StyleBold}, "  ", health(st), "  "+strings.Join(about, "  "))
	if s.lost != "" {
		p.Line(term.Cell{Text: s.lost, Style: term.StyleBad})
	}
	quiet := "no announcement seen yet"
	if len(s.quiet) > 0 {
		sorted := slices.Sorted(slices.Values(s.quiet))
		quiet = fmt.Sprintf("p50 %s  p99 %s of the last %d  %s", term.Duration(stat.Quantile(sorted, 0.5)), term.Duration(stat.Quantile(sorted, 0.99)), len(s.quiet), sparkline(s.quiet, min(len(s.quiet), max(10, width-60))))
	}
	p.Linef("quiet  %s", quiet)
	p.Linef("")
	s.gpuTable(p, width)

	var leases, last bytes.Buffer
	side := *p
	side.W = &leases
	if n := len(s.now.leases); n > 0 {
		side.Linef("")
		printLeases(s.a, &side, s.now.leases[:min(n, max(2, height/8))], s.now.gpus)
	}
	side.W = &last
	if len(s.last) > 0 {
		side.Linef("")
		t := side.Table("", term.Columns{"LAST PREEMPTIONS", "->PID", "COMMAND", ">TOOK", "FOR"})
		for _, l := range s.last[:min(len(s.last), max(3, height/8))] {
			e := l.event
			pid, _, _ := strings.Cut(e.GetTargetId(), "@")
			t.Row(e.GetAt().AsTime().Local().Format("15:04:05.000"), pid, term.Or(l.comm, "-"), term.Took(e.GetTook()), l.why)
		}
		t.Flush()
	}
	p.Linef("")
	others := bytes.Count(out.Bytes(), []byte("\n")) + bytes.Count(leases.Bytes(), []byte("\n")) + bytes.Count(last.Bytes(), []byte("\n"))
	s.targetTable(p, max(1, height-others))
	p.Write(leases.String())
	p.Write(last.String())
}

func (s *topScreen) gpuTable(p *term.Printer, width int) {
	cells := 10
	if width >= 140 {
		cells = 30
	}
	t := p.Table("", term.Columns{">HIP", "->GPU", "-NAME", "QUEUES", "SUSPENDED:" + fmt.Sprint(cells+5), "->LEASES", "+>EVICTIONS", "BREAKER"})
	for i, g := range s.now.gpus {
		most := s.suspendedOn(g.GetGpuId())
		breaker := term.Cell{Text: "closed"}
		if g.GetBreakerOpen() {
			breaker = term.Cell{Text: "open for " + term.Took(g.GetBreakerClosesIn()), Style: term.StyleBad}
		}
		evictions := "-"
		if g.MemoryEvictions != nil {
			evictions = fmt.Sprint(g.GetMemoryEvictions())
		}
		t.Row(i, g.GetGpuId(), g.GetName(), s.busy(g, cells*2/3), term.Cell{Text: fmt.Sprintf("%s %3.0f%%", bar(most, cells), 100*most), Style: term.StyleNote},
			g.GetLeaseCount(), evictions, breaker)
	}
	t.Flush()
}

// targetTable writes at most n lines.
func (s *topScreen) targetTable(p *term.Printer, n int) {
	list := s.listed()
	t := p.Table("", term.Columns{" ", ">PID", "COMMAND", "-CLASS", "STATE", ">SUSP%", "->/S", "->BACKLOG", "-GPUS", "+CONTAINER", "+MECHANISM", "+JOB", "WHY"})
	rows := max(1, n-2)
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
		t.Row(mark, g.GetPid(), term.Cut(g.GetComm(), 15), api.EnumName(g.GetClass()), term.State(g.GetState()), share, rate, behind, term.GPUs(g.GetGpuIds(), false),
			term.Or(container(g), "-"), term.Or(g.GetMechanism(), "-"), term.Or(g.GetJob().GetName(), "-"), term.Or(g.GetAttachError(), term.Or(s.causes[id], "-")))
	}
	t.Flush()
	switch {
	case len(s.now.targets) == 0:
		p.Linef("No process has GPU queues.")
	case len(list) == 0:
		p.Linef("No process matches the filter.")
	case len(list) > rows:
		p.Linef("  %d to %d of %s", first+1, min(len(list), first+rows), term.Count(len(list), "target"))
	}
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
		return "", false
	}
	if s.help || s.detailOf != "" {
		switch name {
		case "up":
			s.scroll = max(0, s.scroll-1)
		case "down":
			s.scroll = min(s.scroll+1, max(0, len(s.detail)-1))
		case "q", "esc", "enter", "?":
			s.help, s.detailOf = false, ""
		}
		return "", false
	}
	switch name {
	case "q":
		return "", true
	case "esc":
		s.filter = ""
	case "?":
		s.help = true
	case "s":
		s.sort = (s.sort + 1) % len(topOrders)
	case "/":
		s.typing = true
	case " ":
		s.paused = !s.paused
	case "enter":
		return s.selected, false
	case "up", "down":
		list := s.listed()
		if len(list) == 0 {
			break
		}
		i := slices.IndexFunc(list, func(t *gpreemptv1.Target) bool { return t.GetTargetId() == s.selected })
		if name == "up" {
			i--
		} else {
			i++
		}
		s.selected = list[min(max(0, i), len(list)-1)].GetTargetId()
	}
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
