// Package workload implements the program that the acceptance suspends: a process with queues on
// one GPU that it creates through /dev/kfd, as ROCm's runtime does.
//
// Its work is packets without code, which the packet processor of every GPU executes, copies
// whose checksum is verified, and kernels of the embedded code objects. The number of
// completed packets is the heartbeat.
package workload

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Command is the first argument of a program that is to call Main.
const Command = "accept-work"

// Config is the work of a process.
type Config struct {
	GPU uint
	// Queues is the number of compute queues, Copiers that of SDMA queues.
	Queues, Copiers int
	Seed            uint64
	// Poll looks for completed packets without pauses.
	Poll bool
	// Kernel fills the compute queues with one endless kernel each, of Groups workgroups,
	// instead of packets without code.
	Kernel bool
	Groups int
	// Peer is another GPU through whose memory copies go, 0 for none.
	Peer uint
	// XNACK is on, off, or "" for the driver's default.
	XNACK string
}

// Args returns the command line of the process.
func (c Config) Args() []string {
	return []string{
		Command, fmt.Sprint("-gpu=", c.GPU), fmt.Sprint("-queues=", c.Queues), fmt.Sprint("-copiers=", c.Copiers),
		fmt.Sprint("-seed=", c.Seed), fmt.Sprint("-poll=", c.Poll), fmt.Sprint("-kernel=", c.Kernel), fmt.Sprint("-groups=", c.Groups),
		fmt.Sprint("-peer=", c.Peer), "-xnack=" + c.XNACK,
	}
}

