package kfdemu

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// opened returns how many files are open, once all that were closed are released.
func (e *Emulator) opened() int {
	e.sweep()
	e.ending.await()
	e.files.mu.Lock()
	defer e.files.mu.Unlock()
	return len(e.files.byID)
}

// A file stays open until its last descriptor is closed, wherever that is, and its last
// mapping.
func TestFileEndsWithItsLastDescriptor(t *testing.T) {
	e, _ := start(t, Config{Profile: driver.KmapProfile})
	must := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	for name, keep := range map[string]func(fd int) (drop func()){
		"nothing": func(int) func() { return nil },
		"dup": func(fd int) func() {
			other, err := unix.Dup(fd)
			must("dup", err)
			return func() { must("close", unix.Close(other)) }
		},
		"message": func(fd int) func() {
			pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			must("socketpair", err)
			must("send", unix.Sendmsg(pair[0], []byte{0}, unix.UnixRights(fd), nil, 0))
			return func() { must("close", errors.Join(unix.Close(pair[0]), unix.Close(pair[1]))) }
		},
		"mapping": func(fd int) func() {
			page, err := unix.Mmap(fd, 0, driver.DoorbellBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			must("mmap", err)
			return func() { must("munmap", unix.Munmap(page)) }
		},
		"child": func(fd int) func() {
			other, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
			must("dup", err)
			file := os.NewFile(uintptr(other), "kfd")
			child := exec.Command("cat")
			child.ExtraFiles = []*os.File{file}
			stdin, err := child.StdinPipe()
			must("pipe", err)
			must("start", child.Start())
			must("close", file.Close())
			return func() { must("end the child", errors.Join(stdin.Close(), child.Wait())) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, path := range []string{kfd.DevicePath, kfdabi.KmapPath, "/dev/dri/renderD128"} {
				var fd int
				here(t, e, func() {
					var err error
					fd, err = unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
					must("open", err)
				})
				drop := keep(fd)
				if n := e.opened(); n != 1 {
					t.Errorf("%s: %d files are open, want 1", path, n)
				}
				must("close", unix.Close(fd))
				if drop != nil {
					if n := e.opened(); n != 1 {
						t.Errorf("%s: %d files are open after the first close, want 1", path, n)
					}
					drop()
				}
				if n := e.opened(); n != 0 {
					t.Errorf("%s: %d files are open after the last close", path, n)
				}
			}
		})
	}
}

// A call keeps its file open, also when another thread closes the descriptor meanwhile.
func TestCallKeepsItsFileOpen(t *testing.T) {
	e, _ := start(t, Config{})
	entered, leave := make(chan struct{}), make(chan struct{})
	e.Inject(Fault{Op: driver.RequestOp(kfd.ReqGetVersion), Do: func() { close(entered); <-leave }})
	opened, closed := make(chan int, 1), make(chan struct{})
	go func() {
		defer close(closed)
		fd := <-opened
		<-entered
		if err := unix.Close(fd); err != nil {
			t.Error(err)
		}
		if n := e.opened(); n != 1 {
			t.Errorf("%d files are open during a call, want 1", n)
		}
		close(leave)
	}()
	here(t, e, func() {
		fd, err := unix.Open(kfd.DevicePath, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Error(err)
		}
		opened <- fd
		var args kfd.GetVersionArgs
		if _, err := kfd.Kernel().Ioctl(fd, kfd.ReqGetVersion, kfd.PointerTo(&args)); err != nil {
			t.Error(err)
		}
	})
	<-closed
	if n := e.opened(); n != 0 {
		t.Errorf("%d files are open after the call", n)
	}
}

// The file of a process that was killed in a call is taken at once, so that an open waits until
// the call has ended and the file is released. That of a living process is taken after the call.
func TestFileOfADeadCallerIsTakenDuringTheCall(t *testing.T) {
	h, _ := newHost(t)
	c := startProgram(t, nil)
	ending := newEndings()
	s := newFiles(&ending)
	f := &file{space: taskOf(t, h, c.pid).Space(), render: 128}
	program, err := s.add(f)
	if err != nil {
		t.Fatal(err)
	}
	found, done := s.behind(int32(os.Getpid()), uint64(program))
	if found != f {
		t.Fatalf("found %v behind the descriptor, want %v", found, f)
	}
	if err := unix.Close(program); err != nil {
		t.Fatal(err)
	}
	if taken := s.takeClosed(); len(taken) > 0 {
		t.Errorf("took %v from a living process in a call", taken)
	}
	c.kill()
	if taken := s.takeClosed(); !slices.Equal(taken, []*file{f}) {
		t.Errorf("took %v after the caller's death, want %v", taken, f)
	}
	done()
	if err := s.remove(f); err != nil {
		t.Error(err)
	}
}
