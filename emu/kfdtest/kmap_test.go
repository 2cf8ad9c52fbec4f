package kfdtest_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// limiter is a process with a handle of the extension.
type limiter struct {
	*scene
	*kfdtest.Process
	k kmap
}

func (s *scene) limiter() *limiter {
	s.Helper()
	p := s.m.Spawn()
	k, err := openKmap(p.Main())
	s.must(err)
	return &limiter{scene: s, Process: p, k: k}
}

func (l *limiter) pidfd(pid int32) int {
	l.scene.Helper()
	fd, err := l.Main().PidfdOpen(pid)
	l.must(err)
	return fd
}

// set limits processes and returns the number of runlists.
func (l *limiter) set(limit uint32, lease time.Duration, jobs ...*kfdtest.Process) int {
	l.scene.Helper()
	var targets []limited
	for _, j := range jobs {
		targets = append(targets, limited{pidfd: l.pidfd(j.PID()), limit: limit})
	}
	cycles, err := l.k.set(targets, lease)
	l.must(err)
	for _, target := range targets {
		l.must(target.err)
	}
	return cycles
}

// held returns the job's queues that a limit keeps out, after a check that none of them runs.
func (s *scene) held() []uint32 {
	s.Helper()
	var ids []uint32
	for id, q := range s.job.Queues() {
		if q.Held {
			ids = append(ids, id)
		}
		if q.Held && (q.Active || q.Running) {
			s.Fatalf("a held queue runs: %+v", q)
		}
	}
	slices.Sort(ids)
	return ids
}

func (s *scene) wantHeld(want ...uint32) {
	s.Helper()
	if got := s.held(); !slices.Equal(got, want) {
		s.Fatalf("held %d, want %d", got, want)
	}
}

// onKmap runs a test on a machine with the extension.
func onKmap(t *testing.T, test func(s *scene)) {
	t.Helper()
	stage(t, driver.KmapProfile, hws, test)
}

func TestOtherDriversHaveNoExtension(t *testing.T) {
	for _, profile := range append(driver.Profiles(), driver.KmapProfile) {
		m := kfdtest.New(kfdtest.Config{Profile: profile})
		var want error = unix.ENOENT
		if profile == driver.KmapProfile {
			want = nil
		}
		if _, err := openKmap(m.Spawn().Main()); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", profile, err, want)
		}
	}
}

// One SET of many processes is one runlist for each GPU.
func TestOneRunlistPerGPUHoldsManyProcesses(t *testing.T) {
	onKmap(t, func(s *scene) {
		jobs := []*kfdtest.Process{s.job}
		s.queue(gpuA)
		s.queue(gpuB)
		for range 63 {
			p := s.m.Spawn()
			fd, err := p.Main().StartRuntime()
			s.must(err)
			for _, gpu := range []gpreempt.GPUID{gpuA, gpuB} {
				_, err = p.Main().CreateQueue(fd, gpu, kfd.QueueTypeComputeAQL)
				s.must(err)
			}
			jobs = append(jobs, p)
		}
		before := s.m.GPU(gpuA)
		l := s.limiter()
		for _, c := range []struct {
			limit  uint32
			cycles int
			queues int
		}{{0, 2, 0}, {0, 0, 0}, {kfdabi.KmapNoLimit, 2, 64}, {kfdabi.KmapNoLimit, 0, 64}} {
			if got := l.set(c.limit, time.Minute, jobs...); got != c.cycles {
				t.Errorf("limit %d took %d runlists, want %d", c.limit, got, c.cycles)
			}
			if n := len(s.running()); n*32 != c.queues {
				t.Errorf("limit %d: %d queues of the first process run", c.limit, n)
			}
		}
		after := s.m.GPU(gpuA)
		// No runlist is left to unmap while everything is held, and none is mapped then.
		if after.Unmaps-before.Unmaps != 1 || after.Maps-before.Maps != 1 {
			t.Errorf("%d unmaps and %d maps on a GPU, want one of each", after.Unmaps-before.Unmaps, after.Maps-before.Maps)
		}
	})
}