func parse(args []string) (c Config, err error) {
	f := flag.NewFlagSet(Command, flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.UintVar(&c.GPU, "gpu", 0, "")
	f.IntVar(&c.Queues, "queues", 0, "")
	f.IntVar(&c.Copiers, "copiers", 0, "")
	f.Uint64Var(&c.Seed, "seed", 0, "")
	f.BoolVar(&c.Poll, "poll", false, "")
	f.BoolVar(&c.Kernel, "kernel", false, "")
	f.IntVar(&c.Groups, "groups", 1, "")
	f.UintVar(&c.Peer, "peer", 0, "")
	f.StringVar(&c.XNACK, "xnack", "", "")
	return c, f.Parse(args)
}

// Reply is the answer to a command, and the first line of the process.
type Reply struct {
	// Beats counts the completed packets and copies of all queues, or what the endless
	// kernels have counted; Pending those that wait.
	Beats, Pending uint64
	// Each is Beats of each queue that there is, in the order of creation.
	Each []uint64
	// Gap is the longest time in which no packet completed since the last reply.
	Gap time.Duration
	// Wrong counts copies with a wrong checksum, and lanes with a wrong result.
	Wrong uint64
	// Took is the duration of what the command asked for.
	Took time.Duration
	// Trapped is what the last command debugtrap found, and Fault the last command touch.
	Trapped uint32
	Fault   string
	Err     string
}

// process is the program.
type process struct {
	cfg Config
	d   *device

	mu       sync.Mutex // guards all below
	queues   []beater
	retired  uint64 // beats of destroyed queues
	last     uint64
	lastBeat time.Time
	gap      time.Duration
	wrong    uint64
	corrupt  bool // damage the next result of a kernel
	trapped  uint32
	fault    string
	err      error
}

// beater is a queue with its work.
type beater interface {
	beats() uint64
	pending() uint64
	fill() error
}

// Main runs the program: it writes a Reply when its queues work, and one for each command,
// a line of in:
//
//	beats     nothing else
//	create    create a compute queue
//	destroy   destroy the compute queue created last; it waits while it is suspended
//	corrupt   damage the next copy, and the next result of verify
//	register N  register N MiB of memory of the host
//	launch N  time N packets, one after the other, on the spare queue
//	verify NAME ROUNDS  run a kernel that keeps values in one kind of storage, and count wrong lanes
//	debugtrap own|none  run a kernel with llvm.debugtrap, with a trap handler or without
//	touch mapped|unmapped  read an address in a kernel; after an unmapped one the process has no use
//	exec      execute this program again
//	exit      end at once
//
// At the end of in it ends as a ROCm program does, with the end of the runtime.
func Main(ctx context.Context, args []string, in io.Reader, out io.Writer) error {
	cfg, err := parse(args)
	if err != nil {
		return err
	}
	p := &process{cfg: cfg}
	reply := json.NewEncoder(out)
	if err := p.begin(); err != nil {
		return errors.Join(err, reply.Encode(Reply{Err: err.Error()}))
	}
	ctx, cancel := context.WithCancel(ctx)
	var feeder sync.WaitGroup
	feeder.Go(func() { p.feed(ctx) })
	defer func() {
		cancel()
		feeder.Wait()
	}()
	if err := reply.Encode(p.state()); err != nil {
		return err
	}
	for {
		line, err := ReadLine(in)
		if err != nil {
			break
		}
		start := time.Now()
		err = p.do(ctx, strings.Fields(line))
		r := p.state()
		r.Took = time.Since(start)
		if err != nil {
			r.Err = err.Error()
		}
		if err := reply.Encode(r); err != nil {
			return err
		}
	}
	cancel()
	feeder.Wait()
	return p.end()
}

// ReadLine reads one line and not a byte beyond it: after an exec the next program reads on.
func ReadLine(in io.Reader) (string, error) {
	var line []byte
	for b := make([]byte, 1); ; {
		if _, err := io.ReadFull(in, b); err != nil {
			return "", err
		}
		if b[0] == '\n' {
			return string(line), nil
		}
		line = append(line, b[0])
	}
}

func (p *process) begin() (err error) {
	if p.d, err = openDevice(uint32(p.cfg.GPU), p.cfg.XNACK); err != nil {
		return err
	}
	for range p.cfg.Queues {
		if err := p.create(); err != nil {
			return err
		}
	}
	for i := range p.cfg.Copiers {
		c, err := p.d.newCopier(p.cfg.Seed+uint64(i), uint32(p.cfg.Peer))
		if err != nil {
			return err
		}
		p.queues = append(p.queues, c)
	}
	p.lastBeat = time.Now()
	return nil
}

// create creates a compute queue. It may wait for another call of the process.
func (p *process) create() error {
	var b beater
	var err error
	if p.cfg.Kernel {
		b, err = p.d.newEndless(p.cfg.Groups)
	} else {
		b, err = p.d.newQueue(0)
	}
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.queues = append(p.queues, b)
	return nil
}

// feed keeps the queues full until ctx ends.
func (p *process) feed(ctx context.Context) {
	const pause = 200 * time.Microsecond
	for ctx.Err() == nil {
		p.mu.Lock()
		p.turn(time.Now())
		p.mu.Unlock()
		if p.cfg.Poll {
			runtime.Gosched()
		} else {
			time.Sleep(pause)
		}
	}
}

// turn looks at the heartbeat and fills the queues.
func (p *process) turn(now time.Time) {
	p.gap = max(p.gap, now.Sub(p.lastBeat))
	if beats := p.beats(); beats != p.last {
		p.last, p.lastBeat = beats, now
	}
	for _, q := range p.queues {
		p.err = errors.Join(p.err, q.fill())
	}
}

func (p *process) beats() uint64 {
	sum := p.retired
	for _, q := range p.queues {
		sum += q.beats()
	}
	return sum
}

func (p *process) state() Reply {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := Reply{Beats: p.beats(), Gap: p.gap, Wrong: p.wrong, Trapped: p.trapped, Fault: p.fault}
	for _, q := range p.queues {
		r.Pending += q.pending()
		r.Each = append(r.Each, q.beats())
		if c, ok := q.(*copier); ok {
			r.Wrong += c.wrong
		}
	}
	p.gap = 0
	if p.err != nil {
		r.Err = p.err.Error()
	}
	return r
}

func (p *process) do(ctx context.Context, words []string) error {
	if len(words) == 0 {
		return errors.New("no command")
	}
	switch words[0] {
	case "beats":
		return nil
	case "create":
		return p.create()
	case "destroy":
		return p.destroy()
	case "corrupt":
		p.mu.Lock()
		defer p.mu.Unlock()
		p.corrupt = true
		for _, q := range p.queues {
			if c, ok := q.(*copier); ok {
				c.corrupt = true
			}
		}
		return nil
	case "launch":
		var n uint64
		if _, err := fmt.Sscan(strings.Join(words[1:], " "), &n); err != nil {
			return fmt.Errorf("launch: %w", err)
		}
		return p.launch(ctx, n)
	case "verify":
		var name string
		var rounds uint32
		if _, err := fmt.Sscan(strings.Join(words[1:], " "), &name, &rounds); err != nil {
			return fmt.Errorf("verify: %w", err)
		}
		p.mu.Lock()
		corrupt := p.corrupt
		p.corrupt = false
		p.mu.Unlock()
		wrong, err := p.d.verify(ctx, name, rounds, p.cfg.Groups, p.cfg.Seed, corrupt)
		p.mu.Lock()
		defer p.mu.Unlock()
		p.wrong += wrong
		return err
	case "debugtrap":
		trapped, err := p.d.debugtrap(ctx, words[len(words)-1] == "own")
		p.mu.Lock()
		defer p.mu.Unlock()
		p.trapped = trapped
		return err
	case "touch":
		fault, err := p.d.touch(ctx, words[len(words)-1] == "mapped")
		p.mu.Lock()
		defer p.mu.Unlock()
		p.fault = fault
		return err
	case "register":
		var mib int
		if _, err := fmt.Sscan(strings.Join(words[1:], " "), &mib); err != nil {
			return fmt.Errorf("register: %w", err)
		}
		_, err := p.d.allocate(mib << 20)
		return err
	case "exec":
		return unix.Exec("/proc/self/exe", os.Args, os.Environ())
	case "exit":
		os.Exit(0)
	}
	return fmt.Errorf("unknown command %q", words[0])
}

// destroy destroys the last compute queue.
func (p *process) destroy() error {
	p.mu.Lock()
	var last *queue
	for i := len(p.queues) - 1; i >= 0 && last == nil; i-- {
		if q, ok := p.queues[i].(*queue); ok {
			last = q
			p.queues = append(p.queues[:i], p.queues[i+1:]...)
			p.retired += q.beats()
		}
	}
	p.mu.Unlock()
	if last == nil {
		return errors.New("there is no compute queue")
	}
	return p.d.destroyQueue(last.id)
}

// launch submits n packets on the spare queue, each when the one before has completed.
func (p *process) launch(ctx context.Context, n uint64) error {
	q, err := p.d.spareQueue(0)
	if err != nil {
		return err
	}
	for range n {
		q.submit(packetBarrierAnd|inOrder, func([]byte) {})
		if err := q.wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// end ends the queues and the runtime.
func (p *process) end() error {
	err := p.err
	for _, b := range p.queues {
		switch q := b.(type) {
		case *queue:
			err = errors.Join(err, p.d.destroyQueue(q.id))
		case *endless:
			q.stop()
			err = errors.Join(err, p.d.destroyQueue(q.id))
		case *copier:
			err = errors.Join(err, p.d.destroyQueue(q.id))
		}
	}
	return errors.Join(err, p.d.setRuntime(0))
}
