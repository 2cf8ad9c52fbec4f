package gpumodel

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Kernel is whose texts the file tree imitates: the driver's, as it came with that
// kernel.
type Kernel uint8

// The kernels. What a driver shows differs in details; how queues are scheduled is
// the same here for all.
const (
	// Linux61 is 6.1: one XCC only, wherever there is more than one.
	Linux61 Kernel = iota
	// Linux612 is 6.12.
	Linux612
	// Linux72 is 7.2: no PASIDs, and no queue priority in an MQD.
	Linux72
	// Linux73 is 7.3: as 7.2, and fewer GPUs announce the reset of one queue.
	Linux73
	// DKMS is AMD's own driver as a host with MI308X showed it: no PASIDs, and MQDs
	// that call themselves active from the beginning. The numbers of its queue types
	// are assumed to be those of 6.12.
	DKMS
)

// String returns the kernel's name.
func (k Kernel) String() string {
	return [...]string{Linux61: "6.1", Linux612: "6.12", Linux72: "7.2", Linux73: "7.3", DKMS: "dkms"}[k]
}

// SetKernel changes whose texts the file tree imitates: at first those of Linux612.
func (m *Machine) SetKernel(k Kernel) {
	m.kernel = k
	m.topology = m.topologyTree()
	m.moves++
}

// is7 reports whether it is 7.2 or later.
func (k Kernel) is7() bool { return k == Linux72 || k == Linux73 }

// hasPASIDs reports whether a process has one PASID for all GPUs, which
// kfd_process.pasid was.
func (k Kernel) hasPASIDs() bool { return k == Linux61 || k == Linux612 }

// pasidFile is the content of a process's file pasid (kfd_procfs_show).
func (k Kernel) pasidFile(pasid uint32) string {
	if k.hasPASIDs() {
		return strconv.FormatUint(uint64(pasid), 10) + "\n"
	}
	return "0\n"
}

// processLine begins a process in mqds (kfd_debugfs_mqds_by_process). Where there is
// no PASID, the thread id of the main thread takes its place.
func (k Kernel) processLine(dst []byte, pid int32, pasid uint32) []byte {
	if k.hasPASIDs() {
		return fmt.Appendf(dst, "Process %d PASID 0x%x:\n", pid, pasid)
	}
	return fmt.Appendf(dst, "Process %d PASID %d:\n", pid, pid)
}

// hiqPipe is KFD_CIK_HIQ_PIPE.
const hiqPipe = 4

// hiqLine begins the HIQ of an XCC in hqds (dqm_debugfs_hqds), slotLine another slot.
func (k Kernel) hiqLine(dst []byte, xcc, pipesPerMEC int) []byte {
	mec, pipe := hiqPipe/pipesPerMEC+1, hiqPipe%pipesPerMEC
	if k == Linux61 {
		return fmt.Appendf(dst, "  HIQ on MEC %d Pipe %d Queue 0\n", mec, pipe)
	}
	return fmt.Appendf(dst, "   Inst %d, HIQ on MEC %d Pipe %d Queue 0\n", xcc, mec, pipe)
}

func (k Kernel) slotLine(dst []byte, xcc, pipe, queue int) []byte {
	if k == Linux61 {
		return fmt.Appendf(dst, "  CP Pipe %d, Queue %d\n", pipe, queue)
	}
	return fmt.Appendf(dst, " Inst %d,  CP Pipe %d, Queue %d\n", xcc, pipe, queue)
}

// xccs is how many of a GPU's XCCs the driver knows of.
func (k Kernel) xccs(s *Spec) int {
	if k == Linux61 {
		return 1
	}
	return s.XCCs
}

// cpQueues is num_cp_queues: the slots of one XCC (get_cp_queues_num), and in AMD's own driver,
// as a host with MI308X showed, of all.
func (k Kernel) cpQueues(s *Spec) int {
	if k == DKMS {
		return s.Slots * s.XCCs
	}
	return s.Slots
}

// sysfsType is the number a queue's file type shows (enum kfd_queue_type).
func (k Kernel) sysfsType(t gpreempt.QueueType) int {
	switch t {
	case gpreempt.QueueSDMA:
		return 1
	case gpreempt.QueueSDMAXGMI:
		if k.is7() {
			return 3
		}
		return 4
	case gpreempt.QueueCompute, gpreempt.QueueUnknown:
	}
	return 0
}

// The bits of capability and capability2 that announce the reset of one compute queue and of
// one SDMA queue (HSA_CAP_PER_QUEUE_RESET_SUPPORTED, HSA_CAP2_PER_SDMA_QUEUE_RESET_SUPPORTED).
const (
	queueReset     = 1 << 31
	sdmaQueueReset = 1
)

// resets returns the bits of capability and capability2 that announce resets of queues
// (kfd_topology_set_capabilities, sdma_v4_4_2_update_reset_mask): up to 6.12 no GPU does.
func (k Kernel) resets(s *Spec) (capability, capability2 uint32) {
	switch {
	case k == Linux72 && s.GFX < 100000, k == Linux73 && s.GFX >= 90400 && s.GFX < 100000,
		k == Linux73 && slices.Contains([]uint32{110000, 110001, 110002, 120000, 120001}, s.GFX):
		capability = queueReset
	}
	if k.is7() && (s.GFX == 90402 && s.topology.firmware >= 0xb0 || s.GFX == 90500 && s.topology.firmware >= 0xf) {
		capability2 = sdmaQueueReset
	}
	return capability, capability2
}
