// Package daemon wires the parts of gpreemptd together, in start order, and
// takes them down again in reverse.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
	systemd "github.com/coreos/go-systemd/v22/daemon"
	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/internal/container"
	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/internal/executor"
	"github.com/gpreempt/gpreempt/internal/hrtimer"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/internal/listen"
	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/logkey"
	"github.com/gpreempt/gpreempt/internal/mechanism/ladder"
	"github.com/gpreempt/gpreempt/internal/server"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

const (
	// eventsKept and changesKept are what watchers can go back by.
	eventsKept  = 16384
	changesKept = 8192
	// shutdownTime bounds an orderly end: resume everything, answer calls in flight.
	shutdownTime = 10 * time.Second
	// endTime is how long the parts may take to end after that.
	endTime = 5 * time.Second
	// orphansTime is how long the start waits for the first attempt to resume processes
	// that an earlier daemon left paused.
	orphansTime = 2 * time.Second
	// beatEvery is the longest interval at which the scheduler shows that it is alive.
	beatEvery = time.Second
)

// Options is what the command line says.
type Options struct {
	// ConfigPath is the config file; it may be missing unless ConfigGiven.
	ConfigPath  string
	ConfigGiven bool
	// Socket replaces the config file's when not "".
	Socket string
	// Host is the machine to work on.
	Host Host
	// Log replaces the logger made from the config when not nil.
	Log *zap.Logger

	// passed are the sockets systemd passed, before Run asks for them.
	passed []*os.File
}

// clock is the daemon's monotonic time.
type clock struct{ start time.Time }

func (c clock) Now() time.Duration { return time.Since(c.start) }

// daemon is the parts that live as long as the process.
type daemon struct {
	opts      Options
	logs      *log.Log
	log       *zap.Logger // of logs; holds back lines that repeat
	records   log.Records
	backend   *backend
	hangups   <-chan os.Signal // SIGHUP
	config    atomic.Pointer[config.Config]
	hazards   atomic.Pointer[hazards]
	authz     atomic.Pointer[auth.Policy]
	warnings  warnings
	events    *events.Log
	inventory *inventory.Inventory
	observer  *inventory.Observer
	// containers is nil in a simulation.
	containers   *container.Resolver
	targets      *targets
	ladder       *ladder.Ladder
	executor     *executor.Executor
	runner       *scheduler.Runner
	server       *server.Server
	idle         *idleWatch
	certificates *auth.CertificateStore // nil without TCP
	// epoch begins the lease ids of this run.
	epoch uint64
	// generation is that of the topology when its GPUs were read last; the observer uses it.
	generation string
	// ready tells that the daemon serves.
	ready atomic.Bool
	// told is which warnings the log knows of; the scheduler's loop uses it.
	told told
	// statusAt is when systemd was told last how it goes; the scheduler's loop uses it.
	statusAt time.Time
}

