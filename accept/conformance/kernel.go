package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// kernelHost plays the table on the driver of the running kernel: an actor is an agent,
// with real threads and real ptrace.
type kernelHost struct {
	listener  net.Listener
	holds     tags
	settles   bool                 // the driver has removed a process when its program has ended
	ids       []uint32             // of the GPUs
	waits     uint64               // the default of CP_IQ_WAIT_TIME2
	seen      map[uint32]int64     // the last unmap of each GPU
	single    map[uint32][2]uint32 // queues that MES has added and removed
	resets    map[uint32]uint32
	agents    []*kernelProcess
	conns     chan greeted
	endAccept sync.WaitGroup
}

// greeted is a connection of an agent that has identified itself.
type greeted struct {
	pid  int32
	conn net.Conn
	in   *json.Decoder
	err  error
}

// newKernelHost returns a host whose agents connect to a socket in dir. The caller closes
// it.
func newKernelHost(ctx context.Context, dir string, holds tags) (*kernelHost, error) {
	h := &kernelHost{holds: holds, seen: map[uint32]int64{}, single: map[uint32][2]uint32{}, resets: map[uint32]uint32{}, conns: make(chan greeted, 8)}
	var err error
	var listen net.ListenConfig
	if h.listener, err = listen.Listen(ctx, "unix", filepath.Join(dir, "agents")); err != nil {
		return nil, err
	}
	h.endAccept.Go(h.accept)
	return h, nil
}

// close ends the socket. No agent may be left.
func (h *kernelHost) close() error {
	err := h.listener.Close()
	h.endAccept.Wait()
	return err
}

func (h *kernelHost) accept() {
	for {
		conn, err := h.listener.Accept()
		if err != nil {
			return
		}
		g := greeted{conn: conn, in: json.NewDecoder(conn)}
		var hi hello
		g.err = g.in.Decode(&hi)
		g.pid = hi.PID
		h.conns <- g
	}
}

func (h *kernelHost) tags() tags     { return h.holds }
func (h *kernelHost) gpus() []uint32 { return h.ids }

func (h *kernelHost) spawn() (process, error) {
	return h.start(exec.Command("/proc/self/exe", AgentCommand)) //nolint:noctx // end kills the agents, in order
}

// start starts an agent by a command.
func (h *kernelHost) start(cmd *exec.Cmd) (*kernelProcess, error) {
	// Signals of Go's runtime to threads would stop a traced one.
	cmd.Env = append(os.Environ(), agentEnv+"="+h.listener.Addr().String(), "GODEBUG=asyncpreemptoff=1")
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &kernelProcess{host: h, id: int32(cmd.Process.Pid), cmd: cmd}
	h.agents = append(h.agents, p)
	return p, p.connect()
}

// end kills the agents, tracers last: the parent of a dead process that is traced cannot
// wait for it until the tracer has ended.
func (h *kernelHost) end() error {
	var errs []error
	for _, p := range h.agents {
		errs = append(errs, ignore(unix.Kill(int(p.id), unix.SIGKILL), unix.ESRCH))
		if p.conn != nil {
			errs = append(errs, p.conn.Close())
		}
		p.readers.Wait()
	}
	for _, p := range h.agents {
		if p.cmd != nil {
			var exit *exec.ExitError
			if err := p.cmd.Wait(); err != nil && !errors.As(err, &exit) {
				errs = append(errs, err)
			}
		}
		errs = append(errs, p.awaitDeath(), p.settle())
	}
	h.agents = nil
	return errors.Join(errs...)
}

func ignore(err, known error) error {
	if errors.Is(err, known) {
		return nil
	}
	return err
}

// kernelProcess is an agent.
type kernelProcess struct {
	host    *kernelHost
	id      int32
	cmd     *exec.Cmd // nil if an agent forked it
	conn    net.Conn
	out     *json.Encoder
	readers sync.WaitGroup
	threads map[int]*kernelThread
	// tracer is the thread that traces the main thread.
	tracer *kernelThread

	mu      sync.Mutex // guards the fields below
	next    int
	results map[int]chan result
	lost    error
	// payloads are the addresses to which exceptions of queues are sent.
	payloads map[uint32]uint64
}

