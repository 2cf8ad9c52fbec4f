package nvrm

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Driver is the name of the driver, in GPU.Driver and Proc.Driver.
const Driver = "nvidia"

const (
	gpusDir = "proc/driver/nvidia/gpus"
	// A process is examined each youngEvery until youngFor after it was first seen, to find out
	// whether it opens the driver, and later each recheck.
	youngFor   = 30 * time.Second
	youngEvery = 500 * time.Millisecond
	recheck    = 5 * time.Second
)

// Source finds NVIDIA's GPUs, and the channels of processes as their queues. It implements
// discovery.Source.
type Source struct {
	root fs.FS
	sys  Sys
	pids map[int32]*seen
	// owners contains the process of each client, for Owner.
	mu     sync.Mutex
	owners map[Handle]gpreempt.ProcessKey
	// omit reports whether a process is a part of the daemon, which holds copies.
	omit func(pid int32) bool
}

var _ discovery.Source = (*Source)(nil)

// seen is a process of the host.
type seen struct {
	key        gpreempt.ProcessKey
	first, due time.Time
	view       *View // nil for one that does not have the driver open
	process    Process
	scan       bool
}

// NewSource returns a source for a host. omit reports whether a process is a part of the program
// itself, whose copies of descriptors are no use of a GPU.
func NewSource(root fs.FS, sys Sys, omit func(pid int32) bool) *Source {
	return &Source{root: root, sys: sys, pids: map[int32]*seen{}, omit: omit}
}

// Driver implements discovery.Source.
func (*Source) Driver() string { return Driver }

// GPUs implements discovery.Source.
func (s *Source) GPUs() ([]gpreempt.GPU, error) { return GPUs(s.root) }

