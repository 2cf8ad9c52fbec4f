package classify_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func jobRules(t *testing.T, rules ...classify.JobRule) *classify.Classifier {
	t.Helper()
	c, err := classify.New(nil, rules)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestTheFirstRuleThatAppliesFindsTheJob(t *testing.T) {
	c := jobRules(t,
		classify.JobRule{Name: "own", By: []string{"env.GPREEMPT_JOB"}},
		classify.JobRule{Name: "label", By: []string{"pod.labels.example.org/job-name"}},
		classify.JobRule{Name: "torch", By: []string{"env.MASTER_ADDR", "env.MASTER_PORT"}},
		classify.JobRule{Name: "slurm", Cgroup: "/system.slice/*slurmstepd.scope/job_*"},
		classify.JobRule{Name: "step", Cgroup: "/slurm/uid_*/job_*", By: []string{"env.STEP"}},
		classify.JobRule{Name: "compose", By: []string{"container.labels.com.docker.compose.project"}},
		classify.JobRule{Name: "container", By: []string{"container.id"}},
		classify.JobRule{Name: "unit", By: []string{"unit"}},
	)
	env := func(words ...string) map[string]string {
		m := map[string]string{}
		for _, word := range words {
			name, value, _ := strings.Cut(word, "=")
			m[name] = value
		}
		return m
	}
	process := func(path string, env map[string]string) classify.Subject {
		return classify.Subject{Process: gpreempt.Process{UID: 1000, Env: env, Cgroup: gpreempt.Cgroup{Path: path}}}
	}
	contained := func(s classify.Subject, id, pod string, c gpreempt.Container) classify.Subject {
		s.Cgroup.ContainerID, s.Cgroup.PodUID, s.Container, s.ContainerKnown = id, pod, c, true
		return s
	}
	const torch = `env.MASTER_ADDR "10.0.0.1", env.MASTER_PORT "29500"`
	master := env("MASTER_ADDR=10.0.0.1", "MASTER_PORT=29500")
	local := func(address string) map[string]string { return env("MASTER_ADDR="+address, "MASTER_PORT=29500") }
	team := gpreempt.Container{Namespace: "team", Pod: "p", PodLabels: map[string]string{"other": "x"}}
	labelled := gpreempt.Container{Namespace: "team", Pod: "p", PodLabels: map[string]string{"example.org/job-name": "llm"}}
	for _, test := range []struct {
		name    string
		subject classify.Subject
		want    classify.Job
	}{
		{"nothing is known", process("", nil), classify.Job{}},
		{"no rule applies", process("/user.slice", nil), classify.Job{}},
		{"variables", process("/", master), classify.Job{UID: 1000, Rule: "torch", By: torch}},
		{"one of two variables", process("/", env("MASTER_ADDR=10.0.0.1")), classify.Job{}},
		{"an empty variable", process("/", local("")), classify.Job{}},
		{"a value of 256 bytes", process("/", env("GPREEMPT_JOB="+strings.Repeat("x", 256))), classify.Job{
			UID: 1000, Rule: "own", By: fmt.Sprintf("env.GPREEMPT_JOB %q", strings.Repeat("x", 256)),
		}},
		{"a longer value", process("/", env("GPREEMPT_JOB="+strings.Repeat("x", 257))), classify.Job{}},
		{"the first of two rules", process("/", env("MASTER_ADDR=10.0.0.1", "MASTER_PORT=29500", "GPREEMPT_JOB=a\n")), classify.Job{
			UID: 1000, Rule: "own", By: `env.GPREEMPT_JOB "a\n"`,
		}},
		{"Slurm, cgroup v2", process("/system.slice/slurmstepd.scope/job_7/step_0/user/task_3", nil), classify.Job{
			UID: 1000, Rule: "slurm", By: `cgroup "/system.slice/slurmstepd.scope/job_7"`,
		}},
		{"Slurm, several nodes on a host", process("/system.slice/node1_slurmstepd.scope/job_17", nil), classify.Job{
			UID: 1000, Rule: "slurm", By: `cgroup "/system.slice/node1_slurmstepd.scope/job_17"`,
		}},
		{"Slurm's own processes", process("/system.slice/slurmstepd.scope/system", nil), classify.Job{}},
		{"a user's cgroup with a name of Slurm", process("/user.slice/user-1000.slice/user@1000.service/slurmstepd.scope/job_7", nil), classify.Job{}},
		{"cgroup and variable", process("/slurm/uid_1000/job_7/step_1", env("STEP=1")), classify.Job{
			UID: 1000, Rule: "step", By: `cgroup "/slurm/uid_1000/job_7", env.STEP "1"`,
		}},
		{"cgroup without the variable", process("/slurm/uid_1000/job_7/step_1", nil), classify.Job{}},
		{"a container", contained(process("/c", nil), "3f", "", gpreempt.Container{}), classify.Job{
			UID: 1000, Within: "a container", Rule: "container", By: `container.id "3f"`,
		}},
		{"one rank in each container", contained(process("/c", master), "3f", "", gpreempt.Container{}), classify.Job{
			UID: 1000, Within: "a container", Rule: "torch", By: torch,
		}},
		{"a loopback address in a container", contained(process("/c", local("127.0.0.1")), "3f", "", gpreempt.Container{}), classify.Job{
			UID: 1000, Within: "container 3f", Rule: "torch", By: `env.MASTER_ADDR "127.0.0.1", env.MASTER_PORT "29500"`,
		}},
		{"a loopback address of IPv6", contained(process("/c", local("[::1]")), "3f", "", gpreempt.Container{}), classify.Job{
			UID: 1000, Within: "container 3f", Rule: "torch", By: `env.MASTER_ADDR "[::1]", env.MASTER_PORT "29500"`,
		}},
		{"a loopback address on the host", process("/", local("localhost")), classify.Job{
			UID: 1000, Rule: "torch", By: `env.MASTER_ADDR "localhost", env.MASTER_PORT "29500"`,
		}},
		{"a loopback address in a pod", contained(process("/c", local("localhost")), "3f", "u1", team), classify.Job{
			UID: 1000, Within: "pod u1", Rule: "torch", By: `env.MASTER_ADDR "localhost", env.MASTER_PORT "29500"`,
		}},
		{"a compose project", contained(process("/c", nil), "3f", "", gpreempt.Container{Labels: map[string]string{"com.docker.compose.project": "llm"}}), classify.Job{
			UID: 1000, Within: "a container", Rule: "compose", By: `container.labels["com.docker.compose.project"] "llm"`,
		}},
		{"pods of a namespace", contained(process("/c", master), "3f", "u1", team), classify.Job{
			UID: 1000, Within: "namespace team", Rule: "torch", By: torch,
		}},
		{"a pod whose namespace is not known yet", contained(process("/c", master), "3f", "u1", gpreempt.Container{}), classify.Job{
			UID: 1000, Within: "pod u1", Rule: "torch", By: torch,
		}},
		{"a pod label", contained(process("/c", master), "3f", "u1", labelled), classify.Job{
			UID: 1000, Within: "namespace team", Rule: "label", By: `pod.labels["example.org/job-name"] "llm"`,
		}},
		{"a unit", classify.Subject{Process: gpreempt.Process{UID: 7, Cgroup: gpreempt.Cgroup{Path: "/a", Unit: "a.service"}}}, classify.Job{
			UID: 7, Rule: "unit", By: `unit "a.service"`,
		}},
		{"a process whose ids contradict each other", classify.Subject{
			Process: gpreempt.Process{UID: 1000, Env: master, Cgroup: gpreempt.Cgroup{Path: "/c", Unit: "a.service", Conflict: "containers 3f and 40"}},
		}, classify.Job{}},
	} {
		if diff := cmp.Diff(test.want, c.Job(&test.subject)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.name, diff)
		}
	}
	if diff := cmp.Diff([]string{"AMD_QUEUE_PRIORITY", "AMD_QUEUE_TAG", "GPREEMPT_CLASS", "GPREEMPT_JOB", "GPREEMPT_PRIORITY", "MASTER_ADDR", "MASTER_PORT", "STEP"}, c.Env()); diff != "" {
		t.Errorf("Env (-want +got):\n%s", diff)
	}
}

