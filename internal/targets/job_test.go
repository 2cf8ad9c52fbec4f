package targets

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestKinAreTheAncestorsAndTheOtherRanks(t *testing.T) {
	rules, err := classify.New([]classify.Rule{offlineTrainers()}, []classify.JobRule{
		{Name: "torch", By: []string{"env.MASTER_PORT"}}, {Name: "container", By: []string{"container.id"}},
	})
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
	add := func(pid int32, port string, ancestors ...int32) {
		p := proc(key(pid), "train", 5)
		p.Ancestors, p.Cgroup.ContainerID = keys(ancestors...), "c1"
		if port != "" {
			p.Env = map[string]string{"MASTER_PORT": port}
		}
		h.procs = append(h.procs, p)
	}
	check := func(want map[gpreempt.ProcessKey][]gpreempt.ProcessKey) {
		t.Helper()
		h.scan()
		if diff := cmp.Diff(want, h.postedKin); diff != "" {
			t.Errorf("kin (-want +got):\n%s", diff)
		}
	}
	// Two ranks of one launch, one of another, and two processes of which only the place is known.
	add(10, "29500", 3, 2)
	add(11, "29500", 3, 2)
	add(12, "29600")
	add(13, "", 2)
	add(14, "")
	check(map[gpreempt.ProcessKey][]gpreempt.ProcessKey{
		key(10): keys(3, 2, 11), key(11): keys(3, 2, 10), key(12): nil, key(13): keys(2), key(14): nil,
	})
	h.procs = h.procs[1:]
	check(map[gpreempt.ProcessKey][]gpreempt.ProcessKey{key(11): keys(3, 2), key(12): nil, key(13): keys(2), key(14): nil})
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
