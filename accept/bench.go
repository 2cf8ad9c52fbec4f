package accept

import (
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/accept/workload"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/mechanism/helper"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/internal/safety"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// bench is what stages work with.
type bench struct {
	cfg    Config
	gpu    gpreempt.GPU
	gpus   []gpreempt.GPU
	device *kfd.Device
	held   *helper.Mechanism // the daemon's
	out    writer

	// start starts a process with work, attach holds one as the daemon does. A test
	// replaces them.
	start  func(context.Context, workload.Config) (job, error)
	attach attach
	// attachWith holds a process with a grace period, and attachElsewhere by another process that
	// does what the daemon does.
	attachWith      func(grace uint32) attach
	attachElsewhere func(context.Context, gpreempt.ProcessKey) (elsewhere, error)
	dmesg           func() []byte
}

// attach holds a process.
type attach func(context.Context, gpreempt.ProcessKey) (mechanism.Session, error)

// elsewhere is a session in another process, which Kill kills.
type elsewhere interface {
	mechanism.Session
	Kill() error
}

// job is a process with work.
type job interface {
	Key() gpreempt.ProcessKey
	// Ask sends a command and returns the reply. An error of the process is one.
	Ask(ctx context.Context, command string) (workload.Reply, error)
	// Kill ends the process at once, End as a ROCm program ends. Both wait for its death.
	Kill() error
	End() error
}

// newBench opens the driver. It refuses a host on which the acceptance must not begin.
func newBench(cfg Config) (*bench, error) {
	files := discovery.NewFS(cfg.Root)
	gpus, err := files.GPUs()
	if err != nil {
		return nil, err
	}
	b := &bench{cfg: cfg, gpus: gpus, dmesg: dmesg}
	for _, g := range gpus {
		if g.ID == cfg.GPU {
			b.gpu = g
		}
	}
	if b.gpu.ID == 0 {
		var ids []string
		for _, g := range gpus {
			ids = append(ids, g.ID.String())
		}
		return nil, fmt.Errorf("unknown GPU %d: use one of %s", cfg.GPU, strings.Join(ids, ", "))
	}
	if err := refuse(files, cfg, b.gpu); err != nil {
		return nil, err
	}
	if _, err := os.Stat(cfg.Out); !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("the report %s must be a new file: use another name, or remove it", cfg.Out)
	}
	if b.device, err = kfd.Open(); err != nil {
		return nil, err
	}
	program, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return nil, errors.Join(err, b.device.Close())
	}
	sum := sha256.Sum256(program)
	b.out = writer{path: cfg.Out, files: map[string][]byte{}, report: Report{
		Machine: machine(cfg.Root), GPU: uint32(cfg.GPU), Quick: cfg.Quick, Seed: cfg.Seed,
		Version: cfg.Version, Program: hex.EncodeToString(sum[:]), Began: time.Now().UTC(),
	}}
	b.held = helpers(b.device, cfg.Root, gpus)
	b.start, b.attach = b.startJob, b.held.Attach
	b.attachWith = func(grace uint32) attach {
		return func(ctx context.Context, key gpreempt.ProcessKey) (mechanism.Session, error) {
			return startHolder(ctx, key, byGrace+strconv.FormatUint(uint64(grace), 10))
		}
	}
	b.attachElsewhere = func(ctx context.Context, key gpreempt.ProcessKey) (elsewhere, error) {
		return startHolder(ctx, key, byHelper)
	}
	return b, nil
}

func (b *bench) machine() string { return b.out.report.Machine }

func (b *bench) close() {
	_, _ = b.held.Close(), b.device.Close() // nothing was written
}