// GPUs returns the GPUs that the driver has, ascending by PCI address.
func GPUs(root fs.FS) ([]gpreempt.GPU, error) {
	entries, err := fs.ReadDir(root, gpusDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var gpus []gpreempt.GPU
	for _, e := range entries {
		id, err := gpuID(e.Name())
		if err != nil {
			continue
		}
		gpu := gpreempt.GPU{ID: id, Driver: Driver, Name: "NVIDIA", BDF: strings.ToLower(e.Name()), MES: true, XCCs: 1}
		text, err := fs.ReadFile(root, path.Join(gpusDir, e.Name(), "information"))
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(string(text)) {
			key, value, _ := strings.Cut(line, ":")
			switch value = strings.TrimSpace(value); key {
			case "Model":
				gpu.Name = value
			case "Device Minor":
				gpu.Node, _ = strconv.Atoi(value) // 0 if it is not a number
			}
		}
		gpus = append(gpus, gpu)
	}
	return gpus, nil
}

// gpuID returns RM's id for a PCI address (gpuGenerate32BitId).
func gpuID(bdf string) (gpreempt.GPUID, error) {
	var domain, bus, device, function uint32
	if n, err := fmt.Sscanf(bdf, "%x:%x:%x.%x", &domain, &bus, &device, &function); n != 4 {
		return 0, fmt.Errorf("%q is not a PCI address: %w", bdf, err)
	}
	return gpreempt.GPUID(domain&0xffff<<16 | bus&0xff<<8 | device&0xff), nil
}

// Uses implements discovery.Source.
func (s *Source) Uses() (all []discovery.Use, warnings []string, err error) {
	entries, err := fs.ReadDir(s.root, "proc")
	if err != nil {
		return nil, nil, err
	}
	now := time.Now()
	for _, p := range s.pids {
		p.scan = false
	}
	for _, e := range entries {
		pid, err := strconv.ParseInt(e.Name(), 10, 32)
		if err != nil || s.omit(int32(pid)) {
			continue
		}
		if err := s.examine(int32(pid), now); err != nil && !errors.Is(err, proc.ErrGone) && !errors.Is(err, fs.ErrNotExist) {
			warnings = append(warnings, fmt.Sprintf("the channels of process %d are not known, or not all: %v", pid, err))
		}
	}
	owners := map[Handle]gpreempt.ProcessKey{}
	for pid, p := range s.pids {
		if !p.scan {
			p.drop()
			delete(s.pids, pid)
			continue
		}
		for _, c := range p.clients() {
			if owner, known := owners[c]; !known || Older(p.key, owner) {
				owners[c] = p.key
			}
		}
	}
	s.mu.Lock()
	s.owners = owners
	s.mu.Unlock()
	for _, p := range s.pids {
		if p.view != nil {
			all = append(all, s.list(p))
		}
	}
	slices.SortFunc(all, func(a, b discovery.Use) int { return cmp.Compare(a.Key.PID, b.Key.PID) })
	return all, warnings, nil
}

// Close forgets all processes. It is not called during Uses or Look.
func (s *Source) Close() {
	for _, p := range s.pids {
		p.drop()
	}
	clear(s.pids)
}

// Owner returns the process that a client belongs to. After a fork several processes have its file,
// and it belongs to the oldest. The result is zero for a client that the last Uses did not find. It
// may be called at any time.
func (s *Source) Owner(client Handle) gpreempt.ProcessKey {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.owners[client]
}

// Older reports whether a process was started before another one: by start time, whose unit is 10 ms,
// and then by pid.
func Older(a, b gpreempt.ProcessKey) bool {
	return cmp.Or(cmp.Compare(a.Start, b.Start), cmp.Compare(a.PID, b.PID)) < 0
}

func (p *seen) clients() []Handle {
	if p.view == nil {
		return nil
	}
	return p.view.Clients()
}

// drop forgets that the process has the driver open.
func (p *seen) drop() {
	if p.process != nil {
		p.process.Close()
	}
	p.view, p.process = nil, nil
}

// examine updates what is known about a process if it is due.
func (s *Source) examine(pid int32, now time.Time) error {
	p := s.pids[pid]
	if p != nil && now.Before(p.due) && (p.view == nil || !p.process.Exited()) {
		p.scan = true
		return nil
	}
	key, err := s.key(pid)
	if err != nil {
		return err
	}
	if p == nil || p.key != key {
		if p != nil {
			p.drop()
		}
		p = &seen{key: key, first: now}
		s.pids[pid] = p
	}
	p.scan = true
	if p.due = now.Add(youngEvery); now.Sub(p.first) > youngFor {
		p.due = now.Add(recheck)
	}
	if p.view == nil {
		if err := s.open(p); err != nil || p.view == nil {
			return err
		}
	}
	if err := p.view.Scan(); errors.Is(err, proc.ErrGone) {
		p.drop()
		return err
	} else if err != nil {
		return err // what was known stays
	}
	return nil
}

// open starts to view a process that has the driver open.
func (s *Source) open(p *seen) error {
	process, err := s.sys.Open(p.key)
	if err != nil {
		return err
	}
	files, err := process.Files()
	if err != nil || len(files) == 0 {
		process.Close()
		return err
	}
	p.process, p.view = process, NewView(s.sys, process)
	return nil
}

func (s *Source) key(pid int32) (gpreempt.ProcessKey, error) {
	text, err := fs.ReadFile(s.root, "proc/"+strconv.Itoa(int(pid))+"/stat")
	if err != nil {
		return gpreempt.ProcessKey{}, err
	}
	stat, err := discovery.ParseProcStat(text)
	if err == nil && !stat.Alive() {
		err = proc.ErrGone
	}
	return gpreempt.ProcessKey{PID: pid, Start: stat.Start}, err
}

// list returns the channels as queues. An id consists of the index of the client and the lower part of
// the handle: handles count upwards and are not reused.
func (s *Source) list(p *seen) discovery.Use {
	channels, _ := p.view.Channels()
	u := discovery.Use{Key: p.key}
	var clients []Handle
	for _, c := range channels {
		if owner := s.Owner(c.Client); owner != p.key && !owner.IsZero() {
			continue
		}
		if !slices.Contains(clients, c.Client) {
			clients = append(clients, c.Client)
		}
		kind := gpreempt.QueueSDMA
		if c.Compute {
			kind = gpreempt.QueueCompute
		}
		u.Queues = append(u.Queues, gpreempt.Queue{
			Process: p.key, ID: uint32(len(clients)-1)<<24 | uint32(c.Handle)&0xffffff, GPU: c.GPU, Type: kind,
		})
		u.Incarnations = append(u.Incarnations, uint64(c.Client)<<32|uint64(c.Handle))
	}
	return u
}

// Look implements discovery.Source.
func (s *Source) Look(key gpreempt.ProcessKey) (discovery.Use, bool) {
	p := s.pids[key.PID]
	if p == nil || p.key != key || p.view == nil || p.view.Scan() != nil {
		return discovery.Use{}, false
	}
	return s.list(p), true
}
