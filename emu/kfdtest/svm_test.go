package kfdtest_test

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// svmCall is a call with its attributes.
type svmCall struct {
	kfdabi.SVMArgs
	Attrs [8]kfdabi.SVMAttribute
}

func (s *scene) svm(c *svmCall) error {
	const header, attribute = 24, 8
	req := kfdabi.ReqSVM&0xc000ffff | kfd.Request(header+attribute*c.NumAttrs)<<16
	return s.do(req, kfd.PointerTo(c))
}

func attr(kind, value uint32) kfdabi.SVMAttribute {
	return kfdabi.SVMAttribute{Type: kind, Value: value}
}

func svmOf(op uint32, start, size uint64, attrs []kfdabi.SVMAttribute) *svmCall {
	c := &svmCall{SVMArgs: kfdabi.SVMArgs{StartAddr: start, Size: size, Op: op, NumAttrs: uint32(len(attrs))}}
	copy(c.Attrs[:], attrs)
	return c
}

func (s *scene) svmSet(start, size uint64, attrs ...kfdabi.SVMAttribute) error {
	return s.svm(svmOf(kfdabi.SVMOpSetAttr, start, size, attrs))
}

func (s *scene) svmGet(start, size uint64, attrs ...kfdabi.SVMAttribute) []kfdabi.SVMAttribute {
	s.Helper()
	c := svmOf(kfdabi.SVMOpGetAttr, start, size, attrs)
	s.must(s.svm(c))
	return c.Attrs[:len(attrs)]
}

const pages = 0x7f0000000000

func TestAttributesOfUnknownAddressesAreTheDefaults(t *testing.T) {
	onProfiles(t, hws, func(s *scene) {
		s.same([]kfdabi.SVMAttribute{
			attr(kfdabi.SVMAttrPreferredLoc, kfdabi.SVMLocationUndefined), attr(kfdabi.SVMAttrPrefetchLoc, kfdabi.SVMLocationUndefined),
			attr(kfdabi.SVMAttrNoAccess, uint32(gpuA)), attr(kfdabi.SVMAttrSetFlags, 3), attr(kfdabi.SVMAttrClrFlags, ^uint32(3)),
			attr(kfdabi.SVMAttrGranularity, 9),
		}, s.svmGet(pages, 8192,
			attr(kfdabi.SVMAttrPreferredLoc, 0), attr(kfdabi.SVMAttrPrefetchLoc, 0), attr(kfdabi.SVMAttrAccess, uint32(gpuA)),
			attr(kfdabi.SVMAttrSetFlags, 0), attr(kfdabi.SVMAttrClrFlags, 0), attr(kfdabi.SVMAttrGranularity, 0)))
		_, err := s.xnack(1)
		s.must(err)
		s.same([]kfdabi.SVMAttribute{attr(kfdabi.SVMAttrAccess, uint32(gpuA))}, s.svmGet(pages, 4096, attr(kfdabi.SVMAttrAccess, uint32(gpuA))))
	})
}

