// Package dbgtrap suspends processes through the driver's debug interface,
// AMDKFD_IOC_DBG_TRAP: it traces the target where the driver asks for that, answers the
// target's ROCm runtime, and copes with other debuggers.
//
// The kernel undoes everything by itself when this program dies: the queues of a
// target are suspended for as long as its debugger lives. Facts about the driver
// come from kfd_debug.c, kfd_chardev.c and kfd_device_queue_manager.c of Linux
// 6.12.107 and 7.2; nothing here was run on AMD hardware.
package dbgtrap

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// Thread is an OS thread that traces a process: what *proc.Tracer is. Its errors
// match proc.ErrGone and proc.ErrDetached.
type Thread interface {
	Do(ctx context.Context, f func() error) error
	Detach(ctx context.Context) error
	Done() <-chan struct{}
}

// Tracer attaches to a process by pid and start time: what proc.Trace does.
type Tracer func(ctx context.Context, pid int32, start uint64) (Thread, error)

// Config is what a Mechanism needs. Its functions may be called by several
// goroutines at once.
type Config struct {
	Device *kfd.Device
	Attach Tracer
	// Root is the directory that has proc and sys in it; "" is "/".
	Root string
	// Files, if not nil, has the sysfs and debugfs of the driver in place of Root.
	Files fs.FS
	// GPUs returns the GPUs a target's queues are on. It must not block. May be nil.
	GPUs func(gpreempt.ProcessKey) []gpreempt.GPU
	// Crashes reports whether SUSPEND_QUEUES crashes the kernel for a process without a VM on
	// a GPU that it flushes (hazard table). Nil means that it does.
	Crashes func(gpreempt.GPUID) bool
	// WaitsIn returns the kernel function in which a thread of this program waits, "" when
	// that is not known; proc.WaitsIn by default.
	WaitsIn func(tid int) string
	// Deserted reports whether somebody else has debugged a target for so long that the debugger may be
	// dead; nil for never. A process that writes a GPU core dump debugs itself and has suspended its
	// queues, for minutes.
	Deserted func(gpreempt.ProcessKey) bool
	// Owns reports whether a process is a part of this program. Nil is the calling one only.
	Owns func(pid int32) bool
	// Log may be nil.
	Log *zap.Logger
}

// Mechanism is the debug interface as a mechanism.Mechanism. It has at most one
// session for each process.
type Mechanism struct {
	cfg Config
	// runtimeEndTime is how long a target that has shut its runtime down may take to end.
	runtimeEndTime time.Duration
	beats          beats

	sessions mechanism.Sessions[*session]

	mu sync.Mutex // guards what follows; not held across a call of anything
	// rule is the kernel's; PermissionUnknown until the first target has shown it.
	rule kfd.PermissionRule
}

var _ mechanism.Inspector = (*Mechanism)(nil)

// beats are the times between two looks whether this program is still the debugger of a target
// that is suspended, and of one that runs.
type beats struct{ suspended, running time.Duration }

// New returns the mechanism. It has no effect before Attach.
func New(cfg Config) *Mechanism {
	if cfg.Root == "" {
		cfg.Root = "/"
	}
	if cfg.GPUs == nil {
		cfg.GPUs = func(gpreempt.ProcessKey) []gpreempt.GPU { return nil }
	}
	if cfg.WaitsIn == nil {
		cfg.WaitsIn = func(tid int) string { return proc.WaitsIn(os.Getpid(), tid) }
	}
	if cfg.Owns == nil {
		cfg.Owns = func(pid int32) bool { return int(pid) == os.Getpid() }
	}
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	if cfg.Files == nil {
		cfg.Files = discovery.Host(cfg.Root)
	}
	return &Mechanism{cfg: cfg, runtimeEndTime: time.Second, beats: beats{suspended: time.Second, running: 10 * time.Second}}
}

// Name implements mechanism.Mechanism.
func (*Mechanism) Name() string { return mechanism.DBGTrap }

// Attach implements mechanism.Mechanism. It interrupts every process on every GPU
// the target can see, for a moment, and may take seconds for each of them. Errors
// beyond mechanism.ErrGone: *RuntimeError, mechanism.ErrDebugged, those of the tracer, a
// *kfd.Error, or the cause of ctx.
func (m *Mechanism) Attach(ctx context.Context, target gpreempt.ProcessKey) (mechanism.Session, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	s := newSession(context.WithoutCancel(ctx), m, target)
	if err := m.sessions.Add(target, s); err != nil {
		return nil, err
	}
	err := mechanism.Guard(func() error { return s.debuggee.begin(s.ctx, ctx) })
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err == nil {
		s.watch()
		return s, nil
	}
	if closing := s.Close(); closing != nil {
		return s, errors.Join(err, closing)
	}
	return nil, err
}

// Queues returns the queues of a target by the driver's last snapshot, which is taken after
// each birth; queues that were destroyed since may be among them.
// False when the target is not held. It makes no call to the driver; the
// result is shared and must not be changed.
func (m *Mechanism) Queues(target gpreempt.ProcessKey) ([]kfd.QueueSnapshotEntry, bool) {
	s := m.sessions.Get(target)
	if s == nil {
		return nil, false
	}
	snapshot := s.debuggee.seen.Load()
	if snapshot == nil {
		return nil, false
	}
	return *snapshot, true
}

// TargetLock is the function in which DBG_TRAP takes the lock of the target
// (kfd_process.mutex), and waits for nothing else: the kernel leaves the functions of the
// lock itself out (get_wchan). What waits for a GPU or its firmware does so in functions
// that this one calls.
const TargetLock = "kfd_ioctl_set_debug_trap"

// WaitsForTarget implements mechanism.Inspector, by the place in the kernel where the
// thread waits that makes the call.
func (m *Mechanism) WaitsForTarget(target gpreempt.ProcessKey) bool {
	s := m.sessions.Get(target)
	if s == nil {
		return false
	}
	tid := s.debuggee.calling.Load()
	return tid != 0 && m.cfg.WaitsIn(int(tid)) == TargetLock
}

// PermissionRule returns the driver's permission rule, kfd.PermissionUnknown until the
// first target has shown it.
func (m *Mechanism) PermissionRule() kfd.PermissionRule {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.rule
}

// permission returns the kernel's rule, asking for it once. The calling thread must
// not trace the target, while another thread of this program does: then no other
// program can enable debugging, and the right to debug is where this program's ENABLE put it.
func (m *Mechanism) permission(pid int32) kfd.PermissionRule {
	if rule := m.PermissionRule(); rule != kfd.PermissionUnknown {
		return rule
	}
	rule, err := m.cfg.Device.ProbePermissionRule(pid)
	if err != nil {
		m.cfg.Log.Debug("the driver's permission rule is not known", log.PID(pid), log.Err(err))
		return rule
	}
	m.cfg.Log.Info("the driver's permission rule is known", log.Permission(rule), log.Profile(m.cfg.Device.Profile()))
	m.mu.Lock()
	defer m.mu.Unlock()
	m.rule = rule
	return rule
}
