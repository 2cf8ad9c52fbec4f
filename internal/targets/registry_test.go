package targets

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// host is a host whose processes and clock the test moves.
type host struct {
	*Registry
	t     *testing.T
	clock time.Time
	procs []discovery.Proc
	// containers is what a runtime reports, by container id.
	containers map[string]gpreempt.Container
	posted     []string
	// postedJobs are the jobs that were posted last.
	postedJobs map[gpreempt.ProcessKey]string
	// postedKin are the kin that were posted last.
	postedKin map[gpreempt.ProcessKey][]gpreempt.ProcessKey
}

func newHost(t *testing.T, rules ...classify.Rule) *host {
	t.Helper()
	h := &host{t: t, clock: time.Unix(1000, 0), postedJobs: map[gpreempt.ProcessKey]string{}, postedKin: map[gpreempt.ProcessKey][]gpreempt.ProcessKey{}}
	h.Registry = NewRegistry(RegistryConfig{
		Inventory: inventory.New(16), Post: h.post,
		Sessions: NewSessions(Config{Now: func() time.Duration { return 0 }, Log: zap.NewNop()}),
		Now:      func() time.Time { return h.clock },
		Container: func(at gpreempt.Cgroup) (c gpreempt.Container, known bool) {
			c, known = h.containers[at.ContainerID]
			return c, known
		},
	})
	h.SetRules(rulesOf(t, rules...))
	return h
}

