package proc

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A thread that waits for a pipe is shown in the pipe's functions; one that does not exist,
// nowhere.
func TestWaitOfAThreadIsThatOfTheKernel(t *testing.T) {
	if where := WaitsIn(os.Getpid(), 1<<30); where != "" {
		t.Errorf("a thread that does not exist waits in %q", where)
	}
	var pipe [2]int
	if err := unix.Pipe(pipe[:]); err != nil {
		t.Fatal(err)
	}
	tid, done := make(chan int), make(chan error)
	go func() {
		runtime.LockOSThread()
		tid <- unix.Gettid()
		_, err := unix.Read(pipe[0], make([]byte, 1))
		done <- err
	}()
	reader := <-tid
	var where string
	for !strings.Contains(where, "pipe") { // before it sleeps there, it may sleep elsewhere
		stat, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/stat", reader))
		if err != nil {
			t.Fatal(err)
		}
		if _, rest, _ := bytes.Cut(stat, []byte(") ")); rest[0] != 'S' {
			runtime.Gosched()
			continue
		}
		if where = WaitsIn(os.Getpid(), reader); where == "" {
			break
		}
	}
	if _, err := unix.Write(pipe[1], []byte{1}); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	_, _ = unix.Close(pipe[0]), unix.Close(pipe[1])
	if where == "" {
		t.Skip("this kernel does not say where threads wait (/proc/TID/wchan)")
	}
}
