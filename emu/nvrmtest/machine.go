// Package nvrmtest is a fake of NVIDIA's resource manager (RM) behind nvrm.Sys: clients that belong
// to an open file, objects, channels that are on or off, statuses and faults. Its rules are our
// reading of the public source and of recorded answers of a real driver; what the GPU's firmware
// (GSP-RM) does is known from these answers only.
//
// Descriptors are real ones of this program, so that they can be sent over sockets.
package nvrmtest

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// GPU is the one GPU of a Machine.
const GPU gpreempt.GPUID = 0x100

const (
	clientBase  nvrm.Handle = 0xc1d00000
	objectBase  nvrm.Handle = 0x5c000000
	channel     nvrm.Class  = 0xc86f // HOPPER_CHANNEL_GPFIFO_A
	compute     nvrm.Class  = 0xcbc0 // HOPPER_COMPUTE_A
	copyEngine  nvrm.Class  = 0xc8b5 // HOPPER_DMA_COPY_A
	firstNumber             = 20
)

// Machine is a host with one GPU. Its methods may be called by several goroutines at once.
type Machine struct {
	mu        sync.Mutex // guards all below, and what it leads to
	processes map[gpreempt.ProcessKey]*Process
	pidfds    map[uint64]*Process  // by the inode number of the pipe, ended ones too
	files     map[uint64]*openFile // by inode number
	clients   map[nvrm.Handle]*client
	newest    nvrm.Handle
	calls     int
	cc        nvrm.Confidential
	ccErr     error
	// before is called before each control call, without mu. An error is its result.
	before func(call int, cmd nvrm.Command) error
}

// Process is a process of a Machine.
type Process struct {
	m     *Machine
	Key   gpreempt.ProcessKey
	files map[int]*openFile
	// parent has forked it, with copies of its files; nil for none.
	parent *Process
	alive  [2]int // a pipe: the end of the second makes the first readable
	gone   bool
}

// openFile is an open file of /dev/nvidiactl. It is freed when all copies are closed.
type openFile struct {
	fd, copies int
	inode      uint64
	owners     int // processes that have it open
}

type client struct {
	file    *openFile
	next    nvrm.Handle
	objects map[nvrm.Handle]*object
	device  nvrm.Handle
}

type object struct {
	class  nvrm.Class
	parent nvrm.Handle
	off    int // how often it was disabled: enabling undoes one
}

// New returns a machine without processes.
func New() *Machine {
	return &Machine{processes: map[gpreempt.ProcessKey]*Process{}, pidfds: map[uint64]*Process{}, files: map[uint64]*openFile{}, clients: map[nvrm.Handle]*client{}, newest: clientBase}
}

// Close ends all processes.
func (m *Machine) Close() {
	for _, p := range m.pidfds {
		p.Kill()
		_ = unix.Close(p.alive[0])
	}
	clear(m.pidfds)
}

// Before has f called before each control call with its number, from 1 on. A result other than
// nil is that of the call, which has no effect then.
func (m *Machine) Before(f func(call int, cmd nvrm.Command) error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.before, m.calls = f, 0
}

// Start starts a process as CUDA does: a client with a device, a group of 8 compute channels and
// groups of copy channels. The key is any.
func (m *Machine) Start(key gpreempt.ProcessKey) *Process {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.process(key)
	f := p.open()
	c := m.newClient(f)
	c.device = c.add(nvrm.ClassDevice, c.handle(m))
	c.add(nvrm.ClassSubdevice, c.device)
	c.next += 100 // memory and others that CUDA has freed
	c.group(8, compute)
	for range 3 {
		c.group(4, copyEngine)
	}
	return p
}

// process needs mu.
func (m *Machine) process(key gpreempt.ProcessKey) *Process {
	p := &Process{m: m, Key: key, files: map[int]*openFile{}}
	must(unix.Pipe2(p.alive[:], unix.O_CLOEXEC))
	m.processes[key], m.pidfds[inode(p.alive[0])] = p, p
	return p
}

// Fork starts a process with copies of the files of this one.
func (p *Process) Fork(key gpreempt.ProcessKey) *Process {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	child := p.m.process(key)
	child.parent, child.files = p, maps.Clone(p.files)
	for _, f := range child.files {
		f.owners++
	}
	return child
}

