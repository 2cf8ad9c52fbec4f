package testutil

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// What holds the lock is shown in a guest with the driver; here, that a failure leaves nothing.
func TestLockOfNoDriverIsNotHeld(t *testing.T) {
	release, err := HoldDriverLock(-1)
	skipWithoutUserfaultfd(t, err)
	if release != nil || !errors.Is(err, unix.EBADF) {
		t.Errorf("HoldDriverLock of no descriptor returns %v, want EBADF", err)
	}
}

// The kernel waits for the page, and its access fails when the page is refused.
func TestCallThatWritesToAnUnfilledPageFailsWhenItIsRefused(t *testing.T) {
	page, err := newUnfilled()
	skipWithoutUserfaultfd(t, err)
	if err != nil {
		t.Fatal(err)
	}
	var p [2]int
	if err := unix.Pipe(p[:]); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(p[0])
	defer unix.Close(p[1])
	if _, err := unix.Write(p[1], []byte("x")); err != nil {
		t.Fatal(err)
	}
	read := make(chan error)
	go func() {
		_, err := unix.Read(p[0], page.memory)
		read <- err
	}()
	if err := page.awaitAccess(); err != nil {
		t.Error(err)
	}
	if err := page.refuse(); err != nil {
		t.Error(err)
	}
	if err := <-read; !errors.Is(err, unix.EFAULT) {
		t.Errorf("the call returns %v, want EFAULT", err)
	}
	if err := page.close(); err != nil {
		t.Error(err)
	}
}

// The program that holds a lock may forget how to release it.
func TestCallWaitsForAPageThatNobodyKnows(t *testing.T) {
	if os.Getenv(waiterEnv) != "" {
		fmt.Println(waitUnknown(t))
		os.Exit(0) // which ends the call
	}
	page, err := newUnfilled()
	skipWithoutUserfaultfd(t, err)
	if err := page.close(); err != nil {
		t.Error(err)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), waiterEnv+"=1")
	out, err := cmd.CombinedOutput()
	if err != nil || string(out) != "1\n" {
		t.Errorf("%q, %v: want 1 page for which the call waits", out, err)
	}
}

// waiterEnv makes the test the process that has a call wait.
const waiterEnv = "GPREEMPT_TEST_WAITER"

// waitUnknown has a call wait for a page, forgets it, and returns how many such pages there are
// once nothing is left to collect.
func waitUnknown(t *testing.T) (pages int) {
	var p [2]int
	if err := unix.Pipe(p[:]); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Write(p[1], []byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := stop(func(memory []byte) error { _, err := unix.Read(p[0], memory); return err }); err != nil {
		t.Fatal(err)
	}
	for range 3 { // what is found in one collection is closed before what is found in the next
		collect()
	}
	open, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range open {
		if to, err := os.Readlink(fd); err == nil && to == "anon_inode:[userfaultfd]" {
			pages++
		}
	}
	return pages
}

// collect returns after a collection that has found something.
func collect() {
	found := make(chan struct{})
	runtime.SetFinalizer(&struct{ _ [64]byte }{}, func(any) { close(found) })
	runtime.GC()
	<-found
}

func skipWithoutUserfaultfd(t *testing.T, err error) {
	t.Helper()
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM) {
		t.Skip("needs a userfaultfd that stops the kernel, too: ", err)
	}
}
