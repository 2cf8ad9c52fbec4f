package targets

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// RegistryConfig is what a Registry needs.
type RegistryConfig struct {
	Inventory *inventory.Inventory
	// Container returns what is known of a container.
	Container func(gpreempt.Cgroup) (c gpreempt.Container, known bool)
	Sessions  *Sessions
	Post      func(scheduler.Event)
	// Now is the wall clock.
	Now func() time.Time
}

// Registry classifies the processes that discovery finds, by rules and by overrides, and
// posts the result to the scheduler. Its methods are safe for concurrent use.
type Registry struct {
	cfg RegistryConfig

	mu         sync.Mutex // guards all below; taken before the scheduler's lock
	classifier *classify.Classifier
	known      map[gpreempt.ProcessKey]*process
	jobs       map[classify.Job]*jobName
	jobsNamed  uint64
	// matched and decided count processes by rule, since the rules were loaded; the
	// tags come last.
	matched, decided []uint64
	// owners are the processes that announce work, with their facts; nil when these are not known.
	owners map[gpreempt.ProcessKey]*gpreempt.Process
	// rereads is how many scans have to end before what new rules depend on was read.
	rereads int
}

// jobName is the name of a job, which has at least one process. The name tells nothing of the
// environment of the processes, and is used once.
type jobName struct {
	name      string
	processes int
}

// process is a process that discovery has found.
type process struct {
	discovery.Proc
	decision classify.Decision
	job      classify.Job
	// override is an admin's class; it holds until expires, or while the process lives
	// when that is zero.
	override *classify.Decision
	expires  time.Time
	// matching reports which rules match; everMatched and everDecided which it was
	// counted for.
	matching, everMatched, everDecided []bool
}

// RuleCount is how often a rule matched.
type RuleCount struct {
	// Rule is the name of the rule, and Class the class it assigns; "tag" stands for
	// the tags of processes, which assign any class.
	Rule  string
	Class gpreempt.Class
	// Matched and Decided count processes since the rules were loaded, and
	// MatchesNow and DecidesNow the living ones.
	Matched, Decided, MatchesNow, DecidesNow uint64
}

// Facts is what is known of a process apart from its queues.
type Facts struct {
	Decision classify.Decision
	// Job is the job of the process, and JobName its name, such as slurm-2; "" for none.
	Job     classify.Job
	JobName string
	// Container is what the container runtime reports of its container.
	Container gpreempt.Container
	// Mechanism is the name of the attached mechanism; "" without one.
	Mechanism string
	// MechanismWhy says why it was chosen, and why preferred ones were not.
	MechanismWhy string
	// AttachCycles counts the runlist cycles that attaching to it and releasing it caused on
	// GPUs that it has no queue on.
	AttachCycles uint64
	// AttachError says why no mechanism could be attached; "" when none failed.
	AttachError string
}

// NewRegistry returns a registry without processes. SetRules comes first.
func NewRegistry(cfg RegistryConfig) *Registry {
	return &Registry{cfg: cfg, known: map[gpreempt.ProcessKey]*process{}, jobs: map[classify.Job]*jobName{}, owners: map[gpreempt.ProcessKey]*gpreempt.Process{}}
}

// Apply takes in what a scan found, and ends overrides whose time is over.
func (r *Registry) Apply(diff inventory.Diff) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, key := range diff.Gone {
		p := r.known[key]
		if p == nil {
			continue
		}
		job := p.job
		r.setJob(p, classify.Job{})
		delete(r.known, key)
		r.postRanks(p, job)
		r.cfg.Post(scheduler.TargetGone{Target: key})
		r.cfg.Sessions.Forget(key)
	}
	for _, proc := range slices.Concat(diff.Born, diff.Changed) {
		p := r.known[proc.Key]
		if p == nil {
			p = &process{}
			r.known[proc.Key] = p
		}
		p.Proc = proc
		r.classify(p)
	}
	r.reread()
	now := r.cfg.Now()
	for _, p := range r.known {
		r.cfg.Container(p.Cgroup) // containers that are asked for are kept up to date
		if p.override != nil && !p.expires.IsZero() && !now.Before(p.expires) {
			p.override = nil
			r.classify(p)
		}
	}
}

// reread classifies every process again once what new rules depend on was read.
func (r *Registry) reread() {
	if r.rereads == 0 {
		return
	}
	if r.rereads--; r.rereads > 0 {
		return
	}
	for key, p := range r.known {
		if proc, ok := r.cfg.Inventory.Process(key); ok {
			p.Proc = proc
			r.classify(p)
		}
	}
}

