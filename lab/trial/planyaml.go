package trial

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// YAML returns the plan as a file that Parse reads.
func (p *Plan) YAML() string {
	w := &yamlWriter{}
	w.line(0, "version", strconv.Itoa(Version))
	w.text(0, "name", p.Name)
	w.text(0, "about", p.About)
	w.section("online", func() {
		w.text(1, "command", p.Online.Command)
		w.text(1, "request", p.Online.Request)
		w.text(1, "ready", p.Online.Ready)
		w.text(1, "answer", p.Online.Answer)
		if p.Online.AnnouncedByCommand {
			w.line(1, "announce", "command")
		}
		w.duration(1, "hold", p.Online.Hold)
		w.duration(1, "max_wait", p.Online.MaxWait)
	})
	w.section("offline", func() {
		w.list(1, "commands", p.Offline.Commands)
		if len(p.Offline.PIDs) > 0 {
			w.line(1, "pids", numbers(p.Offline.PIDs))
		}
		w.list(1, "containers", p.Offline.Containers)
		w.text(1, "progress", p.Offline.Progress)
		w.text(1, "unit", p.Offline.Unit)
	})
	w.section("arrivals", func() {
		a := p.Arrivals
		if a.Kind != "" {
			w.line(1, "kind", string(a.Kind))
		}
		w.number(1, "rate", a.Rate)
		w.number(1, "cv", a.CV)
		w.number(1, "burst", float64(a.Burst))
		w.duration(1, "burst_gap", a.BurstGap)
		w.text(1, "trace", a.Trace)
		w.number(1, "speed", a.Speed)
	})
	if p.Gaps != [2]time.Duration{} {
		w.line(0, "gaps", fmt.Sprintf("[%v, %v]", p.Gaps[0], p.Gaps[1]))
	}
	w.number(0, "count", float64(p.Count))
	w.duration(0, "duration", p.Duration)
	var arms []string
	for _, arm := range p.Arms {
		arms = append(arms, arm.Name())
	}
	w.list(0, "arms", arms)
	w.number(0, "repeats", float64(p.Repeats))
	w.duration(0, "warm_up", p.WarmUp)
	w.text(0, "profile", p.Profile)
	if len(p.GPUs) > 0 {
		w.line(0, "gpus", numbers(p.GPUs))
	}
	if p.Seed > 0 {
		w.line(0, "seed", strconv.FormatUint(p.Seed, 10))
	}
	if p.NoKFDTrace {
		w.line(0, "kfd_trace", "false")
	}
	w.number(0, "hip_log", float64(p.HIPLog))
	return w.b.String()
}

// yamlWriter writes keys that have a value.
type yamlWriter struct{ b strings.Builder }

func (w *yamlWriter) line(level int, key, value string) {
	fmt.Fprintf(&w.b, "%s%s: %s\n", strings.Repeat("  ", level), key, value)
}

func (w *yamlWriter) text(level int, key, value string) {
	if value != "" {
		w.line(level, key, quote(value))
	}
}

func (w *yamlWriter) number(level int, key string, value float64) {
	if value != 0 {
		w.line(level, key, strconv.FormatFloat(value, 'f', -1, 64))
	}
}

func (w *yamlWriter) duration(level int, key string, value time.Duration) {
	if value != 0 {
		w.line(level, key, value.String())
	}
}

func (w *yamlWriter) list(level int, key string, values []string) {
	if len(values) == 0 {
		return
	}
	fmt.Fprintf(&w.b, "%s%s:\n", strings.Repeat("  ", level), key)
	for _, v := range values {
		fmt.Fprintf(&w.b, "%s- %s\n", strings.Repeat("  ", level+1), quote(v))
	}
}

// section writes a key with what write writes below it, and nothing if that is empty.
func (w *yamlWriter) section(key string, write func()) {
	before := w.b.String()
	fmt.Fprintf(&w.b, "%s:\n", key)
	with := w.b.Len()
	write()
	if w.b.Len() == with {
		w.b.Reset()
		w.b.WriteString(before)
	}
}

// quote returns a text in the double quotes of YAML.
func quote(s string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, c := range s {
		switch {
		case c == '"' || c == '\\':
			b.WriteByte('\\')
			b.WriteRune(c)
		case c < ' ' || c >= 0x7f && c <= 0x9f || c == 0x2028 || c == 0x2029 || c == 0xfeff:
			fmt.Fprintf(&b, "\\u%04x", c)
		default:
			b.WriteRune(c)
		}
	}
	b.WriteByte('"')
	return b.String()
}

func numbers[T int32 | uint32](list []T) string {
	texts := make([]string, len(list))
	for i, n := range list {
		texts[i] = fmt.Sprint(n)
	}
	return "[" + strings.Join(texts, ", ") + "]"
}
