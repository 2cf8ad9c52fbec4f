package driver

import (
	"cmp"
	"maps"
	"reflect"
	"slices"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
)

// svmRange is struct svm_range: addresses of a process, from start to last, that GPUs use
// directly, with their attributes. Nothing migrates here.
type svmRange struct {
	start, last          uint64
	preferred, prefetch  uint32
	flags                uint32
	granularity          uint8
	access, accessInSitu map[*gpu]bool
}

// defaultGranularity is the module parameter svm_default_granularity.
const defaultGranularity = 9

// newSVMRange is svm_range_set_default_attributes, with the access of svm_range_new.
func (d *Driver) newSVMRange(p *process, start, last uint64) *svmRange {
	r := &svmRange{
		start: start, last: last, preferred: kfdabi.SVMLocationUndefined, prefetch: kfdabi.SVMLocationUndefined,
		flags: kfdabi.SVMFlagHostAccess | kfdabi.SVMFlagCoherent, granularity: defaultGranularity,
		access: map[*gpu]bool{}, accessInSitu: map[*gpu]bool{},
	}
	if p.xnack {
		for _, g := range d.gpus {
			r.access[g] = true
		}
	}
	return r
}

// part returns a copy of the range with other ends.
func (r *svmRange) part(start, last uint64) *svmRange {
	cut := *r
	cut.start, cut.last = start, last
	cut.access, cut.accessInSitu = maps.Clone(r.access), maps.Clone(r.accessInSitu)
	return &cut
}

// svmAt returns the first range with an address from start to last, nil for none.
func (p *process) svmAt(start, last uint64) *svmRange {
	if i := slices.IndexFunc(p.svm, func(r *svmRange) bool { return r.start <= last && r.last >= start }); i >= 0 {
		return p.svm[i]
	}
	return nil
}

// Unmapped ends what is of the SVM ranges of a process at addresses that it unmaps
// (svm_range_unmap_from_cpu), from start to last. A queue whose save area is among them goes
// on, which the driver would evict.
func (d *Driver) Unmapped(mm MM, start, last uint64) {
	if !d.svmUsed.Load() {
		return
	}
	d.mu.Lock()
	defer d.leave()
	p := d.byMM(mm)
	if p == nil || p.svmAt(start, last) == nil {
		return
	}
	var ranges []*svmRange
	for _, r := range p.svm {
		if r.last < start || r.start > last {
			ranges = append(ranges, r)
			continue
		}
		if r.start < start {
			ranges = append(ranges, r.part(r.start, start-1))
		}
		if r.last > last {
			ranges = append(ranges, r.part(last+1, r.last))
		}
	}
	p.svm = ranges
	d.note()
}

// HasSVM reports whether a process ever shared memory: otherwise Unmapped does nothing.
func (d *Driver) HasSVM() bool { return d.svmUsed.Load() }

// svmCall is kfd_ioctl_svm_validate, kfd_ioctl_svm and svm_ioctl. The attributes follow
// struct kfd_ioctl_svm_args.
func (d *Driver) svmCall(c *call, args *kfdabi.SVMArgs) (int, errno) {
	header, n := sizeOf[kfdabi.SVMArgs](), int(args.NumAttrs)
	switch {
	case c.usize < header+n*sizeOf[kfdabi.SVMAttribute]():
		return 0, EINVAL
	case c.p.Secondary:
		return 0, EOPNOTSUPP
	case args.StartAddr%pageSize != 0 || args.Size%pageSize != 0 || args.StartAddr == 0 || args.Size == 0:
		return 0, EINVAL
	}
	attrs := make([]kfdabi.SVMAttribute, n)
	decode(reflect.ValueOf(attrs), c.data[header:])
	switch args.Op {
	case kfdabi.SVMOpSetAttr:
		return 0, d.svmSet(c, args.StartAddr, args.Size, attrs)
	case kfdabi.SVMOpGetAttr:
		err := d.svmGet(c, args.StartAddr, args.Size, attrs)
		encode(c.data[header:], reflect.ValueOf(attrs))
		return 0, err
	}
	return 0, EINVAL
}

