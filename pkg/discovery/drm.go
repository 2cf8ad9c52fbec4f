package discovery

import (
	"errors"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const (
	userQueueParameter = "sys/module/amdgpu/parameters/user_queue"
	drmDebugDir        = "sys/kernel/debug/dri"
	// drmEvery is the shortest interval between two readings of drmDebugDir, which has a
	// directory for each open render node.
	drmEvery = time.Second
	// drmVariable has ROCm's runtime create its queues through DRM.
	drmVariable = "HSA_ENABLE_DRM_DEBUG"
)

// UserQueues is what a host shows of the user queues of DRM: queues that a process creates
// through a render node (amdgpu_userq_create, from Linux 6.16), and that KFD does not know.
type UserQueues struct {
	// Parameter is the parameter user_queue of the driver; "" where it has none.
	Parameter string
	// Listed reports whether debugfs shows who has such queues (amdgpu_debugfs_userq_init,
	// drm_debugfs_clients_add: from Linux 6.17, if debugfs is mounted).
	Listed bool
	// Owners are the PCI addresses of the GPUs with such queues, by process, "" for a device
	// that is not known. The process is the one that used the render node last.
	Owners map[int32][]string
}

// Enabled reports whether the driver may accept such queues. -1, the default, leaves that to
// the driver, which accepts none for any GPU up to Linux 7.2.
func (u UserQueues) Enabled() bool { return u.Parameter != "" && u.Parameter != "0" }

// ReadUserQueues reads what the host with the root directory root shows. The files take no
// lock that a process can hold.
func ReadUserQueues(root fs.FS) UserQueues {
	text, err := fs.ReadFile(root, userQueueParameter)
	if err != nil {
		return UserQueues{}
	}
	u := UserQueues{Parameter: strings.TrimSpace(string(text))}
	if !u.Enabled() {
		return u
	}
	clients, err := fs.ReadDir(root, drmDebugDir)
	if err != nil {
		return u
	}
	owners := map[int32][]string{}
	for _, client := range clients {
		if !strings.HasPrefix(client.Name(), "client-") {
			continue
		}
		dir := drmDebugDir + "/" + client.Name()
		entries, err := fs.ReadDir(root, dir)
		switch {
		case errors.Is(err, fs.ErrNotExist): // closed since
			continue
		case err != nil:
			return u
		}
		u.Listed = true
		if !slices.ContainsFunc(entries, isUserQueue) {
			continue
		}
		info, err := fs.ReadFile(root, dir+"/proc_info")
		pid, ok := clientOwner(string(info))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case err != nil, !ok:
			u.Listed = false
			return u
		case pid == 0: // it has exited
			continue
		}
		address := ""
		if link, err := fs.ReadLink(root, dir+"/device"); err == nil {
			address = path.Base(link)
		}
		owners[pid] = append(owners[pid], address)
	}
	if len(owners) > 0 {
		u.Owners = owners
	}
	return u
}

// isUserQueue reports whether an entry of a client is a queue: queue-N, or queue_N.
func isUserQueue(e fs.DirEntry) bool {
	digits, found := strings.CutPrefix(strings.Replace(e.Name(), "_", "-", 1), "queue-")
	_, err := strconv.ParseUint(digits, 10, 32)
	return found && err == nil
}

// clientOwner parses proc_info of a client (drm_debugfs_proc_info_show).
func clientOwner(info string) (pid int32, ok bool) {
	line, _, _ := strings.Cut(info, "\n")
	digits, found := strings.CutPrefix(line, "pid: ")
	n, err := strconv.ParseUint(digits, 10, 31)
	return int32(n), found && err == nil
}

// drmState is the last reading of user queues, and the GPUs of the host if it needs them.
type drmState struct {
	read   time.Time
	queues UserQueues
	gpus   []gpreempt.GPU
}

// readDRM reads the user queues if that is due, and has drmVariable read where it is the only
// sign of them.
func (f *FS) readDRM(now time.Time) {
	if d := &f.drm; d.read.IsZero() || now.Sub(d.read) >= drmEvery {
		*d = drmState{read: now, queues: ReadUserQueues(f.root)}
		if d.queues.Owners != nil || d.assumes() {
			d.gpus, _ = f.gpus() // without them, the GPUs of its other queues count
		}
	}
	if at, found := slices.BinarySearch(f.env, drmVariable); f.drm.assumes() && !found {
		f.env = slices.Insert(slices.Clone(f.env), at, drmVariable)
	}
}

// assumes reports whether the environment of processes is the only sign of user queues.
func (d *drmState) assumes() bool { return d.queues.Enabled() && !d.queues.Listed }

// assign sets what is known of the user queues of a process.
func (d *drmState) assign(p *Proc) {
	addresses, owner := d.queues.Owners[p.Key.PID]
	value := p.Env[drmVariable]
	p.DRMAssumed = !owner && d.assumes() && value != "" && value != "0"
	p.DRM = nil
	if !owner && !p.DRMAssumed {
		return
	}
	own := p.GPUs()
	for _, gpu := range d.gpus {
		if p.DRMAssumed || slices.ContainsFunc(addresses, func(a string) bool { return sameDevice(a, gpu.BDF) || !d.known(a) }) {
			p.DRM = append(p.DRM, gpu.ID)
		}
	}
	if p.DRM == nil {
		p.DRM = own
	}
	slices.Sort(p.DRM)
}

// known reports whether a GPU has an address.
func (d *drmState) known(address string) bool {
	return slices.ContainsFunc(d.gpus, func(g gpreempt.GPU) bool { return sameDevice(address, g.BDF) })
}

// sameDevice reports whether two PCI addresses are those of one device: the partitions of a
// GPU differ in the function.
func sameDevice(a, b string) bool {
	a, _, _ = strings.Cut(a, ".")
	b, _, _ = strings.Cut(b, ".")
	return a == b && a != ""
}
