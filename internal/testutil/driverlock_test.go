package testutil

import (
	"errors"
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

func skipWithoutUserfaultfd(t *testing.T, err error) {
	t.Helper()
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM) {
		t.Skip("needs a userfaultfd that stops the kernel, too: ", err)
	}
}
