package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	systemd "github.com/coreos/go-systemd/v22/daemon"

	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/mechanism/nvchannels"
	"github.com/gpreempt/gpreempt/internal/targets"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// serve runs the parts until ctx ends. scraped may be nil.
func (d *daemon) serve(ctx context.Context, listeners []net.Listener, scraped net.Listener) error {
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	failed := make(chan error, 1+len(listeners))
	var parts parts
	parts.Go("the scheduler", func() {
		every := beatEvery
		if d.backend.nvidia != nil {
			every = nvchannels.BeatEvery
		}
		if err := d.runner.Run(running, every, d.beat); err != nil {
			failed <- err
		}
	})
	d.findNewGPUs()
	tried := make(chan struct{})
	parts.Go("resuming what an earlier daemon left paused", func() { d.resumeOrphans(running, sync.OnceFunc(func() { close(tried) })) })
	select { // short, unless a call of the driver hangs
	case <-tried:
	case <-time.After(orphansTime):
	case <-ctx.Done():
	}
	d.observer.Scan()
	d.checkEffect()
	parts.Go("reading processes and queues", func() { d.observer.Run(running) })
	if d.containers != nil {
		parts.Go("asking container runtimes", func() { d.containers.Run(running) })
	}
	parts.Go("watching the warnings", func() { d.watchWarnings(running) })
	parts.Go("reading the kernel log", func() { d.watchKernelLog(running) })
	parts.Go("looking for idle leases", func() { d.idle.run(running) })
	parts.Go("measuring backlogs", func() { d.loads.run(running) })
	parts.Go("a reload of the config file", func() { d.reloadOnHangup(running) })
	for _, listener := range listeners {
		parts.Go("a listener", func() {
			if err := d.server.Serve(listener); err != nil {
				failed <- err
			}
		})
	}
	if scraped != nil {
		parts.Go("the metrics", func() { d.serveMetrics(running, scraped) })
	}
	d.server.SetServing(true)
	d.ready.Store(true)
	d.notify(systemd.SdNotifyReady + "\nSTATUS=" + d.status(d.listWarnings()))
	d.log.Info("serving", log.Socket(d.config.Load().Socket), log.TCP(d.config.Load().TCP.Address), log.Backend(d.backend.name),
		log.Version(api.VersionString()), log.GPUs(len(d.inventory.GPUs())))
	var failure error
	select {
	case <-ctx.Done():
	case failure = <-failed:
	}
	d.ready.Store(false)
	d.notify(systemd.SdNotifyStopping + "\nSTATUS=resuming everything")
	err := d.shutdown(ctx)
	stop()
	if left := parts.Wait(endTime); left != nil {
		err = errors.Join(err, fmt.Errorf("not ended within %v: %s", endTime, strings.Join(left, ", ")))
	}
	if err == nil {
		d.logs.EndRepeats() // or its lines would follow the last one
		d.log.Info("stopped, nothing is suspended")
	}
	return errors.Join(failure, err)
}

// parts are the goroutines of the daemon.
type parts struct {
	mu   sync.Mutex
	left map[string]int // that run, by what they do
	wake chan struct{}
}

// Go runs a part, which name describes by what it does.
func (p *parts) Go(name string, run func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.left == nil {
		p.left, p.wake = map[string]int{}, make(chan struct{}, 1)
	}
	p.left[name]++
	go func() {
		run()
		p.mu.Lock()
		if p.left[name]--; p.left[name] == 0 {
			delete(p.left, name)
		}
		p.mu.Unlock()
		select {
		case p.wake <- struct{}{}:
		default:
		}
	}()
}

// Wait returns when all parts have ended, or after a while those that have not.
func (p *parts) Wait(atMost time.Duration) (left []string) {
	timer := time.NewTimer(atMost)
	defer timer.Stop()
	for {
		p.mu.Lock()
		left = slices.Sorted(maps.Keys(p.left))
		p.mu.Unlock()
		if len(left) == 0 {
			return nil
		}
		select {
		case <-p.wake:
		case <-timer.C:
			return left
		}
	}
}

