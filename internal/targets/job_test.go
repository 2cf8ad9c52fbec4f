package targets

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestKinAreAnnouncingAncestorsAndRanksWithTheSameRule(t *testing.T) {
	rules, err := classify.New([]classify.Rule{
		{Name: "trainers", Match: classify.Match{Cmdline: "*train.py*"}, Class: gpreempt.Offline},
		{Name: "catching", Match: classify.Match{Comm: "python*"}, Class: gpreempt.Offline},
	}, []classify.JobRule{{Name: "torch", By: []string{"env.MASTER_PORT"}}, {Name: "container", By: []string{"container.id"}}})
	if err != nil {
		t.Fatal(err)
	}
	h := newHost(t)
	h.SetRules(rules)
	key := func(pid int32) gpreempt.ProcessKey { return gpreempt.ProcessKey{PID: pid, Start: 1} }
	keys := func(pids ...int32) (all []gpreempt.ProcessKey) {
		for _, pid := range pids {
			all = append(all, key(pid))
		}
		return all
	}
	facts := func(pid int32, cmdline, port string, ancestors ...int32) gpreempt.Process {
		p := gpreempt.Process{Key: key(pid), Comm: "python3", Cmdline: cmdline, Ancestors: keys(ancestors...), Cgroup: gpreempt.Cgroup{ContainerID: "c1"}}
		if port != "" {
			p.Env = map[string]string{"MASTER_PORT": port}
		}
		return p
	}
	add := func(p gpreempt.Process) {
		full := proc(p.Key, p.Comm, 5)
		full.Process = p
		h.procs = append(h.procs, full)
	}
	check := func(want map[gpreempt.ProcessKey][]gpreempt.ProcessKey) {
		t.Helper()
		h.scan()
		if diff := cmp.Diff(want, h.postedKin); diff != "" {
			t.Errorf("kin (-want +got):\n%s", diff)
		}
	}
	const server, trainer = "python3 serve.py", "python3 train.py"
	add(facts(10, server, "29500", 3, 2)) // two ranks of one launch
	add(facts(11, server, "29500", 3, 2))
	add(facts(12, server, "29600", 3, 2))  // one of another
	add(facts(13, trainer, "29500", 3, 2)) // what is started in a launch, and has its variables
	add(facts(14, server, "", 2))          // only the place is known
	add(facts(15, server, ""))
	ranks := map[gpreempt.ProcessKey][]gpreempt.ProcessKey{key(10): keys(11), key(11): keys(10), key(12): nil, key(13): nil, key(14): nil, key(15): nil}
	check(ranks)

	// Their ancestors announce: 2, to which the rule applies that does not tell a server from its
	// workers, and 3, of which nothing can be read.
	h.Announces(key(2), func([]string) (gpreempt.Process, bool) { return facts(2, server, ""), true })
	h.Announces(key(3), func([]string) (gpreempt.Process, bool) { return gpreempt.Process{}, false })
	check(map[gpreempt.ProcessKey][]gpreempt.ProcessKey{
		key(10): keys(2, 11), key(11): keys(2, 10), key(12): keys(2), key(13): nil, key(14): keys(2), key(15): nil,
	})
	// A trainer that announces has its own children as kin, and one by the decision of an admin has none.
	h.Override(key(14), &byAdmin, 0)
	h.Announces(key(3), func([]string) (gpreempt.Process, bool) { return facts(3, trainer, ""), true })
	check(map[gpreempt.ProcessKey][]gpreempt.ProcessKey{
		key(10): keys(2, 3, 11), key(11): keys(2, 3, 10), key(12): keys(2, 3), key(13): keys(3), key(14): nil, key(15): nil,
	})
	h.Override(key(14), nil, 0)
	h.Departed(key(3))
	h.Departed(key(2))
	h.Departed(key(2))
	check(ranks)
	h.procs = h.procs[1:]
	delete(ranks, key(10))
	ranks[key(11)] = nil
	check(ranks)

	// New rules tell the ranks apart from the rest.
	rules, err = classify.New([]classify.Rule{{Name: "all", Match: classify.Match{Comm: "python*"}, Class: gpreempt.Offline}}, []classify.JobRule{{Name: "torch", By: []string{"env.MASTER_PORT"}}})
	if err != nil {
		t.Fatal(err)
	}
	h.SetRules(rules)
	ranks[key(11)], ranks[key(13)] = keys(13), keys(11)
	check(ranks)
}

