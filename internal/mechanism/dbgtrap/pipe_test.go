package dbgtrap

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

// driverEnd returns what the driver keeps of a pipe: the same open file.
func driverEnd(t *testing.T, p *eventPipe) int {
	t.Helper()
	fd, err := unix.FcntlInt(uintptr(p.write), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

func TestPipeNeverBlocksTheDriverAndLosesNoWakeUp(t *testing.T) {
	notified := make(chan struct{}, 1)
	notify := func() {
		select {
		case notified <- struct{}{}:
		default:
		}
	}
	p, err := newEventPipe(notify)
	if err != nil {
		t.Fatal(err)
	}
	driver := driverEnd(t, p)
	// Nobody reads yet.
	for {
		if _, err := unix.Write(driver, []byte{'.'}); errors.Is(err, unix.EAGAIN) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	p.handOver()
	testutil.Receive(t, notified, "news")
	for range 100_000 {
		if _, err := unix.Write(driver, []byte{'.'}); err != nil && !errors.Is(err, unix.EAGAIN) {
			t.Fatal(err)
		}
	}
	testutil.Receive(t, notified, "news")
	unix.Close(driver)
	testutil.Receive(t, p.done, "the end of the pipe")
	p.close()
}

func TestPipeTellsWhetherTheDriverTookIt(t *testing.T) {
	notified := make(chan struct{}, 1)
	notify := func() {
		select {
		case notified <- struct{}{}:
		default:
		}
	}
	p, err := newEventPipe(notify)
	if err != nil {
		t.Fatal(err)
	}
	p.handOver()
	if p.taken() {
		t.Error("a pipe the driver did not take is taken")
	}
	p.close()

	if p, err = newEventPipe(notify); err != nil {
		t.Fatal(err)
	}
	driver := driverEnd(t, p)
	p.handOver()
	if !p.taken() {
		t.Error("a pipe the driver took is not")
	}
	unix.Close(driver)
	if p.taken() {
		t.Error("a pipe that the driver has released is taken")
	}
	testutil.Receive(t, p.done, "the end of the pipe")
	p.close()
	if p.taken() {
		t.Error("a pipe that was closed is taken")
	}
}
