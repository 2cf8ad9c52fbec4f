package safety

import (
	"regexp"
	"slices"
	"strconv"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// The patterns about a queue that does not leave its GPU: first the driver says so
// (kfd_check_hiq_mqd_doorbell_id), then that it has reset the queue, or the GPU.
const (
	PatternPreemptionFailed = "preemption-failed"
	PatternQueueReset       = "queue-reset"
)

// Reset is what the driver prints about a queue that it has reset (set_queue_as_reset). One of
// PID and PASID is 0.
type Reset struct {
	// Queue is the KFD queue id.
	Queue uint32
	// PID is the process in the host's pid namespace, from Linux 7.2 on; PASID names it before.
	PID   int32
	PASID uint32
}

// resetLine is the end of the line. Drivers that print a PASID print it as a hexadecimal
// number, those that print a pid as a decimal one.
var resetLine = regexp.MustCompile(`queue id 0x([0-9a-f]{1,8}) at pasid (0x)?([0-9a-f]{1,8}) is reset$`)

// parseReset reads a line about a queue that was reset.
func parseReset(line string) (Reset, bool) {
	m := resetLine.FindStringSubmatch(line)
	if m == nil {
		return Reset{}, false
	}
	queue, _ := strconv.ParseUint(m[1], 16, 32) // it has at most 8 digits
	r := Reset{Queue: uint32(queue)}
	if m[2] != "" {
		pasid, _ := strconv.ParseUint(m[3], 16, 32)
		r.PASID = uint32(pasid)
		return r, r.PASID != 0
	}
	pid, err := strconv.ParseInt(m[3], 10, 32)
	r.PID = int32(pid)
	return r, err == nil && pid > 0
}

// Suspects returns the process that the driver names, and all whose queue it may have been, by
// key. queues are those of the host. pasid returns the PASID of a process, 0 if that is not known.
//
// Without MES the driver knows of a hung compute queue the address of its ring only, and names
// the first process that has a queue there on the GPU (find_queue_by_address): the addresses
// of two processes are often equal. Then each process with a ring at that address is one of
// them, or with a ring whose address is not known here. If the process that is named is not known,
// named is the zero value, and every process on the GPU is one of them. There is none if that
// process has no queue on the GPU: the line is about another partition.
func (r Reset) Suspects(gpu gpreempt.GPU, queues []gpreempt.QueueEntry, pasid func(pid int32) uint32) (named gpreempt.ProcessKey, all []gpreempt.ProcessKey) {
	known := map[int32]uint32{}
	isNamed := func(pid int32) bool {
		if r.PID != 0 {
			return pid == r.PID
		}
		if _, asked := known[pid]; !asked {
			known[pid] = pasid(pid)
		}
		return known[pid] == r.PASID
	}
	var ring uint64
	here := false
	for _, q := range queues {
		if !isNamed(q.Process.PID) {
			continue
		}
		named = q.Process
		here = here || q.GPU == gpu.ID
		if q.ID == r.Queue {
			ring = q.Info.RingBase
		}
	}
	if !here && !named.IsZero() {
		return named, nil
	}
	for _, q := range queues {
		sameRing := ring == 0 || q.Info.RingBase == 0 || q.Info.RingBase == ring
		if q.GPU == gpu.ID && (named.IsZero() || q.Process == named || !gpu.MES && q.Type == gpreempt.QueueCompute && sameRing) {
			all = append(all, q.Process)
		}
	}
	slices.SortFunc(all, gpreempt.ProcessKey.Compare)
	return named, slices.Compact(all)
}
