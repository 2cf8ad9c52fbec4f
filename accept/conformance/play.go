package conformance

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// host is a machine on which an expectation is played.
type host interface {
	tags() tags
	// gpus are the IDs of g0, g1 and so on.
	gpus() []uint32
	spawn() (process, error)
	// end kills every remaining process.
	end() error
}

// An observer reports what no caller of the driver can see. A driver with hardware has none.
type (
	gpuObserver interface {
		// look returns the changes of a GPU since the last look.
		look(gpu uint32) reply
		// hang makes the GPU leave its next preemption undone.
		hang(gpu uint32) error
		// reset resets a GPU, recover waits for the reset that a failed preemption causes.
		reset(gpu uint32) error
		recover(gpu uint32) error
	}
	// firmwareObserver sets the version of a GPU's firmware.
	firmwareObserver interface {
		firmware(gpu, version uint32) error
	}
	// refuser has a queue not answer a preemption.
	refuser interface {
		refuse(gpu, queue uint32) error
	}
	queueObserver interface {
		queue(id uint32) reply
		// raise raises exceptions of a queue as the hardware does.
		raise(gpu, queue uint32, mask uint64) error
		// evict removes all queues of the process, as when its memory moves, and restore
		// undoes it.
		evict() error
		restore() error
		// fault is an invalid access of the process to an address on a GPU, signal an
		// interrupt for one of its events.
		fault(gpu uint32, address uint64) error
		signal(gpu, event uint32) error
		// hold has the process hold its own lock in the driver until release.
		hold() error
		release() error
	}
)

// process is an actor. Its methods return after they have had their effect.
type process interface {
	pid() int32
	thread(n int) (thread, error) // 0 is the main thread; others are created when first named
	fork() (process, error)
	exec() error
	exit() error
	kill() error
}

// thread does verbs, one at a time.
type thread interface {
	tid() int32
	do(c call) (reply, error)
	// blocked reports whether it sleeps in the driver, stuck whether it waits there for the
	// lock of a target, where no signal reaches it.
	blocked() (bool, error)
	stuck() (bool, error)
	// interrupt sends it a signal that it handles.
	interrupt() error
	// end ends only this thread.
	end() error
	// dropCaps drops the capabilities for a checkpoint.
	dropCaps() error
}

// hangTimeout is the time after which anything counts as hanging. Only a failure waits that
// long.
const hangTimeout = 2 * time.Minute

// play plays an expectation's lines; an error is a difference.
type play struct {
	host   host
	tags   tags
	actors map[string]*actor
	// refused are the targets of a refused ENABLE.
	refused []string
	// record, if not nil, gets each reply in place of the comparison.
	record func(reply)
}

// actor is a process of the script.
type actor struct {
	process process
	fds     map[string]int
	waiting map[int]chan done // per thread: what start started
}

type done struct {
	reply reply
	err   error
}

// perform plays e on the host; nil means that they agree.
func (e expectation) perform(h host) (err error) {
	p := &play{host: h, tags: h.tags(), actors: map[string]*actor{}}
	defer func() { err = errors.Join(err, p.endRefused(), h.end()) }()
	for _, s := range e.steps {
		if err := p.step(s); err != nil {
			return fmt.Errorf("%s: %s: %w", s.where, s.text, err)
		}
	}
	return nil
}

// endRefused ends the targets of refused debuggers, before those end: the driver writes to
// freed memory at the end of a target that outlives such a debugger.
func (p *play) endRefused() error {
	var errs []error
	for _, name := range p.refused {
		if a := p.actors[name]; a != nil {
			errs = append(errs, ignore(a.process.kill(), unix.ESRCH))
		}
	}
	return errors.Join(errs...)
}

