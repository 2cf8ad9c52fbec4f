package kfdemu

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// file is an emulated file that is open: a memory file whose inode is known. It is opened
// twice: for the program, with a lock that the kernel releases with the last descriptor and the
// last mapping of that open file, in whichever process, and here.
type file struct {
	id    FileID
	space *Space
	// kfd is the driver's file of /dev/kfd, kmap that of its extension; both are nil for a render
	// node, whose minor is render.
	kfd    *driver.File
	kmap   *driver.KmapFile
	render uint32
	fd     int
	// doorbells are mapped for /dev/kfd: those of each GPU. They stay until the file is
	// closed and no queue has one of them; both are guarded by files.mu.
	doorbells [][]byte
	queues    int
	closed    bool
	// asked is when the last CREATE_QUEUE used it: see creates.
	asked uint64
}

// files are the emulated files that are open.
type files struct {
	ending *endings
	mu     sync.Mutex
	byID   map[FileID]*file
	gpus   []gpreempt.GPU
	// asked counts calls of CREATE_QUEUE.
	asked uint64
}

func newFiles(ending *endings) files { return files{ending: ending, byID: map[FileID]*file{}} }

// The layout of the memory file of /dev/kfd: the doorbells of one GPU after another, then
// the page of events, then those with registers. A memory file cannot have the driver's own
// offsets, which are negative. In that of a render node, allocations are anywhere. All are
// sparse.
const (
	// doorbellsApart: for its first queue on a GPU libhsakmt 5.2 takes the lower half of
	// the offset for where a doorbell is among the process's, and maps at the upper.
	doorbellsApart = 1 << 32

	eventsAt  = 1 << 30
	mmioAt    = 2 << 30
	fileBytes = 1 << 46
)

// offsets describes the layout to the driver.
func (s *files) offsets(gpus []gpreempt.GPU) *driver.Offsets {
	s.gpus = gpus
	return &driver.Offsets{
		Doorbells: func(id gpreempt.GPUID) uint64 { return uint64(s.index(id)) * doorbellsApart },
		Events:    eventsAt,
		MMIO:      func(id gpreempt.GPUID) uint64 { return mmioAt + uint64(s.index(id))*uint64(os.Getpagesize()) },
	}
}

func (s *files) index(id gpreempt.GPUID) int {
	return slices.IndexFunc(s.gpus, func(g gpreempt.GPU) bool { return g.ID == id })
}

// add makes the memory file of f, registers it by its inode, and returns a descriptor for the
// program. The caller closes that once the program has its own.
func (s *files) add(f *file) (program int, err error) {
	name := fmt.Sprintf("renderD%d", f.render)
	switch {
	case f.kfd != nil:
		name = "kfd"
	case f.kmap != nil:
		name = "kfd_kmap"
	}
	if f.fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING); err != nil {
		return -1, fmt.Errorf("make an emulated file: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, unix.Close(f.fd))
		}
	}()
	if err := unix.Ftruncate(f.fd, fileBytes); err != nil {
		return -1, fmt.Errorf("make room in an emulated file: %w", err)
	}
	// The program could make it shorter than what is mapped here.
	if _, err := unix.FcntlInt(uintptr(f.fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		return -1, fmt.Errorf("seal an emulated file: %w", err)
	}
	if f.id, err = FileIDAt(int32(os.Getpid()), uint64(f.fd)); err != nil {
		return -1, err
	}
	if program, err = f.openAgain(); err != nil {
		return -1, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, unix.Close(program))
		}
	}()
	for i := range s.gpus {
		if f.kfd == nil {
			break
		}
		mapped, err := unix.Mmap(f.fd, int64(i)*doorbellsApart, driver.DoorbellBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			f.closed = true // the doorbells that are mapped are not used
			return -1, errors.Join(fmt.Errorf("map the doorbells: %w", err), f.unmap())
		}
		f.doorbells = append(f.doorbells, mapped)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.byID[f.id] = f
	return program, nil
}

// openAgain opens the file once more and locks that open file.
func (f *file) openAgain() (int, error) {
	fd, err := unix.Open(procPath(int32(os.Getpid()), "fd/"+strconv.Itoa(f.fd)), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open an emulated file: %w", err)
	}
	if err := unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}); err != nil {
		return -1, errors.Join(fmt.Errorf("lock an emulated file: %w", err), unix.Close(fd))
	}
	return fd, nil
}