func TestAttributesApplyToTheirAddressesOnly(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		s.acquire(gpuA)
		at := func(page uint64, n uint64, attrs ...kfdabi.SVMAttribute) {
			s.Helper()
			s.must(s.svmSet(pages+page*4096, n*4096, attrs...))
		}
		granularity := func(page uint64, n uint64) uint32 {
			s.Helper()
			return s.svmGet(pages+page*4096, n*4096, attr(kfdabi.SVMAttrGranularity, 0))[0].Value
		}
		at(2, 2, attr(kfdabi.SVMAttrGranularity, 4))
		at(6, 1, attr(kfdabi.SVMAttrGranularity, 3))
		at(3, 6, attr(kfdabi.SVMAttrGranularity, 5)) // over both, between them and behind them
		at(10, 1, attr(kfdabi.SVMAttrGranularity, 200))
		at(4, 1, attr(kfdabi.SVMAttrGranularity, 1)) // in the middle of one
		var got []uint32
		for page := range uint64(12) {
			got = append(got, granularity(page, 1))
		}
		s.same([]uint32{9, 9, 4, 5, 1, 5, 5, 5, 5, 9, 0x3f, 9}, got)
		s.same(uint32(1), granularity(0, 20)) // the least
		at(0, 20, attr(kfdabi.SVMAttrSetFlags, 0x10), attr(kfdabi.SVMAttrPreferredLoc, uint32(gpuB)))
		at(0, 5, attr(kfdabi.SVMAttrClrFlags, 1), attr(kfdabi.SVMAttrPreferredLoc, 0))
		s.same([]kfdabi.SVMAttribute{
			attr(kfdabi.SVMAttrSetFlags, 0x12), attr(kfdabi.SVMAttrClrFlags, ^uint32(0x13)), attr(kfdabi.SVMAttrPreferredLoc, kfdabi.SVMLocationUndefined),
		}, s.svmGet(pages, 20*4096, attr(kfdabi.SVMAttrSetFlags, 0), attr(kfdabi.SVMAttrClrFlags, 0), attr(kfdabi.SVMAttrPreferredLoc, 0)))
		s.same([]kfdabi.SVMAttribute{attr(kfdabi.SVMAttrPreferredLoc, uint32(gpuB))},
			s.svmGet(pages+5*4096, 15*4096, attr(kfdabi.SVMAttrPreferredLoc, 0)))
	})
}

func TestRangeBeforeAnotherKeepsItsAttributes(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		s.acquire(gpuA)
		s.must(s.svmSet(pages+15*4096, 4096, attr(kfdabi.SVMAttrPreferredLoc, uint32(gpuA))))
		s.must(s.svmSet(pages+12*4096, 4096, attr(kfdabi.SVMAttrPreferredLoc, uint32(gpuB))))
		s.must(s.svmSet(pages, 20*4096, attr(kfdabi.SVMAttrSetFlags, 0x10)))
		var got []uint32
		for _, page := range []uint64{11, 12, 13, 15, 16} {
			got = append(got, s.svmGet(pages+page*4096, 4096, attr(kfdabi.SVMAttrPreferredLoc, 0))[0].Value)
		}
		const none = kfdabi.SVMLocationUndefined
		s.same([]uint32{none, uint32(gpuB), none, uint32(gpuA), none}, got)
	})
}

func TestAccessOfGPUs(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		s.acquire(gpuA)
		access := func(gpu gpreempt.GPUID) uint32 {
			return s.svmGet(pages, 8192, attr(kfdabi.SVMAttrAccess, uint32(gpu)))[0].Type
		}
		s.must(s.svmSet(pages, 8192, attr(kfdabi.SVMAttrAccess, uint32(gpuA)), attr(kfdabi.SVMAttrAccessInPlace, uint32(gpuB))))
		s.same([]uint32{kfdabi.SVMAttrAccess, kfdabi.SVMAttrAccessInPlace}, []uint32{access(gpuA), access(gpuB)})
		s.must(s.svmSet(pages, 4096, attr(kfdabi.SVMAttrAccessInPlace, uint32(gpuA)), attr(kfdabi.SVMAttrNoAccess, uint32(gpuB))))
		s.same([]uint32{kfdabi.SVMAttrNoAccess, kfdabi.SVMAttrNoAccess}, []uint32{access(gpuA), access(gpuB)})
	})
}

