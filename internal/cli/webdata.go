package cli

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/stat"
	"github.com/gpreempt/gpreempt/internal/term"
)

// Bounds of the page.
const (
	webPreemptions = 10
	webQuiet       = 120 // bars of the chart of quiet times
	webExplained   = 16  // targets that one reading explains
)

// webData is what the page of gpctl web shows, with values as gpctl prints them.
type webData struct {
	// Column is the newest column of the timeline, First the first one that is in the answer.
	Column int64 `json:"column"`
	First  int64 `json:"first"`
	// Lost is why there is no newer reading.
	Lost        string          `json:"lost"`
	Daemon      webDaemon       `json:"daemon"`
	Warnings    []webWarning    `json:"warnings"`
	Quiet       webQuietTimes   `json:"quiet"`
	Away        []int           `json:"away"`
	GPUs        []webGPU        `json:"gpus"`
	Tracks      []webTrack      `json:"tracks"`
	Targets     []webTarget     `json:"targets"`
	Leases      []webLease      `json:"leases"`
	Preemptions []webPreemption `json:"preemptions"`
	Explanation *webExplanation `json:"explanation"`
}

type webDaemon struct {
	Backend string `json:"backend"`
	// Model is "simulated" or "emulated" when no hardware is involved.
	Model    string `json:"model"`
	Version  string `json:"version"`
	Policy   string `json:"policy"`
	Up       string `json:"up"`
	Draining bool   `json:"draining"`
}

type webWarning struct {
	Error  bool   `json:"error"`
	Code   string `json:"code"`
	Text   string `json:"text"`
	Remedy string `json:"remedy"`
}

// webQuietTimes are the times from announcements until the GPUs were quiet.
type webQuietTimes struct {
	Count  int       `json:"count"`
	P50    string    `json:"p50"`
	P95    string    `json:"p95"`
	P99    string    `json:"p99"`
	Max    string    `json:"max"`
	Recent []float64 `json:"recent"` // milliseconds, newest last
}

type webGPU struct {
	ID        uint32 `json:"id"`
	Index     int    `json:"index"`
	Name      string `json:"name"`
	Queues    uint32 `json:"queues"`
	Slots     uint32 `json:"slots"`
	Leases    uint32 `json:"leases"`
	Suspended int    `json:"suspended"` // percent
	Breaker   string `json:"breaker"`   // until it closes, "" when it is closed
	// Columns has two figures for each column: waiting, quiet. Begun has one: leases.
	Columns []int `json:"columns"`
	Begun   []int `json:"begun"`
}

// webTrack is the timeline of a target.
type webTrack struct {
	ID   string   `json:"id"`
	PID  int32    `json:"pid"`
	Comm string   `json:"comm"`
	GPUs []uint32 `json:"gpus"`
	Gone bool     `json:"gone"`
	// Columns has three figures for each column: changing, suspended, quarantined.
	Columns []int `json:"columns"`
}

type webTarget struct {
	ID        string `json:"id"`
	PID       int32  `json:"pid"`
	Comm      string `json:"comm"`
	Class     string `json:"class"`
	State     string `json:"state"`
	Suspended string `json:"suspended"` // percent
	Rate      string `json:"rate"`
	Queues    uint32 `json:"queues"`
	Backlog   string `json:"backlog"`
	GPUs      string `json:"gpus"`
	Where     string `json:"where"` // container, pod or job
	Why       string `json:"why"`
}

type webLease struct {
	ID      string `json:"id"`
	Label   string `json:"label"`
	State   string `json:"state"`
	Prio    string `json:"priority"`
	GPUs    string `json:"gpus"`
	Owner   string `json:"owner"`
	Age     string `json:"age"`
	Expires string `json:"expires"`
}

type webPreemption struct {
	At   string `json:"at"`
	PID  string `json:"pid"`
	Comm string `json:"comm"`
	Took string `json:"took"`
	For  string `json:"for"`
}

