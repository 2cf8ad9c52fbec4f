// Package daemon is the main program of gpreemptd: its commands, and the wiring of its
// parts in start order. At the end it resumes everything before it stops the parts.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/internal/container"
	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/internal/hrtimer"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/safety"
	"github.com/gpreempt/gpreempt/internal/server"
	"github.com/gpreempt/gpreempt/internal/targets"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

const (
	// eventsKept and changesKept bound how far back watchers can resume.
	eventsKept  = 16384
	changesKept = 8192
	// The stages of a shutdown, each with its longest time: resume everything, end the calls in
	// flight (a client that sends too much reads that the daemon stops when its debt is paid),
	// detach from the targets, end the parts of the daemon.
	resumeAllTime = 10 * time.Second
	callsTime     = 5 * time.Second
	detachTime    = 5 * time.Second
	endTime       = 5 * time.Second
	// orphansTime is how long the start waits for the first attempt to resume processes
	// that an earlier daemon left paused.
	orphansTime = 2 * time.Second
	// beatEvery is the longest interval at which the scheduler shows that it is alive.
	beatEvery = time.Second
)

// Options are the options of the command line.
type Options struct {
	// ConfigPath is the config file; it may be missing unless ConfigGiven.
	ConfigPath  string
	ConfigGiven bool
	// Socket replaces the socket of the config file if not "".
	Socket string
	// Host is the machine to work on.
	Host Host
	// Tune, if not nil, changes each configuration that is read. It is for tests and emulators, to
	// which the values that no key has do not apply.
	Tune func(*config.Config)
	// Log, if not nil, replaces the log on standard error.
	Log *zap.Logger
}

// clock is the daemon's monotonic time.
type clock struct{ start time.Time }

func (c clock) Now() time.Duration { return time.Since(c.start) }

// daemon has the parts that live as long as the process.
type daemon struct {
	opts      Options
	logs      *log.Log
	log       *zap.Logger // of logs; holds back lines that repeat
	records   log.Records
	backend   *backend
	hangups   <-chan os.Signal // SIGHUP
	left      func() bool      // whether the terminal that the daemon was started in has ended; nil without one
	end       func()           // ends Run
	config    atomic.Pointer[config.Config]
	hazards   atomic.Pointer[targets.Hazards]
	authz     atomic.Pointer[auth.Policy]
	warnings  warnings
	events    *events.Log
	inventory *inventory.Inventory
	observer  *inventory.Observer
	// containers is nil in a simulation.
	containers   *container.Resolver
	registry     *targets.Registry
	sessions     *targets.Sessions
	runner       *scheduler.Runner
	server       *server.Server
	idle         *idleWatch
	loads        *loadWatch
	kernelLog    *safety.KernelLog
	resets       resets
	without      without
	certificates *auth.CertificateStore // nil without TCP
	// doubted are the alarms that were doubted since the start. Only the goroutine that reads
	// the kernel log uses it.
	doubted []string
	// epoch begins the lease ids of this run.
	epoch uint64
	// generation is the generation of the topology at the last read of its GPUs. Only the
	// observer uses it.
	generation string
	// topologyRead is the time of that read.
	topologyRead time.Time
	// ready reports whether the daemon serves.
	ready atomic.Bool
}

// threadsOnOne is how many threads run Go code on one processor.
const threadsOnOne = 4

// processors returns how many processors the daemon may use, and sets GOMAXPROCS if it is one. With
// one thread, an announcement that arrives waits until what runs gives way: the runtime looks at the
// network when nothing else can run, or every 10 ms. With several, the kernel runs the thread that has
// waited at once. On two processors, more threads than two cost an announcement 5 %.
var processors = sync.OnceValue(func() int {
	n := runtime.GOMAXPROCS(0)
	if n == 1 && os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(threadsOnOne)
	}
	return n
})

