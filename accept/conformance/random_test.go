package conformance

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

// report matches what the kernel reports of a bug. Schedules avoid the bugs of its driver
// that are known to harm the kernel: no debugger enables debugging of a process that another
// one debugs (the driver keeps a pointer to the second), no descriptor of the driver
// outlives an execve, and a process has the VM of all GPUs before it has a queue
// (SUSPEND_QUEUES on one without crashes the kernel). So no report is expected.
var report = regexp.MustCompile(`BUG|WARNING|Oops|UBSAN|KASAN|general protection|corrupt|[Pp]oison overwritten|Redzone|refcount_t|use-after-free|blocked for more than|stall`)

// The kernel must also report no bug of its own. GPREEMPT_SOFTGPU is the number of
// schedules, or full for 1,000; GPREEMPT_SEED is the seed of the first.
func TestRealDriverAgreesWithTheFakeOnRandomSchedules(t *testing.T) {
	version, holds := realDriver(t)
	profile := profileOf(version, release(t))
	if !holds["two-gpus"] || !holds["soft"] || !holds["hws"] {
		t.Skip("it needs two nodes of emu/softgpu with HWS, as in make vm-softgpu")
	}
	schedules := 10
	switch given := os.Getenv("GPREEMPT_SOFTGPU"); given {
	case "":
	case "full":
		schedules = 1000
	default:
		var err error
		if schedules, err = strconv.Atoi(given); err != nil {
			t.Fatal("GPREEMPT_SOFTGPU: want full, or the number of schedules: ", err)
		}
	}
	first := rand.Uint64()
	if given := os.Getenv("GPREEMPT_SEED"); given != "" {
		var err error
		if first, err = strconv.ParseUint(given, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	log := testutil.OpenKernelLog(t)
	const control = "corruption that this test makes up"
	if err := os.WriteFile("/dev/kmsg", []byte(control+"\n"), 0); err != nil {
		t.Fatal(err)
	}
	if got := log.Lines(report); !slices.Equal(got, []string{control}) {
		t.Fatalf("the kernel's log has the reports %q, want the one of this test", got)
	}
	h := testHost(t, holds)
	h.settles = true
	if err := h.prepareSoftGPU(); err != nil {
		t.Fatal(err)
	}
	steps := 0
	for i := range schedules {
		seed := first + uint64(i)
		e, err := randomSchedule(profile, seed)
		if err != nil {
			t.Fatalf("seed %d: %v\n%s", seed, err, e)
		}
		steps += len(e.steps)
		if err := e.perform(h); err != nil {
			t.Errorf("seed %d: %v\n%s", seed, err, e)
		}
		for _, line := range log.Lines(report) {
			t.Errorf("seed %d: the kernel reports %s\n%s", seed, line, e)
		}
		if t.Failed() {
			break
		}
	}
	t.Logf("%d random schedules of %d steps from seed %d", schedules, steps, first)
}

func TestRandomSchedulesAgreeWithThemselves(t *testing.T) {
	for seed := range uint64(20) {
		profile := []string{"6.12.117", "7.3"}[seed%2]
		e, err := randomSchedule(profile, seed)
		if err != nil {
			t.Fatalf("seed %d: %v\n%s", seed, err, e)
		}
		h := newScheduleHost(profile)
		if err := e.perform(h); err != nil {
			t.Errorf("seed %d: %v\n%s", seed, err, e)
		}
	}
}

// String returns the expectation as the table has it.
func (e expectation) String() string {
	var b strings.Builder
	fmt.Fprintln(&b, "expect", e.name)
	for _, s := range e.steps {
		b.WriteString(s.text)
		if len(s.answers) > 0 {
			b.WriteString(" -> " + s.answers[0].show())
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// newScheduleHost returns a fake of a profile with the nodes of the guest.
func newScheduleHost(profile string) *fakeHost {
	m := machine{nodes: []driver.Node{{ID: firstGPU, GFX: 90402}, {ID: secondGPU, GFX: 90402}}}
	holds := profileTags(profile)
	maps.Copy(holds, softTags)
	return newFakeHost(profile, m, holds)
}

// schedule is a random expectation in the making: the fake performs each step first, and its
// result is the answer.
type schedule struct {
	rng  *rand.Rand
	play *play
	e    expectation
	last *reply // of the last step, nil if it has none
	jobs []*job
	// debugger is its name; it changes with its death.
	debugger string
	names    int
	// unordered: the last step's cycles depend on the order of the driver's hash table, or
	// are not this schedule's.
	unordered bool
}

// job is a process with a runtime.
type job struct {
	name     string
	debugged bool
	traced   bool
	evicted  int
	// waits are the queues whose destroy waits, by the number of the thread.
	waits   map[int]uint32
	threads int
}

func randomSchedule(profile string, seed uint64) (expectation, error) {
	h := newScheduleHost(profile)
	s := &schedule{
		rng: rand.New(rand.NewPCG(seed, 1)),
		e:   expectation{name: fmt.Sprint("schedule-", seed)}, debugger: "D0",
		play: &play{host: h, tags: h.tags(), actors: map[string]*actor{}},
	}
	s.play.record = func(r reply) { s.last = &r }
	s.unordered = true // what another schedule left
	err := errors.Join(s.do("%s open", s.debugger), s.cycles())
	for range 1 + s.rng.IntN(3) {
		if err == nil {
			err = s.spawn()
		}
	}
	for range 20 {
		if err == nil {
			err = s.step()
		}
	}
	if err == nil {
		err = s.finish()
	}
	return s.e, errors.Join(err, h.end())
}

// do performs a step on the fake and appends it with its result.
func (s *schedule) do(format string, args ...any) error {
	step, err := parseStep(fmt.Sprintf(format, args...))
	if err != nil {
		return err
	}
	step.where = fmt.Sprint("step ", len(s.e.steps)+1)
	s.last = nil
	if err := s.play.step(step); err != nil {
		return fmt.Errorf("%s: %w", step.text, err)
	}
	if s.last != nil {
		step.answers = []answer{{result: s.last.result(), values: s.values()}}
	}
	s.e.steps = append(s.e.steps, step)
	return nil
}

// compared are the results that do not differ between machines.
var compared = []string{
	"ids", "n", "types", "status", "mask", "queue", "gpu", "gpus", "state", "suspended", "active", "running", "evicted", "destroying", "sent",
	"grace", "adds", "removes", "id",
}

func (s *schedule) values() map[string]string {
	values := map[string]string{}
	for _, key := range compared {
		if value, ok := s.last.Out[key]; ok && s.last.Errno == 0 && value != "" {
			values[key] = s.play.shown(key, value)
		}
	}
	return values
}

func (s *schedule) spawn() error {
	s.names++
	j := &job{name: fmt.Sprint("P", s.names), waits: map[int]uint32{}}
	s.jobs = append(s.jobs, j)
	return s.do("%s runtime", j.name)
}

func (s *schedule) pick(words ...string) string { return words[s.rng.IntN(len(words))] }

// ids returns some IDs of queues, each once.
func (s *schedule) ids() string {
	var ids []string
	for id := range 5 {
		if s.rng.IntN(2) == 0 {
			ids = append(ids, strconv.Itoa(id))
		}
	}
	s.rng.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	if len(ids) == 0 {
		return "0"
	}
	return strings.Join(ids, ",")
}

// step is one random action, and a look at what it changed.
func (s *schedule) step() error {
	j := s.jobs[s.rng.IntN(len(s.jobs))]
	if err := s.act(j); err != nil {
		return err
	}
	if err := s.collect(); err != nil {
		return err
	}
	if slices.Contains(s.jobs, j) {
		if err := s.look(j); err != nil {
			return err
		}
	}
	return s.cycles()
}

// look looks at the queues of a job.
func (s *schedule) look(j *job) error {
	for id := range uint32(4) {
		if s.play.actors[j.name].process.(*fakeProcess).queue(id).R == 0 {
			continue
		}
		if err := s.do("%s queue %d", j.name, id); err != nil {
			return err
		}
	}
	return nil
}

// cycles looks at what the GPUs did since it was called last.
func (s *schedule) cycles() error {
	for _, gpu := range []string{"g0", "g1"} {
		if err := s.do("%s cycles", gpu); err != nil {
			return err
		}
		if s.unordered {
			s.e.steps[len(s.e.steps)-1].answers = nil
		}
	}
	s.unordered = false
	return nil
}

func (s *schedule) act(j *job) error {
	d := s.debugger
	if !j.debugged && s.rng.IntN(3) == 0 {
		return s.debug(j)
	}
	switch s.rng.IntN(24) {
	case 0, 1, 2, 3:
		return s.do("%s create_queue gpu=%s type=%s percent=%s", j.name, s.pick("g0", "g1"), s.pick("aql", "aql", "compute", "sdma"), s.pick("100", "100", "100", "0"))
	case 4, 5:
		return s.destroy(j)
	case 6:
		return s.do("%s update_queue id=%d percent=%s", j.name, s.rng.IntN(4), s.pick("0", "50", "100"))
	case 7:
		return s.debug(j)
	case 8, 9, 10, 11:
		return s.do("%s snapshot %s n=8 clear=new", d, j.name)
	case 12, 13, 14:
		return s.do("%s suspend %s ids=%s grace=%s", d, j.name, s.ids(), s.pick("0", "1", "50", "0xffffffff"))
	case 15, 16:
		return s.do("%s resume %s ids=%s", d, j.name, s.ids())
	case 17:
		return s.do("%s resume %s n=0 buf=null", d, j.name)
	case 18:
		return s.do("%s query_event %s clear=%s", d, j.name, s.pick("0", "new", "new+delete"))
	case 19:
		j.evicted++
		return s.do("%s evict", j.name)
	case 20:
		if j.evicted == 0 {
			return nil
		}
		j.evicted--
		return s.do("%s restore", j.name)
	case 21:
		return s.raise(j)
	case 22:
		if s.rng.IntN(2) == 0 {
			return s.end(j)
		}
		return s.replaceDebugger()
	default:
		return s.do("%s snapshot %s n=8", d, j.name)
	}
}

// raise raises an exception of a queue that exists.
func (s *schedule) raise(j *job) error {
	id := uint32(s.rng.IntN(3))
	q := s.play.actors[j.name].process.(*fakeProcess).queue(id)
	if q.R == 0 {
		return nil
	}
	return s.do("%s raise gpu=%s queue=%d mask=%s", j.name, s.play.shown("gpu", q.Out["gpu"]), id, s.pick("trap", "abort"))
}

// debug enables or disables debugging.
func (s *schedule) debug(j *job) error {
	switch {
	case j.debugged:
		j.debugged = false
		return s.do("%s disable %s", s.debugger, j.name)
	case j.traced:
		j.debugged = true
		return s.do("%s enable %s fd=ev mask=%s", s.debugger, j.name, s.pick("new", "trap", "new+trap+abort"))
	}
	j.debugged, j.traced = true, true
	return s.do("%s attach %s mask=%s", s.debugger, j.name, s.pick("new", "trap", "new+trap+abort"))
}

// destroy destroys a queue on a thread of its own, because that may wait.
func (s *schedule) destroy(j *job) error {
	j.threads++
	n, id := j.threads, uint32(s.rng.IntN(4))
	if err := s.do("%s.%d start destroy_queue id=%d", j.name, n, id); err != nil {
		return err
	}
	a := s.play.actors[j.name]
	t, err := a.process.thread(n)
	if err != nil {
		return err
	}
	waits := false
	err = eventually("the destroy neither waits nor ends", func() (bool, error) {
		waits, err = t.blocked()
		return waits || len(a.waiting[n]) > 0, err
	})
	if err != nil {
		return err
	}
	if !waits {
		return s.do("%s.%d await", j.name, n)
	}
	j.waits[n] = id
	return s.do("%s.%d blocked", j.name, n)
}

// collect takes the results of the destroys whose queues are no longer suspended.
func (s *schedule) collect() error {
	for _, j := range s.jobs {
		for _, n := range slices.Sorted(maps.Keys(j.waits)) {
			if s.play.actors[j.name].process.(*fakeProcess).queue(j.waits[n]).Out["suspended"] == "1" {
				continue
			}
			delete(j.waits, n)
			if err := s.do("%s.%d await", j.name, n); err != nil {
				return err
			}
		}
	}
	return nil
}

// end ends a job's program, and starts another.
func (s *schedule) end(j *job) error {
	s.jobs = slices.DeleteFunc(s.jobs, func(o *job) bool { return o == j })
	verb := s.pick("kill", "exit", "exec")
	if verb != "kill" && len(j.waits) > 0 {
		verb = "kill" // its threads wait
	}
	return errors.Join(s.do("%s %s", j.name, verb), s.spawn())
}

// replaceDebugger kills the debugger, which ends its sessions.
func (s *schedule) replaceDebugger() error {
	if err := s.do("%s kill", s.debugger); err != nil {
		return err
	}
	s.names++
	s.debugger = fmt.Sprint("D", s.names)
	targets := 0
	for _, j := range s.jobs {
		if j.debugged {
			targets++
		}
		j.debugged, j.traced = false, false
	}
	s.unordered = targets > 1
	return s.do("%s open", s.debugger)
}

// finish ends every suspension, so that nothing waits.
func (s *schedule) finish() error {
	if err := s.do("%s kill", s.debugger); err != nil {
		return err
	}
	if err := s.collect(); err != nil {
		return err
	}
	for _, j := range s.jobs {
		if err := s.look(j); err != nil {
			return err
		}
	}
	return nil
}