func TestAddressesAreOfOneKindOfMemory(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		handle := s.alloc(gpuA, kfdabi.AllocVRAM, 4096)
		va := s.m.Allocations(s.job.MM())[0].VA
		_, err := s.mapTo(handle, 0, gpuA)
		s.must(err)
		s.want(unix.EADDRINUSE, s.svmSet(va-4096, 2*4096))
		s.must(s.svmSet(va+4096, 4096))
		args := kfdabi.AllocMemoryArgs{VAAddr: va + 4096, Size: 4096, GPUID: uint32(gpuA), Flags: kfdabi.AllocGTT}
		s.want(unix.EADDRINUSE, s.do(kfdabi.ReqAllocMemoryOfGPU, kfd.PointerTo(&args)))
		args = kfdabi.AllocMemoryArgs{Size: 4096, GPUID: uint32(gpuA), Flags: kfdabi.AllocUserptr, MmapOffset: va + 4096}
		s.want(unix.EADDRINUSE, s.do(kfdabi.ReqAllocMemoryOfGPU, kfd.PointerTo(&args)))
	})
}

func TestSVMCallsAreChecked(t *testing.T) {
	onProfiles(t, hws, func(s *scene) {
		flags := []kfdabi.SVMAttribute{attr(kfdabi.SVMAttrSetFlags, 1)}
		s.want(unix.EINVAL, s.svmSet(pages, 4096, flags...)) // before the first VM
		s.acquire(gpuA)
		s.must(s.svmSet(pages, 4096, flags...))
		for _, c := range []*svmCall{
			svmOf(kfdabi.SVMOpSetAttr, pages+1, 4096, flags),
			svmOf(kfdabi.SVMOpSetAttr, pages, 4095, flags),
			svmOf(kfdabi.SVMOpSetAttr, 0, 4096, flags),
			svmOf(kfdabi.SVMOpSetAttr, pages, 0, flags),
			svmOf(2, pages, 4096, flags),
			svmOf(kfdabi.SVMOpSetAttr, pages, 4096, []kfdabi.SVMAttribute{attr(8, 0)}),
			svmOf(kfdabi.SVMOpSetAttr, pages, 4096, []kfdabi.SVMAttribute{attr(kfdabi.SVMAttrAccess, 5)}),
			svmOf(kfdabi.SVMOpSetAttr, pages, 4096, []kfdabi.SVMAttribute{attr(kfdabi.SVMAttrPrefetchLoc, kfdabi.SVMLocationUndefined)}),
			svmOf(kfdabi.SVMOpGetAttr, pages, 4096, []kfdabi.SVMAttribute{attr(kfdabi.SVMAttrAccess, 5)}),
			svmOf(kfdabi.SVMOpGetAttr, pages, 4096, []kfdabi.SVMAttribute{attr(kfdabi.SVMAttrNoAccess, uint32(gpuA))}),
		} {
			s.want(unix.EINVAL, s.svm(c))
		}
		more := svmOf(kfdabi.SVMOpSetAttr, pages, 4096, flags)
		more.NumAttrs = 2 // the request carries fewer
		s.want(unix.EINVAL, s.do(kfdabi.ReqSVM&0xc000ffff|32<<16, kfd.PointerTo(more)))
	})
}

// xnack sets the mode and returns it.
func (s *scene) xnack(mode int32) (uint32, error) {
	args := kfdabi.SetXnackModeArgs{XnackEnabled: uint32(mode)}
	err := s.do(kfdabi.ReqSetXnackMode, kfd.PointerTo(&args))
	return args.XnackEnabled, err
}

func TestXnackDependsOnTheGPUs(t *testing.T) {
	for gfx, can := range map[uint32]bool{hws: true, single: false, mes: false} {
		stage(t, "6.12", gfx, func(s *scene) {
			mode := func() uint32 {
				s.Helper()
				mode, err := s.xnack(-1)
				s.must(err)
				return mode
			}
			s.same(uint32(0), mode())
			_, err := s.xnack(0)
			s.must(err)
			if !can {
				_, err = s.xnack(1)
				s.want(unix.EPERM, err)
				return
			}
			_, err = s.xnack(7)
			s.must(err)
			s.same(uint32(1), mode())
			s.queue(gpuA)
			_, err = s.xnack(1)
			s.want(unix.EBUSY, err)
			s.same(uint32(1), mode())
		})
	}
}
