package doctor

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const (
	sysKFD = "sys/class/kfd/kfd"
	// maxFile is the most that is read of a file, in bytes.
	maxFile = 1 << 20
)

// patient is a host that is being looked at, with what several checks ask for.
type patient struct {
	cfg Config

	// loaded tells that KFD is there.
	loaded  bool
	gpus    []GPU
	gpusErr error
	// pci are the addresses of the AMD GPUs on the PCI bus, in order.
	pci []string
	// seen are the processes of the driver, without this one, and seenErr why they
	// are not known.
	seen     []discovery.Proc
	seenErr  error
	unseen   []string
	told     []Process
	self     discovery.ProcStatus
	selfErr  error
	open     Driver
	openErr  error
	boundsOf map[gpreempt.GPUID]Hazard
}

// see looks at what several checks ask for.
func see(ctx context.Context, cfg Config) *patient {
	p := &patient{cfg: cfg, boundsOf: map[gpreempt.GPUID]Hazard{}}
	p.self, p.selfErr = p.status("self")
	_, err := fs.Stat(cfg.Root, sysKFD+"/topology")
	p.loaded = err == nil
	p.pci = amdGPUs(cfg.Root)
	if !p.loaded {
		return p
	}
	files := discovery.NewFS(cfg.Root)
	var nodes []gpreempt.GPU
	nodes, p.gpusErr = files.GPUs()
	p.scan(files)
	if len(nodes) == 0 {
		return p
	}
	if cfg.Simulated == "" {
		p.open, p.openErr = cfg.OpenDriver()
	}
	if cfg.Hazards != nil {
		for _, h := range cfg.Hazards(nodes) {
			h.Reason = clean(h.Reason)
			p.boundsOf[h.GPU] = h
		}
	}
	for _, node := range nodes {
		p.gpus = append(p.gpus, GPU{GPU: node, Sharing: p.sharing(node), ComputeQueues: p.computeQueues(node.ID), Hazard: p.boundsOf[node.ID]})
	}
	if cfg.Processes != nil {
		for _, proc := range cfg.Processes(ctx) {
			proc.Comm, proc.Why = clean(proc.Comm), clean(proc.Why)
			proc.Rejected = slices.Clone(proc.Rejected)
			for i, r := range proc.Rejected {
				proc.Rejected[i] = Rejection{Mechanism: r.Mechanism, Why: clean(r.Why), Remedy: clean(r.Remedy)}
			}
			p.told = append(p.told, proc)
		}
		slices.SortFunc(p.told, func(a, b Process) int { return a.Key.Compare(b.Key) })
	}
	return p
}

// scan finds the processes of the driver.
func (p *patient) scan(files *discovery.FS) {
	snapshot, err := files.Scan()
	p.seenErr, p.unseen = err, snapshot.Warnings
	for _, proc := range snapshot.Processes {
		if p.selfErr != nil || proc.Key.PID != p.self.Process {
			p.seen = append(p.seen, proc)
		}
	}
}

func (p *patient) computeQueues(gpu gpreempt.GPUID) int {
	n := 0
	for _, proc := range p.seen {
		for _, q := range proc.Queues {
			if q.GPU == gpu && q.Type == gpreempt.QueueCompute {
				n++
			}
		}
	}
	return n
}

// read returns a small file.
func (p *patient) read(path string) ([]byte, error) {
	file, err := p.cfg.Root.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return io.ReadAll(io.LimitReader(file, maxFile))
}

// text returns a small file without the space around it.
func (p *patient) text(path string) (string, error) {
	b, err := p.read(path)
	return strings.TrimSpace(string(b)), err
}

// status reads the status of a process or a thread.
func (p *patient) status(of string) (discovery.ProcStatus, error) {
	b, err := p.read("proc/" + of + "/status")
	if err != nil {
		return discovery.ProcStatus{}, err
	}
	return discovery.ParseProcStatus(b)
}

// amdGPUs finds the PCI devices of AMD that are display controllers or processing
// accelerators, bound to a driver or not.
func amdGPUs(root fs.FS) []string {
	const (
		devices = "sys/bus/pci/devices"
		amd     = "0x1002"
	)
	entries, err := fs.ReadDir(root, devices)
	if err != nil {
		return nil
	}
	var found []string
	for _, entry := range entries {
		vendor, _ := fs.ReadFile(root, devices+"/"+entry.Name()+"/vendor")
		class, _ := fs.ReadFile(root, devices+"/"+entry.Name()+"/class")
		display := strings.HasPrefix(string(class), "0x03") || strings.HasPrefix(string(class), "0x12")
		if display && strings.TrimSpace(string(vendor)) == amd {
			found = append(found, entry.Name())
		}
	}
	return found
}