func (p *play) step(s step) error {
	if isGPU(s.actor) {
		return p.observe(s)
	}
	name, number, _ := strings.Cut(s.actor, ".")
	n := 0
	if number != "" {
		var err error
		if n, err = strconv.Atoi(number); err != nil {
			return fmt.Errorf("actor %s: %w", s.actor, err)
		}
	}
	a, err := p.actor(name)
	if err != nil {
		return err
	}
	t, err := a.process.thread(n)
	if err != nil {
		return err
	}
	if done, err := p.stage(s, a, n, t); done || err != nil {
		return err
	}
	if s.verb == "await" {
		return p.await(s, a, n)
	}
	refused := func(a answer) bool { return a.result == "EALREADY" }
	if slices.ContainsFunc(s.answers, refused) && len(s.args) > 0 && !slices.Contains(p.refused, s.args[0]) {
		p.refused = append(p.refused, s.args[0])
	}
	for _, s := range expand(s, a) {
		start := s.verb == "start"
		if start {
			if len(s.args) == 0 {
				return errors.New("want a verb after start")
			}
			s.verb, s.args = s.args[0], s.args[1:]
		}
		c, err := p.resolve(s, a)
		if err != nil {
			return err
		}
		if a.waiting[n] != nil {
			return fmt.Errorf("%s is still in a call", s.actor)
		}
		ch := make(chan done, 1)
		go func() {
			r, err := t.do(c)
			ch <- done{r, err}
		}()
		a.waiting[n] = ch
		if start {
			continue
		}
		if err := p.await(s, a, n); err != nil {
			return err
		}
	}
	return nil
}

func (p *play) actor(name string) (*actor, error) {
	if a := p.actors[name]; a != nil {
		return a, nil
	}
	process, err := p.host.spawn()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return p.enter(name, process, map[string]int{}), nil
}

func (p *play) enter(name string, process process, fds map[string]int) *actor {
	a := &actor{process: process, fds: fds, waiting: map[int]chan done{}}
	p.actors[name] = a
	return a
}

// stage does the verbs about processes and threads themselves.
func (p *play) stage(s step, a *actor, n int, t thread) (bool, error) {
	switch s.verb {
	case "spawn": // naming the actor creates it
		return true, nil
	case "fork":
		child, err := a.process.fork()
		if err != nil {
			return true, err
		}
		if len(s.args) != 1 {
			return true, errors.New("want fork NAME")
		}
		p.enter(s.args[0], child, maps.Clone(a.fds))
		return true, nil
	case "exec":
		return true, a.process.exec()
	case "exit":
		return true, a.process.exit()
	case "kill":
		return true, a.process.kill()
	case "end":
		return true, t.end()
	case "interrupt":
		return true, t.interrupt()
	case "dropcaps":
		return true, t.dropCaps()
	case "blocked":
		return true, p.blocked(a, n, t.blocked)
	case "stuck":
		return true, p.blocked(a, n, t.stuck)
	}
	if slices.Contains(observed, s.verb) {
		return true, p.peer(s, a)
	}
	return false, nil
}

// observed are the verbs of a queueObserver.
var observed = []string{"raise", "queue", "evict", "restore", "fault", "signal", "hold", "release", "refuse"}

// isGPU reports whether an actor is a GPU: g0 or g1.
func isGPU(name string) bool { return name == "g0" || name == "g1" }

// observe compares the changes of a GPU, or does what happens to one.
func (p *play) observe(s step) error {
	observer, ok := p.host.(gpuObserver)
	if !ok {
		return errNobody
	}
	id, err := p.number("gpu", s.actor, nil)
	if err != nil {
		return err
	}
	gpu := number32(id)
	switch s.verb {
	case "hang":
		return observer.hang(gpu)
	case "reset":
		return observer.reset(gpu)
	case "recover":
		return observer.recover(gpu)
	case "firmware":
		h, ok := p.host.(firmwareObserver)
		if !ok || len(s.args) != 1 {
			return errNobody
		}
		return h.firmware(gpu, number32(s.args[0]))
	case "cycles":
	default:
		return errNobody
	}
	want, err := s.answer(p.tags)
	if err != nil {
		return err
	}
	return p.compare(want, observer.look(gpu))
}

var errNobody = errors.New("nobody can see that here")

// peer compares the state of a queue, or does what the hardware or the memory manager does
// to a process.
func (p *play) peer(s step, a *actor) error {
	observer, ok := a.process.(queueObserver)
	if !ok {
		return errNobody
	}
	switch s.verb {
	case "evict":
		return observer.evict()
	case "restore":
		return observer.restore()
	case "hold":
		return observer.hold()
	case "release":
		return observer.release()
	case "queue":
		want, err := s.answer(p.tags)
		if err != nil {
			return err
		}
		if len(s.args) != 1 {
			return errors.New("want queue ID")
		}
		return p.compare(want, observer.queue(number32(s.args[0])))
	}
	gpu, err := p.number("gpu", s.values["gpu"], a)
	if err != nil {
		return err
	}
	switch s.verb {
	case "fault":
		address, err := parseNumber(s.values["va"])
		if err != nil {
			return err
		}
		return observer.fault(number32(gpu), address)
	case "signal":
		return observer.signal(number32(gpu), number32(s.values["event"]))
	case "refuse":
		process, ok := a.process.(refuser)
		if !ok {
			return errNobody
		}
		return process.refuse(number32(gpu), number32(s.values["queue"]))
	}
	mask, err := parseMask(s.values["mask"], false)
	if err != nil {
		return err
	}
	return observer.raise(number32(gpu), number32(s.values["queue"]), mask)
}

