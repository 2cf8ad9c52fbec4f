package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

// watchdogTime is WatchdogSec=, two of the daemon's beats.
const watchdogTime = 2 * time.Second

// serviceManager is the test's replacement of systemd: it receives a daemon's notifications.
type serviceManager struct {
	t     *testing.T
	ready chan struct{} // closed at READY=1
	beats chan struct{} // has one of WATCHDOG=1
}

// manage starts a daemon in a directory as systemd would, and waits until it serves.
func (m *emulated) manage(dir string) (*daemon, *serviceManager) {
	m.t.Helper()
	socket := filepath.Join(testutil.TempSocketDir(m.t), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		m.t.Fatal(err)
	}
	s := &serviceManager{t: m.t, ready: make(chan struct{}), beats: make(chan struct{}, 1)}
	heard := make(chan struct{})
	go func() {
		defer close(heard)
		s.hear(conn)
	}()
	m.t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			m.t.Error(err)
		}
		<-heard
	})
	d := prepare(m.t, dir, atOnce, onHost)
	d.process = m.Command(context.Background(), m.gpreemptd, "serve", "--socket", d.socket, "--config", d.config)
	d.process.Env = environment("RUNTIME_DIRECTORY="+dir, "NOTIFY_SOCKET="+socket, fmt.Sprintf("WATCHDOG_USEC=%d", watchdogTime.Microseconds()))
	d.process.Stderr = d.log
	d.run()
	select {
	case <-s.ready:
	case <-time.After(timeout):
		m.t.Fatalf("gpreemptd did not say READY=1 within %v; it wrote:\n%s", timeout, d.log)
	}
	d.awaitServing()
	d.events = watchEvents(m.t, d.admin)
	return d, s
}

// hear takes in what the daemon notifies, until the socket is closed.
func (s *serviceManager) hear(conn *net.UnixConn) {
	buf := make([]byte, 4096)
	for isReady := false; ; {
		n, err := conn.Read(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			s.t.Error(err)
			return
		}
		for line := range strings.Lines(string(buf[:n])) {
			switch strings.TrimSpace(line) {
			case "READY=1":
				if !isReady {
					isReady = true
					close(s.ready)
				}
			case "WATCHDOG=1":
				select {
				case s.beats <- struct{}{}:
				default:
				}
			}
		}
	}
}

// awaitBeat waits until the daemon has shown twice that it is alive: the first time may
// have been long ago.
func (s *serviceManager) awaitBeat() {
	s.t.Helper()
	for range 2 {
		select {
		case <-s.beats:
		case <-time.After(timeout):
			s.t.Fatalf("no beat of the daemon within %v", timeout)
		}
	}
}

// awaitSilence waits until the watchdog's time is over since the last beat.
func (s *serviceManager) awaitSilence() {
	s.t.Helper()
	silence, late := time.NewTimer(watchdogTime), time.After(timeout)
	defer silence.Stop()
	for {
		select {
		case <-s.beats:
			silence.Reset(watchdogTime)
		case <-silence.C:
			return
		case <-late:
			s.t.Fatalf("a daemon that does nothing was heard for %v", timeout)
		}
	}
}

// freeze stops the daemon's process where it is.
func (d *daemon) freeze(m *emulated) {
	d.t.Helper()
	d.signal(syscall.SIGSTOP)
	m.eventually("gpreemptd is stopped", func() bool { return procState(d.t, int32(d.process.Process.Pid)) == "T" })
}