// Run serves until ctx ends, or the terminal that this process was started in, then resumes everything
// and returns. It handles SIGHUP and SIGPIPE; the caller handles the signals that end the process.
func Run(ctx context.Context, opts Options) (err error) {
	ctx, end := context.WithCancel(ctx)
	defer end()
	var left func() bool
	if !signal.Ignored(syscall.SIGHUP) && hasTerminal() { // not by nohup
		left = func() bool { return !hasTerminal() }
	}
	// First, because an unhandled SIGHUP would end the process.
	hangups := make(chan os.Signal, 1)
	signal.Notify(hangups, syscall.SIGHUP)
	defer signal.Stop(hangups)
	// An unhandled SIGPIPE would end the process when the reader of the log ends.
	pipes := make(chan os.Signal, 1)
	signal.Notify(pipes, syscall.SIGPIPE)
	defer signal.Stop(pipes)
	cfg, err := opts.load()
	if err != nil {
		return err
	}
	d := &daemon{opts: opts, hangups: hangups, left: left, end: end}
	d.openLog(cfg)
	defer d.logs.Close()
	unlock, unknown, err := opts.Host.lockHost()
	if err != nil {
		return err
	}
	defer unlock()
	if unknown != nil {
		d.log.Warn("a second daemon of this host would not be noticed", log.Err(unknown))
	}
	listener, release, err := listen(ctx, cfg.Socket, opts.lockPath(cfg.Socket), activation.Files(true))
	if err != nil {
		return err
	}
	defer release()
	var scraped net.Listener // of the metrics; before parts are created that must be closed
	if address := cfg.Metrics.Address; address != "" {
		if scraped, err = events.Listen(ctx, address); err != nil {
			return errors.Join(err, listener.Close())
		}
		defer func() { _ = scraped.Close() }() // closed already after an orderly end
	}
	remote, err := d.listenTCP(ctx, cfg.TCP)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	if remote != nil {
		defer func() { _ = remote.Close() }()
	}
	d.backend = openBackend(ctx, opts.Host, cfg, d.gpusOf, d.crashesWithoutVM, d.countHelperExit, d.sinceBreakersClosed, d.log)
	defer func() { err = errors.Join(err, d.backend.close()) }()
	if err := d.build(cfg); err != nil {
		return errors.Join(err, listener.Close())
	}
	clients, err := d.identified(listener)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	listeners := []net.Listener{clients}
	if remote != nil {
		listeners = append(listeners, remote)
	}
	return d.serve(ctx, listeners, scraped)
}

// openLog opens the log at the level of the config.
func (d *daemon) openLog(cfg config.Config) {
	if d.opts.Log != nil {
		d.logs = log.Of(d.opts.Log)
	} else {
		d.logs = log.Open(os.Stderr)
	}
	d.logs.SetLevel(cfg.Log.Level)
	d.log = d.logs.Logger()
	d.records = log.Records{Log: d.logs.Changes(), LeaseID: d.leaseID}
}

// leaseID returns the ID of a lease that clients know.
func (d *daemon) leaseID(id scheduler.LeaseID) string { return server.LeaseID(d.epoch, id) }

// resumeOrphans resumes what an earlier daemon left paused, and calls tried after the
// first attempt.
func (d *daemon) resumeOrphans(ctx context.Context, tried func()) {
	if d.backend.pauses == nil {
		tried()
		return
	}
	d.backend.pauses.Run(ctx, func(failures []error) {
		var warnings []gpreempt.Warning
		for _, err := range failures {
			warnings = append(warnings, gpreempt.WarnOrphanedPause.Warn(fmt.Sprintf("an earlier daemon may have left it paused: %v", err)))
		}
		d.warnings.set("orphans", warnings...)
		tried()
	})
}

// load reads the config file; the socket of the command line takes precedence. After a
// first successful read a missing file is an error: while an editor replaces the file, the
// rules must stay in force.
func (o *Options) load() (config.Config, error) {
	cfg, err := config.Load(o.ConfigPath)
	switch {
	case err == nil:
		o.ConfigGiven = true
	case errors.Is(err, fs.ErrNotExist) && !o.ConfigGiven:
		cfg = config.Default()
	default:
		return config.Config{}, err
	}
	if cfg, err = cfg.WithThreshold(os.Getenv(config.ThresholdVariable)); err != nil {
		return config.Config{}, err
	}
	if o.Socket != "" {
		cfg.Socket = o.Socket
	}
	if o.Tune != nil {
		o.Tune(&cfg)
		cfg.Policy = cfg.Policy.Normalize()
	}
	return cfg, nil
}