// refuse returns why an acceptance of the GPU must not begin.
func refuse(files *discovery.FS, cfg Config, gpu gpreempt.GPU) error {
	snapshot, err := files.Scan()
	if err != nil {
		return err
	}
	var foreign []string
	for _, p := range snapshot.Processes {
		foreign = append(foreign, fmt.Sprintf("%d (%s)", p.Key.PID, p.Comm))
	}
	if len(foreign) > 0 {
		return &gpreempt.Error{
			Code: gpreempt.CodeFailedPrecondition, Message: "other processes use the GPU driver: " + strings.Join(foreign, ", "),
			Next: "end them, gpreemptd too: the acceptance preempts every process on every GPU, and may reset GPUs",
		}
	}
	host, facts, _ := safety.Read(cfg.Root, []gpreempt.GPU{gpu})
	for _, g := range facts {
		if r := safety.Default().Check(host, g, "dbgtrap"); r.Action == safety.Deny {
			return &gpreempt.Error{
				Code: gpreempt.CodeFailedPrecondition, Message: "the hazard table denies dbgtrap: " + r.Reason, Next: r.Row.Remedy,
			}
		}
	}
	return nil
}

func keyOf(pid int32) (gpreempt.ProcessKey, error) {
	p, err := proc.Open("/", gpreempt.ProcessKey{PID: pid})
	if err != nil {
		return gpreempt.ProcessKey{}, err
	}
	defer p.Close()
	return p.Key(), nil
}

// child is a process of this program.
type child struct {
	cmd *exec.Cmd
	key gpreempt.ProcessKey
	in  io.WriteCloser

	mu  sync.Mutex // one command at a time
	out *bufio.Reader
}

// startJob starts a process with work and waits until it works.
func (b *bench) startJob(ctx context.Context, cfg workload.Config) (job, error) {
	cfg.GPU, cfg.Seed = cmp.Or(cfg.GPU, uint(b.gpu.ID)), b.cfg.Seed
	c, err := start(cfg.Args()...)
	if err != nil {
		return nil, err
	}
	if _, err := c.reply(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("start the work: %w", err), c.Kill())
	}
	return c, nil
}

func start(args ...string) (*child, error) {
	c := &child{cmd: exec.Command("/proc/self/exe", args...)} //nolint:gosec,noctx // G204: this program again; Kill ends it
	var err error
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.out, c.cmd.Stderr = bufio.NewReader(out), os.Stderr
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	if c.key, err = keyOf(int32(c.cmd.Process.Pid)); err != nil {
		return nil, errors.Join(err, c.Kill())
	}
	return c, nil
}

func (c *child) Key() gpreempt.ProcessKey { return c.key }

func (c *child) Ask(ctx context.Context, command string) (workload.Reply, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, err := io.WriteString(c.in, command+"\n"); err != nil {
		return workload.Reply{}, fmt.Errorf("ask process %d: %w", c.key.PID, err)
	}
	return c.reply(ctx)
}

// reply reads a line. The end of ctx ends the process.
func (c *child) reply(ctx context.Context) (workload.Reply, error) {
	stop := context.AfterFunc(ctx, func() { _ = c.cmd.Process.Kill() }) // it may have ended
	defer stop()
	line, err := c.out.ReadBytes('\n')
	if err != nil {
		return workload.Reply{}, fmt.Errorf("process %d ended: %w", c.key.PID, errors.Join(err, context.Cause(ctx)))
	}
	var r workload.Reply
	if err := json.Unmarshal(line, &r); err != nil {
		return workload.Reply{}, err
	}
	if r.Err != "" {
		return r, fmt.Errorf("process %d: %s", c.key.PID, r.Err)
	}
	return r, nil
}

func (c *child) Kill() error {
	err := c.cmd.Process.Kill()
	if errors.Is(err, os.ErrProcessDone) {
		err = nil
	}
	var exit *exec.ExitError
	if waited := c.cmd.Wait(); waited != nil && !errors.As(waited, &exit) && !errors.Is(waited, os.ErrProcessDone) {
		err = errors.Join(err, waited)
	}
	return err
}

func (c *child) End() error {
	if err := c.in.Close(); err != nil {
		return err
	}
	return c.cmd.Wait()
}

// dmesg returns the kernel log, or why it cannot be read.
func dmesg() []byte {
	text := make([]byte, 8<<20)
	const readAll = 3 // SYSLOG_ACTION_READ_ALL
	n, err := unix.Klogctl(readAll, text)
	if err != nil {
		return []byte("the kernel log cannot be read: " + err.Error() + "\n")
	}
	return text[:n]
}