func TestKmapLeaseEndsOnTheClock(t *testing.T) {
	onKmap(t, func(s *scene) {
		s.queue(gpuA)
		l := s.limiter()
		start := time.Now()
		at := func(d time.Duration) { time.Sleep(time.Until(start.Add(d))); synctest.Wait() }
		l.set(0, time.Second, s.job)
		at(900 * time.Millisecond)
		l.set(0, time.Second) // renews
		at(1899 * time.Millisecond)
		s.wantHeld(0)
		at(1900 * time.Millisecond)
		s.wantHeld()
		info, err := l.k.info()
		s.must(err)
		if info.Lapses != 1 || info.Limited != 0 {
			t.Errorf("after the lease: %+v", info)
		}
		l.set(0, time.Second, s.job) // the handle is usable
		s.wantHeld(0)
		l.set(kfdabi.KmapNoLimit, time.Second, s.job)
		at(time.Minute)
		if info, err = l.k.info(); err != nil || info.Lapses != 1 {
			t.Errorf("a lease without a limit lapsed: %+v, %v", info, err)
		}
	})
}

// A GPU that fails does not lose a limit, and the other GPU gets its runlist.
func TestHungGPUKeepsTheLimit(t *testing.T) {
	for _, errno := range []unix.Errno{unix.ETIME, unix.EIO} {
		onKmap(t, func(s *scene) {
			s.queue(gpuA)
			s.queue(gpuB)
			l := s.limiter()
			fault := s.m.FailGPU("KMAP_SET", gpuB, errno)
			set := func(limit uint32) (states []string, cycles int, err error) {
				job := []limited{{pidfd: l.pidfd(s.job.PID()), limit: limit, room: 4}}
				cycles, setErr := l.k.set(job, time.Minute)
				s.must(setErr)
				for _, q := range job[0].queues {
					states = append(states, fmt.Sprint(q.GPU(), " ", q.State))
				}
				return states, cycles, job[0].err
			}
			good, bad := fmt.Sprint(gpuA, " held"), fmt.Sprint(gpuB, " held+failed")
			if states, cycles, err := set(0); !errors.Is(err, unix.EIO) || cycles != 1 || !slices.Equal(states, []string{good, bad}) {
				t.Errorf("got %v, %d cycles, %v; want EIO, one cycle and a failure on one GPU", states, cycles, err)
			}
			if _, cycles, err := set(0); !errors.Is(err, unix.EIO) || cycles != 0 {
				t.Errorf("while it fails: %d cycles, %v; want EIO again", cycles, err)
			}
			l.set(0, time.Minute) // names no process there
			fault.Remove()
			if states, cycles, err := set(0); err != nil || cycles != 1 || !slices.Equal(states, []string{good, fmt.Sprint(gpuB, " held")}) {
				t.Errorf("after the failure: %v, %d cycles, %v; want one cycle", states, cycles, err)
			}
			if got := s.running(); got != nil {
				t.Errorf("queues %d run", got)
			}
			s.m.StartReset(gpuB)
			s.m.EndReset(gpuB)
			s.must(s.m.Restore(s.job.MM()))
			s.wantHeld(0, 1)
		})
	}
}

func TestResetKeepsToTheLimit(t *testing.T) {
	onKmap(t, func(s *scene) {
		s.queue(gpuA)
		s.queue(gpuB)
		l := s.limiter()
		s.m.StartReset(gpuA)
		job := []limited{{pidfd: l.pidfd(s.job.PID())}}
		_, err := l.k.set(job, time.Minute)
		s.must(err)
		s.want(unix.EIO, job[0].err)
		s.m.EndReset(gpuA)
		s.must(s.m.Restore(s.job.MM()))
		s.wantHeld(0, 1)
		if got := s.running(); got != nil {
			t.Errorf("queues %d run", got)
		}
		s.must(l.k.close())
		if got := s.running(); len(got) != 2 {
			t.Errorf("only queues %d run after the handle's end", got)
		}
	})
}