// connect waits for the connection of the agent.
func (p *kernelProcess) connect() error {
	late := time.NewTimer(hangTimeout)
	defer late.Stop()
	var g greeted
	select {
	case g = <-p.host.conns:
	case <-late.C:
		return fmt.Errorf("agent %d does not connect", p.id)
	}
	if g.err != nil || g.pid != p.id {
		return fmt.Errorf("agent %d connected instead of %d (%w)", g.pid, p.id, g.err)
	}
	p.conn, p.out = g.conn, json.NewEncoder(g.conn)
	p.threads = map[int]*kernelThread{0: {p: p, id: p.id}}
	p.mu.Lock()
	p.results, p.lost, p.payloads = map[int]chan result{}, nil, map[uint32]uint64{}
	p.mu.Unlock()
	p.readers.Go(func() { p.read(g.in) })
	return nil
}

// read distributes the agent's answers. At the end it closes the channels of those that
// wait.
func (p *kernelProcess) read(in *json.Decoder) {
	for {
		var r result
		err := in.Decode(&r)
		p.mu.Lock()
		if err != nil {
			p.lost = fmt.Errorf("process %d has ended", p.id)
			for _, ch := range p.results {
				close(ch)
			}
			p.results = nil
			p.mu.Unlock()
			return
		}
		if ch := p.results[r.ID]; ch != nil {
			delete(p.results, r.ID)
			ch <- r
		}
		p.mu.Unlock()
	}
}

// send sends the agent an order. The channel is closed without a result if the agent ends.
func (p *kernelProcess) send(o order) (chan result, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.lost != nil {
		return nil, p.lost
	}
	p.next++
	o.ID = p.next
	ch := make(chan result, 1)
	p.results[o.ID] = ch
	return ch, p.out.Encode(o)
}

func (p *kernelProcess) ask(o order) (result, error) {
	ch, err := p.send(o)
	if err != nil {
		return result{}, err
	}
	r, ok := <-ch
	if !ok {
		return result{}, fmt.Errorf("process %d has ended", p.id)
	}
	if r.Err != "" {
		return r, errors.New(r.Err)
	}
	return r, nil
}

func (p *kernelProcess) pid() int32 { return p.id }

func (p *kernelProcess) thread(n int) (thread, error) {
	if t := p.threads[n]; t != nil {
		return t, nil
	}
	r, err := p.ask(order{Thread: n, What: orderThread})
	if err != nil {
		return nil, err
	}
	t := &kernelThread{p: p, number: n, id: r.TID}
	p.threads[n] = t
	return t, nil
}

func (p *kernelProcess) fork() (process, error) { return p.child() }

func (p *kernelProcess) child() (*kernelProcess, error) {
	r, err := p.ask(order{What: orderFork})
	if err != nil {
		return nil, err
	}
	child := &kernelProcess{host: p.host, id: r.TID}
	p.host.agents = append(p.host.agents, child)
	return child, child.connect()
}

func (p *kernelProcess) exec() error {
	if _, err := p.send(order{What: orderExec}); err != nil {
		return err
	}
	p.readers.Wait() // the old program's socket closes
	if err := p.conn.Close(); err != nil {
		return err
	}
	return errors.Join(p.connect(), p.settle())
}

// settle waits until the driver, in a worker, has removed a process that has ended.
func (p *kernelProcess) settle() error {
	if !p.host.settles {
		return nil
	}
	return eventually("the driver keeps a process that has ended", func() (bool, error) {
		_, err := os.Stat(fmt.Sprintf("/sys/class/kfd/kfd/proc/%d", p.id))
		return errors.Is(err, fs.ErrNotExist), ignore(err, fs.ErrNotExist)
	})
}

func (p *kernelProcess) exit() error {
	if _, err := p.send(order{What: orderExit}); err != nil {
		return err
	}
	return errors.Join(p.awaitDeath(), p.settle())
}

