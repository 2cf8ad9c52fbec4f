package classify

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// JobRule finds the job of a process. All of it must be known of the process, and processes
// for which all of it is equal are of one job.
type JobRule struct {
	// Name is unique, of letters, digits, - and _.
	Name string `yaml:"name"`
	// Cgroup is a glob for the beginning of the control group's path, up to a slash or the
	// end. The shortest beginning that matches is the same for all processes of a job. ""
	// is not set.
	Cgroup string `yaml:"cgroup" filled:"write a glob, or remove the key"`
	// By names properties: unit, user_unit, container.id, and env.NAME, container.labels.NAME and
	// pod.labels.NAME, where NAME may have dots and slashes.
	By []string `yaml:"by" write:"write a list of properties, such as [env.SLURM_JOB_ID]"`
}

// Job is what the processes of a job have in common. Two processes are of one job if they
// have equal Jobs. The zero value is no job.
type Job struct {
	// UID is the user of the processes: no user's process joins a job of another user.
	UID uint32
	// Within is the Kubernetes namespace, the pod or the container that the job cannot
	// leave; "" for a job outside containers. The processes of several owners may have one
	// UID there.
	Within string
	// Rule is the name of the rule, and By the properties with their values, which may be
	// of the environment.
	Rule, By string
}

// IsZero reports whether it is no job.
func (j Job) IsZero() bool { return j == Job{} }

// IsLaunch reports whether the processes of the job are the ranks of one program: a variable of
// their environment has it, which a launcher sets for what it starts together. Other jobs are
// of processes in one place.
func (j Job) IsLaunch() bool { return strings.HasPrefix(j.By, fields[env].name+".") }

// IsLocal reports whether no process outside one container, or one pod, can be of the job.
func (j Job) IsLocal() bool {
	return strings.HasPrefix(j.Within, inPod) || strings.HasPrefix(j.Within, inContainer) || strings.Contains(j.By, fields[containerID].name+` "`)
}

// String returns the rule, the properties, the user and where the job is, in one line.
func (j Job) String() string {
	if j.IsZero() {
		return "no rule of jobs applies"
	}
	text := fmt.Sprintf("rule %s: %s, uid %d", j.Rule, j.By, j.UID)
	if j.Within != "" {
		text += ", in " + j.Within
	}
	return text
}

const (
	// maxJobName bounds the name of a rule, in bytes.
	maxJobName = 32
	// maxJobValue bounds a value that identifies a job, in bytes: a longer one identifies
	// none.
	maxJobValue = 256
	// inPod and inContainer begin Job.Within for one of these, before its id.
	inPod       = "pod "
	inContainer = "container "
	// anyContainer is Job.Within for containers outside Kubernetes.
	anyContainer = "a container"
)

// jobRule is a compiled JobRule.
type jobRule struct {
	name   string
	cgroup *glob // of path; nil is not set
	path   string
	by     []condition
}

func compileJob(r *JobRule, fail reject) jobRule {
	j := jobRule{name: r.Name, path: r.Cgroup}
	if r.Name != "" && (len(r.Name) > maxJobName || strings.Trim(r.Name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") != "") {
		fail("name", quoted(r.Name)+" is not a name", fmt.Sprintf("use at most %d letters, digits, - and _", maxJobName))
	}
	if r.Cgroup == "" && len(r.By) == 0 {
		fail("by", "is missing: all processes would be one job", "name properties, such as [env.SLURM_JOB_ID], or write a cgroup")
	}
	if r.Cgroup != "" {
		j.cgroup = new(compileText(cgroup, "", r.Cgroup, fail).glob)
	}
	for n, name := range r.By {
		c, ok := property(name)
		if !ok {
			fail(fmt.Sprintf("by[%d]", n), quoted(name)+" is not a property that identifies jobs",
				"write env.NAME, pod.labels.NAME, container.labels.NAME, container.id, unit or user_unit")
		} else if slices.Contains(r.By[:n], name) {
			fail(fmt.Sprintf("by[%d]", n), quoted(name)+" is given twice", "keep one of them")
		}
		j.by = append(j.by, c)
	}
	return j
}

// property returns the condition that has the value of a property; it has no glob.
func property(name string) (condition, bool) {
	for _, f := range []field{unit, userUnit, containerID} {
		if name == fields[f].name {
			return condition{field: f}, true
		}
	}
	for _, f := range []field{env, containerLabels, podLabels} {
		if key, found := strings.CutPrefix(name, fields[f].name+"."); found && key != "" && !strings.ContainsAny(key, "=\x00") {
			return condition{field: f, key: key}, true
		}
	}
	return condition{}, false
}

// Job returns the job of s: that of the first rule that applies, by what is known of s. A
// process whose ids contradict each other has none, because it is unknown whose it is.
func (c *Classifier) Job(s *Subject) Job {
	if s.Cgroup.Conflict != "" {
		return Job{}
	}
	for n := range c.jobs {
		if job, ok := c.jobs[n].job(s); ok {
			return job
		}
	}
	return Job{}
}

func (r *jobRule) job(s *Subject) (Job, bool) {
	var parts []string
	local := false
	if r.cgroup != nil {
		path, ok := beginning(*r.cgroup, s.Cgroup.Path)
		if !ok {
			return Job{}, false
		}
		parts = append(parts, "cgroup "+strconv.Quote(path))
	}
	for n := range r.by {
		c := &r.by[n]
		text, known := c.text(s)
		if !known || text == "" || len(text) > maxJobValue {
			return Job{}, false
		}
		local = local || c.field == env && isLoopback(text)
		parts = append(parts, c.name()+" "+strconv.Quote(text))
	}
	return Job{UID: s.UID, Within: within(s, local), Rule: r.name, By: strings.Join(parts, ", ")}, true
}

// beginning returns the shortest beginning of a path, in whole names, that matches.
func beginning(g glob, path string) (string, bool) {
	for n := 1; n <= len(path) && n <= maxJobValue; n++ {
		if (n == len(path) || path[n] == '/') && g.matches(path[:n]) {
			return path[:n], true
		}
	}
	return "", false
}

// within returns where the job of a process ends. Users have the same ids in the containers
// of different owners, so a job ends with its namespace, or with its pod until the runtime
// has reported the namespace. A local one ends with the network namespace: containers of a
// pod share one.
func within(s *Subject, local bool) string {
	switch at := &s.Cgroup; {
	case at.PodUID != "" && (local || s.Container.Namespace == ""):
		return inPod + at.PodUID
	case s.Container.Namespace != "":
		return "namespace " + s.Container.Namespace
	case at.ContainerID != "" && local:
		return inContainer + at.ContainerID
	case at.ContainerID != "":
		return anyContainer
	}
	return ""
}

// isLoopback reports whether a value is an address that means another host, or another
// container, for each process that uses it.
func isLoopback(value string) bool {
	return value == "localhost" || strings.HasPrefix(value, "127.") || strings.Trim(value, "[]") == "::1"
}
