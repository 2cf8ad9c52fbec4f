package sim

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/gpreempt/gpreempt/internal/stat"
	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/scenario"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// PlanOptions are the input of a plan besides its work.
type PlanOptions struct {
	// Policies are compared, each with each of Floors as its share floor, 0 to 0.95. Shadow
	// policies are refused: they suspend nothing.
	Policies []NamedPolicy
	Floors   []float64
	// Options is that of each run; repeat n has Seed + n.
	Options
	// Repeats of each run, at least 1.
	Repeats int
	// Keep, if set, is called with each arm in its order.
	Keep func(evidence.Arm) error
}

// NamedPolicy is a policy that may be a preset with other knobs.
type NamedPolicy struct {
	Name string
	scheduler.Policy
}

// Plan is what policies do to work: a point for each policy and share floor, and the choice among
// them.
type Plan struct {
	// Alone is the online work on GPUs of its own, and None both kinds of work without
	// preemption; nil for a recording, which does not say what they are.
	Alone *Point `json:"alone,omitempty"`
	None  *Point `json:"none,omitempty"`
	// Points are in the order of the policies, and of the floors within each.
	Points []Point `json:"points"`
	// OnlineGPUs and OfflineGPUs are those that each kind of work has, and SharedGPUs those that
	// any of them has.
	OnlineGPUs  int `json:"online_gpus"`
	OfflineGPUs int `json:"offline_gpus"`
	SharedGPUs  int `json:"shared_gpus"`
	// Floors are the highest share floors that keep the SLO, by policy; a policy that never
	// keeps it is absent. Empty without an SLO.
	Floors []PolicyFloor `json:"floors,omitempty"`
	// Best is the index of the point that keeps the SLO with the most offline work, -1 for none.
	Best int `json:"best"`
}

// PolicyFloor is a share floor of a policy.
type PolicyFloor struct {
	Policy     string  `json:"policy"`
	ShareFloor float64 `json:"share_floor"`
}

// Point is the result of one policy with one share floor. Times are in milliseconds.
type Point struct {
	Policy     string  `json:"policy,omitempty"`
	ShareFloor float64 `json:"share_floor"`
	// Services has each service in the order of the scenario; for a recording one, all
	// announcements.
	Services []ServicePoint `json:"services,omitempty"`
	// Offline is the offline work as a part of that of offline work alone. Saved is how many GPUs
	// more would do as much online and offline work if each kind had its own.
	Offline float64 `json:"offline"`
	Saved   float64 `json:"gpus_saved"`
	// Preemptions is the mean number that a request caused, MostPreemptions the largest.
	Preemptions     float64 `json:"preemptions"`
	MostPreemptions int     `json:"most_preemptions"`
	// Verdict says whether every service with an SLO keeps it.
	Verdict Verdict `json:"slo"`
	// Dominated: another point is at least as good in p99 of every service and in offline
	// work, and better in one of them. Of a recording, Protection counts as well.
	Dominated bool `json:"dominated"`
}

// Verdict says whether an SLO is kept.
type Verdict string

// The verdicts.
const (
	NoSLO  Verdict = "none"
	Kept   Verdict = "kept"
	Missed Verdict = "missed"
)

// ServicePoint is the latency of one service: from arrival to result; with an LLM, to the first
// token, and TPOT between tokens. For a recording it is from the announcement to its answer.
type ServicePoint struct {
	Name     string  `json:"name"`
	Requests int     `json:"requests"`
	Failed   int     `json:"failed"`
	P50      float64 `json:"p50"`
	P99      float64 `json:"p99"`
	TPOTP50  float64 `json:"tpot_p50,omitempty"`
	TPOTP99  float64 `json:"tpot_p99,omitempty"`
	SLO      float64 `json:"slo,omitempty"`
	TPOTSLO  float64 `json:"tpot_slo,omitempty"`
	// Recorded is set for a recording.
	Recorded *Protection `json:"protection,omitempty"`
}

// Protection is what the announcements of a recording get.
type Protection struct {
	// NotQuiet were answered before their GPUs were quiet.
	NotQuiet int `json:"not_quiet"`
	// Disturbed is the part of the time of all their work in which offline work that they
	// outrank ran on their GPUs.
	Disturbed float64 `json:"disturbed"`
	// Within is the part of them that had quiet GPUs within the SLO until their end.
	Within float64 `json:"within"`
}

