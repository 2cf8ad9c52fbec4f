package driver_test

import (
	"fmt"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// typed is client.queue with the type of the queue.
func (c *client) typed(ring, kind uint32) (id uint32) {
	c.Helper()
	return c.call(kfdabi.ReqCreateQueue, ring, 0, ring+1, 0, ring+2, 0, 0, 0, 4096, 7, kind, 100, 5, 0, 0, 0, 0, 0, ring+3, 0, 8192, 64)[13]
}

// resetOf returns the processes that have a reset queue, and those whose queues of it are active.
func resetOf(d *driver.Driver) (reset, active []int32) {
	for _, p := range d.Processes() {
		for _, q := range p.Queues {
			if q.Reset {
				reset = append(reset, p.PID)
			}
			if q.Reset && q.Active {
				active = append(active, p.PID)
			}
		}
	}
	return reset, active
}

// Process 10 is older than 20, and their queues have rings at one address. The queue of 10 does
// not leave the GPU when 20 creates another queue.
func TestQueueThatDoesNotLeaveTheGPUIsReset(t *testing.T) {
	preemption := "Queue preemption failed for queue with doorbell_id: 0"
	for _, tt := range []struct {
		profile string
		kind    uint32
		lines   []string
		reset   []int32
		errno   syscall.Errno
	}{
		// By the address of the ring: the wrong process.
		{"6.12.117", kfd.QueueTypeComputeAQL, []string{preemption, "queue id 0x0 at pasid 0x8014 is reset", "Queues reset on process task tid 20 thread task pid 20"}, []int32{20}, 0},
		{"7.2", kfd.QueueTypeComputeAQL, []string{preemption, "queue id 0x0 at pasid 20 is reset", "Queues reset on process task tid 20 thread task pid 20"}, []int32{20}, 0},
		{"7.3", kfd.QueueTypeComputeAQL, []string{preemption, "queue id 0x0 at pasid 20 is reset", "Queues reset on process task tid 20 thread task pid 20"}, []int32{20}, 0},
		// By the doorbell.
		{"7.2", kfd.QueueTypeSDMA, []string{"queue id 0x0 at pasid 10 is reset", "Queues reset on process task tid 10 thread task pid 10"}, []int32{10}, 0},
		{"6.12.117", kfd.QueueTypeSDMA, nil, nil, 0},
		{"6.5", kfd.QueueTypeComputeAQL, []string{preemption}, nil, syscall.ETIME},
	} {
		t.Run(fmt.Sprint(tt.profile, "/", tt.kind), func(t *testing.T) {
			var lines []string
			stuck := driver.QueueOf{}
			d, err := driver.New(driver.Config{
				Profile: tt.profile, Nodes: []driver.Node{{ID: 7, GFX: 90010}},
				Log:   func(_ gpreempt.GPUID, text string) { lines = append(lines, text) },
				PASID: func(mm driver.MM) uint32 { return 0x8000 + uint32(mm.(int32)) },
			}, func(s driver.Step) (o driver.Outcome) {
				if s.Kind == driver.StepUnmap {
					o.Stuck = stuck
				}
				return o
			})
			if err != nil {
				t.Fatal(err)
			}
			old, young := newClient(t, d, 10), newClient(t, d, 20)
			old.typed(0x10000, tt.kind)
			young.typed(0x10000, tt.kind)
			stuck = driver.QueueOf{PID: 10}
			memory := space{bytes: append(words(0x20000, 0, 0x20001, 0, 0x20002, 0, 0, 0, 4096, 7, kfd.QueueTypeComputeAQL, 100, 5, 0, 0, 0, 0, 0, 0x20003, 0, 8192, 64), make([]byte, 512)...)}
			_, errno := d.Ioctl(young.task, young.file, kfdabi.ReqCreateQueue, memory)
			reset, active := resetOf(d)
			if diff := cmp.Diff(tt.lines, lines); diff != "" || errno != tt.errno {
				t.Errorf("%v, want %v; lines (-want +got):\n%s", errno, tt.errno, diff)
			}
			if diff := cmp.Diff(tt.reset, reset); diff != "" || len(active) != 0 {
				t.Errorf("reset queues that are active: %v; processes with a reset queue (-want +got):\n%s", active, diff)
			}
		})
	}
}

// MES does not answer REMOVE_QUEUE of a DESTROY_QUEUE. Only drivers before 7.2 return the error.
func TestQueueThatMESDoesNotRemove(t *testing.T) {
	line := "MES failed to respond to msg=REMOVE_QUEUE"
	for _, tt := range []struct {
		profile string
		lines   []string
		errno   syscall.Errno
		running bool
	}{
		{"6.12.117", []string{line, "failed to remove hardware queue from MES, doorbell=0x0", "MES might be in unrecoverable state, issue a GPU reset"}, syscall.ETIME, true},
		{"7.2", []string{line}, 0, true},
		{"7.3", []string{line, "queue id 0x0 at pasid 10 is reset", "Queues reset on process task tid 10 thread task pid 10"}, 0, false},
	} {
		t.Run(tt.profile, func(t *testing.T) {
			var lines []string
			d, err := driver.New(driver.Config{
				Profile: tt.profile, Nodes: []driver.Node{{ID: 7, GFX: 110000}},
				Log: func(_ gpreempt.GPUID, text string) { lines = append(lines, text) },
			}, func(s driver.Step) (o driver.Outcome) {
				if s.Kind == driver.StepRemove {
					o.Errno = syscall.ETIME
				}
				return o
			})
			if err != nil {
				t.Fatal(err)
			}
			c := newClient(t, d, 10)
			id := c.typed(0x10000, kfd.QueueTypeComputeAQL)
			// UPDATE_QUEUE with a percentage of 0 takes the queue off the GPU.
			_, errno := d.Ioctl(c.task, c.file, kfdabi.ReqUpdateQueue, space{bytes: append(words(0x10000, 0, id, 4096, 0, 5), make([]byte, 64)...)})
			q := d.Processes()[0].Queues[0]
			if diff := cmp.Diff(tt.lines, lines); diff != "" || errno != tt.errno || q.Running != tt.running {
				t.Errorf("%v, want %v; queue %+v, want it running %v; lines (-want +got):\n%s", errno, tt.errno, q, tt.running, diff)
			}
		})
	}
}
