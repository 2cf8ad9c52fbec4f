package dbgtrap

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

// kernelReport matches what the kernel writes about memory that was corrupted.
var kernelReport = regexp.MustCompile(`BUG |KASAN|corrupt|[Pp]oison overwritten|Redzone overwritten|refcount_t|use-after-free|Oops|general protection`)

// checkMemory has the kernel check the memory of the caches that a process of the driver is in,
// and reports whether it can: it needs slub_debug=FZPU on its command line (validate_store).
func checkMemory(t *testing.T) bool {
	t.Helper()
	caches, err := filepath.Glob("/sys/kernel/slab/kmalloc-*[124]k/validate")
	if err != nil {
		t.Fatal(err)
	}
	checked := false
	for _, cache := range caches {
		err := os.WriteFile(cache, []byte("1"), 0)
		if err != nil && !errors.Is(err, unix.EINVAL) {
			t.Fatal(err)
		}
		checked = checked || err == nil
	}
	return checked
}

// uncheckedEnv has the daemons of TestRealDriverReportsNothing call ENABLE without asking first
// whether somebody debugs the job, as other debuggers do. The test then wants the kernel's
// memory to be corrupted: it shows that corruption is noticed.
const uncheckedEnv = "GPREEMPT_UNCHECKED"

// schedule is two daemons and a job on the real driver.
type schedule struct {
	t       *testing.T
	r       *rand.Rand
	role    string
	job     *program
	daemons [2]*program
	holds   [2]bool // which daemon holds the job
	tally   map[string]int
}

func (s *schedule) startJob() *program {
	s.t.Helper()
	job := startReal(s.t, s.role)
	if s.role == roleJob {
		job.must("open")
		job.must("enable")
	} else if ready := job.answer(); !strings.Contains(ready, `"ready"`) {
		s.t.Fatal(ready)
	}
	return job
}

// ends ends a program: by itself, without cleaning up, or by SIGKILL. It sometimes waits until
// the driver has released what it knew of it.
func (s *schedule) ends(p *program) {
	s.t.Helper()
	if s.r.IntN(2) == 0 {
		s.tally["exits"]++
		p.tell("exit")
		p.exits()
	} else {
		s.tally["kills"]++
		p.kill()
	}
	if s.r.IntN(4) == 0 {
		return
	}
	path := fmt.Sprintf("/sys/class/kfd/kfd/proc/%d", p.key.PID)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for late := time.After(guardTime); ; {
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			return
		}
		select {
		case <-tick.C:
		case <-late:
			s.t.Fatalf("the driver keeps process %d, which has ended", p.key.PID)
		}
	}
}

// step does something at random.
func (s *schedule) step() {
	s.t.Helper()
	at := s.r.IntN(2)
	d := s.daemons[at]
	switch s.r.IntN(9) {
	case 0, 1, 2, 3:
		d.tell("attach", s.job.key.String())
		switch answer := d.answer(); {
		case answer == "ok":
			s.holds[at] = true
			s.tally["attaches"]++
		case strings.Contains(answer, "another debugger"):
			s.tally["refused"]++
		default:
			s.t.Fatal(answer)
		}
	case 4, 5:
		if s.holds[at] {
			verb := []string{"suspend", "resume"}[s.r.IntN(2)]
			s.tally[verb]++
			d.tell(verb)
			_ = d.answer() // the other daemon may have taken the job
		}
	case 6, 7:
		s.ends(d)
		s.daemons[at], s.holds[at] = startReal(s.t, roleDaemon), false
	case 8:
		s.ends(s.job)
		s.job, s.holds = s.startJob(), [2]bool{}
	}
}

// Two daemons attach to the same job, are refused, suspend and resume it, exit and are killed,
// and so is the job, in any order. The job has a queue on each GPU where the driver has nodes
// of emu/softgpu. With slub_debug=FZPU on its command line, the kernel reports a write to freed
// memory. GPREEMPT_SCHEDULES is how many schedules, GPREEMPT_SEED the first; see uncheckedEnv.
func TestRealDriverReportsNothingWhateverRefusedDaemonsAndJobsDo(t *testing.T) {
	newReal(t)
	unchecked := os.Getenv(uncheckedEnv) != ""
	_, err := os.Stat("/sys/kernel/debug/softgpu")
	onSoftGPU := err == nil
	checks := checkMemory(t)
	if unchecked && !(onSoftGPU && checks) {
		t.Fatalf("%s corrupts the memory of the kernel: only for a guest of emu/vm -softgpu with slub_debug=FZPU", uncheckedEnv)
	}
	log := testutil.OpenKernelLog(t)
	s := schedule{t: t, role: roleJob, tally: map[string]int{}}
	if onSoftGPU {
		s.role = roleQueues
	}
	schedules, first := testutil.Number(t, "GPREEMPT_SCHEDULES", 30), testutil.Number(t, "GPREEMPT_SEED", 1)
	for i := range schedules {
		seed := first + i
		s.r = rand.New(rand.NewPCG(uint64(seed), 1))
		s.job, s.holds = s.startJob(), [2]bool{}
		s.daemons = [2]*program{startReal(t, roleDaemon), startReal(t, roleDaemon)}
		for range 8 {
			s.step()
		}
		for _, i := range s.r.Perm(3) {
			s.ends(append(s.daemons[:], s.job)[i])
		}
		checkMemory(t)
		reports := log.Lines(kernelReport)
		switch {
		case len(reports) > 0 && unchecked:
			t.Logf("without the check, after schedule %d (%v) the kernel reports: %q", seed, s.tally, reports)
			return
		case len(reports) > 0:
			t.Fatalf("after schedule %d the kernel reports: %q", seed, reports)
		}
		if i%10 == 9 {
			t.Logf("%d schedules: %v", i+1, s.tally)
		}
	}
	if unchecked {
		t.Fatalf("without the check before ENABLE, the kernel reports nothing after %d schedules: %v", schedules, s.tally)
	}
	t.Logf("%d schedules from seed %d, the kernel checks its memory: %v, %v; it reports nothing", schedules, first, checks, s.tally)
}
