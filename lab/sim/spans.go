package sim

import (
	"slices"

	"github.com/gpreempt/gpreempt/lab/evidence"
)

// The words of evidence.Span.What.
const (
	spanOnline    = "online"
	spanOffline   = "offline"
	spanSuspended = "suspended"
	spanSwitching = "switching"
)

// moving notes that an operation begins or ends on the GPU.
func (g *gpu) moving(by int) {
	g.operations += by
	g.engine.touch(g)
}

// spans records who has the GPU: online work in one span, offline work in another.
func (g *gpu) spans() {
	e := g.engine
	if e.now > e.o.SpanLimit || e.o.SpanLimit == 0 {
		return
	}
	what, name := "", ""
	if len(g.online) > 0 {
		what = spanOnline
		for _, s := range e.services {
			if slices.ContainsFunc(s.streams, func(st *stream) bool { return st.gpu == g && st.running }) {
				name = s.Name
			}
		}
	}
	g.span(&g.onlineSpan, what, name)
	what, name = "", ""
	switch {
	case g.operations > 0 || g.cycles > 0:
		what = spanSwitching
	case len(g.offline) > 0 && g.mute != offlineTurn:
		what = spanOffline
	case g.anyWants():
		what = spanSuspended
	}
	if what != "" && what != spanSwitching {
		name = g.jobs()
	}
	g.span(&g.offlineSpan, what, name)
}

func (g *gpu) anyWants() (wants bool) {
	g.engine.eachOffline(g, func(s *stream) { wants = wants || s.wants() })
	return wants
}

// jobs names the offline jobs of the GPU.
func (g *gpu) jobs() string {
	names := ""
	last := ""
	g.engine.eachOffline(g, func(s *stream) {
		if s.process.job.Name == last {
			return
		}
		last = s.process.job.Name
		if names != "" {
			names += ", "
		}
		names += last
	})
	return names
}

// span ends the span in progress and begins another, if they differ.
func (g *gpu) span(open *evidence.Span, what, name string) {
	if open.What == what && open.Name == name {
		return
	}
	now := min(g.engine.now, g.engine.o.SpanLimit)
	if open.What != "" && ms(now) > open.From {
		open.To = ms(now)
		g.engine.out.Spans = append(g.engine.out.Spans, *open)
	}
	*open = evidence.Span{From: ms(now), GPU: g.index, What: what, Name: name}
}

func (g *gpu) closeSpans() {
	g.span(&g.onlineSpan, "", "")
	g.span(&g.offlineSpan, "", "")
}