// verdict compares the p99 with the SLO. A request without a result misses it; of the announcements
// of a recording, 99 % must keep it.
func (s ServicePoint) verdict() Verdict {
	switch {
	case s.SLO == 0 && s.TPOTSLO == 0:
		return NoSLO
	case s.Recorded != nil && s.Recorded.Within < 0.99:
		return Missed
	case s.Requests == 0 || s.Failed > 0, s.SLO > 0 && s.P99 > s.SLO, s.TPOTSLO > 0 && s.TPOTP99 > s.TPOTSLO:
		return Missed
	default:
		return Kept
	}
}

// Decisive returns the service that decides: the one whose p99 is highest relative to its SLO, or
// without SLOs the one with the highest p99. A point has at least one.
func (pt *Point) Decisive() ServicePoint {
	return slices.MaxFunc(pt.Services, func(a, b ServicePoint) int {
		return cmp.Or(cmp.Compare(a.strain(), b.strain()), cmp.Compare(a.P99, b.P99))
	})
}

// strain returns the part of the SLO that the p99 uses up, 0 without an SLO.
func (s ServicePoint) strain() float64 {
	strain := 0.0
	if s.SLO > 0 {
		strain = s.P99 / s.SLO
	}
	if s.TPOTSLO > 0 {
		strain = max(strain, s.TPOTP99/s.TPOTSLO)
	}
	return strain
}

// PlanScenario simulates a scenario alone, without preemption, and with each policy and floor.
func PlanScenario(s scenario.Scenario, o PlanOptions) (Plan, error) {
	if err := o.check(); err != nil {
		return Plan{}, err
	}
	if len(s.Online) == 0 || len(s.Offline) == 0 {
		return Plan{}, errors.New("a plan needs online and offline work: add both to the scenario")
	}
	p := &planner{o: o, services: s.Online, run: func(name string, scheme Scheme) (evidence.Arm, error) {
		return Arm(name, s, scheme, o.Options, o.Repeats)
	}}
	var online, offline []int
	for _, svc := range s.Online {
		online = append(online, gpusOf(svc.GPUs)...)
	}
	for _, j := range s.Offline {
		offline = append(offline, gpusOf(j.GPUs)...)
	}
	p.plan.OnlineGPUs, p.plan.OfflineGPUs, p.plan.SharedGPUs = distinct(online), distinct(offline), distinct(append(online, offline...))
	alone, err := p.arm("offline alone", Scheme{Kind: OfflineAlone})
	if err != nil {
		return Plan{}, err
	}
	p.offlineAlone = workRate(alone)
	for _, ref := range []struct {
		name   string
		scheme Scheme
		into   **Point
	}{
		{"online alone", Scheme{Kind: OnlineAlone}, &p.plan.Alone},
		{"no preemption", Scheme{Kind: None}, &p.plan.None},
	} {
		arm, err := p.arm(ref.name, ref.scheme)
		if err != nil {
			return Plan{}, err
		}
		*ref.into = new(p.point(arm, NamedPolicy{}))
	}
	return p.finish()
}

// PlanRecording replays a recording with each policy and floor. slo bounds the time from an
// announcement to its answer, in milliseconds; 0 for none.
func PlanRecording(rec Recording, slo float64, o PlanOptions) (Plan, error) {
	if err := errors.Join(o.check(), rec.check()); err != nil {
		return Plan{}, err
	}
	if len(rec.Leases) == 0 {
		return Plan{}, errors.New("the recording has no announcement: record while clients work")
	}
	var offline, online []int
	for _, t := range rec.Targets {
		for _, g := range t.GPUs {
			offline = append(offline, int(g))
		}
	}
	for _, l := range rec.Leases {
		for _, g := range l.GPUs {
			online = append(online, int(g))
		}
	}
	if len(offline) == 0 {
		return Plan{}, errors.New("the recording has no offline target: classify jobs as offline, also with the policy shadow, and record again")
	}
	p := &planner{o: o, slo: slo, recorded: true, offlineAlone: rec.offlineAlone() / rec.Length.Seconds()}
	p.plan.OnlineGPUs, p.plan.OfflineGPUs, p.plan.SharedGPUs = distinct(online), distinct(offline), distinct(append(online, offline...))
	p.run = func(name string, scheme Scheme) (evidence.Arm, error) {
		r, err := replay(rec, scheme.Policy, o.Costs)
		if err != nil {
			return evidence.Arm{}, err
		}
		p.protection = r.protection
		return evidence.Arm{
			Name: name, Kind: evidence.Protected, Mechanism: string(GPreempt), Policy: scheme.Policy.Preset, Repeats: []evidence.Repeat{r.out},
		}, nil
	}
	return p.finish()
}