// SetRules replaces the rules and classifies every process again.
func (r *Registry) SetRules(c *classify.Classifier) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.classifier != nil && len(r.known) > 0 && slices.ContainsFunc(c.Env(), func(name string) bool { return !slices.Contains(r.classifier.Env(), name) }) {
		r.rereads = 2 // the scan that is under way may have begun before
		for _, p := range r.known {
			p.Unread = true
		}
	}
	r.classifier = c
	rules := len(c.Names())
	r.matched, r.decided = make([]uint64, rules), make([]uint64, rules)
	for _, p := range r.known {
		p.everMatched, p.everDecided = nil, nil
		r.classify(p)
	}
	for _, p := range r.known {
		if p.job.IsLaunch() { // some of its ranks were classified later
			r.post(p)
		}
	}
}

// QueuesChanged classifies a process again: the facts of its queues have changed.
func (r *Registry) QueuesChanged(proc discovery.Proc) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.known[proc.Key]; p != nil {
		r.classify(p)
	}
}

// ContainerChanged classifies the processes of a container again: something new is known
// of it.
func (r *Registry) ContainerChanged(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.known {
		if p.Cgroup.ContainerID == id {
			r.classify(p)
		}
	}
}

// subject returns all that a process is classified by.
func (r *Registry) subject(p *process) *classify.Subject {
	s := &classify.Subject{
		Process: p.Process, GPUs: GPUsWithQueues(r.cfg.Inventory.GPUs(), p.Proc), Queues: r.cfg.Inventory.QueuesOf(p.Key),
	}
	s.SetContainer(r.cfg.Container(p.Cgroup))
	return s
}

// GPUsWithQueues returns those of gpus that have a queue of a process.
func GPUsWithQueues(gpus []gpreempt.GPU, proc discovery.Proc) []gpreempt.GPU {
	with := proc.GPUs()
	return slices.DeleteFunc(slices.Clone(gpus), func(gpu gpreempt.GPU) bool { return !slices.Contains(with, gpu.ID) })
}

// count counts the rules that match a process.
func (r *Registry) count(p *process, s *classify.Subject) {
	p.matching = r.classifier.Matching(s, p.matching[:0])
	if p.everMatched == nil {
		p.everMatched, p.everDecided = make([]bool, len(p.matching)), make([]bool, len(p.matching))
	}
	for n, matches := range p.matching {
		if matches && !p.everMatched[n] {
			p.everMatched[n] = true
			r.matched[n]++
		}
	}
	if n := p.deciding(); n >= 0 && !p.everDecided[n] {
		p.everDecided[n] = true
		r.decided[n]++
	}
}

// deciding returns the rule that decides; -1 when none does.
func (p *process) deciding() int {
	if p.override != nil || p.decision.Waits {
		return -1
	}
	return slices.Index(p.matching, true)
}

// RuleCounts describes how often each rule matched.
func (r *Registry) RuleCounts() []RuleCount {
	r.mu.Lock()
	defer r.mu.Unlock()
	classes := r.classifier.Classes()
	counts := make([]RuleCount, len(r.matched))
	for n, name := range r.classifier.Names() {
		counts[n] = RuleCount{Rule: name, Class: classes[n], Matched: r.matched[n], Decided: r.decided[n]}
	}
	for _, p := range r.known {
		for n, matches := range p.matching {
			if matches {
				counts[n].MatchesNow++
			}
		}
		if n := p.deciding(); n >= 0 {
			counts[n].DecidesNow++
		}
	}
	return counts
}

// Explain returns the steps by which a process is classified, nil if it is not known.
func (r *Registry) Explain(key gpreempt.ProcessKey) []classify.Step {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.known[key]
	if p == nil {
		return nil
	}
	return r.classifier.Explain(r.subject(p), p.override)
}

// Override sets the class of a process, with precedence over the rules, for ttl, or for as
// long as the process lives if ttl is 0. A nil decision ends the override. It reports
// whether the process is known.
func (r *Registry) Override(key gpreempt.ProcessKey, decision *classify.Decision, ttl time.Duration) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.known[key]
	if p == nil {
		return false
	}
	p.override, p.expires = decision, time.Time{}
	if ttl > 0 {
		p.expires = r.cfg.Now().Add(ttl)
	}
	r.classify(p)
	return true
}

// classify classifies a process and posts the result.
func (r *Registry) classify(p *process) {
	s := r.subject(p)
	job, rule := p.job, p.deciding()
	p.decision = r.classifier.Decide(s)
	r.count(p, s)
	if p.override != nil {
		rule := p.decision // the override is of the class alone
		p.decision = *p.override
		p.decision.NeverDebug = rule.NeverDebug
		if p.decision.Class == gpreempt.Offline && p.decision.Mechanism == "" {
			p.decision.OnResist = rule.OnResist
		}
	}
	r.setJob(p, r.classifier.Job(s))
	r.post(p)
	if job != p.job || rule != p.deciding() {
		r.postRanks(p, job)
		r.postRanks(p, p.job)
	}
	if p.decision.Class == gpreempt.Offline {
		r.cfg.Sessions.Invalidate(p.Key, func(name string) *mechanism.Evidence { return Obstacle(name, p.Proc, p.decision) })
	}
}