// A daemon that hangs in a lease keeps its jobs suspended until the service manager
// ends it, as systemd does: with SIGABRT and SIGCONT, then with SIGKILL.
func TestWatchdogEndsAHangingDaemonAndEveryQueueRuns(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		end  func(d *daemon)
	}{
		{"it ends at SIGABRT", func(d *daemon) {
			d.signal(syscall.SIGABRT)
			d.signal(syscall.SIGCONT)
			d.checkExit(2) // of the Go runtime, with the stacks of all goroutines
			says(d.t, d.log.String(), "SIGABRT: abort", "goroutine ")
		}},
		{"it does not end at SIGABRT", func(d *daemon) {
			d.signal(syscall.SIGABRT)
			select {
			case <-d.exited:
				d.t.Error("a process that is stopped ended at SIGABRT")
			case <-time.After(100 * time.Millisecond): // TimeoutAbortSec=
			}
			d.kill()
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := emulate(t, kfdemu.Config{GPUs: 2})
			job := m.work("--queues", "2", "--duration", "500", "--runtime")
			dir := testutil.TempSocketDir(t)
			d, systemd := m.manage(dir)
			d.offlineTarget(job, 4)
			d.announce(t.Context())
			systemd.awaitBeat() // also in a lease
			d.freeze(m)
			job.signal(syscall.SIGUSR1) // its tracer is asked before it gets it
			systemd.awaitSilence()
			m.checkEach(job, 4, offGPU)
			tc.end(d)
			m.awaitEach(job, 4, onGPU)
			m.awaitProgress(job)

			d, _ = m.manage(dir) // Restart=on-watchdog
			d.offlineTarget(job, 4)
			lease := d.announce(t.Context())
			m.checkStill(job)
			d.complete(lease.GetLeaseId())
			m.awaitEach(job, 4, onGPU)
			m.awaitProgress(job)
			job.stop()
		})
	}
}

func TestPausedDaemonKeepsItsLease(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	job := m.work("--queues", "2", "--duration", "500", "--runtime")
	leaving := m.work("--duration", "500", "--runtime")
	d, systemd := m.manage(testutil.TempSocketDir(t))
	d.offlineTarget(job, 2)
	d.offlineTarget(leaving, 1)
	lease := d.announce(t.Context())
	d.freeze(m)
	// What is suspended stays so, and its helper suspends a queue that is born.
	job.create()
	m.awaitEach(job, 3, offGPU)
	leaving.signal(syscall.SIGKILL)
	job.signal(syscall.SIGUSR1)

	d.signal(syscall.SIGCONT)
	m.awaitEach(job, 3, offGPU)
	leaving.awaitEnd() // not before: its end is shown to its tracer first
	m.gone(d, leaving.PID)
	systemd.awaitBeat()
	m.checkStill(job)
	if end := d.complete(lease.GetLeaseId()).GetEnd(); end != gpreemptv1.LeaseEnd_LEASE_END_COMPLETED {
		t.Errorf("the lease ended as %v", end)
	}
	m.awaitEach(job, 3, onGPU)
	m.awaitProgress(job)
	m.stays(d, job)
	job.stop()
}

func TestLeaseThatExpiredWhileTheDaemonWasPausedEndsAfterwards(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	job := m.work("--queues", "2", "--duration", "500", "--runtime")
	d, _ := m.manage(testutil.TempSocketDir(t))
	d.offlineTarget(job, 2)
	brief := announcement()
	var lease *gpreemptv1.NotifyOnlineResponse
	for ttl := time.Second; ; ttl *= 2 {
		brief.Ttl = durationpb.New(ttl)
		began := time.Now()
		var err error
		if lease, err = d.online.NotifyOnline(t.Context(), brief); err != nil {
			t.Fatal(err)
		}
		d.freeze(m)
		if time.Since(began) < ttl {
			break
		}
		d.signal(syscall.SIGCONT) // it may have expired before, on a busy host
		d.awaitEnd(lease.GetLeaseId())
		m.awaitEach(job, 2, onGPU)
	}
	if !lease.GetQuiesced() {
		t.Fatalf("announced: %v", lease)
	}
	m.elapse(brief.GetTtl().AsDuration())
	m.checkEach(job, 2, offGPU)
	d.signal(syscall.SIGCONT)
	if end := d.awaitEnd(lease.GetLeaseId()); end != gpreemptv1.LeaseEnd_LEASE_END_EXPIRED {
		t.Errorf("the lease ended as %v", end)
	}
	m.awaitEach(job, 2, onGPU)
	m.awaitProgress(job)
	job.stop()
}
