package driver

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// SMIStream is an open stream of the events of one GPU: struct kfd_smi_client.
type SMIStream struct {
	d      *Driver
	gpu    *gpu
	pid    int32
	super  bool
	events kfd.SMIMask
	fifo   []byte
}

// smiEvents is kfd_ioctl_smi_events and kfd_smi_event_open.
func (d *Driver) smiEvents(c *call, args *kfd.SMIEventsArgs) (int, errno) {
	x := d.lookUp(c, args.GPUID)
	if x == nil {
		return 0, EINVAL
	}
	s := &SMIStream{d: d, gpu: x.gpu, super: c.task.Capable(CapSysAdmin), pid: c.task.Leader().TID()}
	if d.prof.smiInside && !d.prof.smiGlobal {
		s.pid = c.task.PIDInside()
	}
	fd := c.task.Install(s)
	if fd < 0 {
		return 0, errno(-fd)
	}
	x.gpu.smi = append(x.gpu.smi, s)
	args.AnonFD = uint32(fd)
	return 0, 0
}

// Read is kfd_smi_ev_read. It never waits. The error is an errno.
func (s *SMIStream) Read(p []byte) (int, error) {
	s.d.mu.Lock()
	defer s.d.leave()
	if len(s.fifo) == 0 || len(p) == 0 {
		return 0, EAGAIN
	}
	n := copy(p, s.fifo)
	s.fifo = s.fifo[n:]
	s.d.note()
	return n, nil
}

// Write is kfd_smi_ev_write: p is the mask of events. The error is an errno.
func (s *SMIStream) Write(p []byte) (int, error) {
	s.d.mu.Lock()
	defer s.d.leave()
	if len(p) < 8 {
		return 0, EFAULT
	}
	s.events = kfd.SMIMask(binary.NativeEndian.Uint64(p))
	return 8, nil
}

// Pending reports whether there is something to read (kfd_smi_ev_poll).
func (s *SMIStream) Pending() bool {
	s.d.mu.Lock()
	defer s.d.leave()
	return len(s.fifo) > 0
}

// Release closes the open file (kfd_smi_ev_release).
func (s *SMIStream) Release() {
	s.d.mu.Lock()
	defer s.d.leave()
	s.gpu.smi = slices.DeleteFunc(s.gpu.smi, func(o *SMIStream) bool { return o == s })
}

// wants is kfd_smi_ev_enabled. pid is 0 for an event that every stream gets.
func (s *SMIStream) wants(id kfd.SMIEventID, pid int32) bool {
	others := s.super && (!s.d.prof.smiNeedsBit || s.events&kfd.SMIAllProcesses != 0)
	return (pid == 0 || pid == s.pid || others) && s.events&kfd.SMIEvents(id) != 0
}

// emit is kfd_smi_event_add: an event that does not fit is dropped. p is nil for an event that
// every stream gets.
func (d *Driver) emit(g *gpu, id kfd.SMIEventID, p *process, format string, args ...any) {
	var pid int32
	switch {
	case p != nil && d.prof.smiGlobal:
		pid = p.PID
	case p != nil:
		pid = d.smiPID(p)
	}
	line := fmt.Appendf(nil, "%x ", uint32(id))
	line = fmt.Appendf(line, format, args...)
	for _, s := range g.smi {
		if s.wants(id, pid) && len(s.fifo)+len(line) <= d.prof.smiFIFO {
			s.fifo = append(s.fifo, line...)
		}
	}
	d.note()
}

// smiPID returns the pid of a process in events: kfd_smi_task_to_pid since 7.2.
func (d *Driver) smiPID(p *process) int32 {
	if d.prof.smiInside {
		return p.lead.PIDInside()
	}
	return p.PID
}

// smiQueues is kfd_smi_event_queue_eviction, and kfd_smi_event_queue_restore with why 0.
func (d *Driver) smiQueues(x *pdd, id kfd.SMIEventID, why kfd.SMITrigger) {
	pid := d.smiPID(x.p)
	d.emit(x.gpu, id, x.p, "%d -%d %x %d\n", d.boottime(), pid, uint32(x.gpu.ID), int(why))
}

func (d *Driver) smiReset(g *gpu, id kfd.SMIEventID) {
	d.emit(g, id, nil, "%x %s\n", g.resets, "")
}

// smiAbout returns whom an event about a memory fault, or about the start or end of a process,
// is about: up to 7.2 every stream gets it.
func (d *Driver) smiAbout(p *process) *process {
	if d.prof.smiGlobal {
		return p
	}
	return nil
}

// smiProcess is kfd_smi_event_process.
func (d *Driver) smiProcess(x *pdd, id kfd.SMIEventID) {
	d.emit(x.gpu, id, d.smiAbout(x.p), "%x %s\n", uint32(x.p.PID), x.p.lead.Comm())
}

func (d *Driver) boottime() int64 {
	if !d.countEvents {
		return d.cfg.Clock().Boot
	}
	d.events += 1000
	return d.events
}
