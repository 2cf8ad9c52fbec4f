package e2e

import (
	"encoding/json"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// lastMessage is that of the last line the daemon logged.
func (d *daemon) lastMessage() string {
	var last struct{ Msg string }
	all := d.log.all()
	_ = json.Unmarshal([]byte(all[len(all)-1]), &last) // what is no JSON has no message
	return last.Msg
}

// Before the handler is there, a signal is the process's death, of which nothing is left
// either.
func TestSignalDuringTheStartReleasesEverything(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	inOrder, killed := 0, 0
	for range 30 {
		d := launch(t, testutil.TempSocketDir(t), atOnce)
		<-time.After(time.Duration(random.Int64N(int64(80 * time.Millisecond))))
		d.signal([]syscall.Signal{syscall.SIGTERM, syscall.SIGINT}[random.IntN(2)])
		d.over = true
		select {
		case <-d.exited:
		case <-time.After(timeout):
			t.Fatalf("gpreemptd did not end within %v", timeout)
		}
		status := d.process.ProcessState.Sys().(syscall.WaitStatus)
		switch {
		case status.Signaled() && d.log.String() == "":
			killed++
		case status.ExitStatus() == 0 && d.lastMessage() == "stopped, nothing is suspended":
			inOrder++
		default:
			t.Errorf("gpreemptd ended with %v; it wrote:\n%s", d.process.ProcessState, d.log)
		}
		if _, err := os.Lstat(d.socket); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the socket outlived the daemon: %v", err)
		}
	}
	t.Logf("%d ended in order, %d before they had begun", inOrder, killed)
}

// A daemon that waits for the journal, for example while gpreemptd --cleanup runs, is
// terminated.
func TestStartThatWaitsForTheJournalEndsWithTheSignal(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	dir := testutil.TempSocketDir(t)
	held := holdJournal(t, dir)
	d := m.launch(dir, atOnce)
	lock := filepath.Join(dir, "gpreemptd.lock")
	m.eventually("the daemon has its lock", func() bool {
		text, err := os.ReadFile(lock)
		return err == nil && len(text) > 0
	})
	signalled := time.Now()
	d.signal(syscall.SIGTERM)
	d.checkExit(0)
	if took := time.Since(signalled); took > 8*time.Second { // it would wait for 10 s
		t.Errorf("the end took %v", took)
	}
	if got := d.lastMessage(); got != "stopped, nothing is suspended" {
		t.Errorf("the last log line says %q", got)
	}
	if err := held.Close(); err != nil {
		t.Error(err)
	}
}

// The end is bounded as it is: who is in a hurry does not get it sooner by leaving jobs
// suspended.
func TestMoreSignalsDuringTheShutdownChangeNothing(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	job := m.work("--queues", "2", "--duration", "500", "--runtime")
	d := m.start(atOnce)
	d.offlineTarget(job, 2)
	d.announce(t.Context())
	resume := m.halt(kfd.TrapResumeQueues, job.PID)
	d.signal(syscall.SIGTERM)
	resume.await()
	for range 50 {
		for _, s := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP} {
			d.signal(s)
		}
	}
	m.checkFrozen(job)
	resume.release()
	d.checkExit(0)
	if got := d.lastMessage(); got != "stopped, nothing is suspended" {
		t.Errorf("the last log line says %q", got)
	}
	m.awaitEach(job, 2, onGPU)
	job.stop()
}

// Each reload that is asked for while one is under way is one more, no matter how often.
func TestReloadStormDoesNotBlockClients(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	pid := d.startOffline()
	before, fds := d.status(), d.fds()
	var storm sync.WaitGroup
	ended := make(chan struct{})
	sent := 0
	storm.Go(func() {
		for {
			select {
			case <-ended:
				return
			default:
				if err := d.process.Process.Signal(syscall.SIGHUP); err != nil {
					t.Error(err)
					return
				}
				sent++
			}
		}
	})
	for range 200 {
		lease := d.announce(t.Context())
		d.complete(lease.GetLeaseId())
	}
	close(ended)
	storm.Wait()
	t.Logf("%d signals during 200 leases", sent)
	d.reload(strings.Replace(atOnce, "preset: strict", "preset: shadow", 1))
	d.eventually("the last file is in force", func() bool { return d.policy().GetShadow() })
	d.reload(atOnce)
	d.eventually("the first file is in force again", func() bool { return !d.policy().GetShadow() })
	d.settled(before, fds)
	d.checkRuns(pid)
	d.stopJob(pid)
}

func TestMissingConfigFileChangesNothing(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	pid := d.startOffline()
	if err := os.Remove(d.config); err != nil {
		t.Fatal(err)
	}
	d.signal(syscall.SIGHUP)
	d.eventually("the warning", func() bool { return d.warned("CONFIG_REJECTED") != nil })
	says(t, d.warned("CONFIG_REJECTED").GetText(), d.config, "no such file")
	lease := d.announce(t.Context())
	d.checkFrozen(pid)
	d.complete(lease.GetLeaseId())
	d.reload(atOnce)
	d.eventually("the warning goes", func() bool { return d.warned("CONFIG_REJECTED") == nil })
	d.checkRuns(pid)
	d.stopJob(pid)
}

// A log that cannot be written costs its lines and nothing else.
func TestUnwritableLogBlocksNothing(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(t *testing.T) *os.File{
		"its reader has died": func(t *testing.T) *os.File {
			reader, writer, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			reader.Close()
			return writer
		},
		"its disk is full": func(t *testing.T) *os.File {
			full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
			if err != nil {
				t.Skip(err)
			}
			return full
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := prepare(t, testutil.TempSocketDir(t), atOnce+"log:\n  level: debug\n")
			log := open(t)
			d.process.Stderr = log
			d.run()
			log.Close()
			d.awaitServing()
			d.events = watchEvents(t, d.admin)
			pid := d.startOffline()
			for range 50 {
				lease := d.announce(t.Context())
				d.complete(lease.GetLeaseId())
			}
			d.checkRuns(pid)
			d.stopJob(pid)
			d.signal(syscall.SIGTERM)
			d.checkExit(0)
		})
	}
}
