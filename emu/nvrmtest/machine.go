// Package nvrmtest is a fake of NVIDIA's resource manager (RM) behind nvrm.Sys: clients that belong
// to an open file, objects, channels that are on or off, statuses and faults. Its rules are our
// reading of the public source and of recorded answers of a real driver; what the GPU's firmware
// (GSP-RM) does is known from these answers only.
//
// Descriptors are real ones of this program, so that they can be sent over sockets.
package nvrmtest

import (
	"maps"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// GPU is the one GPU of a Machine, and FirstFile the number of the first descriptor of a process.
const (
	GPU       gpreempt.GPUID = 0x100
	FirstFile int            = 20
)

const (
	clientBase nvrm.Handle = 0xc1d00000
	objectBase nvrm.Handle = 0x5c000000
	channel    nvrm.Class  = 0xc86f // HOPPER_CHANNEL_GPFIFO_A
	compute    nvrm.Class  = 0xcbc0 // HOPPER_COMPUTE_A
	copyEngine nvrm.Class  = 0xc8b5 // HOPPER_DMA_COPY_A
)

// Machine is a host with one GPU. Its methods may be called by several goroutines at once.
type Machine struct {
	mu        sync.Mutex // guards all below, and what it leads to
	processes map[gpreempt.ProcessKey]*Process
	all       []*Process           // ended ones too
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
	alive [2]int // a pipe: the end of the second makes the first readable
	gone  bool
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
	return &Machine{processes: map[gpreempt.ProcessKey]*Process{}, files: map[uint64]*openFile{}, clients: map[nvrm.Handle]*client{}, newest: clientBase}
}

// Close ends all processes.
func (m *Machine) Close() {
	for _, p := range m.all {
		p.Kill()
		_ = unix.Close(p.alive[0])
	}
	m.all = nil
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
	c := m.newClient(p.open())
	c.boot(m)
	for range 3 {
		c.group(4, copyEngine)
	}
	return p
}

// process needs mu.
func (m *Machine) process(key gpreempt.ProcessKey) *Process {
	p := &Process{m: m, Key: key, files: map[int]*openFile{}}
	must(unix.Pipe2(p.alive[:], unix.O_CLOEXEC))
	m.processes[key], m.all = p, append(m.all, p)
	return p
}

// Fork starts a process with copies of the files of this one.
func (p *Process) Fork(key gpreempt.ProcessKey) *Process {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	child := p.m.process(key)
	child.files = maps.Clone(p.files)
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
	p.files[p.number()] = f
	return f
}

// number is for the next descriptor: FirstFile, and those behind it.
func (p *Process) number() int {
	n := FirstFile
	for p.files[n] != nil {
		n++
	}
	return n
}

// Dup adds a descriptor of the first file.
func (p *Process) Dup() (number int) {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	number = p.number()
	p.files[number] = p.files[FirstFile]
	p.files[number].owners++
	return number
}

// CloseFile closes a descriptor. The clients of a file end with its last one.
func (p *Process) CloseFile(number int) {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	f := p.files[number]
	delete(p.files, number)
	f.owners--
	p.m.release(f)
}

// OpenFile opens another file, with a client that has 8 compute channels.
func (p *Process) OpenFile() (number int) {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	number = p.number()
	p.m.newClient(p.open()).boot(p.m)
	return number
}

// OpenBare opens another file, without a client.
func (p *Process) OpenBare() (number int) {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	number = p.number()
	p.open()
	return number
}

// AddClient creates a client of a file, that has 8 compute channels.
func (p *Process) AddClient(number int) {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	p.m.newClient(p.files[number]).boot(p.m)
}

// FreeClient frees the first client of the process. Its file stays open.
func (p *Process) FreeClient() {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	first := p.client()
	maps.DeleteFunc(p.m.clients, func(_ nvrm.Handle, c *client) bool { return c == first })
}

// boot creates what CUDA does, in a new client.
func (c *client) boot(m *Machine) {
	c.device = c.add(nvrm.ClassDevice, c.handle(m))
	c.add(nvrm.ClassSubdevice, c.device)
	c.next += 500 // memory and others that CUDA has freed
	c.group(8, compute)
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

// client returns the first client of the process.
func (p *Process) client() *client {
	for _, h := range slices.Sorted(maps.Keys(p.m.clients)) {
		if c := p.m.clients[h]; slices.Contains(slices.Collect(maps.Values(p.files)), c.file) {
			return c
		}
	}
	return nil
}

// Off returns how many compute channels of all clients of the machine are disabled, and how many exist.
func (m *Machine) Off() (off, all int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.clients {
		for _, o := range c.objects {
			if o.class == compute {
				all++
				if c.objects[o.parent].off > 0 {
					off++
				}
			}
		}
	}
	return off, all
}

// Assign has RM assign so many handles of clients to others. After 1<<20 it begins again.
func (m *Machine) Assign(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.newest = clientBase + (m.newest-clientBase+nvrm.Handle(n))&(1<<20-1)
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

// State returns how many compute channels of the process are disabled, and how many it has; and the
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