// blocked waits until a call that was started waits in the driver, which waits reports.
func (p *play) blocked(a *actor, n int, waits func() (bool, error)) error {
	ch := a.waiting[n]
	if ch == nil {
		return errors.New("it was not told to start anything")
	}
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	late := time.NewTimer(hangTimeout)
	defer late.Stop()
	for {
		if waiting, err := waits(); waiting || err != nil {
			return err
		}
		select {
		case d := <-ch:
			return fmt.Errorf("it did not block: %s", d.reply.show(p))
		case <-late.C:
			return errors.New("it neither blocks nor ends")
		case <-tick.C:
		}
	}
}

// await waits for the call in progress and compares its result.
func (p *play) await(s step, a *actor, n int) error {
	ch := a.waiting[n]
	if ch == nil {
		return errors.New("it was not told to start anything")
	}
	late := time.NewTimer(hangTimeout)
	defer late.Stop()
	var d done
	select {
	case d = <-ch:
	case <-late.C:
		return errors.New("no answer, it hangs")
	}
	a.waiting[n] = nil
	if d.err != nil {
		return d.err
	}
	if d.reply.Broken != "" {
		return errors.New(d.reply.Broken)
	}
	if err := p.remember(s, a, d.reply); err != nil {
		return err
	}
	want, err := s.answer(p.tags)
	if err != nil {
		return err
	}
	return p.compare(want, d.reply)
}

// remember adds new descriptors to the actor's table.
func (p *play) remember(s step, a *actor, r reply) error {
	take := func(name, key string) error {
		fd, ok := r.Out[key]
		if !ok {
			return nil // the call failed
		}
		delete(r.Out, key)
		n, err := strconv.Atoi(fd)
		a.fds[name] = n
		return err
	}
	as := func(name string) string {
		if given, ok := s.values["as"]; ok {
			return given
		}
		return name
	}
	switch s.verb {
	case "open":
		return take(as("kfd"), "fd")
	case "getfd", "smi", "kmap", "pidfd":
		return take(as(s.verb), "fd")
	case "pipe":
		name := "ev"
		if len(s.args) > 0 {
			name = s.args[0]
		}
		return errors.Join(take(name, "w"), take(name+".r", "r"))
	}
	return nil
}

// compare returns the difference of r and the wanted answer; nil wants any success.
func (p *play) compare(want *answer, r reply) error {
	if p.record != nil {
		p.record(r)
		return nil
	}
	if want == nil {
		if r.Errno != 0 {
			return fmt.Errorf("got %s, want success", r.show(p))
		}
		return nil
	}
	got := map[string]string{}
	for key := range want.values {
		got[key] = p.shown(key, r.Out[key])
	}
	if r.result() != want.result || !maps.Equal(got, want.values) {
		return fmt.Errorf("got %s, want %s", r.show(p), want.show())
	}
	return nil
}

// result returns the value returned, or the errno's name.
func (r reply) result() string {
	if r.Errno != 0 {
		if r.Errno == unix.EOPNOTSUPP {
			return "EOPNOTSUPP" // x/sys prefers its other name
		}
		if name := unix.ErrnoName(r.Errno); name != "" {
			return name
		}
		return fmt.Sprintf("errno-%d", uint32(r.Errno)) // such as ENOTSUPP, which is internal to the kernel
	}
	return strconv.FormatInt(r.R, 10)
}

func (r reply) show(p *play) string {
	shown := map[string]string{}
	for key, value := range r.Out {
		shown[key] = p.shown(key, value)
	}
	return answer{result: r.result(), values: shown}.show()
}

func (a answer) show() string {
	words := []string{a.result}
	for _, key := range slices.Sorted(maps.Keys(a.values)) {
		words = append(words, key+"="+a.values[key])
	}
	return strings.Join(words, " ")
}