// shutdown resumes everything, then ends calls, then detaches from the targets. Detaching
// resumes a target that an action in flight still suspends.
func (d *daemon) shutdown(ctx context.Context) error {
	d.runner.Stop()
	return inStages(context.WithoutCancel(ctx), d.awaitAllRunning, d.server.Shutdown, d.sessions.Close)
}

// inStages runs the stages of a shutdown. One that takes all of its time leaves the next ones
// theirs.
func inStages(ctx context.Context, running func(context.Context) error, endCalls func(context.Context), detach func(context.Context) error) error {
	resume, cancel := context.WithTimeout(ctx, resumeAllTime)
	err := running(resume)
	cancel()
	calls, cancel := context.WithTimeout(ctx, callsTime)
	endCalls(calls)
	cancel()
	last, cancel := context.WithTimeout(ctx, detachTime)
	defer cancel()
	if detached := detach(last); detached != nil {
		err = errors.Join(err, detached)
	} else if err != nil {
		err = running(last) // those that were late have been resumed since
	}
	if err != nil {
		return fmt.Errorf("shut down: %w", err)
	}
	return nil
}

// awaitAllRunning returns when no target is suspended.
func (d *daemon) awaitAllRunning(ctx context.Context) error {
	for {
		revision := d.events.Revision()
		suspended := 0
		d.runner.View(func(c *scheduler.Core) { suspended = c.Away() })
		if suspended == 0 {
			return nil
		}
		if err := d.events.Wait(ctx, revision); err != nil {
			return fmt.Errorf("%d targets still being resumed: %w", suspended, err)
		}
	}
}

// findGPUs adds the GPUs of the host to inventory and scheduler.
func (d *daemon) findGPUs() error {
	gpus, err := d.backend.fs.GPUs()
	if errors.Is(err, fs.ErrNotExist) {
		d.warnings.set("gpus", gpreempt.WarnNoKFD.Warn("/sys/class/kfd does not exist: the amdgpu driver is not loaded or found no GPU"))
		return nil
	}
	if err != nil {
		return fmt.Errorf("find GPUs: %w", err)
	}
	omitted := d.backend.fs.Omitted()
	var unreadable []gpreempt.Warning
	if len(omitted) > 0 {
		unreadable = append(unreadable, gpreempt.WarnGPUOmitted.Warn("KFD topology: "+strings.Join(omitted, "; ")))
	}
	d.warnings.set("unreadable GPUs", unreadable...)
	if len(gpus) == 0 && len(omitted) == 0 {
		d.warnings.set("gpus", gpreempt.WarnNoGPU.Warn("the amdgpu driver is loaded and has no compute GPU"))
		return nil
	}
	d.warnings.set("gpus")
	d.inventory.SetGPUs(gpus)
	if d.backend.simulated == "" {
		hazards, unknown := targets.NewHazards(d.backend.root, gpus, d.config.Load().Safety.Hazards)
		d.hazards.Store(hazards)
		hazards.SetRows(d.config.Load().Safety.Hazards) // a reload meanwhile has changed those before
		for _, text := range unknown {
			d.log.Warn("facts for the hazard table are unknown", log.Text(text))
		}
	}
	for _, gpu := range gpus {
		d.runner.Post(scheduler.GPUAdded{GPU: gpu.ID})
	}
	return nil
}

// rereadUnreadable is how often the topology is read while a node of it cannot be read: its
// files change without a new generation.
const rereadUnreadable = 10 * time.Second

// findNewGPUs finds the GPUs, also those that were added after the start: a driver that is
// loaded adds one after the other.
func (d *daemon) findNewGPUs() {
	generation, err := d.backend.fs.Generation()
	due := len(d.backend.fs.Omitted()) > 0 && time.Since(d.topologyRead) >= rereadUnreadable
	if len(d.inventory.GPUs()) > 0 && !due && (err != nil || generation == d.generation) {
		return
	}
	d.generation, d.topologyRead = generation, time.Now()
	if err := d.findGPUs(); err != nil {
		d.generation = ""
		d.warnings.set("gpus", gpreempt.WarnGPUsUnreadable.Warn(err.Error()))
	}
}
