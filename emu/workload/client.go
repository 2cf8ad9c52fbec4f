package workload

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Exit codes of a client.
const (
	exitProved = 0
	exitWrong  = 1
	exitUsage  = 2
)

// client is the program: it carries out commands on its load.
type client struct {
	load *load
	// asked counts the commands in progress.
	asked sync.WaitGroup

	// mu guards out, so that lines stay whole, and broken, the first error of writing.
	mu     sync.Mutex
	out    io.Writer
	broken error
}

// Main runs a client: args are its flags, and it reads commands from in, one per line:
//
//	create           create another compute queue, on the next GPU
//	destroy ID       destroy a queue at once, with the packets in it
//	report           report the state
//	rtenable         RUNTIME_ENABLE
//	rtdisable        RUNTIME_ENABLE that ends the runtime
//	fork MS          create a child that tries the inherited descriptor and lives for MS ms
//	stop             wait until the queues are empty, prove their work and end
//	crash            end by SIGSEGV
//	exit             end at once, without cleaning up
//	exec FLAGS       execute a new client
//
// It writes a Message per line to out, and usage to help. It stops when ctx ends, and
// returns the exit code: 0 when all work was proved.
func Main(ctx context.Context, sys Sys, args []string, in io.Reader, out, help io.Writer) int {
	return run(sys, args, out, help, func(*Config) error { return nil }, func(c *client) {
		c.load.start()
		c.serve(ctx, in)
		c.asked.Wait()
	})
}

// run runs a client whose work is done, and its queues destroyed, when work returns.
func run(sys Sys, args []string, out, help io.Writer, check func(*Config) error, work func(*client)) int {
	cfg, err := ParseArgs(args, help)
	if errors.Is(err, flag.ErrHelp) {
		return exitProved
	}
	if err == nil {
		if err = check(&cfg); err != nil {
			fmt.Fprintln(help, err)
		}
	}
	if err != nil {
		return exitUsage
	}
	c := &client{out: out}
	if c.load, err = newLoad(sys, cfg, c.fail); err != nil {
		c.fail(err)
		return exitWrong
	}
	c.say(Message{Event: "ready", PID: os.Getpid(), Queues: c.load.queues()})
	work(c)
	return c.finish()
}

// finish proves the work, reports that, releases everything and returns the exit code. The
// queues have been destroyed.
func (c *client) finish() int {
	c.load.prove()
	tally := c.load.tally()
	c.say(Message{Event: "done", Queues: c.load.queues(), Tally: tally})
	err := c.load.leaveRuntime()
	if err = errors.Join(err, c.load.close()); err != nil {
		c.fail(err)
	}
	if err != nil || !tally.OK || c.broken != nil {
		return exitWrong
	}
	return exitProved
}

// serve carries out commands until all work is done.
func (c *client) serve(ctx context.Context, in io.Reader) {
	lines, next, end := make(chan string), make(chan struct{}), make(chan struct{})
	defer close(end)
	go read(in, lines, next, end)
	stop := ctx.Done()
	var steps <-chan time.Time
	if c.load.cfg.Steps {
		ticker := time.NewTicker(100 * time.Millisecond)
		defer ticker.Stop()
		steps = ticker.C
	}
	for !c.load.over() {
		select {
		case <-steps:
			c.write(fmt.Appendf(nil, "step %d", c.load.tally().Count), nil)
		case <-stop:
			stop = nil
			c.load.halt()
		case <-c.load.change:
		case line, more := <-lines:
			if !more {
				lines = nil
				continue
			}
			c.do(strings.Fields(line))
			next <- struct{}{}
		}
	}
}

// read sends the lines of in to lines, each after a value of next. It reads byte by byte,
// and never ahead: the input after an exec is for the next program.
func read(in io.Reader, lines chan<- string, next, end <-chan struct{}) {
	defer close(lines)
	var line []byte
	for b := make([]byte, 1); ; {
		n, err := in.Read(b)
		if err != nil || n == 0 {
			return // end of the commands
		}
		if b[0] != '\n' {
			line = append(line, b[0])
			continue
		}
		select {
		case lines <- string(line):
		case <-end:
			return
		}
		select {
		case <-next:
		case <-end:
			return
		}
		line = line[:0]
	}
}

// do carries out a command, in a goroutine if it may wait.
func (c *client) do(words []string) {
	if len(words) == 0 {
		return
	}
	command, rest := words[0], words[1:]
	var err error
	switch command {
	case "create":
		c.ask(func() error { return c.queue("created", c.load.create) })
	case "destroy":
		var id uint64
		if id, err = number(rest); err == nil {
			c.ask(func() error {
				return c.queue("destroyed", func() (Queue, error) { return c.load.destroy(uint32(id)) })
			})
		}
	case "rtenable", "rtdisable":
		c.ask(func() error {
			if err := c.load.setRuntime(command == "rtenable"); err != nil {
				return err
			}
			c.say(Message{Event: command + "d"})
			return nil
		})
	case "fork":
		var ms uint64
		if ms, err = number(rest); err == nil {
			c.ask(func() error { return c.fork(time.Duration(ms) * time.Millisecond) })
		}
	case "report":
		c.say(Message{Event: "report", Queues: c.load.queues(), Tally: c.load.tally()})
	case "stop":
		c.load.halt()
	case "crash":
		c.say(Message{Event: "crash"})
		err = crash()
	case "exit":
		os.Exit(exitProved)
	case "exec":
		err = execSelf(rest)
	default:
		err = fmt.Errorf("unknown command %q", command)
	}
	if err != nil {
		c.fail(err)
	}
}

// execSelf executes this program again, by its own name.
func execSelf(args []string) error {
	self, err := os.Executable()
	if err == nil {
		err = unix.Exec(self, append([]string{os.Args[0]}, args...), os.Environ())
	}
	return fmt.Errorf("exec this program: %w", err)
}

// number returns the only argument of a command.
func number(words []string) (uint64, error) {
	if len(words) != 1 {
		return 0, fmt.Errorf("%d arguments, want one number", len(words))
	}
	return strconv.ParseUint(words[0], 10, 32)
}

// ask carries out a command in a goroutine.
func (c *client) ask(command func() error) {
	c.asked.Go(func() {
		if err := command(); err != nil {
			c.fail(err)
		}
	})
}

func (c *client) queue(event string, command func() (Queue, error)) error {
	q, err := command()
	if err != nil {
		return err
	}
	c.say(Message{Event: event, Queues: []Queue{q}})
	return nil
}

func (c *client) fork(linger time.Duration) error {
	child, err := forkAndTry(c.load.d.fd, linger)
	if err != nil && child.PID == 0 {
		return err
	}
	if err == nil {
		c.say(Message{Event: "fork", PID: child.PID, Errno: int(child.Errno)})
	}
	return errors.Join(err, child.Wait())
}

// fail reports an error.
func (c *client) fail(err error) {
	m := Message{Event: "error", What: err.Error()}
	if errno, ok := errors.AsType[unix.Errno](err); ok {
		m.Errno = int(errno)
	}
	c.say(m)
}

// say writes a message.
func (c *client) say(m Message) {
	line, err := json.Marshal(m)
	c.write(line, err)
}

// write writes a line that was made with err.
func (c *client) write(line []byte, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil {
		_, err = c.out.Write(append(line, '\n'))
	}
	if err != nil && c.broken == nil {
		c.broken = err
	}
}