func (o *PlanOptions) check() error {
	switch {
	case len(o.Policies) == 0 || len(o.Floors) == 0:
		return errors.New("a plan needs a policy and a share floor")
	case o.Repeats < 1:
		return fmt.Errorf("%d repeats: use at least 1", o.Repeats)
	}
	for _, p := range o.Policies {
		if p.Shadow {
			return fmt.Errorf("the policy %s suspends nothing: choose others", p.Name)
		}
	}
	return nil
}

// planner makes the arms of a plan and the points of them.
type planner struct {
	o            PlanOptions
	run          func(name string, scheme Scheme) (evidence.Arm, error)
	services     []scenario.Service
	recorded     bool
	slo          float64
	protection   []protection // of the last arm of a recording
	offlineAlone float64      // work in a second
	plan         Plan
}

func (p *planner) arm(name string, scheme Scheme) (evidence.Arm, error) {
	arm, err := p.run(name, scheme)
	if err == nil && p.o.Keep != nil {
		err = p.o.Keep(arm)
	}
	return arm, err
}

// finish runs the policies and makes the choice.
func (p *planner) finish() (Plan, error) {
	for _, policy := range p.o.Policies {
		for _, floor := range p.o.Floors {
			if floor > policy.ShareCap {
				continue
			}
			policy.ShareFloor = floor
			policy.Policy = policy.Normalize()
			arm, err := p.arm(fmt.Sprintf("%s, share floor %.2f", policy.Name, floor), Scheme{Kind: GPreempt, Policy: policy.Policy})
			if err != nil {
				return Plan{}, err
			}
			p.plan.Points = append(p.plan.Points, p.point(arm, policy))
		}
	}
	p.plan.choose()
	return p.plan, nil
}

// point makes the point of an arm.
func (p *planner) point(a evidence.Arm, policy NamedPolicy) Point {
	pt := Point{Policy: policy.Name, ShareFloor: policy.ShareFloor, Verdict: NoSLO}
	if p.offlineAlone > 0 {
		pt.Offline = workRate(a) / p.offlineAlone
	}
	if policy.Name != "" {
		pt.Saved = float64(p.plan.OnlineGPUs) + pt.Offline*float64(p.plan.OfflineGPUs) - float64(p.plan.SharedGPUs)
	}
	if p.recorded {
		pt.Services = []ServicePoint{p.announcements(a)}
	}
	for i := range p.services {
		pt.Services = append(pt.Services, servicePoint(&p.services[i], a))
	}
	requests := 0
	for _, r := range a.Repeats {
		requests += len(r.Requests)
		for _, q := range r.Requests {
			pt.Preemptions += float64(q.Preemptions)
			pt.MostPreemptions = max(pt.MostPreemptions, q.Preemptions)
		}
	}
	pt.Preemptions /= float64(max(requests, 1))
	for _, s := range pt.Services {
		if v := s.verdict(); v == Missed || pt.Verdict == NoSLO {
			pt.Verdict = v
		}
	}
	return pt
}