// build creates the parts from the bottom up, and starts none of them.
func (d *daemon) build(cfg config.Config) error {
	rules, err := classify.New(cfg.Rules, cfg.Jobs)
	if err != nil {
		return err
	}
	timer, err := hrtimer.New()
	if err != nil {
		return err
	}
	time0 := clock{time.Now()}
	d.epoch = uint64(time0.start.UnixNano())
	d.events = events.NewLog(eventsKept)
	d.inventory = inventory.New(changesKept)
	d.kernelLog = safety.NewKernelLog(kernelLog, d.inventory.GPUs, d.alarm)
	d.config.Store(&cfg)
	access, unknown := lookUpAccess(cfg)
	d.setAccess(access, unknown, cfg.Socket)
	d.sessions = targets.NewSessions(targets.Config{
		Mechanisms: d.backend.mechanisms,
		Assess:     d.assess,
		Post:       d.post,
		Look:       func(key gpreempt.ProcessKey) { d.observer.LookAt(key) },
		Bystanders: d.bystanders,
		Disturbed:  func(gpu gpreempt.GPUID, cycles int) { d.events.Disturbed(gpu, cycles) },
		Kill:       kill,
		Permitted:  permittedTracer,
		Now:        time0.Now,
		Log:        d.log.Named("targets"),
	})
	core := scheduler.New(cfg.Policy, cfg.Limits.Leases)
	d.runner = scheduler.NewRunner(core, time0, timer, d.sessions, d.record)
	if d.backend.simulated == "" { // a simulation has no containers
		d.containers = newContainers(d.backend.root, func(id string) { d.registry.ContainerChanged(id) }, d.log.Named("containers"))
	}
	d.registry = targets.NewRegistry(targets.RegistryConfig{
		Inventory: d.inventory, Container: d.container, Sessions: d.sessions, Post: d.runner.Post, Now: time.Now,
	})
	d.setRules(rules)
	d.openObserver()
	d.idle = &idleWatch{runner: d.runner, busy: d.busy, wake: make(chan struct{}, 1)}
	d.server = server.New(server.Config{
		Scheduler:       announcer{d.runner, d.idle},
		Events:          d.events,
		Inventory:       d.inventory,
		Directory:       d.registry,
		Observer:        d.observer,
		Backlogs:        d.backlogs,
		BootID:          bootID(),
		Authz:           func() auth.Policy { return *d.authz.Load() },
		Limits:          func() server.Limits { return d.config.Load().Limits.Rates(processors()) },
		Processors:      processors(),
		MaxMessageBytes: cfg.Limits.MaxMessageBytes,
		Epoch:           d.epoch,
		Now:             time.Now,
		Log:             d.log.Named("server"),
		Audit:           d.logs.Audit().Named("audit"),
		Version:         api.VersionString(),
		Backend:         d.backend.name,
		Mechanisms:      d.backend.mechanismNames(),
		Diagnose:        d.diagnose,
		Warnings:        d.listWarnings,
	})
	d.loads = &loadWatch{runner: d.runner, inventory: d.inventory, backlogs: d.backlogs, waves: d.hasWaves, wake: make(chan struct{}, 1)}
	d.setHQDBudget(cfg.HQDBudget)
	d.warnings.set("backend", d.backend.warnings...)
	return nil
}

// record handles every state change of the scheduler. It feeds the event stream, the
// statistics, the metrics and the log.
func (d *daemon) record(r scheduler.Record) {
	mechanism := ""
	if r.ToTarget == scheduler.TargetSuspended {
		state, _ := d.sessions.State(r.Target)
		mechanism = state.Choice.Mechanism
	}
	d.events.Append(time.Now(), r, mechanism)
	d.records.Write(r)
}