// webExplanation is gpctl target explain, with the queues of the target.
type webExplanation struct {
	ID      string     `json:"id"`
	Verdict string     `json:"verdict"`
	Error   string     `json:"error"`
	Facts   string     `json:"facts"`
	Checks  []webCheck `json:"checks"`
	Class   []webCheck `json:"class"`
	Queues  []webQueue `json:"queues"`
}

type webCheck struct {
	Name    string `json:"name"`
	Result  string `json:"result"`
	Decides bool   `json:"decides"`
	Detail  string `json:"detail"`
}

type webQueue struct {
	ID      uint32 `json:"id"`
	GPU     uint32 `json:"gpu"`
	Type    string `json:"type"`
	Ring    string `json:"ring"`
	Backlog string `json:"backlog"`
}

// verdict is the explanation of a target, and the reading that it is from.
type verdict struct {
	text    string
	reading int
}

// webModel is the state of the page. It follows the daemon's events all the time, and reads the
// daemon only while somebody looks at the page.
type webModel struct {
	a     *term.App
	admin term.AdminClient
	every time.Duration
	began time.Time
	// busy holds a token while a request reads the daemon; the others wait for its reading.
	busy chan struct{}

	mu       sync.Mutex // guards all below
	monitor  monitor
	timeline *timeline
	verdicts map[string]verdict
	readings int
	readAt   time.Duration // of the last reading or failure
}

func newWebModel(a *term.App, admin term.AdminClient, every time.Duration) *webModel {
	return &webModel{
		a: a, admin: admin, every: every, began: a.Now(), busy: make(chan struct{}, 1),
		monitor: newMonitor(), timeline: newTimeline(), verdicts: map[string]verdict{}, readAt: -every,
	}
}

// clock returns the time since the model began.
func (m *webModel) clock() time.Duration { return m.a.Now().Sub(m.began) }

// follow follows the daemon until ctx ends.
func (m *webModel) follow(ctx context.Context) {
	follow(ctx, m.a, m.admin, false, m.every, func(r reading) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.monitor.read(r)
		m.timeline.begin(m.clock(), r)
	}, func(e *gpreemptv1.Event) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.monitor.event(e)
		m.timeline.event(e)
	}, func(err error) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.monitor.lost = err.Error()
		m.timeline.end(m.clock())
	})
}

