package driver

import (
	"encoding/binary"
	"maps"
	"slices"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// svmRange is struct svm_range: addresses of a process, first to last, that GPUs may
// use as they are, and how. Nothing is moved here; every address is taken for mapped.
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
		start: start, last: last, preferred: kfd.SVMLocationUndefined, prefetch: kfd.SVMLocationUndefined,
		flags: kfd.SVMFlagHostAccess | kfd.SVMFlagCoherent, granularity: defaultGranularity,
		access: map[*gpu]bool{}, accessInSitu: map[*gpu]bool{},
	}
	if p.xnack {
		for _, g := range d.gpus {
			r.access[g] = true
		}
	}
	return r
}

// part is a copy of the range, cut to other ends.
func (r *svmRange) part(start, last uint64) *svmRange {
	cut := *r
	cut.start, cut.last = start, last
	cut.access, cut.accessInSitu = maps.Clone(r.access), maps.Clone(r.accessInSitu)
	return &cut
}

// svmAt returns the first range with an address of some, nil if there is none.
func (p *process) svmAt(start, last uint64) *svmRange {
	if i := slices.IndexFunc(p.svm, func(r *svmRange) bool { return r.start <= last && r.last >= start }); i >= 0 {
		return p.svm[i]
	}
	return nil
}

// svmHeader is sizeof(struct kfd_ioctl_svm_args), svmAttribute that of an attribute.
const (
	svmHeader    = 24
	svmAttribute = 8
)

// svmCall is kfd_ioctl_svm_validate, kfd_ioctl_svm and svm_ioctl.
func (d *Driver) svmCall(c *call) (int, errno) {
	start, size := c.u64(0), c.u64(8)
	n := uint64(c.u32(20))
	switch {
	case uint64(c.usize) < svmHeader+svmAttribute*n:
		return 0, EINVAL
	case c.p.secondary:
		return 0, EOPNOTSUPP
	case start%pageSize != 0 || size%pageSize != 0 || start == 0 || size == 0:
		return 0, EINVAL
	}
	attrs := c.data[svmHeader : svmHeader+svmAttribute*n]
	switch c.u32(16) {
	case kfd.SVMOpSetAttr:
		return 0, d.svmSet(c.p, start, start+size-1, attrs)
	case kfd.SVMOpGetAttr:
		return 0, d.svmGet(c.p, start, start+size-1, attrs)
	}
	return 0, EINVAL
}

// attribute is struct kfd_ioctl_svm_attribute, where it stands.
type attribute []byte

func (a attribute) kind() uint32  { return binary.NativeEndian.Uint32(a) }
func (a attribute) value() uint32 { return binary.NativeEndian.Uint32(a[4:]) }

func (a attribute) become(kind, value uint32) {
	binary.NativeEndian.PutUint32(a, kind)
	binary.NativeEndian.PutUint32(a[4:], value)
}

func attributes(b []byte) []attribute {
	var all []attribute
	for a := range slices.Chunk(b, svmAttribute) {
		all = append(all, a)
	}
	return all
}

// checkAttribute is svm_range_check_attr for one.
func (p *process) checkAttribute(a attribute) errno {
	value := a.value()
	switch a.kind() {
	case kfd.SVMAttrPreferredLoc:
		if value == kfd.SVMLocationSysmem || value == kfd.SVMLocationUndefined {
			return 0
		}
	case kfd.SVMAttrPrefetchLoc:
		if value == kfd.SVMLocationSysmem {
			return 0
		}
	case kfd.SVMAttrAccess, kfd.SVMAttrAccessInPlace, kfd.SVMAttrNoAccess:
	case kfd.SVMAttrSetFlags, kfd.SVMAttrClrFlags, kfd.SVMAttrGranularity:
		return 0
	default:
		return EINVAL
	}
	if p.pdd(value) == nil {
		return EINVAL
	}
	return 0
}

// svmValid is svm_range_is_valid, as far as memory of GPUs is concerned.
func (p *process) svmValid(start, last uint64) errno {
	for _, x := range p.pdds {
		for _, o := range x.memory {
			if o.overlaps(start, last) {
				return EADDRINUSE
			}
		}
	}
	return 0
}

// svmSet is svm_range_set_attr: ranges are split and made so that the attributes
// hold of these addresses alone.
func (d *Driver) svmSet(p *process, start, last uint64, b []byte) errno {
	attrs := attributes(b)
	for _, a := range attrs {
		if err := p.checkAttribute(a); err != 0 {
			return err
		}
	}
	if !slices.ContainsFunc(p.pdds, func(x *pdd) bool { return x.vm }) {
		return EINVAL // kgd_process_info comes with the first VM
	}
	if err := p.svmValid(start, last); err != 0 {
		return err
	}
	var ranges []*svmRange
	next := start // what follows has no range yet
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
	return 0
}

