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

// client is the program: it makes a load do what it is told.
type client struct {
	load *load
	// asked counts the commands that are being carried out.
	asked sync.WaitGroup

	// mu guards out, so that lines stay whole, and broken, the first error there.
	mu     sync.Mutex
	out    io.Writer
	broken error
}

// Main is a client: args are its flags, and commands come from in, one a line:
//
//	create           make one more compute queue, on the next of the GPUs
//	destroy ID       destroy a queue at once, with what is in it
//	report           say how it stands
//	rtenable         RUNTIME_ENABLE
//	rtdisable        the same, to end the runtime
//	fork MS          make a child that tries the inherited descriptor and lives for MS ms
//	stop             let the queues run empty, prove what they did and end
//	crash            end by SIGSEGV
//	exit             end at once, without cleaning up
//	exec FLAGS       become a new client
//
// It writes a Message a line to out, and usage to help. It stops when ctx ends, and
// returns the exit code: 0 when all was proved.
func Main(ctx context.Context, sys Sys, args []string, in io.Reader, out, help io.Writer) int {
	cfg, err := ParseArgs(args, help)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return exitProved
	case err != nil:
		return exitUsage
	}
	c := &client{out: out}
	if c.load, err = newLoad(sys, cfg, c.fail); err != nil {
		c.fail(err)
		return exitWrong
	}
	queues := c.load.queues()
	c.say(Message{Event: "ready", PID: os.Getpid(), Queues: queues})
	c.load.start()
	c.serve(ctx, in)
	c.asked.Wait()
	return c.finish()
}

// finish proves what was done, says so, gives everything back and tells the exit code.
// The queues are gone.
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

// serve carries out commands until all is over.
func (c *client) serve(ctx context.Context, in io.Reader) {
	lines, next, end := make(chan string), make(chan struct{}), make(chan struct{})
	defer close(end)
	go read(in, lines, next, end)
	stop := ctx.Done()
	for !c.load.over() {
		select {
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

// read sends the lines of in, each after the next was asked for: what follows an exec is
// for the program that comes then. So it reads byte by byte, and no more than it must.
func read(in io.Reader, lines chan<- string, next, end <-chan struct{}) {
	defer close(lines)
	var line []byte
	for b := make([]byte, 1); ; {
		n, err := in.Read(b)
		if err != nil || n == 0 {
			return // nobody has anything to say any more
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

// do carries out a command. Those that may wait for somebody do it in a goroutine.
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
		err = fmt.Errorf("%q is no command", command)
	}
	if err != nil {
		c.fail(err)
	}
}

// execSelf becomes this program anew, by its own name.
func execSelf(args []string) error {
	self, err := os.Executable()
	if err == nil {
		err = unix.Exec(self, append([]string{os.Args[0]}, args...), os.Environ())
	}
	return fmt.Errorf("exec this program: %w", err)
}

// number is the one argument of a command.
func number(words []string) (uint64, error) {
	if len(words) != 1 {
		return 0, fmt.Errorf("%d arguments: one number is what it takes", len(words))
	}
	return strconv.ParseUint(words[0], 10, 32)
}

// ask carries out a command that may take long.
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

// fail says what went wrong.
func (c *client) fail(err error) {
	m := Message{Event: "error", What: err.Error()}
	if errno, ok := errors.AsType[unix.Errno](err); ok {
		m.Errno = int(errno)
	}
	c.say(m)
}

// say writes a line.
func (c *client) say(m Message) {
	line, err := json.Marshal(m)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil {
		_, err = c.out.Write(append(line, '\n'))
	}
	if err != nil && c.broken == nil {
		c.broken = err
	}
}
