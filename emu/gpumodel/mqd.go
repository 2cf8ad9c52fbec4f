package gpumodel

import (
	"math/bits"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Dwords of a compute MQD: the same for v9 to v12 (v9_structs.h to v12_structs.h).
const (
	computeMQDWords = computeMQDBytes / 4

	mqdHeader        = 0
	mqdPipelineStat  = 11
	mqdPGMResource2  = 20
	mqdLogicXCC      = 39
	mqdTGChunkSize   = 41
	mqdReadIndex     = 96
	mqdRegisters     = 128
	mqdStrideOfXCCs  = 226
	mqdHeaderValue   = 0xc031_0800
	mqdTrapPresent   = 1 << 6
	registersOfQueue = 56
)

// mqdCUMasks are the dwords that say which CUs of each shader engine may be used.
var mqdCUMasks = [...]int{23, 24, 26, 27}

// Registers of a hardware queue descriptor, from CP_MQD_BASE_ADDR on: the same for
// gfx9 to gfx12. An MQD has them at mqdRegisters.
const (
	regMQDBase         = 0
	regActive          = 2
	regVMID            = 3
	regPersistentState = 4
	regPipePriority    = 5
	regQueuePriority   = 6
	regQuantum         = 7
	regPQBase          = 8
	regPQRptr          = 10
	regPQRptrReport    = 11
	regPQWptrPoll      = 13
	regDoorbell        = 15
	regPQControl       = 17
	regIBControl       = 21
	regHQStatus        = 32
	regMQDControl      = 34
	regEOPBase         = 37
	regEOPControl      = 39
	regEOPRptr         = 40
	regEOPWptr         = 41
	regSaveBase        = 43
	regStackOffset     = 46
	regStackSize       = 47
	regWaveStateOffset = 48
	regSaveSize        = 49
	regAQLControl      = 53
	regPQWptr          = 54
)

// Values of those registers.
const (
	stateGFX9, stateGFX11 = 0x4000_5301, 0x4000_5501
	quantum               = 0x111
	doorbellDrop          = 1 << 1
	doorbellEnabled       = 3 << 29
	pqRptrBlock           = 5 << 8
	pqQueueFull           = 1 << 14
	pqEmpty               = 1 << 15
	pqClamp               = 1 << 16
	pqSlotBased           = 2 << 25
	pqNoUpdateRptr        = 1 << 27
	pqUnordered           = 1 << 28
	ibAvailable           = 3 << 20
	ibNotExecuted         = 1 << 23
	dispatchPointer       = 1 << 14
	statusSeen            = 1 << 30
	privateMQD            = 1 << 8
	eopControlOf4KiB      = 9
	eopFetcher, eopEnd    = 1 << 30, 0x7f_8000
)

// What a slot holds that was never used, after an MI308X.
const (
	emptyState, emptyPQControl, emptyEOPControl = 0x0be0_5301, 0x0030_8509, 6
)

// The ring of the HIQ, after an MI308X; how much one runlist takes is made up.
const (
	hiqDwords         = 512
	hiqDwordsPerCycle = 32
	hiqState          = 0x5300
	hiqDoorbell       = 0xe000_3000
	hiqControl        = 0xd000_0508
)

// put writes a 64-bit value as two dwords, the low one first.
func put(dst []uint32, i int, v uint64) { dst[i], dst[i+1] = uint32(v), uint32(v>>32) }

// pipePriority is pipe_priority_map: low, medium, high.
func pipePriority(p gpreempt.Priority) uint32 {
	switch {
	case p < gpreempt.PriorityNormal:
		return 0
	case p < gpreempt.PriorityHigh:
		return 1
	}
	return 2
}

// dialect is what a dump depends on, apart from what is in it: kernel and kind of GPU.
type dialect struct {
	kernel Kernel
	spec   *Spec
	major  int
	sdma   *sdmaLayout
}

// registers writes the registers of a compute queue on an XCC. With at.known they are
// those hardware has when it runs the queue or saves it, else those the driver
// prepares (init_mqd and update_mqd of kfd_mqd_manager_v9.c to v12.c).
func (t *dialect) registers(r []uint32, s *setup, priority gpreempt.Priority, at place, xcc int) {
	put(r, regMQDBase, s.mqd+uint64(xcc)*s.mqdStride)
	r[regPersistentState] = stateGFX9
	if t.major >= 11 {
		r[regPersistentState] = stateGFX11
	}
	r[regPipePriority] = pipePriority(priority)
	if !t.kernel.is7() {
		r[regQueuePriority] = uint32(priority)
	}
	r[regQuantum] = quantum
	put(r, regPQBase, s.ring.base>>8)
	put(r, regPQRptrReport, s.read)
	put(r, regPQWptrPoll, s.write)
	r[regDoorbell] = s.doorbell << 2
	control := uint32(pqUnordered|pqRptrBlock) | log2(s.ring.bytes/4) - 1
	if !s.pm4 {
		control |= pqSlotBased | pqQueueFull
		if t.major == 9 {
			control |= pqClamp
		}
		// Of several XCCs, the first writes the read index.
		if t.spec.XCCs == 1 || xcc > 0 {
			control |= pqNoUpdateRptr
		}
		r[regAQLControl] = 1
		r[regDoorbell] |= doorbellDrop
	}
	r[regPQControl] = control
	r[regIBControl] = ibAvailable
	if t.major == 9 {
		r[regIBControl] |= ibNotExecuted
	}
	r[regHQStatus] = dispatchPointer
	r[regMQDControl] = privateMQD
	if s.eop != 0 {
		put(r, regEOPBase, s.eop>>8)
		r[regEOPControl] = eopControlOf4KiB
	}
	put(r, regSaveBase, s.save+uint64(xcc)*uint64(s.saveBytes))
	r[regStackOffset], r[regStackSize], r[regWaveStateOffset] = s.stackBytes, s.stackBytes, s.stackBytes
	r[regSaveSize] = s.saveBytes
	if !at.known {
		if t.kernel == DKMS {
			r[regActive] = 1
		}
		return
	}
	r[regActive] = 1
	r[regVMID] = uint32(at.vmid) | uint32(at.vmid)<<8
	// The read pointer wraps with the ring, the write pointer does not.
	r[regPQRptr] = uint32(at.read/4) & uint32(s.ring.bytes/4-1)
	put(r, regPQWptr, at.write/4)
	r[regDoorbell] |= doorbellEnabled
	if at.read == at.write {
		r[regPQControl] |= pqEmpty
	}
	r[regHQStatus] |= statusSeen
	r[regEOPRptr], r[regEOPWptr] = eopFetcher, eopEnd
}

func log2(n uint64) uint32 { return uint32(bits.Len64(n) - 1) }

// computeMQD writes the MQD of a compute queue for an XCC.
func (t *dialect) computeMQD(w []uint32, m *memory, xcc int) {
	w[mqdHeader] = mqdHeaderValue
	w[mqdPipelineStat] = 1
	w[mqdPGMResource2] = mqdTrapPresent
	for _, i := range mqdCUMasks {
		w[i] = ^uint32(0)
	}
	if t.spec.XCCs > 1 {
		w[mqdLogicXCC] = uint32((m.logicXCC + xcc) % t.spec.XCCs)
		w[mqdTGChunkSize] = 1
		w[mqdStrideOfXCCs] = uint32(m.mqdStride)
	}
	if m.saved.known && !m.pm4 {
		put(w, mqdReadIndex, m.saved.read/packetBytes)
	}
	t.registers(w[mqdRegisters:][:registersOfQueue], m.setup, m.priority, m.saved, xcc)
}

// slotRegisters writes the registers of a slot as they are now: at is how far the
// queue in it is, or the last one was.
func (t *dialect) slotRegisters(r []uint32, s *slot, xcc int) {
	if s.was == nil {
		r[regPersistentState] = emptyState
		r[regPQControl] = emptyPQControl
		r[regIBControl] = ibAvailable
		r[regHQStatus] = statusSeen
		r[regMQDControl] = privateMQD
		r[regEOPControl] = emptyEOPControl
		r[regEOPRptr], r[regEOPWptr] = eopFetcher, eopEnd
		return
	}
	t.registers(r, s.was, s.priority, s.at, xcc)
	if s.q == nil {
		r[regActive] = 0
		r[regDoorbell] = doorbellDrop
	}
}

// hiqRegisters writes the registers of the HIQ, which the driver sends the firmware
// its runlists by: it has been used for cycles of them. MES has no HIQ.
func (t *dialect) hiqRegisters(r []uint32, cycles uint64, xcc int) {
	if t.spec.MES {
		t.slotRegisters(r, &slot{}, xcc)
		return
	}
	put(r, regMQDBase, kernelMQDs+uint64(xcc)*computeMQDBytes)
	r[regActive] = 1
	r[regPersistentState] = hiqState
	r[regQueuePriority] = 1
	r[regQuantum] = quantum
	put(r, regPQBase, hiqRing>>8)
	put(r, regPQRptrReport, hiqRing+hiqDwords*4)
	put(r, regPQWptrPoll, hiqRing+hiqDwords*4+0x200)
	wptr := cycles * hiqDwordsPerCycle
	r[regPQRptr] = uint32(wptr % hiqDwords)
	put(r, regPQWptr, wptr)
	r[regDoorbell] = hiqDoorbell
	r[regPQControl] = hiqControl | pqEmpty
	r[regIBControl] = ibAvailable | ibNotExecuted
	r[regHQStatus] = statusSeen | dispatchPointer
	r[regMQDControl] = privateMQD
	r[regEOPRptr], r[regEOPWptr] = eopFetcher, eopEnd
}

// Byte addresses of the first register of a hardware queue descriptor, and how far
// apart they are on the XCCs of gfx9, of which every two share a die.
const (
	registersGFX9   = 0xc914
	registersGFX10  = 0xc824
	registersPerXCC = 0xc_0000
	registersPerAID = 0x10_0000
)

// registerAddress is the byte address of the first register of a hardware queue
// descriptor. XCC 0 to 3 of gfx9 are those of an MI308X; the pattern is assumed to go
// on.
func (t *dialect) registerAddress(xcc int) uint32 {
	if t.major == 9 {
		return uint32(registersGFX9 + xcc/2*registersPerAID + xcc%2*registersPerXCC)
	}
	return registersGFX10
}
