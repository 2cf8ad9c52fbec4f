package accept

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strconv"
	"strings"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/accept/workload"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/mechanism/dbgtrap"
	"github.com/gpreempt/gpreempt/internal/mechanism/helper"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/internal/safety"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// helpers returns the daemon's mechanism, whose calls are made by helper processes.
func helpers(device *kfd.Device, root fs.FS, gpus []gpreempt.GPU) *helper.Mechanism {
	return helper.New(helper.Config{
		Pool:  helper.NewPool(zap.NewNop(), nil, nil),
		Local: dbgtrap.New(dbgtrap.Config{Device: device, Files: root}),
		Safe:  func() []gpreempt.GPUID { return safeGPUs(root, gpus) },
	})
}

// safeGPUs returns the GPUs on which the hazard table lets a process without a VM be suspended.
func safeGPUs(root fs.FS, gpus []gpreempt.GPU) (safe []gpreempt.GPUID) {
	host, facts, _ := safety.Read(root, gpus)
	for _, g := range facts {
		if safety.Default().CheckProcess(host, g, safety.GPUWithoutVM, "dbgtrap").Action != safety.Deny {
			safe = append(safe, g.ID)
		}
	}
	return safe
}

// graced is the kernel, with a grace period for SUSPEND_QUEUES, in which waves may end by
// themselves.
type graced struct {
	kfd.Sys
	period uint32
}

func (g graced) Ioctl(fd int, req kfd.Request, arg kfd.Pointer) (uintptr, error) {
	if req == kfd.ReqDbgTrap && kfd.As[kfd.TrapDisableArgs](arg).Op == kfd.TrapSuspendQueues {
		kfd.As[kfd.TrapSuspendQueuesArgs](arg).GracePeriod = g.period
	}
	return g.Sys.Ioctl(fd, req, arg)
}

// HoldCommand is the first argument of a program that is to call Hold, before a pid and one of
// the ways below.
const HoldCommand = "accept-hold"

// How a holder holds.
const (
	byHelper = "by-helper"   // as the daemon does
	byGrace  = "with-grace=" // in the same process, with the grace period after it
)

// Hold holds a process, as a daemon that can be killed meanwhile. It writes a Reply when it holds
// it, and one for each line of in, which is "suspend" or "resume". At the end of in it releases
// the process.
func Hold(ctx context.Context, root fs.FS, args []string, in io.Reader, out io.Writer) (err error) {
	if len(args) != 2 {
		return errors.New("want a pid, and how to hold it")
	}
	pid, err := strconv.ParseInt(args[0], 10, 32)
	if err != nil {
		return err
	}
	reply := json.NewEncoder(out)
	s, release, err := holdProcess(ctx, root, int32(pid), args[1])
	if err != nil {
		return errors.Join(err, reply.Encode(workload.Reply{Err: err.Error()}))
	}
	defer func() { err = errors.Join(err, s.Close(), release()) }()
	if err := reply.Encode(workload.Reply{}); err != nil {
		return err
	}
	for {
		line, err := workload.ReadLine(in)
		if err != nil {
			return nil // the end of in
		}
		var r workload.Reply
		do := s.Resume
		if line == "suspend" {
			do = func(ctx context.Context) error { return s.Suspend(ctx, nil) }
		}
		if err := do(ctx); err != nil {
			r.Err = err.Error()
		}
		if err := reply.Encode(r); err != nil {
			return err
		}
	}
}

// holdProcess returns a session, and what to call after its end.
func holdProcess(ctx context.Context, root fs.FS, pid int32, how string) (s mechanism.Session, release func() error, err error) {
	gpus, err := discovery.NewFS(root).GPUs()
	if err != nil {
		return nil, nil, err
	}
	key, err := keyOf(pid)
	if err != nil {
		return nil, nil, err
	}
	sys := kfd.Kernel()
	if text, with := strings.CutPrefix(how, byGrace); with {
		grace, err := strconv.ParseUint(text, 10, 32)
		if err != nil {
			return nil, nil, err
		}
		sys = graced{sys, uint32(grace)}
	}
	device, err := kfd.OpenWith(sys, kfd.DevicePath)
	if err != nil {
		return nil, nil, err
	}
	release = device.Close
	attach := inProcess(device, root, gpus).Attach
	if how == byHelper {
		m := helpers(device, root, gpus)
		attach, release = m.Attach, func() error { return errors.Join(m.Close(), device.Close()) }
	}
	if s, err = attach(ctx, key); err != nil {
		return nil, nil, errors.Join(err, release())
	}
	return s, release, nil
}

// inProcess returns the mechanism of a helper, in this process.
func inProcess(device *kfd.Device, root fs.FS, gpus []gpreempt.GPU) *dbgtrap.Mechanism {
	crashes := map[gpreempt.GPUID]bool{}
	for _, g := range gpus {
		crashes[g.ID] = true
	}
	for _, id := range safeGPUs(root, gpus) {
		crashes[id] = false
	}
	return dbgtrap.New(dbgtrap.Config{
		Device: device, Files: root, Crashes: func(id gpreempt.GPUID) bool { return crashes[id] },
		Attach: func(ctx context.Context, pid int32, start uint64) (dbgtrap.Thread, error) {
			t, err := proc.Trace(ctx, pid, start)
			if err != nil {
				return nil, err // an interface with a nil *Tracer would not be nil
			}
			return t, nil
		},
	})
}

// holder is a process that holds another one.
type holder struct {
	*child
	mechanism.Notifier
}

// startHolder starts one that has the process.
func startHolder(ctx context.Context, key gpreempt.ProcessKey, how string) (*holder, error) {
	c, err := start(HoldCommand, strconv.Itoa(int(key.PID)), how)
	if err != nil {
		return nil, err
	}
	if _, err := c.reply(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("hold process %d %s: %w", key.PID, how, err), c.Kill())
	}
	return &holder{child: c}, nil
}

// Suspend implements mechanism.Session.
func (h *holder) Suspend(ctx context.Context, _ func()) error { return h.do(ctx, "suspend") }

// Resume implements mechanism.Session.
func (h *holder) Resume(ctx context.Context) error { return h.do(ctx, "resume") }

// Handle implements mechanism.Session: nobody calls it, without events.
func (*holder) Handle(context.Context) (r mechanism.Report, err error) { return r, nil }

// Close implements mechanism.Session.
func (h *holder) Close() error { return h.End() }

func (h *holder) do(ctx context.Context, command string) error {
	_, err := h.Ask(ctx, command)
	return err
}
