package driver

import (
	"fmt"
	"slices"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// removeRule is what remove_queue_mes does when MES does not answer REMOVE_QUEUE.
type removeRule uint8

const (
	// removeFails: it returns the error, and resets the GPU.
	removeFails removeRule = iota
	// removeForgets: it suspends and resumes all queues of the GPU, and returns 0. MES is not
	// asked again, and runs the queue (7.2).
	removeForgets
	// removeResets: it resets what hangs, and returns 0 (7.3, reset_queues_mes, with firmware
	// that can do that).
	removeResets
)

// print writes a line about a GPU to the kernel log.
func (d *Driver) print(g *gpu, format string, a ...any) {
	if d.cfg.Log != nil {
		d.cfg.Log(g.ID, fmt.Sprintf(format, a...))
	}
}

// resetStuck is what unmap_queues_cpsch does when the firmware has answered, and a queue is
// still on the GPU: check_preemption_failed and reset_hung_queues for one of
// compute, sdma_has_hang and reset_hung_queues_sdma for one of SDMA. The driver finds a queue
// of SDMA by its doorbell, and one of compute by the address of its ring alone
// (find_queue_by_address): it takes the first process with a queue at that address.
func (d *Driver) resetStuck(g *gpu, which QueueOf) errno {
	stuck := d.find(g, func(q *queue) bool { return q.pdd.p.PID == which.PID && q.ID == which.ID })
	switch {
	case stuck == nil:
		return 0
	case stuck.Type == kfd.QueueTypeSDMA || stuck.Type == kfd.QueueTypeSDMAXGMI:
		if !d.prof.resetsSDMA {
			return 0 // nobody looks
		}
		d.setReset(g, stuck)
	default:
		for xcc := range g.node.XCCs {
			prefix := ""
			if g.node.XCCs > 1 {
				prefix = fmt.Sprintf("XCC %d: ", xcc)
			}
			d.print(g, "%sQueue preemption failed for queue with doorbell_id: %x", prefix, stuck.Doorbell)
		}
		if !d.prof.resets {
			g.Hung = true
			return ETIME
		}
		named := d.find(g, func(q *queue) bool { return q.Ring == stuck.Ring })
		for range g.node.XCCs {
			d.setReset(g, named)
		}
	}
	d.signalReset(g, true)
	return 0
}

// find returns the first queue on a GPU in the order of the driver's lists: the newest process
// first, and its newest queue.
func (d *Driver) find(g *gpu, is func(*queue) bool) *queue {
	for _, p := range slices.Backward(d.procs) {
		for _, x := range p.pdds {
			if x.gpu != g {
				continue
			}
			if i := slices.IndexFunc(x.queues, is); i >= 0 {
				return x.queues[i]
			}
		}
	}
	return nil
}

// setReset is set_queue_as_reset. The queue is inactive until something makes it active again,
// such as RESUME_QUEUES: QUEUE_IS_ACTIVE does not look at is_reset.
func (d *Driver) setReset(g *gpu, q *queue) {
	switch {
	case d.prof.resetsSDMA:
		d.print(g, "queue id 0x%0x at pasid %d is reset", q.ID, q.pdd.p.PID)
	case d.cfg.PASID != nil:
		d.print(g, "queue id 0x%0x at pasid 0x%0x is reset", q.ID, d.cfg.PASID(q.pdd.p.MM))
	default:
		d.print(g, "queue id 0x%0x at pasid 0x%0x is reset", q.ID, 0x8000)
	}
	q.pdd.hasReset, q.Active, q.Reset = true, false, true
	d.note()
}

// notRemoved is the rest of remove_queue_mes when MES has not answered.
func (d *Driver) notRemoved(g *gpu, q *queue) errno {
	d.print(g, "MES failed to respond to msg=REMOVE_QUEUE")
	switch d.prof.removes {
	case removeForgets:
	case removeResets:
		delete(g.mapped, q)
		d.setReset(g, q)
		d.signalReset(g, true)
	default:
		d.print(g, "failed to remove hardware queue from MES, doorbell=0x%x", q.Doorbell)
		d.print(g, "MES might be in unrecoverable state, issue a GPU reset")
		return ETIME
	}
	d.note()
	return 0
}