// post posts a process to the scheduler.
func (r *Registry) post(p *process) {
	r.cfg.Post(scheduler.TargetSeen{
		Target: p.Key, Job: r.jobName(p), Class: p.decision.Class, Priority: p.decision.Priority,
		Comm: p.Comm, By: p.decision.By, GPUs: p.GPUs(), Kin: r.kin(p), OnResist: p.decision.OnResist, Queues: r.cfg.Inventory.QueuesBorn(p.Key),
	})
}

// kin returns the processes whose leases do not suspend a process: those of its ancestors that
// announce and of its program's other ranks to which the rule that decides about the process
// applies as well. Such a rule does not tell a trainer from a server, and one that applies to the
// process alone does.
func (r *Registry) kin(p *process) (kin []gpreempt.ProcessKey) {
	rule := p.deciding()
	if rule < 0 || p.decision.Class != gpreempt.Offline {
		return nil
	}
	for _, key := range p.Ancestors {
		if owner, announces := r.owners[key]; announces && r.applies(rule, key, owner, p) {
			kin = append(kin, key)
		}
	}
	if !p.job.IsLaunch() {
		return kin
	}
	for _, rank := range r.known {
		if rank != p && rank.job == p.job && rank.deciding() == rule {
			kin = append(kin, rank.Key)
		}
	}
	slices.SortFunc(kin, gpreempt.ProcessKey.Compare)
	return slices.Compact(kin)
}

// applies reports whether a rule is known to match a process that announces, and that p
// descends from. Only discovery reads the records of Slurm jobs: p has that of its own.
func (r *Registry) applies(rule int, key gpreempt.ProcessKey, facts *gpreempt.Process, p *process) bool {
	owner := r.known[key]
	if owner == nil {
		if facts == nil {
			return false
		}
		owner = &process{Proc: discovery.Proc{Process: *facts}}
		if owner.Cgroup.SlurmJob == p.Cgroup.SlurmJob {
			owner.Slurm = p.Slurm
		}
	}
	return r.classifier.Matching(r.subject(owner), nil)[rule]
}

// postRanks posts the ranks of a job other than p, if it has any.
func (r *Registry) postRanks(p *process, job classify.Job) {
	if !job.IsLaunch() {
		return
	}
	for _, rank := range r.known {
		if rank != p && rank.job == job {
			r.post(rank)
		}
	}
}

// Announces is called before the first announcement of a process, and Departed when it is no
// client any more. facts has its facts with the variables env; false when they are not known.
func (r *Registry) Announces(owner gpreempt.ProcessKey, facts func(env []string) (gpreempt.Process, bool)) {
	r.mu.Lock()
	env := r.classifier.Env()
	r.mu.Unlock()
	p, known := facts(env) // without the lock: it can take a while
	r.mu.Lock()
	defer r.mu.Unlock()
	r.owners[owner] = nil
	if known {
		r.owners[owner] = &p
	}
	r.postDescendants(owner)
}

// Departed ends what Announces began.
func (r *Registry) Departed(owner gpreempt.ProcessKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, announces := r.owners[owner]; announces {
		delete(r.owners, owner)
		r.postDescendants(owner)
	}
}

func (r *Registry) postDescendants(owner gpreempt.ProcessKey) {
	for _, p := range r.known {
		if slices.Contains(p.Ancestors, owner) {
			r.post(p)
		}
	}
}

// setJob makes a process one of a job, and names the job if it is new.
func (r *Registry) setJob(p *process, job classify.Job) {
	if p.job == job {
		return
	}
	if j := r.jobs[p.job]; j != nil {
		if j.processes--; j.processes == 0 {
			delete(r.jobs, p.job)
		}
	}
	p.job = job
	if job.IsZero() {
		return
	}
	if r.jobs[job] == nil {
		r.jobsNamed++
		r.jobs[job] = &jobName{name: fmt.Sprintf("%s-%d", job.Rule, r.jobsNamed)}
	}
	r.jobs[job].processes++
}

// jobName returns the name of the job of a process, "" for none.
func (r *Registry) jobName(p *process) string {
	if j := r.jobs[p.job]; j != nil {
		return j.name
	}
	return ""
}

// Facts returns what is known of a process.
func (r *Registry) Facts(key gpreempt.ProcessKey) (Facts, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.known[key]
	if p == nil {
		return Facts{}, false
	}
	facts := Facts{Decision: p.decision, Job: p.job, JobName: r.jobName(p)}
	facts.Container, _ = r.cfg.Container(p.Cgroup)
	if p.decision.Class != gpreempt.Offline {
		return facts, true
	}
	state, _ := r.cfg.Sessions.State(key)
	facts.AttachCycles = state.AttachCycles
	if state.Err != nil {
		facts.AttachError = state.Err.Error()
	} else if state.Choice.Mechanism != "" {
		facts.Mechanism, facts.MechanismWhy = state.Choice.Mechanism, state.Choice.String()
	}
	return facts, true
}