// Run serves until ctx ends, then resumes everything and returns. It is the whole
// daemon but for the signals that end the process.
func Run(ctx context.Context, opts Options) (err error) {
	// From here on: a SIGHUP that nobody waits for would end the process.
	hangups := make(chan os.Signal, 1)
	signal.Notify(hangups, syscall.SIGHUP)
	defer signal.Stop(hangups)
	// Or the death of whoever reads the log would be the daemon's.
	pipes := make(chan os.Signal, 1)
	signal.Notify(pipes, syscall.SIGPIPE)
	defer signal.Stop(pipes)
	opts.passed = append(opts.passed, activation.Files(true)...)
	cfg, err := opts.load()
	if err != nil {
		return err
	}
	d := &daemon{opts: opts, hangups: hangups, told: told{}}
	d.openLog(cfg)
	defer d.logs.Close()
	listener, release, err := listen.Unix(ctx, cfg.Socket, opts.lockPath(cfg.Socket), opts.passed)
	if err != nil {
		return err
	}
	defer release()
	scraped, err := listenMetrics(ctx, cfg.Metrics) // before parts are made that have to be ended
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	if scraped != nil {
		defer func() { _ = scraped.Close() }() // the daemon's end has closed it, unless it did not get that far
	}
	remote, err := d.listenTCP(ctx, cfg.TCP)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	if remote != nil {
		defer func() { _ = remote.Close() }()
	}
	d.backend = openBackend(ctx, opts.Host, cfg, d.hooks(), d.log)
	defer func() { err = errors.Join(err, d.backend.close()) }()
	if err := d.build(ctx, cfg); err != nil {
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

// load reads the config file and lets the command line have the last word. Once there
// was a file, that it is missing is a mistake: a moment without it, while somebody
// edits, must not put all rules out of force.
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
	if o.Socket != "" {
		cfg.Socket = o.Socket
	}
	return cfg, nil
}

// build makes the parts, from the bottom up. Nothing runs yet but the workers'
// bookkeeping.
func (d *daemon) build(ctx context.Context, cfg config.Config) error {
	rules, err := classify.New(cfg.Rules)
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
	d.config.Store(&cfg)
	access, unknown := lookUpAccess(cfg)
	d.setAccess(access, unknown, cfg.Socket)
	d.ladder = ladder.New(ladder.Config{
		Rungs: d.backend.rungs,
		Judge: d.judge,
		Lost:  func(key gpreempt.ProcessKey, err error) { d.targets.attached(key, err) },
		Now:   time.Now,
		Log:   d.log.Named("ladder"),
	})
	d.executor = executor.New(executor.Config{
		Mechanism: d.ladder,
		Post:      func(ev scheduler.Event) { d.runner.Post(ev) },
		Attached:  func(key gpreempt.ProcessKey, err error) { d.targets.attached(key, err) },
		Now:       time0.Now,
		Log:       d.log.Named("executor"),
	})
	core := scheduler.New(cfg.Policy, cfg.Limits.Leases)
	d.runner = scheduler.NewRunner(core, time0, timer, d.executor, d.record)
	d.openContainers(cfg.Containers)
	d.targets = &targets{
		inventory: d.inventory, container: d.container, attacher: d.executor, chooser: d.ladder, post: d.runner.Post, now: time.Now,
		log: d.log.Named("targets"), known: map[gpreempt.ProcessKey]*knownTarget{},
	}
	d.setRules(rules)
	d.openObserver()
	d.server = server.New(server.Config{
		Scheduler:       announcer{d.runner, d.onIdleLease},
		Events:          d.events,
		Inventory:       d.inventory,
		Directory:       d.targets,
		Observer:        d.observer,
		Backlogs:        d.backlogs,
		BootID:          bootID(),
		Authz:           func() auth.Policy { return *d.authz.Load() },
		Limits:          func() server.Limits { return d.config.Load().Limits.Clients },
		MaxMessageBytes: cfg.Limits.MaxMessageBytes,
		Epoch:           d.epoch,
		Now:             time.Now,
		Log:             d.log.Named("server"),
		Audit:           d.logs.Audit().Named("audit"),
		Version:         api.VersionString(),
		Backend:         d.backend.name,
		Diagnose:        d.diagnose,
		Warnings:        d.listWarnings,
	})
	d.idle = &idleWatch{runner: d.runner, client: server.ProcessOf, busy: d.busy, wake: make(chan struct{}, 1)}
	d.warnings.set("backend", d.backend.warnings...)
	return nil
}

// record takes every state change of the scheduler: the one place from which the
// event stream, the statistics, the metrics and the log are fed.
func (d *daemon) record(r scheduler.Record) {
	mechanism := ""
	if r.ToTarget == scheduler.TargetSuspended {
		held, _ := d.ladder.Choice(r.Target)
		mechanism = held.Mechanism
	}
	d.events.Append(time.Now(), r, mechanism)
	d.records.Write(r)
}

// serve runs the parts until ctx ends. scraped may be nil.
func (d *daemon) serve(ctx context.Context, listeners []net.Listener, scraped net.Listener) error {
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	failed := make(chan error, 1+len(listeners))
	var parts sync.WaitGroup
	parts.Go(func() {
		if err := d.runner.Run(running, beatEvery, d.beat); err != nil {
			failed <- err
		}
	})
	if err := d.findGPUs(); err != nil {
		stop()
		parts.Wait()
		return errors.Join(err, closeAll(listeners))
	}
	tried := make(chan struct{})
	parts.Go(func() { d.resumeOrphans(running, sync.OnceFunc(func() { close(tried) })) })
	select { // short, unless a call of the driver hangs
	case <-tried:
	case <-time.After(orphansTime):
	case <-ctx.Done():
	}
	d.observer.Scan()
	parts.Go(func() { d.observer.Run(running) })
	if d.containers != nil {
		parts.Go(func() { d.containers.Run(running) })
	}
	parts.Go(func() { d.watchKernelLog(running) })
	parts.Go(func() { d.idle.run(running) })
	parts.Go(func() { d.reloadOnHangup(running) })
	for _, listener := range listeners {
		parts.Go(func() {
			if err := d.server.Serve(listener); err != nil {
				failed <- err
			}
		})
	}
	if scraped != nil {
		parts.Go(func() { d.serveMetrics(running, scraped) })
	}
	d.server.SetServing(true)
	d.ready.Store(true)
	d.notify(systemd.SdNotifyReady + "\nSTATUS=" + d.status())
	d.log.Info("serving", logkey.Socket(d.config.Load().Socket), logkey.TCP(d.config.Load().TCP.Address), logkey.Backend(d.backend.name),
		logkey.Version(api.VersionString()), logkey.GPUs(len(d.inventory.GPUs())))
	var failure error
	select {
	case <-ctx.Done():
	case failure = <-failed:
	}
	d.ready.Store(false)
	d.notify(systemd.SdNotifyStopping + "\nSTATUS=letting everything run again")
	err := d.shutdown(ctx)
	stop()
	ended := make(chan struct{})
	go func() { parts.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(endTime):
		err = errors.Join(err, errors.New("something hangs in the kernel and is left behind"))
	}
	return errors.Join(failure, err)
}

// shutdown resumes everything first, then ends calls, then lets the targets go.
// The mechanism's Close resumes whatever an action in flight left behind.
func (d *daemon) shutdown(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTime)
	defer cancel()
	d.runner.Stop()
	quiet := d.awaitAllRunning(ctx)
	d.server.Shutdown(ctx)
	if err := errors.Join(quiet, d.executor.Close(ctx)); err != nil {
		return fmt.Errorf("shut down: %w", err)
	}
	d.logs.EndRepeats() // or its lines would follow the last one
	d.log.Info("stopped, nothing is suspended")
	return nil
}