// open reports whether a process has a descriptor or a mapping of the open file.
func (f *file) open() bool {
	lock := unix.Flock_t{Type: unix.F_WRLCK}
	err := unix.FcntlFlock(uintptr(f.fd), unix.F_OFD_GETLK, &lock)
	return err != nil || lock.Type != unix.F_UNLCK
}

// takeClosed forgets the files that no process has open, and returns them. It leaves one that a
// living process closed during a call, which may last.
func (s *files) takeClosed() (all []*file) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, f := range s.byID {
		if f.open() || s.ending.underWay(f) && f.space.Alive() {
			continue
		}
		delete(s.byID, id)
		all = append(all, f)
	}
	return all
}

// release has the driver release the file.
func (f *file) release(d *driver.Driver) {
	switch {
	case f.kfd != nil:
		d.Release(f.kfd)
	case f.kmap != nil:
		d.ReleaseKmap(f.kmap)
	}
}

// remove forgets a file: processes that still have it open have a plain memory file.
func (s *files) remove(f *file) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.byID, f.id)
	f.closed = true
	return errors.Join(f.unmap(), unix.Close(f.fd))
}

// unmap unmaps the doorbells once no queue uses them. It needs files.mu.
func (f *file) unmap() (err error) {
	if !f.closed || f.queues > 0 {
		return nil
	}
	for _, mapped := range f.doorbells {
		err = errors.Join(err, unix.Munmap(mapped))
	}
	f.doorbells = nil
	return err
}

// of returns the files a process opened.
func (s *files) of(space *Space) []*file {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []*file
	for _, f := range s.byID {
		if f.space == space {
			all = append(all, f)
		}
	}
	return all
}

// behind finds the file behind a thread's descriptor for a call, nil if it is not emulated. The
// caller calls done when the call has ended, before it is answered: after the answer the program
// may close the file, and the next open must find it released.
func (s *files) behind(tid int32, fd uint64) (f *file, done func()) {
	id, err := FileIDAt(tid, fd)
	if err != nil {
		return nil, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if f = s.byID[id]; f == nil {
		return nil, nil
	}
	return f, s.ending.enter(f)
}

// creates records a CREATE_QUEUE that uses a file: the process will map the doorbell by
// that file, of several that it may have open.
func (s *files) creates(f *file) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked++
	f.asked = s.asked
}

// doorbell returns the eight bytes of a queue's doorbell, which stay mapped until drop is called.
func (s *files) doorbell(space *Space, gpu gpreempt.GPUID, at uint32) (doorbell []byte, drop func() error) {
	all := s.of(space)
	s.mu.Lock()
	defer s.mu.Unlock()
	all = slices.DeleteFunc(all, func(f *file) bool { return f.doorbells == nil || f.closed })
	if len(all) == 0 || at+8 > driver.DoorbellBytes {
		return nil, nil
	}
	f := slices.MaxFunc(all, func(a, b *file) int { return cmp.Compare(a.asked, b.asked) })
	f.queues++
	return f.doorbells[s.index(gpu)][at : at+8], func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		f.queues--
		return f.unmap()
	}
}

// free releases the host's memory behind an allocation that the process has freed. Its
// addresses are not used again.
func (s *files) free(space *Space, a driver.Allocation) error {
	if a.Offset == 0 {
		return nil // it is memory of the process itself
	}
	var errs []error
	for _, f := range s.of(space) {
		if f.kfd == nil && f.kmap == nil && f.render == s.render(a.GPU) {
			errs = append(errs, unix.Fallocate(f.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(a.Offset), int64(a.Size)))
		}
	}
	return errors.Join(errs...)
}

func (s *files) render(id gpreempt.GPUID) uint32 { return uint32(s.gpus[s.index(id)].RenderMinor) }

// close forgets all files.
func (s *files) close() error {
	s.mu.Lock()
	var all []*file
	for _, f := range s.byID {
		all = append(all, f)
	}
	s.mu.Unlock()
	var errs []error
	for _, f := range all {
		errs = append(errs, s.remove(f))
	}
	return errors.Join(errs...)
}