func must(err error) {
	if err != nil {
		panic(err) // the test has no descriptors left
	}
}

func (p *Process) open() *openFile {
	fd, err := unix.MemfdCreate("nvidiactl", unix.MFD_CLOEXEC)
	must(err)
	f := &openFile{fd: fd, inode: inode(fd), owners: 1}
	p.m.files[f.inode] = f
	p.files[firstNumber+len(p.files)] = f
	return f
}

func inode(fd int) uint64 {
	var st unix.Stat_t
	must(unix.Fstat(fd, &st))
	return st.Ino
}

func (m *Machine) newClient(f *openFile) *client {
	c := &client{file: f, next: objectBase, objects: map[nvrm.Handle]*object{}}
	m.clients[m.newest] = c
	c.objects[m.newest] = &object{class: nvrm.ClassRoot}
	m.newest++
	return c
}

func (c *client) handle(m *Machine) nvrm.Handle {
	for h, other := range m.clients {
		if other == c {
			return h
		}
	}
	return 0
}

func (c *client) add(class nvrm.Class, parent nvrm.Handle) nvrm.Handle {
	h := c.next
	c.next++
	c.objects[h] = &object{class: class, parent: parent}
	return h
}

func (c *client) group(channels int, engine nvrm.Class) {
	g := c.add(nvrm.ClassGroup, c.device)
	for range channels {
		c.add(engine, c.add(channel, g))
	}
}

func (p *Process) client() *client {
	for _, c := range p.m.clients {
		if slices.Contains(slices.Collect(maps.Values(p.files)), c.file) {
			return c
		}
	}
	return nil
}

// Bear adds a group of compute channels, as a new context does.
func (p *Process) Bear(channels int) {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	p.client().group(channels, compute)
}

// FreeChannel frees the first compute channel.
func (p *Process) FreeChannel() {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	c := p.client()
	for _, h := range slices.Sorted(maps.Keys(c.objects)) {
		if c.objects[h].class == compute {
			delete(c.objects, c.objects[h].parent)
			delete(c.objects, h)
			return
		}
	}
}

// State returns how many compute channels of the process are off, and how many it has; and the
// same of other channels.
func (p *Process) State() (off, all, othersOff, others int) {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	c := p.client()
	if c == nil {
		return 0, 0, 0, 0
	}
	for _, o := range c.objects {
		if o.class != compute && o.class != copyEngine {
			continue
		}
		isOff := 0
		if c.objects[o.parent].off > 0 {
			isOff = 1
		}
		if o.class == compute {
			off, all = off+isOff, all+1
		} else {
			othersOff, others = othersOff+isOff, others+1
		}
	}
	return off, all, othersOff, others
}

// Kill ends the process. Its clients live as long as a copy of their files.
func (p *Process) Kill() {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	if p.gone {
		return
	}
	p.gone = true
	delete(p.m.processes, p.Key)
	_ = unix.Close(p.alive[1])
	for _, f := range p.files {
		f.owners--
		p.m.release(f)
	}
}

// release frees a file that nobody has open. It needs mu.
func (m *Machine) release(f *openFile) {
	if f.owners > 0 || f.copies > 0 {
		return
	}
	delete(m.files, f.inode)
	_ = unix.Close(f.fd)
	maps.DeleteFunc(m.clients, func(_ nvrm.Handle, c *client) bool { return c.file == f })
}

// Clients returns how many clients exist: those of ended processes too, while copies are open.
func (m *Machine) Clients() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.clients)
}

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

func (s sys) Adopt(pidfd int, _ int32) nvrm.Process {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	return &handle{s.m.pidfds[inode(pidfd)], pidfd}
}

type handle struct {
	*Process
	fd int
}

func (h *handle) FD() int      { return h.fd }
func (h *handle) Exited() bool { return proc.Exited(h.fd) }
func (h *handle) Close()       { _ = unix.Close(h.fd) }

func (h *handle) Parent() (nvrm.Process, error) {
	if h.parent == nil {
		return nil, proc.ErrGone
	}
	return sys{h.m}.Open(h.parent.Key)
}

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