// A lease that ends while the hardware is busy with a SET ends after it.
func TestLeaseThatEndsDuringASet(t *testing.T) {
	onKmap(t, func(s *scene) {
		s.queue(gpuA)
		l := s.limiter()
		hang := s.m.Hang("KMAP_SET")
		done := start(func() error {
			_, err := l.k.set([]limited{{pidfd: l.pidfd(s.job.PID())}}, 100*time.Millisecond)
			return err
		})
		time.Sleep(time.Second)
		synctest.Wait()
		if !waits(done) {
			t.Fatal("the call returned while the hardware hung")
		}
		hang.Release()
		s.must(<-done)
		synctest.Wait()
		s.wantHeld()
	})
}

// The end of the process that limits, in each way, releases at once.
func TestHandleEndsWithItsLastDescriptor(t *testing.T) {
	for name, end := range map[string]func(l *limiter){
		"close": func(l *limiter) { l.must(l.k.close()) },
		"kill":  func(l *limiter) { l.Kill() },
		"exec":  func(l *limiter) { l.Exec() },
	} {
		t.Run(name, func(t *testing.T) {
			onKmap(t, func(s *scene) {
				s.queue(gpuA)
				l := s.limiter()
				l.set(0, time.Minute, s.job)
				child := l.Fork()
				end(l)
				s.wantHeld(0) // the child has the descriptor
				child.Kill()
				s.wantHeld()
				if got := s.running(); !slices.Equal(got, []uint32{0}) {
					t.Errorf("queues %d run", got)
				}
			})
		})
	}
}

// A target that exits while a SET waits for the hardware is not mapped on the next GPU.
func TestTargetThatExitsDuringASetIsNotMapped(t *testing.T) {
	var mapped []gpreempt.GPUID
	var job int32
	stageOf(t, kfdtest.Config{Profile: driver.KmapProfile, Hardware: func(step driver.Step) driver.Outcome {
		for _, q := range step.Queues {
			if q.PID == job {
				mapped = append(mapped, q.GPU)
			}
		}
		return driver.Outcome{}
	}}, hws, func(s *scene) {
		s.queue(gpuB)
		other := s.m.Spawn()
		fd, err := other.Main().StartRuntime()
		s.must(err)
		_, err = other.Main().CreateQueue(fd, gpuA, kfd.QueueTypeComputeAQL)
		s.must(err)
		l := s.limiter()
		l.set(0, time.Minute, s.job)
		mapped, job = nil, s.job.PID()
		hang := s.m.Inject(kfdtest.Fault{Op: "KMAP_SET", GPU: gpuA, Stage: kfdtest.Hardware, Hold: true})
		targets := []limited{{pidfd: l.pidfd(s.job.PID())}, {pidfd: l.pidfd(other.PID())}}
		done := start(func() error {
			_, err := l.k.set(targets, time.Minute)
			return err
		})
		s.job.Kill()
		hang.Release()
		s.must(<-done)
		if mapped != nil {
			t.Errorf("mapped on %v", mapped)
		}
	})
}

// Nothing of a process that exits while it is held is mapped before its end.
func TestHeldProcessThatExitsIsNotMapped(t *testing.T) {
	for name, end := range map[string]func(p *kfdtest.Process){"kill": (*kfdtest.Process).Kill, "exec": (*kfdtest.Process).Exec} {
		t.Run(name, func(t *testing.T) {
			var mapped []string
			stageOf(t, kfdtest.Config{Profile: driver.KmapProfile, Hardware: func(step driver.Step) driver.Outcome {
				for _, q := range step.Queues {
					mapped = append(mapped, fmt.Sprint(q.ID))
				}
				return driver.Outcome{}
			}}, hws, func(s *scene) {
				s.queue(gpuA)
				l := s.limiter()
				l.set(0, time.Minute, s.job)
				mapped = nil
				end(s.job)
				if mapped != nil {
					t.Errorf("mapped queues %s", strings.Join(mapped, ", "))
				}
				if info, err := l.k.info(); err != nil || info.Limited != 0 {
					t.Errorf("the handle still limits: %+v, %v", info, err)
				}
			})
		})
	}
}