func TestAJobIsDescribedInOneLine(t *testing.T) {
	for want, job := range map[string]classify.Job{
		"no rule of jobs applies":                                     {},
		`rule torch: env.MASTER_ADDR "a\nb", uid 7`:                   {UID: 7, Rule: "torch", By: `env.MASTER_ADDR "a\nb"`},
		`rule own: env.GPREEMPT_JOB "a", uid 7, in namespace default`: {UID: 7, Rule: "own", By: `env.GPREEMPT_JOB "a"`, Within: "namespace default"},
	} {
		if got := job.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestNoOwnerJoinsTheJobOfAnother draws two processes of which the second may have any
// environment, labels and cgroup that its owner can choose: what differs is the user, or the
// namespace in Kubernetes.
func TestNoOwnerJoinsTheJobOfAnother(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var rules []classify.JobRule
		some := rapid.SampledFrom([]string{"env.X", "env.Y", "pod.labels.X", "container.labels.X", "container.id", "unit"})
		for n := range rapid.IntRange(1, 4).Draw(t, "rules") {
			rules = append(rules, classify.JobRule{
				Name: fmt.Sprint("r", n), Cgroup: rapid.SampledFrom([]string{"", "*", "/a"}).Draw(t, "cgroup"),
				By: rapid.SliceOfNDistinct(some, 1, 2, rapid.ID).Draw(t, "by"),
			})
		}
		c, err := classify.New(nil, rules)
		if err != nil {
			t.Fatal(err)
		}
		victim, other := drawSubject(t), drawSubject(t)
		if rapid.Bool().Draw(t, "imitates") {
			*other = *victim
		}
		if rapid.Bool().Draw(t, "pods") {
			for n, s := range []*classify.Subject{victim, other} {
				s.UID, s.Cgroup.ContainerID, s.Cgroup.PodUID = 0, "id", fmt.Sprint("pod", n)
				s.Container.Namespace = rapid.SampledFrom([]string{"", fmt.Sprint("namespace", n)}).Draw(t, "known")
			}
		} else {
			other.UID = victim.UID + 1
		}
		job, joins := c.Job(victim), c.Job(other)
		if !job.IsZero() && job == joins {
			t.Errorf("both are of %v", job)
		}
		if !job.IsZero() && job != c.Job(victim) {
			t.Error("the job of a process is not always the same")
		}
	})
}

