package nvrmtest

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// Sys returns the machine as a program sees it.
func (m *Machine) Sys() nvrm.Sys { return sys{m} }

type sys struct{ m *Machine }

func (s sys) Open(key gpreempt.ProcessKey) (nvrm.Process, error) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	p := s.m.processes[key]
	if p == nil {
		return nil, fmt.Errorf("process %d: %w", key.PID, proc.ErrGone)
	}
	fd, err := unix.FcntlInt(uintptr(p.alive[0]), unix.F_DUPFD_CLOEXEC, 0)
	return &handle{p, fd}, err
}

func (s sys) NewestClient() (nvrm.Handle, error) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	s.m.newest++
	return s.m.newest - 1, nil
}

// SetConfidential sets what RM answers about confidential computing.
func (m *Machine) SetConfidential(state nvrm.Confidential, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.cc, m.ccErr = state, err
}

func (s sys) Confidential() (nvrm.Confidential, error) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	return s.m.cc, s.m.ccErr
}

type handle struct {
	*Process
	fd int
}

func (h *handle) Exited() bool { return proc.Exited(h.fd) }
func (h *handle) Close()       { _ = unix.Close(h.fd) }

func (h *handle) Files() ([]int, error) {
	h.m.mu.Lock()
	defer h.m.mu.Unlock()
	if h.gone {
		return nil, proc.ErrGone
	}
	return slices.Sorted(maps.Keys(h.files)), nil
}

func (h *handle) Copy(number int) (nvrm.File, error) {
	h.m.mu.Lock()
	defer h.m.mu.Unlock()
	f := h.files[number]
	switch {
	case h.gone:
		return nil, proc.ErrGone
	case f == nil:
		return nil, unix.EBADF
	}
	fd, err := unix.FcntlInt(uintptr(f.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	f.copies++
	return &file{m: h.m, fd: fd, f: f}, nil
}

// file is a copy.
type file struct {
	m  *Machine
	fd int
	f  *openFile // nil: not one of the machine
}

func (f *file) Close() error {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if f.f != nil {
		f.f.copies--
		f.m.release(f.f)
	}
	return unix.Close(f.fd)
}

func (f *file) Control(clientHandle, objectHandle nvrm.Handle, cmd nvrm.Command, params []byte) error {
	f.m.mu.Lock()
	f.m.calls++
	call, before := f.m.calls, f.m.before
	f.m.mu.Unlock()
	if before != nil {
		if err := before(call, cmd); err != nil {
			return err
		}
	}
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	c := f.m.clients[clientHandle]
	switch {
	case f.f == nil:
		return unix.EBADF
	case c == nil, c.file != f.f:
		return WrongClient
	}
	o := c.objects[objectHandle]
	if o == nil {
		return nvrm.ObjectNotFound
	}
	switch {
	case cmd == nvrm.GetHandleInfo && o.class == nvrm.ClassRoot:
		return c.info(nvrm.Params[nvrm.HandleInfo](params))
	case cmd == nvrm.GetGPUID && o.class == nvrm.ClassSubdevice:
		nvrm.Params[nvrm.GPUIDInfo](params).GPU = uint32(GPU)
		return nil
	case cmd == nvrm.DisableChannels && o.class == nvrm.ClassSubdevice:
		return f.m.disable(nvrm.Params[nvrm.DisableList](params))
	}
	return nvrm.NotSupported
}

// WrongClient is the status for a client of another file, or none.
const WrongClient = nvrm.InvalidClient

func (c *client) info(p *nvrm.HandleInfo) error {
	o := c.objects[p.Object]
	switch {
	case o == nil:
		return nvrm.ObjectNotFound
	case p.Index == nvrm.IndexParent:
		p.Result = uint64(o.parent)
	case p.Index == nvrm.IndexClass:
		p.Result = uint64(o.class)
	default:
		return nvrm.InvalidArgument
	}
	return nil
}

// disable is the firmware's, as a driver of version 580.159.04 with an H200 answered: clients in the
// list are not checked against the caller, disabling is counted for each channel, and a wrong channel
// prevents disabling those before it, but not enabling them.
func (m *Machine) disable(p *nvrm.DisableList) error {
	if p.PreemptEvent != 0 {
		return nvrm.NotPermitted
	}
	if p.Number == 0 {
		return nvrm.InvalidStruct
	}
	if p.OnlyScheduling != 0 {
		panic(errors.New("OnlyScheduling leaves a state that nothing undoes"))
	}
	wrong := func(i uint32) bool {
		c := m.clients[p.Clients[i]]
		return c == nil || c.objects[p.Channels[i]] == nil || !c.objects[p.Channels[i]].class.IsChannel()
	}
	for i := range min(p.Number, nvrm.MaxChannels) {
		if p.Disable != 0 && wrong(i) {
			return nvrm.InvalidChannel
		}
	}
	for i := range min(p.Number, nvrm.MaxChannels) {
		c := m.clients[p.Clients[i]]
		if wrong(i) {
			return nvrm.InvalidChannel // those before it are done
		}
		if o := c.objects[p.Channels[i]]; p.Disable != 0 {
			o.off++
		} else {
			o.off = max(0, o.off-1)
		}
	}
	return nil
}