func servicePoint(svc *scenario.Service, a evidence.Arm) ServicePoint {
	sp := ServicePoint{Name: svc.Name, SLO: ms(svc.SLO)}
	if svc.LLM != nil {
		sp.TPOTSLO = ms(svc.LLM.TPOT)
	}
	var latency, tpot []float64
	for _, r := range a.Repeats {
		for _, q := range r.Requests {
			switch {
			case q.Server != "" && q.Server != svc.Name:
				continue
			case q.Failed != "":
				sp.Failed++
			case svc.LLM != nil:
				latency = append(latency, q.TTFT)
				if q.TPOT > 0 { // not of an answer of one token
					tpot = append(tpot, q.TPOT)
				}
			default:
				latency = append(latency, q.Total)
			}
			sp.Requests++
		}
	}
	sp.P50, sp.P99 = p50p99(latency)
	sp.TPOTP50, sp.TPOTP99 = p50p99(tpot)
	return sp
}

// announcements is the only service of a recording.
func (p *planner) announcements(a evidence.Arm) ServicePoint {
	sp := ServicePoint{Name: "announcements", SLO: p.slo, Recorded: &Protection{}}
	var waits []float64
	var work, disturbed float64
	within := 0
	for _, r := range a.Repeats {
		sp.Recorded.NotQuiet += r.NotQuiet
		for i, q := range r.Requests {
			got := p.protection[i]
			waits = append(waits, q.Announce)
			work += q.Service
			disturbed += ms(got.disturbed)
			if got.quiet && got.disturbed == 0 && (p.slo == 0 || q.Announce <= p.slo) {
				within++
			}
		}
	}
	sp.Requests = len(waits)
	sp.P50, sp.P99 = p50p99(waits)
	sp.Recorded.Within = float64(within) / float64(max(len(waits), 1))
	if work > 0 {
		sp.Recorded.Disturbed = disturbed / work
	}
	return sp
}

func p50p99(samples []float64) (p50, p99 float64) {
	slices.Sort(samples)
	return stat.Quantile(samples, 0.5), stat.Quantile(samples, 0.99)
}

// workRate returns the offline work in a second.
func workRate(a evidence.Arm) float64 {
	var work, seconds float64
	for _, r := range a.Repeats {
		work += r.Work
		seconds += r.Seconds
	}
	if seconds == 0 {
		return 0
	}
	return work / seconds
}

// choose sets what compares the points.
func (p *Plan) choose() {
	p.Best = -1
	for i := range p.Points {
		pt := &p.Points[i]
		pt.Dominated = slices.ContainsFunc(p.Points, func(other Point) bool { return other.dominates(pt) })
		if pt.Verdict != Kept {
			continue
		}
		if p.Best < 0 || p.Points[p.Best].offline() < pt.offline() {
			p.Best = i
		}
		at := slices.IndexFunc(p.Floors, func(f PolicyFloor) bool { return f.Policy == pt.Policy })
		if at < 0 {
			p.Floors = append(p.Floors, PolicyFloor{Policy: pt.Policy, ShareFloor: pt.ShareFloor})
		} else {
			p.Floors[at].ShareFloor = max(p.Floors[at].ShareFloor, pt.ShareFloor)
		}
	}
}

// dominates reports whether pt is at least as good as other in everything, and better in
// something.
func (pt Point) dominates(other *Point) bool {
	if pt.offline() < other.offline() {
		return false
	}
	better := pt.offline() > other.offline()
	for i := range pt.Services {
		mine, theirs := pt.Services[i].losses(), other.Services[i].losses()
		for k := range mine {
			if mine[k] > theirs[k] {
				return false
			}
			better = better || mine[k] < theirs[k]
		}
	}
	return better
}

// offline returns the offline work in tenths of a percent. Smaller differences are not compared.
func (pt *Point) offline() float64 { return math.Round(1000 * pt.Offline) }

// losses are what should be small: times in hundredths of a millisecond, parts in tenths of a
// percent. Smaller differences are not compared.
func (s *ServicePoint) losses() [5]float64 {
	losses := [5]float64{math.Round(100 * s.P99), math.Round(100 * s.TPOTP99), float64(s.Failed)}
	if s.Recorded != nil {
		losses[3], losses[4] = float64(s.Recorded.NotQuiet), math.Round(1000*s.Recorded.Disturbed)
	}
	return losses
}

// gpusOf returns the GPUs of an owner.
func gpusOf(gpus []int) []int {
	if len(gpus) == 0 {
		return []int{0}
	}
	return gpus
}

func distinct(all []int) int {
	return len(slices.Compact(slices.Sorted(slices.Values(all))))
}