// FuzzJobOfAnyProcess: whatever a process writes into its environment and cgroup, its job has
// bounded printable text.
func FuzzJobOfAnyProcess(f *testing.F) {
	f.Add("/system.slice/slurmstepd.scope/job_7/x", "10.0.0.1", "\x00\xff")
	f.Add("/job_", "127.0.0.1", "::1")
	f.Add("/x/job_1", strings.Repeat("a", 1<<13), "b")
	c, err := classify.New(nil, []classify.JobRule{
		{Name: "both", Cgroup: "/*/job_*", By: []string{"env.A", "env.B"}},
		{Name: "path", Cgroup: "*job_*"},
		{Name: "env", By: []string{"env.A"}},
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, path, a, b string) {
		s := classify.Subject{Process: gpreempt.Process{Env: map[string]string{"A": a, "B": b}, Cgroup: gpreempt.Cgroup{Path: path}}}
		job := c.Job(&s)
		if text := job.String(); text != gpreempt.Printable(text) || len(text) > 4*3*256+200 {
			t.Errorf("%d bytes: %q", len(text), text)
		}
		if path, found := strings.CutPrefix(job.By, "cgroup "); found && job.Rule == "path" && !strings.Contains(path, "job_") {
			t.Errorf("%q has no job", path)
		}
	})
}

func TestJobIsLocalIfNoOtherContainerCanHaveAProcessOfIt(t *testing.T) {
	for _, test := range []struct {
		job  classify.Job
		want bool
	}{
		{classify.Job{}, false},
		{classify.Job{Rule: "torch", By: `env.MASTER_ADDR "a"`, Within: "a container"}, false},
		{classify.Job{Rule: "torch", By: `env.MASTER_ADDR "a"`, Within: "namespace pod x"}, false},
		{classify.Job{Rule: "torch", By: `env.MASTER_ADDR "container.id \"x\""`}, false},
		{classify.Job{Rule: "torch", By: `env.MASTER_ADDR "localhost"`, Within: "container 3f"}, true},
		{classify.Job{Rule: "torch", By: `env.MASTER_ADDR "localhost"`, Within: "pod u1"}, true},
		{classify.Job{Rule: "container", By: `container.id "3f"`, Within: "namespace team"}, true},
	} {
		if got := test.job.IsLocal(); got != test.want {
			t.Errorf("%v is local: %v", test.job, got)
		}
	}
}