// checkAttribute is svm_range_check_attr for one attribute.
func (p *process) checkAttribute(a kfdabi.SVMAttribute) errno {
	switch a.Type {
	case kfdabi.SVMAttrPreferredLoc:
		if a.Value == kfdabi.SVMLocationSysmem || a.Value == kfdabi.SVMLocationUndefined {
			return 0
		}
	case kfdabi.SVMAttrPrefetchLoc:
		if a.Value == kfdabi.SVMLocationSysmem {
			return 0
		}
	case kfdabi.SVMAttrAccess, kfdabi.SVMAttrAccessInPlace, kfdabi.SVMAttrNoAccess:
	case kfdabi.SVMAttrSetFlags, kfdabi.SVMAttrClrFlags, kfdabi.SVMAttrGranularity:
		return 0
	default:
		return EINVAL
	}
	if p.pdd(a.Value) == nil {
		return EINVAL
	}
	return 0
}

// svmValid is svm_range_is_valid: the caller has mapped the addresses, none of them is a
// device's, and no GPU memory is there. It returns the last one.
func (d *Driver) svmValid(c *call, start, size uint64) (last uint64, err errno) {
	last = start + size - 1
	switch {
	case start+size < start && d.prof.svmOverflow:
		return 0, EOVERFLOW
	case start+size < start || !d.mapped(c.task, start, last):
		return 0, EFAULT
	}
	return last, c.p.svmFree(start, last)
}

// The addresses that a process can map: mmap_min_addr, and TASK_SIZE of x86-64.
const (
	firstAddress = 1 << 16
	endAddress   = 1<<47 - pageSize
)

// mapped is Config.Mapped or its default.
func (d *Driver) mapped(t Task, start, last uint64) bool {
	if d.cfg.Mapped != nil {
		return d.cfg.Mapped(t, start, last)
	}
	return start >= firstAddress && last < endAddress
}

// svmFree is svm_range_check_vm.
func (p *process) svmFree(start, last uint64) errno {
	for _, x := range p.pdds {
		for _, o := range x.memory {
			if o.overlaps(start, last) {
				return EADDRINUSE
			}
		}
	}
	return 0
}

// svmSet is svm_range_set_attr: ranges are split and created so that the attributes apply
// to exactly these addresses.
func (d *Driver) svmSet(c *call, start, size uint64, attrs []kfdabi.SVMAttribute) errno {
	p := c.p
	for _, a := range attrs {
		if err := p.checkAttribute(a); err != 0 {
			return err
		}
	}
	if !slices.ContainsFunc(p.pdds, func(x *pdd) bool { return x.vm }) {
		return EINVAL // kgd_process_info comes with the first VM
	}
	last, err := d.svmValid(c, start, size)
	if err != 0 {
		return err
	}
	var ranges []*svmRange
	next := start // the first address without a new range
	inside := func(r *svmRange) {
		for _, a := range attrs {
			r.apply(p, a)
		}
		ranges = append(ranges, r)
	}
	for _, r := range p.svm {
		if r.last < start || r.start > last {
			if r.start > last && next <= last {
				inside(d.newSVMRange(p, next, last))
				next = last + 1
			}
			ranges = append(ranges, r)
			continue
		}
		if r.start < start {
			ranges = append(ranges, r.part(r.start, start-1))
		} else if r.start > next {
			inside(d.newSVMRange(p, next, r.start-1))
		}
		inside(r.part(max(r.start, start), min(r.last, last)))
		if r.last > last {
			ranges = append(ranges, r.part(last+1, r.last))
		}
		next = min(r.last, last) + 1
	}
	if next <= last {
		inside(d.newSVMRange(p, next, last))
	}
	p.svm = ranges
	d.svmUsed.Store(true)
	return 0
}

// apply is svm_range_apply_attrs for one attribute.
func (r *svmRange) apply(p *process, a kfdabi.SVMAttribute) {
	switch a.Type {
	case kfdabi.SVMAttrPreferredLoc:
		r.preferred = a.Value
	case kfdabi.SVMAttrPrefetchLoc:
		r.prefetch = a.Value
	case kfdabi.SVMAttrAccess, kfdabi.SVMAttrAccessInPlace, kfdabi.SVMAttrNoAccess:
		g := p.pdd(a.Value).gpu
		delete(r.access, g)
		delete(r.accessInSitu, g)
		switch a.Type {
		case kfdabi.SVMAttrAccess:
			r.access[g] = true
		case kfdabi.SVMAttrAccessInPlace:
			r.accessInSitu[g] = true
		}
	case kfdabi.SVMAttrSetFlags:
		r.flags |= a.Value
	case kfdabi.SVMAttrClrFlags:
		r.flags &^= a.Value
	case kfdabi.SVMAttrGranularity:
		r.granularity = uint8(min(a.Value, 0x3f))
	}
}

