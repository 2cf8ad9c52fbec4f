package proc

import (
	"strings"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// maxCmdline is where the command line is cut, as discovery cuts it.
const maxCmdline = 4 << 10

// Facts reads what the process is classified by, apart from its queues and what others report
// of its job and container; env are the variables to read. It reads the memory of the process,
// which can take as long as the process likes.
func (p *Process) Facts(env []string) (gpreempt.Process, error) {
	facts := gpreempt.Process{Key: p.key}
	ids, err := parse(p, "status", discovery.ParseProcStatus)
	if err != nil {
		return facts, err
	}
	facts.UID, facts.GID, facts.NamespacePIDs = ids.UID, ids.GID, ids.NamespacePIDs
	comm, err := p.read("comm")
	if err != nil {
		return facts, err
	}
	facts.Comm = strings.ToValidUTF8(strings.TrimSuffix(string(comm), "\n"), "\uFFFD")
	if text, err := p.read("cgroup"); err == nil { // kernels without control groups have no such file
		facts.Cgroup = discovery.ParseCgroup(text)
	}
	if facts.Exe, err = p.Exe(); err != nil {
		return facts, err
	}
	facts.Exe = strings.ToValidUTF8(strings.TrimSuffix(facts.Exe, " (deleted)"), "\uFFFD")
	cmdline, err := p.read("cmdline")
	if err != nil {
		return facts, err
	}
	facts.Cmdline = discovery.ParseProcCmdline(cmdline[:min(len(cmdline), maxCmdline)])
	environ, err := p.read("environ")
	if err != nil {
		return facts, err
	}
	facts.Env = discovery.ParseProcEnviron(environ, env)
	return facts, p.Check()
}
