package driver

import (
	"cmp"
	"encoding/binary"
	"reflect"
	"slices"
	"syscall"
	"time"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// The rules of the extension at kfdabi.KmapPath, which no released kernel has: they were not read
// from a driver, but written for it. It keeps queues of a process out of the runlist, beside
// evictions and debuggers.

// KmapProfile is the profile of a 6.12 with the extension.
const KmapProfile = "6.12+kmap"

// OpOpenKmap is open(2) of the extension's device.
const OpOpenKmap Op = "open kfd_kmap"

// KmapFile is an open file of the extension: a handle.
type KmapFile struct {
	// mutex is held during a call that works on the limits, also while it waits for a GPU
	// (kmap_handle.lock).
	mutex mutex
	// limited are the processes that it limits.
	limited []*process
	lapses  uint32
	// stopLease, if not nil, stops the timer of the lease that runs: the one numbered lease.
	stopLease func()
	lease     int
}

// kmapLimit is the limit of a process: how many compute queues stay mapped on each GPU.
type kmapLimit struct {
	file *KmapFile
	most uint32
}

const (
	kmapMajor = 1
	kmapMinor = 0
)

// OpenKmap opens the extension's device for t. The error is an errno: ENOENT without the
// extension.
func (d *Driver) OpenKmap(t Task) (*KmapFile, error) {
	switch {
	case !d.prof.kmap:
		return nil, ENOENT
	case !t.Capable(CapSysAdmin):
		return nil, EPERM
	}
	return &KmapFile{}, nil
}

// ReleaseKmap closes a handle, after the last call on it has returned: its limits end.
func (d *Driver) ReleaseKmap(f *KmapFile) {
	d.mu.Lock()
	defer d.leave()
	c := &call{d: d}
	defer d.hold(c, &f.mutex)()
	f.stop()
	d.lift(c, f)
	d.note()
}

// kmapHandlers are the ioctls.
var kmapHandlers = map[kfd.Request]func(*Driver, *call, *KmapFile) errno{
	kfdabi.ReqKmapInfo:      kmapIoctl((*Driver).kmapInfo),
	kfdabi.ReqKmapSet:       kmapIoctl((*Driver).kmapSet),
	kfdabi.ReqKmapOccupancy: kmapIoctl((*Driver).kmapOccupancy),
}

// kmapIoctl returns the handler of a request whose argument is a T.
func kmapIoctl[T any](handle func(*Driver, *call, *KmapFile, *T) errno) func(*Driver, *call, *KmapFile) errno {
	return func(d *Driver, c *call, f *KmapFile) errno {
		args := copyIn[T](c)
		if err := handle(d, c, f, args); err != 0 {
			return err
		}
		encode(c.data, reflect.ValueOf(args).Elem())
		if !copyTo(c.arg, c.data) {
			return EFAULT
		}
		return 0
	}
}

// IoctlKmap makes a call of t on f. err is 0 or the errno.
func (d *Driver) IoctlKmap(t Task, f *KmapFile, req kfd.Request, arg Memory) (err syscall.Errno) {
	d.mu.Lock()
	defer d.leave()
	handle, known := kmapHandlers[req]
	switch {
	case !t.Capable(CapSysAdmin):
		return EPERM
	case !known:
		return ENOTTY
	}
	c := &call{
		d: d, task: t, caller: t.Leader().TID(), op: Op(kfdabi.KmapName(req)), usize: req.Size(), arg: arg, data: make([]byte, req.Size()),
	}
	if !read(arg, c.data) {
		return EFAULT
	}
	return handle(d, c, f)
}

func (d *Driver) kmapInfo(_ *call, f *KmapFile, args *kfdabi.KmapInfoArgs) errno {
	if args.Pad != 0 {
		return EINVAL
	}
	*args = kfdabi.KmapInfoArgs{
		ABIMajor: kmapMajor, ABIMinor: kmapMinor, MaxTargets: kfdabi.KmapMaxTargets,
		MinLeaseMS: kfdabi.KmapMinLeaseMS, MaxLeaseMS: kfdabi.KmapMaxLeaseMS,
		Lapses: f.lapses, Limited: uint32(len(f.limited)),
	}
	return 0
}

// kmapTarget is a target of a SET, or with args == nil of the end of a handle or lease.
type kmapTarget struct {
	args *kfdabi.KmapTargetArgs
	// named is its process, with a reference, and p the same unless the target failed.
	named, p *process
}

func (d *Driver) kmapSet(c *call, f *KmapFile, args *kfdabi.KmapSetArgs) errno {
	size := sizeOf[kfdabi.KmapTargetArgs]()
	switch {
	case args.Flags != 0, args.TargetSize != uint32(size), args.LeaseMS < kfdabi.KmapMinLeaseMS, args.LeaseMS > kfdabi.KmapMaxLeaseMS:
		return EINVAL
	case args.NumTargets > kfdabi.KmapMaxTargets:
		return E2BIG
	}
	// The bytes are kept: those of the pointers are written back as they are.
	from, b := c.memory(&args.TargetsPtr), make([]byte, int(args.NumTargets)*size)
	if !read(from, b) {
		return EFAULT
	}
	array := make([]kfdabi.KmapTargetArgs, args.NumTargets)
	decode(reflect.ValueOf(array), b)

	defer d.hold(c, &f.mutex)()
	targets := make([]kmapTarget, len(array))
	for i := range targets {
		t := &targets[i]
		t.args = &array[i]
		listed := binary.NativeEndian.Uint64(b[i*size+queuesPtrOffset:]) != 0
		var err errno
		if t.named, err = d.kmapProcess(c, t.args, listed); err == 0 {
			t.named.refs++
			defer d.unref(t.named)
			err = d.claim(f, t, targets[:i])
		}
		if t.args.Result = -int32(err); err == 0 {
			t.p = t.named
			d.record(f, t.p, t.args.Limit)
		}
	}
	// Before the hardware's part, which may take longer than the lease.
	d.startLease(f, time.Duration(args.LeaseMS)*time.Millisecond)

	args.Cycles = 0
	for _, g := range d.gpus {
		d.applyLimits(c, g, targets, args)
	}
	args.Failed = 0
	for i := range targets {
		t := &targets[i]
		if t.p != nil && !t.p.reportQueues(t.args, from.At(i*size).Pointer(queuesPtrOffset)) {
			t.args.Result = -int32(EFAULT)
		}
		if t.args.Result != 0 {
			args.Failed++
		}
	}
	args.Lapses = f.lapses
	encode(b, reflect.ValueOf(array))
	if !copyTo(from, b) {
		return EFAULT
	}
	return 0
}

// queuesPtrOffset is that of queues_ptr in struct kfd_kmap_target.
const queuesPtrOffset = 8

// kmapProcess returns the process of a target. listed: it has an array for queues.
func (d *Driver) kmapProcess(c *call, args *kfdabi.KmapTargetArgs, listed bool) (*process, errno) {
	switch {
	case args.Pad != 0:
		return nil, EINVAL
	case !listed && args.NumQueues > 0:
		return nil, EFAULT
	case args.NumQueues > kfdabi.KmapMaxRoom:
		return nil, E2BIG
	}
	task, ok := c.task.Pidfd(args.PIDFD)
	if !ok {
		return nil, EBADF
	}
	if task != nil && task.MM() != nil {
		if p := d.byMM(task.MM()); p != nil {
			return p, 0
		}
	}
	return nil, ESRCH
}

// claim reports whether a handle may set the limit of a target.
func (d *Driver) claim(f *KmapFile, t *kmapTarget, earlier []kmapTarget) errno {
	p := t.named
	switch {
	case slices.ContainsFunc(earlier, func(o kmapTarget) bool { return o.named == p }):
		return EINVAL
	case p.limit != nil && p.limit.file != f:
		return EBUSY
	case t.args.Limit == kfdabi.KmapNoLimit:
		return 0
	case slices.ContainsFunc(p.pdds, func(x *pdd) bool { return len(x.queues) > 0 && d.perQueue(x.gpu) }):
		return EOPNOTSUPP
	}
	return 0
}

// record stores the limit of a process, or removes it.
func (d *Driver) record(f *KmapFile, p *process, most uint32) {
	if most == kfdabi.KmapNoLimit {
		p.unlimit()
		return
	}
	if p.limit == nil {
		f.limited = append(f.limited, p)
	}
	p.limit = &kmapLimit{file: f, most: most}
}

// unlimit removes the limit of a process from its handle.
func (p *process) unlimit() {
	if p.limit == nil {
		return
	}
	f := p.limit.file
	f.limited = slices.DeleteFunc(f.limited, func(o *process) bool { return o == p })
	p.limit = nil
	if len(f.limited) == 0 {
		f.stop()
	}
}

// applyLimits makes the choice again for the targets with queues on a GPU, with one runlist
// if that changes anything, or if the last one failed and a call names them.
func (d *Driver) applyLimits(c *call, g *gpu, targets []kmapTarget, args *kfdabi.KmapSetArgs) {
	if d.perQueue(g) {
		return // out of reach: no queue there is held
	}
	defer d.hold(c, &g.dqm)()
	var changed *process
	named := func(t kmapTarget) bool { return t.p != nil && t.args != nil && len(t.p.on(g).queues) > 0 }
	for _, t := range targets {
		if t.p != nil && t.p.choose(g) || named(t) && g.kmapFailed {
			changed = cmp.Or(changed, t.p)
		}
	}
	if changed == nil {
		return
	}
	g.kmapFailed = d.executeQueues(c, g, changed, args.Grace) != 0
	if !g.kmapFailed {
		args.Cycles++
		return
	}
	for _, t := range targets {
		if named(t) {
			t.args.Result = -int32(EIO)
		}
	}
}

// on returns the part of the process on a GPU.
func (p *process) on(g *gpu) *pdd {
	return p.pdds[slices.IndexFunc(p.pdds, func(x *pdd) bool { return x.gpu == g })]
}

// choose marks the queues of a process on a GPU that exceed its limit, and reports whether
// that changed. The GPU's lock is held.
func (p *process) choose(g *gpu) (changed bool) {
	if !p.table {
		return false // its end takes its queues with it, and nothing maps them before
	}
	x := p.on(g)
	stay := map[*queue]bool{}
	for _, q := range x.queues {
		switch {
		case p.limit == nil:
			stay[q] = true
		case p.limit.most > 0 && !q.compute():
			stay[q] = true
		}
	}
	if p.limit != nil {
		candidates := slices.DeleteFunc(slices.Clone(x.queues), func(q *queue) bool { return !q.compute() || !q.eligible() })
		slices.SortFunc(candidates, func(a, b *queue) int {
			return cmp.Or(cmp.Compare(b.Priority, a.Priority), cmp.Compare(a.ID, b.ID))
		})
		for _, q := range candidates[:min(len(candidates), int(p.limit.most))] {
			stay[q] = true
		}
	}
	for _, q := range x.queues {
		if q.Held == stay[q] {
			q.Held = !stay[q]
			q.Active = q.wanted()
			changed = true
		}
	}
	return changed
}

// bornHeld reports whether a new queue exceeds the limit of its process. It counts queues that
// are not mapped for another reason, too: they may be again without a SET.
func (q *queue) bornHeld() bool {
	limit := q.pdd.p.limit
	switch {
	case limit == nil:
		return false
	case limit.most == 0:
		return true
	case !q.compute():
		return false
	}
	var free uint32
	for _, o := range q.pdd.queues {
		if o.compute() && !o.Held {
			free++
		}
	}
	return free >= limit.most
}

func (q *queue) compute() bool {
	return q.Type == kfd.QueueTypeCompute || q.Type == kfd.QueueTypeComputeAQL
}

// reportQueues writes the states of the process's queues, as many as fit. It returns false for
// EFAULT.
func (p *process) reportQueues(args *kfdabi.KmapTargetArgs, to Memory) bool {
	room := args.NumQueues
	args.NumQueues, args.NumHeld = 0, 0
	var list []kfdabi.KmapQueue
	for _, x := range p.pdds {
		for _, q := range x.queues {
			list = append(list, kfdabi.KmapQueue{GPUID: uint32(q.GPU), ID: q.ID, State: q.kmapState()})
			args.NumQueues++
			if q.Held {
				args.NumHeld++
			}
		}
	}
	slices.SortFunc(list, func(a, b kfdabi.KmapQueue) int { return cmp.Or(cmp.Compare(a.GPUID, b.GPUID), cmp.Compare(a.ID, b.ID)) })
	return copyTo(to, bytesOf(list[:min(len(list), int(room))]))
}

func (q *queue) kmapState() (s kfdabi.KmapQueueState) {
	for _, bit := range []struct {
		set  bool
		mask kfdabi.KmapQueueState
	}{
		{q.Active, kfdabi.KmapMapped},
		{q.Held, kfdabi.KmapHeld},
		{q.Evicted, kfdabi.KmapEvicted},
		{q.Suspended, kfdabi.KmapSuspended},
		{q.pdd.gpu.kmapFailed, kfdabi.KmapFailed},
	} {
		if bit.set {
			s |= bit.mask
		}
	}
	return s
}

// startLease starts the lease anew while the handle limits a process.
func (d *Driver) startLease(f *KmapFile, lasts time.Duration) {
	f.stop()
	if len(f.limited) == 0 {
		return
	}
	f.lease++
	this := f.lease
	f.stopLease = d.cfg.After(lasts, func() {
		d.mu.Lock()
		defer d.leave()
		c := &call{d: d}
		defer d.hold(c, &f.mutex)()
		// It may have been renewed, or the handle closed, before or while this waited.
		if f.stopLease == nil || f.lease != this {
			return
		}
		f.stopLease = nil
		f.lapses++
		d.lift(c, f)
		d.note()
	})
}

// stop stops the lease.
func (f *KmapFile) stop() {
	if f.stopLease != nil {
		f.stopLease()
		f.stopLease = nil
	}
}

// lift ends every limit of a handle, with one runlist for each GPU that this changes. A failure is
// left to the GPU's reset, or to the next SET for a process there. The handle's lock is held.
func (d *Driver) lift(c *call, f *KmapFile) {
	var targets []kmapTarget
	for _, p := range slices.Clone(f.limited) {
		p.unlimit()
		p.refs++
		defer d.unref(p)
		targets = append(targets, kmapTarget{p: p})
	}
	for _, g := range d.gpus {
		d.applyLimits(c, g, targets, &kfdabi.KmapSetArgs{Grace: DefaultGrace})
	}
}

// cpSlots is the number of compute queues that the firmware of a GPU here maps at once: 4 pipes with 8
// queues, without the driver's own.
const cpSlots = 24

// kmapProcesses is the most processes that it maps at once, one for each VMID of the driver.
const kmapProcesses = 8

func (d *Driver) kmapOccupancy(c *call, _ *KmapFile, args *kfdabi.KmapOccupancyArgs) errno {
	if args.Flags != 0 || args.Pad != [2]uint32{} {
		return EINVAL
	}
	g := d.gpu(gpreempt.GPUID(args.GPUID))
	switch {
	case g == nil:
		return ENODEV
	case d.perQueue(g):
		return EOPNOTSUPP
	}
	defer d.hold(c, &g.dqm)()
	*args = kfdabi.KmapOccupancyArgs{GPUID: args.GPUID, CPSlots: cpSlots, SDMASlots: g.node.sdmaSlots()}
	processes := 0
	for _, p := range d.procs {
		x := p.on(g)
		if len(x.queues) == 0 {
			continue
		}
		processes++
		if p.limit != nil {
			args.Limited++
		}
		for _, q := range x.queues {
			mapped, held := &args.SDMAMapped, &args.SDMAHeld
			if q.compute() {
				mapped, held = &args.CPMapped, &args.CPHeld
			}
			if q.Active {
				*mapped++
			}
			if q.Held {
				*held++
			}
		}
	}
	if args.CPMapped > cpSlots || processes > kmapProcesses {
		args.OverSubscribed = 1
	}
	return 0
}

// sdmaSlots is the number of SDMA queues that the node maps at once, of both kinds.
func (n Node) sdmaSlots() uint32 {
	const perEngine = 8
	return uint32(cmp.Or(n.SDMAQueues, pcieEngines*perEngine) + cmp.Or(n.XGMIQueues, (sdmaEngines-pcieEngines)*perEngine))
}
