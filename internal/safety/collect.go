package safety

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const (
	sysKFD = "sys/class/kfd/kfd"
	// maxFile is the most that is read of a file, in bytes.
	maxFile = 1 << 20
)

// host is a host that is examined, with the facts that several checks use.
type host struct {
	cfg Config

	// loaded reports whether KFD is there.
	loaded  bool
	gpus    []gpu
	gpusErr error
	// omitted are the nodes of GPUs that cannot be read, each with the reason and the remedy.
	omitted []string
	// pci are the addresses of the AMD GPUs on the PCI bus, in order.
	pci []string
	// seen are the processes of the driver without the parts of gpreempt, and seenErr is why they are
	// unknown. daemons are the parts that are a gpreemptd that serves, without this one, by pid.
	seen    []discovery.Proc
	daemons []discovery.ProcStatus
	seenErr error
	unseen  []string
	reports []*gpreemptv1.DiagnosedProcess
	self    discovery.ProcStatus
	selfErr error
	open    Driver
	openErr error
}

// collect reads the facts that several checks use.
func collect(ctx context.Context, cfg Config) *host {
	h := &host{cfg: cfg}
	h.self, h.selfErr = h.status("self")
	_, err := fs.Stat(cfg.Root, sysKFD+"/topology")
	h.loaded = err == nil
	h.pci = amdGPUs(cfg.Root)
	if !h.loaded {
		return h
	}
	files := discovery.NewFS(cfg.Root)
	var nodes []gpreempt.GPU
	nodes, h.gpusErr = files.GPUs()
	h.omitted = files.Omitted()
	h.scan(files)
	if len(nodes) == 0 {
		return h
	}
	if cfg.Simulated == "" {
		h.open, h.openErr = cfg.OpenDriver()
	}
	for _, node := range nodes {
		h.gpus = append(h.gpus, gpu{node, h.sharing(node), h.computeQueues(node.ID)})
	}
	if cfg.Processes != nil {
		h.reports = cfg.Processes(ctx)
	}
	for _, p := range h.reports {
		p.Comm, p.Why = gpreempt.Printable(p.GetComm()), gpreempt.Printable(p.GetWhy())
		for _, r := range p.GetRejected() {
			r.Why, r.Remedy = gpreempt.Printable(r.GetWhy()), gpreempt.Printable(r.GetRemedy())
		}
	}
	slices.SortFunc(h.reports, func(a, b *gpreemptv1.DiagnosedProcess) int { return cmp.Compare(a.GetPid(), b.GetPid()) })
	return h
}

// scan reads the processes of the driver. Their command lines and environments are read in the
// background, and may be missing at first; it waits for them for a bounded time.
func (h *host) scan(files *discovery.FS) {
	const (
		rounds = 50
		pause  = 20 * time.Millisecond
	)
	parts := map[int32]discovery.ProcStatus{}
	files.Omit(func(pid int32) bool {
		s, err := h.status(strconv.Itoa(int(pid)))
		if err != nil || !proc.Ours(s) && (h.selfErr != nil || pid != h.self.Process) {
			return false
		}
		if pid != h.self.Process && s.Name == daemonName && !h.diagnoses(pid) {
			parts[pid] = s
		}
		return true
	})
	snapshot, err := files.Scan()
	for range rounds {
		if err != nil || !slices.ContainsFunc(snapshot.Processes, unreadMemory) {
			break
		}
		time.Sleep(pause)
		snapshot, err = files.Scan()
	}
	h.seen, h.seenErr, h.unseen = snapshot.Processes, err, snapshot.Warnings
	for _, pid := range slices.Sorted(maps.Keys(parts)) {
		h.daemons = append(h.daemons, parts[pid])
	}
}

// diagnoses reports whether a process is a diagnosis: it has the driver open for a short time, and
// suspends nothing.
func (h *host) diagnoses(pid int32) bool {
	line, err := h.text(fmt.Sprintf("proc/%d/cmdline", pid))
	words := strings.Split(line, "\x00")
	return err == nil && len(words) > 1 && words[1] == "diagnose"
}