// present reports whether there is a GPU to work on; none tells that the host has
// no AMD GPU at all.
func (p *patient) present() (f finding, none bool) {
	switch {
	case len(p.gpus) > 0 && p.cfg.Simulated != "":
		return ok("simulated: %s", p.inventory()), false
	case len(p.gpus) > 0:
		return ok("%s", p.inventory()), false
	case p.loaded && p.gpusErr != nil:
		return fail("check that amdgpu is not just being loaded or unloaded; if it stays so, report it with the file named",
			"%v", p.gpusErr).blocking(dbgtrap, criu, freezer), false
	case p.loaded && len(p.unseen) > 0:
		return fail("give this process the GPUs: DeviceAllow of its systemd unit, or the devices of its container",
			"the driver shows this process no GPU: %s", p.unseen[0]).blocking(dbgtrap, criu, freezer), false
	case len(p.pci) > 0 && p.loaded:
		return fail("dmesg | grep -i kfd tells why; a GPU given to a virtual machine (vfio-pci) or of an unsupported kind has no node",
			"the amdgpu driver is loaded, and has no compute node for %s", strings.Join(p.pci, ", ")).blocking(dbgtrap, criu, freezer), false
	case len(p.pci) > 0:
		return fail("modprobe amdgpu; if that does not help, dmesg | grep -iE 'amdgpu|kfd' tells why",
			"the amdgpu driver is not loaded: there is an AMD GPU at %s and no /%s", strings.Join(p.pci, ", "), sysKFD).blocking(dbgtrap, criu, freezer), false
	}
	const try = "gpctl demo shows gpreempt on a simulated GPU; gpreemptd serve --sim mi300x serves one"
	if p.loaded {
		return fail(try, "none: the amdgpu driver is loaded and has no GPU"), true
	}
	return fail(try, "none: no AMD GPU on the PCI bus and no amdgpu driver loaded"), true
}

// inventory counts the GPUs by kind.
func (p *patient) inventory() string {
	var kinds []string
	count := map[string]int{}
	for _, g := range p.gpus {
		scheduler := "HWS"
		if g.MES {
			scheduler = "MES"
		}
		kind := gfxName(g.GFX)
		if g.Name != kind {
			kind = g.Name + " " + kind
		}
		kind += fmt.Sprintf(" (%s, %s)", scheduler, plural(g.XCCs, "XCC"))
		if count[kind] == 0 {
			kinds = append(kinds, kind)
		}
		count[kind]++
	}
	for i, kind := range kinds {
		kinds[i] = fmt.Sprintf("%d × %s", count[kind], kind)
	}
	return strings.Join(kinds, ", ")
}

// perGPU says something of every GPU, with those of which the same holds together.
func (p *patient) perGPU(say func(GPU) string) string {
	ids := map[string][]string{}
	var order []string
	for _, g := range p.gpus {
		s := say(g)
		if s == "" {
			continue
		}
		if ids[s] == nil {
			order = append(order, s)
		}
		ids[s] = append(ids[s], g.ID.String())
	}
	for i, s := range order {
		switch n := len(ids[s]); {
		case n == len(p.gpus) && n > 1:
			order[i] = fmt.Sprintf("all %d GPUs: %s", n, s)
		case n == 1:
			order[i] = fmt.Sprintf("GPU %s: %s", ids[s][0], s)
		default:
			order[i] = fmt.Sprintf("GPUs %s: %s", strings.Join(ids[s], ", "), s)
		}
	}
	return strings.Join(order, "; ")
}

// plural writes "1 queue", "3 queues".
func plural(n int, thing string) string {
	switch {
	case n == 1:
	case strings.HasSuffix(thing, "s"):
		thing += "es"
	default:
		thing += "s"
	}
	return strconv.Itoa(n) + " " + thing
}

// gfxName returns the name compilers use: 90402 is gfx942, 90010 is gfx90a.
func gfxName(v uint32) string { return fmt.Sprintf("gfx%d%x%x", v/10000, v/100%100, v%100) }

// param reads a parameter of the amdgpu module.
func (p *patient) param(name string) (int, error) {
	s, err := p.text("sys/module/amdgpu/parameters/" + name)
	if err != nil {
		return 0, err
	}
	v, err := strconv.Atoi(s)
	if err != nil {
		return 0, fmt.Errorf("amdgpu.%s is %q, want a number", name, clean(s))
	}
	return v, nil
}

// unread is the finding for a file that could not be read.
func unread(err error) finding { return skip("cannot tell: %v", err) }