// apply is svm_range_apply_attrs for one.
func (r *svmRange) apply(p *process, a attribute) {
	value := a.value()
	switch a.kind() {
	case kfd.SVMAttrPreferredLoc:
		r.preferred = value
	case kfd.SVMAttrPrefetchLoc:
		r.prefetch = value
	case kfd.SVMAttrAccess, kfd.SVMAttrAccessInPlace, kfd.SVMAttrNoAccess:
		g := p.pdd(value).gpu
		delete(r.access, g)
		delete(r.accessInSitu, g)
		switch a.kind() {
		case kfd.SVMAttrAccess:
			r.access[g] = true
		case kfd.SVMAttrAccessInPlace:
			r.accessInSitu[g] = true
		}
	case kfd.SVMAttrSetFlags:
		r.flags |= value
	case kfd.SVMAttrClrFlags:
		r.flags &^= value
	case kfd.SVMAttrGranularity:
		r.granularity = uint8(min(value, 0x3f))
	}
}

// svmGet is svm_range_get_attr: what all ranges among the addresses have in common,
// or what a new one would have.
func (d *Driver) svmGet(p *process, start, last uint64, b []byte) errno {
	if err := p.svmValid(start, last); err != 0 {
		return err
	}
	attrs := attributes(b)
	for _, a := range attrs {
		switch a.kind() {
		case kfd.SVMAttrPreferredLoc, kfd.SVMAttrPrefetchLoc, kfd.SVMAttrAccess, kfd.SVMAttrSetFlags, kfd.SVMAttrClrFlags,
			kfd.SVMAttrGranularity:
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
	for _, a := range attrs {
		if err := p.getAttribute(a, ranges); err != 0 {
			return err
		}
	}
	return 0
}

// getAttribute fills in one attribute.
func (p *process) getAttribute(a attribute, ranges []*svmRange) errno {
	first := ranges[0]
	same := func(of func(*svmRange) uint32) uint32 {
		if slices.ContainsFunc(ranges, func(r *svmRange) bool { return of(r) != of(first) }) {
			return kfd.SVMLocationUndefined
		}
		return of(first)
	}
	every := func(of func(*svmRange) bool) bool {
		return !slices.ContainsFunc(ranges, func(r *svmRange) bool { return !of(r) })
	}
	switch a.kind() {
	case kfd.SVMAttrPreferredLoc:
		a.become(a.kind(), same(func(r *svmRange) uint32 { return r.preferred }))
	case kfd.SVMAttrPrefetchLoc:
		a.become(a.kind(), same(func(r *svmRange) uint32 { return r.prefetch }))
	case kfd.SVMAttrAccess:
		x := p.pdd(a.value())
		switch {
		case x == nil:
			return EINVAL
		case every(func(r *svmRange) bool { return r.access[x.gpu] }):
		case every(func(r *svmRange) bool { return r.accessInSitu[x.gpu] }):
			a.become(kfd.SVMAttrAccessInPlace, a.value())
		default:
			a.become(kfd.SVMAttrNoAccess, a.value())
		}
	case kfd.SVMAttrSetFlags:
		flags := ^uint32(0)
		for _, r := range ranges {
			flags &= r.flags
		}
		a.become(a.kind(), flags)
	case kfd.SVMAttrClrFlags:
		flags := uint32(0)
		for _, r := range ranges {
			flags |= r.flags
		}
		a.become(a.kind(), ^flags)
	case kfd.SVMAttrGranularity:
		least := first.granularity
		for _, r := range ranges {
			least = min(least, r.granularity)
		}
		a.become(a.kind(), uint32(least))
	}
	return 0
}

// setXnackMode is kfd_ioctl_set_xnack_mode.
func (d *Driver) setXnackMode(c *call) (int, errno) {
	p, mode := c.p, int32(c.u32(0))
	d.lock(c, &p.mutex)
	defer d.unlock(&p.mutex)
	switch {
	case mode < 0:
		c.put32(0, 0)
		if p.xnack {
			c.put32(0, 1)
		}
	case len(p.queues) > 0:
		return 0, EBUSY
	case mode <= 1 && p.xnack == (mode == 1): // a number above 1 is never what it is
	case mode > 0 && !p.canXnack():
		return 0, EPERM
	default:
		p.xnack = mode > 0
	}
	return 0, 0
}

// canXnack is kfd_process_xnack_mode of what a process may have: of the GPUs here
// those with a mode for each process.
func (p *process) canXnack() bool {
	return !slices.ContainsFunc(p.pdds, func(x *pdd) bool {
		switch x.gpu.node.GFX {
		case 90010, 90402, 90500:
			return false
		}
		return true
	})
}