// unreadMemory reports whether the command line and the environment of a process are not
// known. A process of the driver has a command line, unless it erased it.
func unreadMemory(p discovery.Proc) bool { return p.Cmdline == "" && p.Exe == "" && len(p.Env) == 0 }

func (h *host) computeQueues(gpu gpreempt.GPUID) int {
	n := 0
	for _, proc := range h.seen {
		for _, q := range proc.Queues {
			if q.GPU == gpu && q.Type == gpreempt.QueueCompute {
				n++
			}
		}
	}
	return n
}

// read returns a small file.
func (h *host) read(path string) ([]byte, error) {
	file, err := h.cfg.Root.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return io.ReadAll(io.LimitReader(file, maxFile))
}

// text returns a small file without the space around it.
func (h *host) text(path string) (string, error) {
	b, err := h.read(path)
	return strings.TrimSpace(string(b)), err
}

// status reads the status of a process or a thread.
func (h *host) status(of string) (discovery.ProcStatus, error) {
	b, err := h.read("proc/" + of + "/status")
	if err != nil {
		return discovery.ProcStatus{}, err
	}
	return discovery.ParseProcStatus(b)
}

// amdGPUs returns the PCI devices of AMD that are display controllers or processing
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

// present checks that the driver has a GPU; none reports that the host has no AMD GPU.
func (h *host) present() (f finding, none bool) {
	switch {
	case len(h.gpus) > 0 && h.cfg.Simulated != "":
		return ok("simulated: %s", h.inventory()), false
	case len(h.gpus) > 0 && len(h.omitted) > 0:
		return warn("the other GPUs are used; gpreemptd reads this one again every 10 s", "%s; not read: %s", h.inventory(), strings.Join(h.omitted, "; ")), false
	case len(h.gpus) > 0:
		return ok("%s", h.inventory()), false
	case h.loaded && h.gpusErr != nil:
		return fail("retry when amdgpu is loaded; if the error stays, report it with the name of the file",
			"%v", h.gpusErr), false
	case len(h.omitted) > 0:
		return fail("allow the GPUs to this process: DeviceAllow of its systemd unit, or the devices of its container; for another reason, see dmesg | grep -i amdgpu",
			"no GPU can be read: %s", strings.Join(h.omitted, "; ")), false
	case len(h.pci) > 0 && h.loaded:
		return fail("see dmesg | grep -i kfd; a GPU that belongs to a virtual machine (vfio-pci) or is unsupported has no node",
			"the amdgpu driver is loaded and has no compute node for %s", strings.Join(h.pci, ", ")), false
	case len(h.pci) > 0:
		return fail("modprobe amdgpu; if that does not help, see dmesg | grep -iE 'amdgpu|kfd'",
			"the amdgpu driver is not loaded: AMD GPU at %s, no /%s", strings.Join(h.pci, ", "), sysKFD), false
	}
	const try = "kfdemu demo shows gpreempt on an emulated GPU"
	if h.loaded {
		return fail(try, "none: the amdgpu driver is loaded and has no GPU"), true
	}
	return fail(try, "none: no AMD GPU on the PCI bus and no amdgpu driver loaded"), true
}

// inventory counts the GPUs by kind.
func (h *host) inventory() string {
	var kinds []string
	count := map[string]int{}
	for _, g := range h.gpus {
		scheduler := "HWS"
		if g.MES {
			scheduler = "MES"
		}
		kind := gpreempt.GFXName(g.GFX)
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

// perGPU joins a text for each GPU; GPUs with the same text are named together.
func (h *host) perGPU(text func(gpu) string) string {
	ids := map[string][]string{}
	var order []string
	for _, g := range h.gpus {
		s := text(g)
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
		case n == len(h.gpus) && n > 1:
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

// param reads a parameter of the amdgpu module.
func (h *host) param(name string) (int, error) {
	s, err := h.text("sys/module/amdgpu/parameters/" + name)
	if err != nil {
		return 0, err
	}
	v, err := strconv.Atoi(s)
	if err != nil {
		return 0, fmt.Errorf("amdgpu.%s is %q, want a number", name, gpreempt.Printable(s))
	}
	return v, nil
}

// unread is the finding for a file that could not be read.
func unread(err error) finding { return skip("unknown: %v", err) }
