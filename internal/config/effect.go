package config

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Facts are what a host has of what rules and names can be about.
type Facts struct {
	// GPUs are the host's; nil if they are not known.
	GPUs []gpreempt.GPU
	// Debugfs is why the dumps of queues cannot be read, and DebugfsRemedy what to do; "" if they can.
	Debugfs, DebugfsRemedy string
	// NoRuntime: no container runtime has a socket there. NoSlurm: no prolog has recorded a job.
	NoRuntime, NoSlurm bool
	// Unknown are the users and groups that the host does not have, as auth.Names.LookUp returns them.
	Unknown []string
}

// ineffective collects what can have no effect.
type ineffective struct {
	problems
	places yamlfile.Places
}

// add adds one at the place of its key.
func (es *ineffective) add(key, problem, remedy string) {
	es.problems.add(key, problem, remedy)
	es.places.Put(es.Errors[len(es.Errors)-1])
}

// WithoutEffect returns what is valid in the file and can never take effect on a host, with its place and
// a remedy.
func (c Config) WithoutEffect(h Facts) yamlfile.Errors {
	es := ineffective{places: c.Places}
	es.access(c, h)
	if classifier, err := classify.New(c.Rules, c.Jobs); err == nil {
		for _, e := range classifier.Hidden() {
			es.add(ruleKey(&e), e.Problem, e.Remedy)
		}
	}
	if !c.Discovery.Debugfs {
		h.Debugfs, h.DebugfsRemedy = "discovery.debugfs is false", "set discovery.debugfs: true"
	}
	es.needing(c.Rules, h.Debugfs, h.DebugfsRemedy, "ring_address", "matches no process before dbgtrap is attached to it", func(m *classify.Match) bool { return m.RingAddress != nil })
	es.needing(c.Rules, h.Debugfs, h.DebugfsRemedy, "queue_priority", "matches no process", func(m *classify.Match) bool { return m.QueuePriority != nil })
	if h.NoRuntime {
		const why, remedy = "no container runtime has a socket on this host", "start the runtime, or make a symbolic link to its socket, such as /run/crio/crio.sock; container.id, container.runtime and cgroup need none"
		es.needing(c.Rules, why, remedy, "container", "matches no process", func(m *classify.Match) bool {
			return m.Container.Name != "" || m.Container.Image != "" || m.Container.Labels != nil
		})
		es.needing(c.Rules, why, remedy, "pod", "matches no process", func(m *classify.Match) bool { return m.Pod.Name != "" || m.Pod.Namespace != "" || m.Pod.Labels != nil })
	}
	if h.NoSlurm {
		es.needing(c.Rules, "no prolog has recorded a Slurm job since this host started", "set Prolog=/usr/lib/gpreempt/slurm/prolog in slurm.conf (docs/kubernetes.md)",
			"slurm", "matches no process", func(m *classify.Match) bool { return m.Slurm != classify.SlurmMatch{} })
	}
	for i := range c.Rules {
		es.rule(c, i, h.GPUs)
	}
	es.Sort()
	return es.Errors
}

// needing adds one entry for all rules that need what the host lacks; "" is nothing.
func (es *ineffective) needing(rules []classify.Rule, why, remedy, field, never string, needs func(*classify.Match) bool) {
	var names []string
	key := ""
	for i := range rules {
		if why != "" && needs(&rules[i].Match) {
			if names = append(names, rules[i].Name); len(names) == 1 {
				key = fmt.Sprintf("rules[%d].match.%s", i, field)
			}
		}
	}
	if names != nil {
		es.add(key, fmt.Sprintf("%s, because %s (rules: %s)", never, why, strings.Join(names, ", ")), remedy)
	}
}

// rule adds what one rule has no effect for.
func (es *ineffective) rule(c Config, i int, gpus []gpreempt.GPU) {
	r, key := &c.Rules[i], fmt.Sprintf("rules[%d].", i)
	if r.Class == gpreempt.Offline && r.Priority != nil && *r.Priority == gpreempt.MaxPriority {
		es.add(key+"priority", "no lease suspends its processes: a lease suspends those of lower priority than its own, which is 15 at most", "write a lower one, such as 0")
	}
	others := mechanism.Names(func(k mechanism.Kind) bool { return !k.Debugs && slices.Contains(c.Mechanisms, k.Name) })
	if r.Class == gpreempt.Offline && r.NeverDebug && len(c.Mechanisms) > 0 && others == nil {
		es.add(key+"never_debug", "its processes are never suspended: the mechanisms are debuggers", "add freezer to mechanisms, or write class: unmanaged")
	}
	if text := r.Match.Cmdline; text != "" && !strings.HasPrefix(text, "/") && !strings.Contains(text, "*") {
		es.add(key+"match.cmdline", "no *: matches only this whole command line", "write "+yamlfile.Quoted("*"+text+"*"))
	}
	for n, text := range r.Match.GPU {
		if gpus != nil && !classify.NamesOne(text, gpus) {
			es.add(fmt.Sprintf("%smatch.gpu[%d]", key, n), yamlfile.Quoted(text)+" names no GPU of this host", "write a gpu_id, node:N, a PCI address or renderDN, as `gpctl gpu list` shows them")
		}
	}
}

// access adds the names that give nobody a right. Those of the default are created with the package, and a
// file may be checked elsewhere.
func (es *ineffective) access(c Config, h Facts) {
	own := Default().Access
	for _, list := range []struct {
		kind, key string
		names     []string
	}{{"group", "online_groups", c.Access.OnlineGroups}, {"group", "admin_groups", c.Access.AdminGroups}, {"user", "admin_users", c.Access.AdminUsers}} {
		for i, name := range list.names {
			if slices.Contains(h.Unknown, list.kind+" "+name) && !slices.Contains(own.OnlineGroups, name) && !slices.Contains(own.AdminGroups, name) {
				es.add(fmt.Sprintf("access.%s[%d]", list.key, i), fmt.Sprintf("this host has no %s %s: nobody has the right", list.kind, yamlfile.Quoted(name)),
					"create it, such as with "+list.kind+"add --system "+name+", or remove it")
			}
		}
	}
	for key, names := range map[string][]string{"tcp.online": c.TCP.Online, "tcp.admin": c.TCP.Admin} {
		if c.TCP.Address == "" && names != nil {
			es.add(key, "nobody has the right: without tcp.address there is no TCP", "set tcp.address, or remove the names")
		}
	}
}