// read reads the daemon, unless the last reading is recent.
func (m *webModel) read(ctx context.Context) error {
	select {
	case m.busy <- struct{}{}:
		defer func() { <-m.busy }()
	case <-ctx.Done():
		return ctx.Err()
	}
	m.mu.Lock()
	recent := m.clock()-m.readAt < m.every
	m.mu.Unlock()
	if recent {
		return nil
	}
	r, err := readAll(ctx, m.admin)
	if err == nil {
		err = m.explainSome(ctx, r.targets)
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		return ctx.Err() // the reader has gone, which says nothing about the daemon
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.readAt = m.clock()
	if err != nil {
		m.monitor.lost = m.a.FromDaemon(ctx, err).Error()
		return nil
	}
	m.monitor.read(r)
	m.timeline.describe(r)
	return nil
}

// explainSome explains the targets whose explanation is the oldest, and replaces them in the list
// by what the daemon returned with it: state and explanation must not contradict each other.
func (m *webModel) explainSome(ctx context.Context, list []*gpreemptv1.Target) error {
	m.mu.Lock()
	m.readings++
	now, old := m.readings, m.verdicts
	m.mu.Unlock()
	next := make(map[string]verdict, len(list))
	order := make([]int, len(list))
	for i, t := range list {
		order[i] = i
		if v, ok := old[t.GetTargetId()]; ok {
			next[t.GetTargetId()] = v
		}
	}
	slices.SortStableFunc(order, func(x, y int) int {
		return cmp.Compare(next[list[x].GetTargetId()].reading, next[list[y].GetTargetId()].reading)
	})
	for _, i := range order[:min(len(order), webExplained)] {
		id := list[i].GetTargetId()
		e, err := m.admin.ExplainTarget(ctx, &gpreemptv1.ExplainTargetRequest{TargetId: id})
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			continue // it has exited meanwhile, or the next reading fails too
		}
		next[id] = verdict{e.GetVerdict(), now}
		list[i] = e.GetTarget()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.verdicts = next
	return nil
}

// data returns what the page shows: the columns of the timeline after a column, and the
// explanation of a target, unless it is "".
func (m *webModel) data(ctx context.Context, after int64, target string) (*webData, error) {
	if err := m.read(ctx); err != nil {
		return nil, err
	}
	var explanation *webExplanation
	if target != "" {
		explanation = m.explain(ctx, target)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	d := &webData{
		Column: m.timeline.advance(m.clock()), Lost: m.monitor.lost,
		Warnings: []webWarning{}, GPUs: []webGPU{}, Tracks: []webTrack{}, Targets: []webTarget{}, Leases: []webLease{}, Preemptions: []webPreemption{},
		Explanation: explanation,
	}
	d.First = max(0, d.Column-columnCount+columnMargin+1)
	if after >= d.First && after <= d.Column {
		d.First = after + 1
	}
	d.Away = m.timeline.away.figures(d.First, d.Column, 1)
	m.addDaemon(d)
	m.addQuiet(&d.Quiet)
	m.addGPUs(d)
	m.addTargets(d)
	for _, l := range m.monitor.now.leases {
		d.Leases = append(d.Leases, webLease{
			ID: l.GetLeaseId(), Label: term.Printable(l.GetLabel()), State: api.EnumName(l.GetState()), Prio: term.Priority(l.GetPriority()),
			GPUs: term.GPUNames(m.monitor.now.gpus).HIP(l.GetGpuIds()...), Owner: term.Printable(leaseOwner(l)), Age: m.a.Age(l.GetCreatedAt()), Expires: term.Took(l.GetExpiresIn()),
		})
	}
	for _, p := range m.monitor.last[:min(len(m.monitor.last), webPreemptions)] {
		pid, _, _ := strings.Cut(p.event.GetTargetId(), "@")
		d.Preemptions = append(d.Preemptions, webPreemption{
			At: p.event.GetAt().AsTime().Local().Format("15:04:05.000"), PID: pid, Comm: term.Printable(term.Or(p.comm, "-")), Took: term.Took(p.event.GetTook()),
			For: p.why,
		})
	}
	return d, nil
}

func (m *webModel) addDaemon(d *webData) {
	st := m.monitor.now.status
	d.Daemon = webDaemon{
		Backend: term.Printable(st.GetBackend()), Model: modelOf(st), Version: st.GetVersion(), Policy: st.GetPolicy(), Up: m.a.Age(st.GetStartedAt()), Draining: st.GetDraining(),
	}
	for _, w := range st.GetWarnings() {
		d.Warnings = append(d.Warnings, webWarning{severity(w) == term.StyleBad, w.GetCode(), term.Printable(w.GetText()), term.Printable(w.GetRemedy())})
	}
}

func (m *webModel) addQuiet(q *webQuietTimes) {
	list := m.monitor.quiet
	q.Count, q.Recent = len(list), []float64{}
	if len(list) == 0 {
		return
	}
	sorted := slices.Sorted(slices.Values(list))
	at := func(share float64) string { return term.Duration(stat.Quantile(sorted, share)) }
	q.P50, q.P95, q.P99, q.Max = at(0.5), at(0.95), at(0.99), at(1)
	for _, d := range list[max(0, len(list)-webQuiet):] {
		q.Recent = append(q.Recent, float64(d.Microseconds())/1000)
	}
}

func (m *webModel) addGPUs(d *webData) {
	for i, g := range m.monitor.now.gpus {
		one := webGPU{
			ID: g.GetGpuId(), Index: i, Name: term.Printable(g.GetName()), Queues: g.GetQueueCount(), Slots: g.GetQueueSlots(), Leases: g.GetLeaseCount(),
			Suspended: int(100*m.monitor.suspendedOn(g.GetGpuId()) + 0.5),
		}
		if g.GetBreakerOpen() {
			one.Breaker = term.Took(g.GetBreakerClosesIn())
		}
		if t := m.timeline.gpus[g.GetGpuId()]; t != nil {
			one.Columns, one.Begun = t.figures(d.First, d.Column, 2), t.begun(d.First, d.Column)
		}
		d.GPUs = append(d.GPUs, one)
	}
	for id, t := range m.timeline.targets {
		if t.about == nil {
			continue
		}
		columns := t.figures(d.First, d.Column, 3)
		if columns == nil && t.about.GetClass() != gpreemptv1.Class_CLASS_OFFLINE {
			continue
		}
		d.Tracks = append(d.Tracks, webTrack{id, t.about.GetPid(), term.Printable(t.about.GetComm()), t.about.GetGpuIds(), t.gone, columns})
	}
	slices.SortFunc(d.Tracks, func(x, y webTrack) int { return cmp.Or(cmp.Compare(x.PID, y.PID), cmp.Compare(x.ID, y.ID)) })
}

func (m *webModel) addTargets(d *webData) {
	for _, t := range m.monitor.now.targets {
		id := t.GetTargetId()
		_, backlog := m.monitor.backlog(id)
		one := webTarget{
			ID: id, PID: t.GetPid(), Comm: term.Printable(t.GetComm()), Class: api.EnumName(t.GetClass()), State: api.EnumName(t.GetState()),
			Suspended: "-", Rate: "-", Queues: t.GetQueueCount(), Backlog: backlog, GPUs: term.GPUNames(m.monitor.now.gpus).HIP(t.GetGpuIds()...),
			Where: term.Printable(term.Or(container(t), t.GetJob().GetName())), Why: term.Printable(term.Or(t.GetAttachError(), m.verdicts[id].text)),
		}
		if share, rate, ok := m.monitor.rates(id); ok {
			one.Suspended, one.Rate = fmt.Sprintf("%.0f", 100*share), fmt.Sprintf("%.1f", rate)
		}
		d.Targets = append(d.Targets, one)
	}
}

// explain asks the daemon about one target.
func (m *webModel) explain(ctx context.Context, target string) *webExplanation {
	out := &webExplanation{ID: target, Checks: []webCheck{}, Class: []webCheck{}, Queues: []webQueue{}}
	e, err := m.admin.ExplainTarget(ctx, &gpreemptv1.ExplainTargetRequest{TargetId: target})
	if err != nil {
		out.Error = m.a.FromDaemon(ctx, err).Error()
		return out
	}
	m.mu.Lock()
	names := term.GPUNames(m.monitor.now.gpus)
	m.mu.Unlock()
	var text bytes.Buffer
	printTarget(&term.Printer{W: &text}, e.GetTarget(), names)
	out.Verdict, out.Facts = term.Printable(e.GetVerdict()), text.String()
	for _, c := range e.GetChecks() {
		out.Checks = append(out.Checks, webCheck{c.GetCheck(), api.EnumName(c.GetResult()), c.GetDecides(), term.Printable(c.GetDetail())})
	}
	for _, s := range e.GetClassification() {
		result := "no"
		if s.GetMatches() {
			result = api.EnumName(s.GetClass())
		}
		out.Class = append(out.Class, webCheck{term.Printable(s.GetBy()), result, s.GetDecides(), term.Printable(s.GetDetail())})
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, q := range m.monitor.now.queues {
		if q.GetTargetId() != target {
			continue
		}
		out.Queues = append(out.Queues, webQueue{q.GetQueueId(), q.GetGpuId(), q.GetType(), term.Size(q.GetRingBytes()), behind(q)})
	}
	return out
}