// awaitAllRunning returns when no target is away any more.
func (d *daemon) awaitAllRunning(ctx context.Context) error {
	for {
		revision := d.events.Revision()
		away := 0
		d.runner.View(func(c *scheduler.Core) { away = c.Away() })
		if away == 0 {
			return nil
		}
		if err := d.events.Wait(ctx, revision); err != nil {
			return fmt.Errorf("%d targets still being resumed: %w", away, err)
		}
	}
}

// findGPUs tells inventory and scheduler which GPUs there are.
func (d *daemon) findGPUs() error {
	gpus, err := d.backend.fs.GPUs()
	if errors.Is(err, fs.ErrNotExist) {
		d.warnings.set("gpus", gpreempt.WarnNoKFD.Warn("this host has no /sys/class/kfd: the amdgpu driver is not loaded or found no GPU"))
		return nil
	}
	if err != nil {
		return fmt.Errorf("find GPUs: %w", err)
	}
	if len(gpus) == 0 {
		d.warnings.set("gpus", gpreempt.WarnNoGPU.Warn("the amdgpu driver is loaded and shows no GPU that computes"))
		return nil
	}
	d.warnings.set("gpus")
	d.inventory.SetGPUs(gpus)
	if d.backend.simulated == "" {
		hazards, unknown := newHazards(d.backend.root, gpus, d.config.Load().Safety.Hazards)
		d.hazards.Store(hazards)
		for _, text := range unknown {
			d.log.Warn("what the hazard table asks for is not known", logkey.Text(text))
		}
	}
	for _, gpu := range gpus {
		d.runner.Post(scheduler.GPUAdded{GPU: gpu.ID})
	}
	return nil
}

// topologyGeneration is a file of the driver's that changes once a GPU has come or gone.
const topologyGeneration = "sys/class/kfd/kfd/topology/generation_id"

// lookForGPUs finds GPUs that came after the daemon: a driver that is being loaded
// brings one after the other.
func (d *daemon) lookForGPUs() {
	generation, err := fs.ReadFile(d.backend.root, topologyGeneration)
	if len(d.inventory.GPUs()) > 0 && (err != nil || string(generation) == d.generation) {
		return
	}
	d.generation = string(generation)
	if err := d.findGPUs(); err != nil {
		d.generation = ""
		d.warnings.set("gpus", gpreempt.WarnGPUsUnreadable.Warn(err.Error()))
	}
}