// svmGet is svm_range_get_attr: the attributes that all ranges there have in common, or
// those that a new range would have.
func (d *Driver) svmGet(c *call, start, size uint64, attrs []kfdabi.SVMAttribute) errno {
	p := c.p
	last, err := d.svmValid(c, start, size)
	if err != 0 {
		return err
	}
	for _, a := range attrs {
		switch a.Type {
		case kfdabi.SVMAttrPreferredLoc, kfdabi.SVMAttrPrefetchLoc, kfdabi.SVMAttrAccess, kfdabi.SVMAttrSetFlags, kfdabi.SVMAttrClrFlags,
			kfdabi.SVMAttrGranularity:
		default:
			return EINVAL
		}
	}
	var ranges []*svmRange
	for _, r := range p.svm {
		if r.start <= last && r.last >= start {
			ranges = append(ranges, r)
		}
	}
	if len(ranges) == 0 {
		ranges = []*svmRange{d.newSVMRange(p, start, last)}
	}
	for i := range attrs {
		if err := p.getAttribute(&attrs[i], ranges); err != 0 {
			return err
		}
	}
	return 0
}

// getAttribute sets one attribute to its value in all ranges.
func (p *process) getAttribute(a *kfdabi.SVMAttribute, ranges []*svmRange) errno {
	first := ranges[0]
	same := func(of func(*svmRange) uint32) uint32 {
		if slices.ContainsFunc(ranges, func(r *svmRange) bool { return of(r) != of(first) }) {
			return kfdabi.SVMLocationUndefined
		}
		return of(first)
	}
	every := func(of func(*svmRange) bool) bool {
		return !slices.ContainsFunc(ranges, func(r *svmRange) bool { return !of(r) })
	}
	switch a.Type {
	case kfdabi.SVMAttrPreferredLoc:
		a.Value = same(func(r *svmRange) uint32 { return r.preferred })
	case kfdabi.SVMAttrPrefetchLoc:
		a.Value = same(func(r *svmRange) uint32 { return r.prefetch })
	case kfdabi.SVMAttrAccess:
		x := p.pdd(a.Value)
		switch {
		case x == nil:
			return EINVAL
		case every(func(r *svmRange) bool { return r.access[x.gpu] }):
		case every(func(r *svmRange) bool { return r.accessInSitu[x.gpu] }):
			a.Type = kfdabi.SVMAttrAccessInPlace
		default:
			a.Type = kfdabi.SVMAttrNoAccess
		}
	case kfdabi.SVMAttrSetFlags:
		a.Value = ^uint32(0)
		for _, r := range ranges {
			a.Value &= r.flags
		}
	case kfdabi.SVMAttrClrFlags:
		a.Value = ^uint32(0)
		for _, r := range ranges {
			a.Value &^= r.flags
		}
	case kfdabi.SVMAttrGranularity:
		a.Value = uint32(slices.MinFunc(ranges, func(r, o *svmRange) int { return cmp.Compare(r.granularity, o.granularity) }).granularity)
	}
	return 0
}

// setXnackMode is kfd_ioctl_set_xnack_mode.
func (d *Driver) setXnackMode(c *call, args *kfdabi.SetXnackModeArgs) (int, errno) {
	p, mode := c.p, int32(args.XnackEnabled)
	defer d.hold(c, &p.mutex)()
	switch {
	case mode < 0:
		args.XnackEnabled = flag(p.xnack)
	case len(p.queues) > 0:
		return 0, EBUSY
	case mode <= 1 && p.xnack == (mode == 1): // no change; a number above 1 is one
	case mode > 0 && !p.canXnack():
		return 0, EPERM
	default:
		p.xnack = mode > 0
	}
	return 0, 0
}

// canXnack is kfd_process_xnack_mode: every GPU must support a mode for each process.
func (p *process) canXnack() bool {
	return !slices.ContainsFunc(p.pdds, func(x *pdd) bool {
		switch x.gpu.node.GFX {
		case 90010, 90402, 90500:
			return false
		}
		return true
	})
}