func (p *kernelProcess) kill() error {
	if err := unix.Kill(int(p.id), unix.SIGKILL); err != nil {
		return err
	}
	return errors.Join(p.awaitDeath(), p.settle())
}

// awaitDeath waits until no thread of the process runs, so that its memory is released. The
// process may be a zombie.
func (p *kernelProcess) awaitDeath() error {
	return eventually(fmt.Sprintf("process %d does not die", p.id), func() (bool, error) {
		tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", p.id))
		if err != nil {
			return true, nil //nolint:nilerr // it is gone
		}
		for _, task := range tasks {
			state, err := taskState(p.id, task.Name())
			if err == nil && state != "Z" && state != "X" {
				return false, nil
			}
		}
		return true, nil
	})
}

// taskState returns the letter of the state in /proc/PID/task/TID/stat.
func taskState(pid int32, tid string) (string, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/stat", pid, tid))
	if err != nil {
		return "", err
	}
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(fields) == 0 {
		return "", errors.New("no state in stat")
	}
	return fields[0], nil
}

// eventually polls until cond holds.
func eventually(why string, cond func() (bool, error)) error {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	late := time.NewTimer(hangTimeout)
	defer late.Stop()
	for {
		if ok, err := cond(); ok || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-late.C:
			return errors.New(why)
		}
	}
}

type kernelThread struct {
	p      *kernelProcess
	number int
	id     int32
}

func (t *kernelThread) tid() int32 { return t.id }

func (t *kernelThread) do(c call) (reply, error) {
	r, err := t.p.ask(order{Thread: t.number, Call: c})
	if err != nil {
		return reply{}, err
	}
	if at := r.Reply.Out["payload"]; at != "" {
		t.p.mu.Lock()
		t.p.payloads[number32(r.Reply.Out["id"])], err = strconv.ParseUint(at, 10, 64)
		t.p.mu.Unlock()
		if err != nil {
			return reply{}, err
		}
	}
	if r.Reply.Errno == 0 && (c.Verb == "seize" || c.Verb == "detach") {
		for _, p := range t.p.host.agents {
			if strconv.Itoa(int(p.id)) != c.Values["pid"] {
				continue
			}
			p.tracer = nil
			if c.Verb == "seize" {
				p.tracer = t
			}
		}
	}
	return r.Reply, nil
}

// blocked reports whether the thread sleeps in an ioctl, system call 16.
func (t *kernelThread) blocked() (bool, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/syscall", t.p.id, t.id))
	if err != nil {
		return false, err
	}
	state, err := taskState(t.p.id, strconv.Itoa(int(t.id)))
	return strings.HasPrefix(string(text), "16 ") && state == "S", err
}

// targetLock is the function in which DBG_TRAP takes the lock of its target: the kernel shows
// the caller of mutex_lock (get_wchan).
const targetLock = "kfd_ioctl_set_debug_trap"

func (t *kernelThread) stuck() (bool, error) {
	where, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/wchan", t.p.id, t.id))
	return string(where) == targetLock, err
}

// interrupt sends a signal that has a handler. A traced thread stops first, until its
// tracer continues it.
func (t *kernelThread) interrupt() error {
	if err := unix.Tgkill(int(t.p.id), int(t.id), interruption); err != nil {
		return err
	}
	tracer := t.p.tracer
	if tracer == nil || t.number != 0 {
		return nil
	}
	_, err := tracer.p.ask(order{
		Thread: tracer.number, What: orderPass,
		Call: call{Values: map[string]string{"pid": strconv.Itoa(int(t.p.id))}},
	})
	return err
}

func (t *kernelThread) end() error {
	if _, err := t.p.ask(order{Thread: t.number, What: orderEnd}); err != nil {
		return err
	}
	return eventually(fmt.Sprintf("thread %d does not end", t.id), func() (bool, error) {
		_, err := os.Stat(fmt.Sprintf("/proc/%d/task/%d", t.p.id, t.id))
		return err != nil, nil
	})
}

func (t *kernelThread) dropCaps() error {
	_, err := t.p.ask(order{Thread: t.number, What: orderDropCaps})
	return err
}