func TestProcessesOfAJobArePostedWithItsName(t *testing.T) {
	rules, err := classify.New([]classify.Rule{offlineTrainers()}, []classify.JobRule{
		{Name: "own", By: []string{"env.GPREEMPT_JOB"}},
		{Name: "compose", By: []string{"container.labels.project"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	h := newHost(t)
	h.SetRules(rules)
	a, b, c, d := gpreempt.ProcessKey{PID: 1, Start: 1}, gpreempt.ProcessKey{PID: 2, Start: 1}, gpreempt.ProcessKey{PID: 3, Start: 1}, gpreempt.ProcessKey{PID: 4, Start: 1}
	train := func(key gpreempt.ProcessKey, uid uint32, job string) (p gpreempt.Process) {
		p = gpreempt.Process{Key: key, Comm: "train", UID: uid, Env: map[string]string{}}
		if job != "" {
			p.Env["GPREEMPT_JOB"] = job
		}
		return p
	}
	contained := train(d, 7, "")
	contained.Cgroup.ContainerID = "c1"
	for _, p := range []gpreempt.Process{train(a, 7, "secret"), train(b, 7, "secret"), train(c, 8, "secret"), contained} {
		full := proc(p.Key, p.Comm, 5)
		full.Process = p
		h.procs = append(h.procs, full)
	}
	h.scan()
	jobs := func(want map[gpreempt.ProcessKey]string) {
		t.Helper()
		got := map[gpreempt.ProcessKey]string{}
		for key := range h.known {
			facts, _ := h.Facts(key)
			got[key] = facts.JobName
			if posted := h.postedJobs[key]; posted != facts.JobName {
				t.Errorf("%v was posted as one of %q, and is of %q", key, posted, facts.JobName)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("jobs (-want +got):\n%s", diff)
		}
		if len(h.jobs) > len(h.known) {
			t.Errorf("%d jobs of %d processes are kept", len(h.jobs), len(h.known))
		}
	}
	// Another user's process is of another job, with the same variable.
	jobs(map[gpreempt.ProcessKey]string{a: "own-1", b: "own-1", c: "own-2", d: ""})
	facts, _ := h.Facts(a)
	if diff := cmp.Diff(classify.Job{UID: 7, Rule: "own", By: `env.GPREEMPT_JOB "secret"`}, facts.Job); diff != "" {
		t.Errorf("job (-want +got):\n%s", diff)
	}

	// The runtime answers.
	h.containers = map[string]gpreempt.Container{"c1": {Labels: map[string]string{"project": "p"}}}
	h.ContainerChanged("c1")
	jobs(map[gpreempt.ProcessKey]string{a: "own-1", b: "own-1", c: "own-2", d: "compose-3"})

	// The last process of a job ends: its name is not used again.
	procs := h.procs
	h.procs = procs[:2]
	h.scan()
	h.procs = procs
	h.scan()
	jobs(map[gpreempt.ProcessKey]string{a: "own-1", b: "own-1", c: "own-4", d: "compose-5"})

	// New rules find other jobs; those that stay keep their names.
	rules, err = classify.New([]classify.Rule{offlineTrainers()}, []classify.JobRule{{Name: "own", By: []string{"env.GPREEMPT_JOB"}}})
	if err != nil {
		t.Fatal(err)
	}
	h.SetRules(rules)
	jobs(map[gpreempt.ProcessKey]string{a: "own-1", b: "own-1", c: "own-4", d: ""})
	h.procs = nil
	h.scan()
	if len(h.jobs) != 0 {
		t.Errorf("%d jobs are kept without processes", len(h.jobs))
	}
}