func rulesOf(t *testing.T, rules ...classify.Rule) *classify.Classifier {
	t.Helper()
	c, err := classify.New(rules, nil)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// offlineTrainers makes processes called train* offline with priority 2.
func offlineTrainers() classify.Rule {
	two := gpreempt.Priority(2)
	return classify.Rule{Name: "training", Match: classify.Match{Comm: "train*"}, Class: gpreempt.Offline, Priority: &two}
}

// attached sets what the sessions know of a target.
func (h *host) attached(key gpreempt.ProcessKey, err error) {
	st := State{Choice: Choice{Mechanism: "fake", Why: "it is there"}}
	if err != nil {
		st = State{Err: err}
	}
	h.cfg.Sessions.states[key] = &st
}

func (h *host) post(ev scheduler.Event) {
	switch ev := ev.(type) {
	case scheduler.TargetSeen:
		h.postedJobs[ev.Target], h.postedKin[ev.Target] = ev.Job, ev.Kin
		h.posted = append(h.posted, fmt.Sprintf("seen %v %v %d on %v, %d queues born", ev.Target, ev.Class, ev.Priority, ev.GPUs, ev.Queues))
	case scheduler.TargetGone:
		delete(h.postedKin, ev.Target)
		h.posted = append(h.posted, fmt.Sprint("gone ", ev.Target))
	default:
		h.t.Errorf("unexpected %T", ev)
	}
}

// scan looks at the host again.
func (h *host) scan() {
	h.Apply(h.cfg.Inventory.Apply(h.clock, discovery.Snapshot{Processes: h.procs}))
}

// want checks what was posted since the last check.
func (h *host) want(want ...string) {
	h.t.Helper()
	if diff := cmp.Diff(want, h.posted); diff != "" {
		h.t.Errorf("posted (-want +got):\n%s", diff)
	}
	h.posted = nil
}

func (h *host) facts(key gpreempt.ProcessKey, want Facts) {
	h.t.Helper()
	got, known := h.Facts(key)
	if !known {
		h.t.Errorf("%v is not known", key)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		h.t.Errorf("facts of %v (-want +got):\n%s", key, diff)
	}
}

var (
	trainer = gpreempt.ProcessKey{PID: 100, Start: 1}
	viewer  = gpreempt.ProcessKey{PID: 200, Start: 2}

	byRule    = classify.Decision{Class: gpreempt.Offline, Priority: 2, By: "rule training"}
	byDefault = classify.Decision{Class: gpreempt.Unmanaged, Priority: 7, By: "default"}
	byAdmin   = classify.Decision{Class: gpreempt.Offline, Priority: 0, By: "admin"}
)

// proc is a process with a queue on each GPU.
func proc(key gpreempt.ProcessKey, comm string, gpus ...gpreempt.GPUID) discovery.Proc {
	p := discovery.Proc{Process: gpreempt.Process{Key: key, Comm: comm}}
	for id, gpu := range gpus {
		p.Queues = append(p.Queues, gpreempt.Queue{Process: key, ID: uint32(id), GPU: gpu, Type: gpreempt.QueueCompute})
	}
	return p
}

func TestProcessesArePostedWithTheirClassAndQueues(t *testing.T) {
	h := newHost(t, offlineTrainers())
	h.procs = []discovery.Proc{proc(trainer, "trainer", 9, 5, 9), proc(viewer, "viewer", 5)}
	h.scan()
	h.want(
		"seen 100@1 offline 2 on [5 9], 3 queues born",
		"seen 200@2 unmanaged 7 on [5], 1 queues born",
	)
	h.facts(trainer, Facts{Decision: byRule})
	h.attached(trainer, nil)
	h.facts(trainer, Facts{Decision: byRule, Mechanism: "fake", MechanismWhy: "it is there"})
	h.facts(viewer, Facts{Decision: byDefault})

	// Nothing new, nothing posted; another queue is.
	h.scan()
	h.want()
	h.procs[0] = proc(trainer, "trainer", 9, 5, 9, 9)
	h.scan()
	h.want("seen 100@1 offline 2 on [5 9], 4 queues born")

	h.procs = h.procs[1:]
	h.scan()
	h.want("gone 100@1")
	if _, known := h.Facts(trainer); known {
		t.Error("a process that left is still known")
	}
	if _, known := h.cfg.Sessions.State(trainer); known {
		t.Error("the mechanism of a process that left is still known")
	}
}

func TestWhyNoMechanismIsAttachedIsShownOfOfflineProcessesOnly(t *testing.T) {
	h := newHost(t, offlineTrainers())
	h.procs = []discovery.Proc{proc(trainer, "trainer", 5)}
	h.scan()
	h.attached(trainer, errors.New("ptrace: already traced by pid 7"))
	h.facts(trainer, Facts{Decision: byRule, AttachError: "ptrace: already traced by pid 7"})
	h.SetRules(rulesOf(t))
	h.facts(trainer, Facts{Decision: byDefault})
}

func TestNewRulesJudgeTheLivingAgain(t *testing.T) {
	h := newHost(t)
	h.procs = []discovery.Proc{proc(trainer, "trainer", 5)}
	h.scan()
	h.want("seen 100@1 unmanaged 7 on [5], 1 queues born")
	h.SetRules(rulesOf(t, offlineTrainers()))
	h.want("seen 100@1 offline 2 on [5], 1 queues born")
	h.attached(trainer, nil)
	h.posted = nil
	h.SetRules(rulesOf(t))
	h.want("seen 100@1 unmanaged 7 on [5], 1 queues born")
	h.facts(trainer, Facts{Decision: byDefault})
}

func TestOverrideHoldsUntilItsTimeIsOver(t *testing.T) {
	h := newHost(t)
	h.procs = []discovery.Proc{proc(trainer, "trainer", 5)}
	h.scan()
	h.posted = nil
	if !h.Override(trainer, &byAdmin, time.Minute) {
		t.Fatal("the process is not known")
	}
	h.want("seen 100@1 offline 0 on [5], 1 queues born")
	h.attached(trainer, nil)
	h.posted = nil

	// Rules do not matter meanwhile, nor does a change of the process.
	h.SetRules(rulesOf(t, offlineTrainers()))
	h.facts(trainer, Facts{Decision: byAdmin, Mechanism: "fake", MechanismWhy: "it is there"})
	h.SetRules(rulesOf(t))
	h.posted = nil
	h.clock = h.clock.Add(time.Minute - 1)
	h.scan()
	h.want()
	h.clock = h.clock.Add(1)
	h.scan()
	h.want("seen 100@1 unmanaged 7 on [5], 1 queues born")
	h.facts(trainer, Facts{Decision: byDefault})
}

func TestOverrideWithoutTimeHoldsUntilItIsTakenBack(t *testing.T) {
	h := newHost(t, offlineTrainers())
	h.procs = []discovery.Proc{proc(trainer, "trainer", 5)}
	h.scan()
	online := classify.Decision{Class: gpreempt.Online, Priority: 11, By: "admin"}
	h.Override(trainer, &online, time.Second)
	h.Override(trainer, &online, 0) // the second call's time is what counts
	h.posted = nil
	h.clock = h.clock.Add(1000 * time.Hour)
	h.scan()
	h.want()
	h.facts(trainer, Facts{Decision: online})
	h.Override(trainer, nil, 0)
	h.want("seen 100@1 offline 2 on [5], 1 queues born")
	if h.Override(viewer, &online, 0) {
		t.Error("a process nobody has seen can be classified")
	}
}

func TestProcessIsJudgedAgainWhenItsContainerIsKnown(t *testing.T) {
	h := newHost(t, classify.Rule{Name: "batch", Match: classify.Match{Container: classify.ContainerMatch{Name: "bert-*"}}, Class: gpreempt.Offline})
	h.procs = []discovery.Proc{{Process: gpreempt.Process{Key: trainer, Comm: "python3", Cgroup: gpreempt.Cgroup{ContainerID: "c1"}}}}
	h.scan()
	h.facts(trainer, Facts{Decision: byDefault})
	bert := gpreempt.Container{Name: "bert-0"}
	h.containers = map[string]gpreempt.Container{"c1": bert}
	h.ContainerChanged("c2")
	h.facts(trainer, Facts{Decision: byDefault, Container: bert})
	h.ContainerChanged("c1")
	h.facts(trainer, Facts{Decision: classify.Decision{Class: gpreempt.Offline, By: "rule batch"}, Container: bert})
}

func TestProcessWithAFalseContainerIsClassifiedWithoutIt(t *testing.T) {
	h := newHost(t,
		classify.Rule{Name: "server", Match: classify.Match{Container: classify.ContainerMatch{ID: "c*"}}, Class: gpreempt.Online},
		classify.Rule{Name: "pods", Match: classify.Match{Pod: classify.PodMatch{Namespace: "*"}}, Class: gpreempt.Unmanaged}, offlineTrainers())
	at := gpreempt.Cgroup{Path: "/batch/c1", ContainerID: "c1", ContainerPath: "/batch/c1", PodUID: "u1"}
	h.procs = []discovery.Proc{{Process: gpreempt.Process{Key: trainer, Comm: "train", Cgroup: at}}}
	refused := gpreempt.Container{Conflict: "container c1, and by its runtime that of process 42 in /docker/c1"}
	h.containers = map[string]gpreempt.Container{"c1": refused}
	h.scan()
	h.facts(trainer, Facts{Decision: classify.Decision{Class: gpreempt.Offline, Priority: 2, By: "rule training"}, Container: refused})
	var details []string
	for _, step := range h.Explain(trainer) {
		details = append(details, step.Detail)
	}
	const why = "refused, because names contradict each other: container c1, and by its runtime that of process 42 in /docker/c1"
	if diff := cmp.Diff([]string{"container.id: " + why, "pod.namespace: " + why}, details[1:3]); diff != "" {
		t.Errorf("explanation (-want +got):\n%s", diff)
	}
}

func TestProcessIsJudgedAgainWhenItsQueuesAreKnown(t *testing.T) {
	low := classify.Rule{Name: "low", Match: classify.Match{QueuePriority: &classify.PriorityRange{Max: 6}}, Class: gpreempt.Offline}
	h := newHost(t, low)
	proc := discovery.Proc{
		Process: gpreempt.Process{Key: trainer, Comm: "python3"},
		Queues:  []gpreempt.Queue{{Process: trainer, GPU: 1, Type: gpreempt.QueueCompute, RingBytes: 1 << 20}},
	}
	h.procs = []discovery.Proc{proc}
	h.scan()
	h.facts(trainer, Facts{Decision: byDefault})
	h.cfg.Inventory.SetInfos(h.clock, proc, []gpreempt.QueueInfo{{Source: gpreempt.FromMQD, PriorityKnown: true, PriorityExact: true}})
	h.QueuesChanged(proc)
	h.facts(trainer, Facts{Decision: classify.Decision{Class: gpreempt.Offline, By: "rule low"}})
}

func TestRulesAreCountedWhetherOrNotTheyDecide(t *testing.T) {
	all := classify.Rule{Name: "all", Match: classify.Match{Comm: "*"}, Class: gpreempt.Online}
	h := newHost(t, offlineTrainers(), all)
	start := func(key gpreempt.ProcessKey, comm string) {
		h.procs = append(h.procs, discovery.Proc{Process: gpreempt.Process{Key: key, Comm: comm}})
	}
	start(trainer, "train")
	start(viewer, "viewer")
	h.scan()
	h.scan()
	counts := func(what string, want ...RuleCount) {
		t.Helper()
		want = append(want, RuleCount{Rule: "tag"})
		if diff := cmp.Diff(want, h.RuleCounts()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
	counts("both live",
		RuleCount{Rule: "training", Class: gpreempt.Offline, Matched: 1, Decided: 1, MatchesNow: 1, DecidesNow: 1},
		RuleCount{Rule: "all", Class: gpreempt.Online, Matched: 2, Decided: 1, MatchesNow: 2, DecidesNow: 1})
	h.Override(trainer, &byAdmin, 0)
	h.procs = h.procs[:1]
	h.scan()
	counts("one left, the other is an admin's",
		RuleCount{Rule: "training", Class: gpreempt.Offline, Matched: 1, Decided: 1, MatchesNow: 1},
		RuleCount{Rule: "all", Class: gpreempt.Online, Matched: 2, Decided: 1, MatchesNow: 1})
	h.SetRules(rulesOf(t, all))
	counts("new rules", RuleCount{Rule: "all", Class: gpreempt.Online, Matched: 1, MatchesNow: 1})
}

func TestNeverDebugOutlivesAnOverrideOfTheClass(t *testing.T) {
	rule := classify.Rule{Name: "batch", Match: classify.Match{Comm: "train*"}, Class: gpreempt.Unmanaged, NeverDebug: true}
	h := newHost(t, rule)
	h.procs = []discovery.Proc{proc(trainer, "trainer")}
	h.scan()
	h.want("seen 100@1 unmanaged 7 on [], 0 queues born")
	h.Override(trainer, &classify.Decision{Class: gpreempt.Offline, Priority: 1, By: classify.ByAdmin}, 0)
	want := classify.Decision{Class: gpreempt.Offline, Priority: 1, By: classify.ByAdmin, NeverDebug: true}
	h.facts(trainer, Facts{Decision: want})
	for name, obstacle := range map[string]bool{"dbgtrap": true, "criu": true, "freezer": false} {
		if e := Obstacle(name, h.procs[0], want); (e != nil) != obstacle {
			t.Errorf("%s: %+v", name, e)
		}
	}
}

func TestMechanismOfAnOverrideIsTheOnlyOne(t *testing.T) {
	h := newHost(t, offlineTrainers())
	h.procs = []discovery.Proc{proc(trainer, "trainer")}
	h.scan()
	want := func(usable ...string) {
		t.Helper()
		facts, _ := h.Facts(trainer)
		var got []string
		for _, name := range []string{"dbgtrap", "criu", "freezer"} {
			if Obstacle(name, h.procs[0], facts.Decision) == nil {
				got = append(got, name)
			}
		}
		if diff := cmp.Diff(usable, got); diff != "" {
			t.Errorf("usable (-want +got):\n%s", diff)
		}
	}
	want("dbgtrap", "criu", "freezer")
	for _, name := range []string{"criu", "freezer"} {
		h.Override(trainer, &classify.Decision{Class: gpreempt.Offline, By: classify.ByAdmin, Mechanism: name}, 0)
		want(name)
	}
	if step := h.Explain(trainer)[0]; step.Detail != "admin override, suspended by freezer only" {
		t.Errorf("explained: %+v", step)
	}
	h.Override(trainer, nil, 0)
	want("dbgtrap", "criu", "freezer")
}

func TestClassificationIsExplained(t *testing.T) {
	h := newHost(t, offlineTrainers())
	h.procs = []discovery.Proc{{Process: gpreempt.Process{Key: trainer, Comm: "train"}}}
	h.scan()
	who := func() (by []string) {
		for _, step := range h.Explain(trainer) {
			if step.Decides {
				by = append(by, step.By)
			}
		}
		return by
	}
	if got := who(); !cmp.Equal(got, []string{"rule training"}) {
		t.Errorf("decided by %v", got)
	}
	h.Override(trainer, &byAdmin, 0)
	if got := who(); !cmp.Equal(got, []string{"admin"}) {
		t.Errorf("decided by %v after an override", got)
	}
	if got := h.Explain(viewer); got != nil {
		t.Errorf("an unknown process is explained by %v", got)
	}
}

// A process must not be held, let alone suspended, for the time it takes to learn
// that an earlier rule is about it.
func TestProcessIsNotOfflineWhileAnEarlierRuleMayMatch(t *testing.T) {
	h := newHost(t,
		classify.Rule{Name: "serving", Match: classify.Match{Container: classify.ContainerMatch{Name: "serve-*"}}, Class: gpreempt.Online},
		offlineTrainers())
	h.procs = []discovery.Proc{{Process: gpreempt.Process{Key: trainer, Comm: "train", Cgroup: gpreempt.Cgroup{ContainerID: "c1"}}}}
	h.scan()
	waits := classify.Decision{Class: gpreempt.Unmanaged, Priority: 7, By: "rule serving may match", Waits: true}
	h.facts(trainer, Facts{Decision: waits})
	h.want("seen 100@1 unmanaged 7 on [], 0 queues born")

	h.containers = map[string]gpreempt.Container{"c1": {Name: "train-0"}}
	h.ContainerChanged("c1")
	h.want("seen 100@1 offline 2 on [], 0 queues born")
}

// The environment was read for the old rules: what the new ones look at is not
// known before the next scan.
func TestNewRulesWaitForTheVariablesTheyLookAt(t *testing.T) {
	h := newHost(t, offlineTrainers())
	proc := discovery.Proc{Process: gpreempt.Process{Key: trainer, Comm: "train"}}
	h.procs = []discovery.Proc{proc}
	h.scan()
	h.posted = nil
	online := classify.Rule{Name: "prod", Match: classify.Match{Env: map[string]string{"TEAM": "prod"}}, Class: gpreempt.Online}
	h.SetRules(rulesOf(t, online, classify.Rule{Name: "all", Match: classify.Match{Comm: "*"}, Class: gpreempt.Offline}))
	h.facts(trainer, Facts{Decision: classify.Decision{Class: gpreempt.Unmanaged, Priority: 7, By: "rule prod may match", Waits: true}})
	h.scan() // it may have begun before
	proc.Env = map[string]string{"TEAM": "prod"}
	h.procs = []discovery.Proc{proc}
	h.scan()
	h.facts(trainer, Facts{Decision: classify.Decision{Class: gpreempt.Online, Priority: 11, By: "rule prod"}})
}
