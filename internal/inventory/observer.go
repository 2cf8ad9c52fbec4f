package inventory

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Config is what an Observer needs. The functions must not block; none may be nil unless
// its comment says so.
type Config struct {
	// Root is the root directory of the host, FS the reader of its KFD.
	Root fs.FS
	FS   *discovery.FS
	// Dump reads a file of debugfs. It may block for as long as the driver does. The error is a
	// *BusyError if a process may make the driver wait. Nil reads Root.
	Dump func(path string) ([]byte, error)
	// Inventory is written by this Observer only.
	Inventory *Inventory
	// Intervals returns the intervals in force.
	Intervals func() Intervals
	// Before is called before each scan, to find GPUs that appear late.
	Before func()
	// Scanned is called with what a scan changed, also when that is nothing.
	Scanned func(Diff)
	// Described is called when the info of a process's queues changed.
	Described func(discovery.Proc)
	// Snapshot returns the queues of a process by id as the driver's debug interface
	// reports them, nil for a process that is not debugged. It may be nil.
	Snapshot func(gpreempt.ProcessKey) map[uint32]gpreempt.QueueInfo
	// Busy reports whether the driver's locks of a process are needed for something more
	// urgent than reading mqds.
	Busy func() bool
	// SMI opens the event stream of a GPU. It is nil without a driver.
	SMI func(gpreempt.GPUID) (Stream, error)
	// Warn replaces the warnings of a source.
	Warn func(source string, now ...gpreempt.Warning)
	// Now is the wall clock.
	Now func() time.Time
	Log *zap.Logger
}

// Intervals are how often sources are read.
type Intervals struct {
	// Shortest and Longest bound the pause between two scans of sysfs: short after a
	// change, longer while nothing happens.
	Shortest, Longest time.Duration
	// Debugfs permits to read mqds and hqds.
	Debugfs bool
}

const (
	// settled is the time from a change of queues to a reading of mqds. Changes come together.
	settled = 200 * time.Millisecond
	// mqdsShortest and mqdsLongest bound the pause between two readings of mqds: short after a
	// change.
	mqdsShortest, mqdsLongest = time.Second, 30 * time.Second
	// mqdsShare is how many times as long as a reading takes the pause after it is at least, and
	// mqdsSoon the same where queues have changed.
	mqdsShare, mqdsSoon = 50, 10
	// mqdsMost bounds both: a reading that was late once, on a host without a free CPU, is repeated in minutes.
	mqdsMost = 5 * time.Minute
	// mqdsDelay is how long a reading is delayed while the driver is needed for other things.
	mqdsDelay = 2 * time.Second
	// checks is how many cheap checks there are from one scan to the next while nothing
	// changes: each wakes a processor.
	checks = 5
	// scanGap is the least time between two scans. Without it a program that creates
	// queues in a loop could keep the daemon scanning.
	scanGap = 20 * time.Millisecond
)

// Observer keeps an Inventory up to date. Scan and Run are called by one goroutine, the
// other methods by any.
type Observer struct {
	cfg Config
	// wake is filled by LookAt and Rescan.
	wake chan struct{}
	// dumps receives each reading of mqds.
	dumps chan dump
	hqds  hqdReader
	smi   smiReader

	// What follows belongs to the goroutine of Run.
	scanPace, mqdsPace *discovery.Pace
	// reading is set while mqds is being read; the next reading is not before rested.
	reading bool
	rested  time.Time

	began   time.Time  // of the observer
	mu      sync.Mutex // guards what follows
	sources map[string]*Source
	// asked are the processes to read, and all is set to scan every process.
	asked []gpreempt.ProcessKey
	all   bool
}

// NewObserver returns an Observer. It reads nothing before Scan or Run.
func NewObserver(cfg Config) *Observer {
	o := &Observer{
		cfg: cfg, began: cfg.Now(), wake: make(chan struct{}, 1), dumps: make(chan dump, 1),
		sources: map[string]*Source{},
		smi: smiReader{
			streams: map[gpreempt.GPUID]Stream{}, memory: map[gpreempt.GPUID]uint64{}, recent: map[gpreempt.GPUID]time.Time{},
		},
	}
	for _, name := range order {
		o.sources[name] = &Source{Name: name}
	}
	o.sources[hqds].Available, o.sources[hqds].Note = true, "read on demand: gpctl queue slots"
	o.sources[events].Note = "none yet: they come from targets that dbgtrap is attached to"
	if cfg.SMI == nil {
		o.sources[smi].Note = "no driver"
	}
	o.hqds.turn = make(chan struct{}, 1)
	every := cfg.Intervals()
	o.scanPace = discovery.NewPace(every.Shortest, every.Longest)
	o.mqdsPace = discovery.NewPace(mqdsShortest, mqdsLongest)
	return o
}

// LookAt starts to read the queues of one process, because the driver has reported that
// the process created a queue. It does not block.
func (o *Observer) LookAt(key gpreempt.ProcessKey) {
	now := o.cfg.Now()
	o.update(events, func(s *Source) {
		s.Available, s.ReadAt, s.Note = true, now, ""
		s.Readings++
	})
	o.mu.Lock()
	if !slices.Contains(o.asked, key) {
		o.asked = append(o.asked, key)
	}
	o.mu.Unlock()
	o.wakeUp()
}

// Rescan starts a scan of all processes now, because what scans read has changed. It does
// not block.
func (o *Observer) Rescan() {
	o.mu.Lock()
	o.all = true
	o.mu.Unlock()
	o.wakeUp()
}

func (o *Observer) wakeUp() {
	select {
	case o.wake <- struct{}{}:
	default: // it is pending
	}
}

// takeAsked returns the arguments of LookAt since the last call, and whether Rescan was
// called.
func (o *Observer) takeAsked() (asked []gpreempt.ProcessKey, all bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	asked, all = o.asked, o.all
	o.asked, o.all = nil, false
	return asked, all
}

// Run keeps the inventory up to date until ctx ends.
func (o *Observer) Run(ctx context.Context) {
	defer o.smi.close()
	every := o.cfg.Intervals()
	now := o.cfg.Now()
	pause := every.Shortest
	nextScan, nextDump := now.Add(pause), now
	tick := time.NewTimer(every.Shortest)
	defer tick.Stop()
	for {
		woken := false
		select {
		case <-ctx.Done():
			return
		case <-o.wake:
			woken = true
		case d := <-o.dumps:
			nextDump = o.cfg.Now().Add(o.applyDump(d))
			continue
		case <-tick.C:
		}
		every = o.cfg.Intervals()
		o.scanPace.Set(every.Shortest, every.Longest)
		o.readSMI()
		asked, scan := o.takeAsked()
		scan = scan || !o.cfg.Now().Before(nextScan) || o.processesChanged()
		changed := false
		for _, key := range asked {
			if scan {
				break
			}
			known, changes := o.lookAt(key)
			scan, changed = !known, changed || changes
		}
		if scan {
			var changes bool
			pause, changes = o.Scan()
			nextScan, changed = o.cfg.Now().Add(pause), changed || changes
		}
		if changed {
			if soonest := o.soonest(); soonest.Before(nextDump) {
				nextDump = soonest
			}
		}
		o.readMQDs(ctx, every, nextDump)
		tick.Reset(min(max(every.Shortest, pause/checks), max(nextScan.Sub(o.cfg.Now()), scanGap)))
		if woken { // not again at once
			select {
			case <-ctx.Done():
				return
			case <-time.After(scanGap):
			}
		}
	}
}

// soonest returns when mqds may be read after a change now.
func (o *Observer) soonest() time.Time {
	at := o.cfg.Now().Add(settled)
	if at.Before(o.rested) {
		return o.rested
	}
	return at
}

// processesChanged is the cheap check between scans. The next scan finds what it misses.
func (o *Observer) processesChanged() bool {
	changed, err := o.cfg.FS.Changed()
	return err == nil && changed
}

// Scan reads all processes and queues. It returns the time to wait before the next scan,
// and whether a queue or the info of one changed. It is called by the goroutine of Run,
// or before that.
func (o *Observer) Scan() (pause time.Duration, changed bool) {
	o.cfg.Before()
	began := o.cfg.Now()
	snapshot, err := o.cfg.FS.Scan()
	took := o.cfg.Now().Sub(began)
	if err != nil {
		pause = o.scanPace.Next(false, took)
		o.noteReading(sysfs, began, pause, err)
		if !errors.Is(err, fs.ErrNotExist) { // another warning reports a missing driver
			o.cfg.Warn(sysfs, gpreempt.WarnScanFailed.Warn("cannot read the queues: "+err.Error()))
		}
		o.cfg.Scanned(Diff{}) // the caller may have work that depends on time only
		return pause, false
	}
	o.cfg.Warn(sysfs, scanWarnings(snapshot)...)
	diff := o.cfg.Inventory.Apply(o.cfg.Now(), snapshot)
	pause = o.scanPace.Next(!diff.Empty(), took)
	o.noteReading(sysfs, began, pause, nil)
	described := o.readSnapshots(o.cfg.Inventory.Processes())
	o.cfg.Scanned(diff)
	for _, proc := range described {
		o.cfg.Described(proc)
	}
	return pause, len(diff.Queues)+len(described) > 0
}

// lookAt reads the queues of one process. It reports whether that was possible without a
// scan, and whether a queue or the info of one changed.
func (o *Observer) lookAt(key gpreempt.ProcessKey) (known, changed bool) {
	proc, known := o.cfg.FS.Look(key)
	if !known {
		return false, false
	}
	diff := o.cfg.Inventory.ApplyOne(o.cfg.Now(), proc)
	described := o.readSnapshots([]discovery.Proc{proc})
	o.cfg.Scanned(diff)
	for _, proc := range described {
		o.cfg.Described(proc)
	}
	return true, len(diff.Queues)+len(described) > 0
}

// readSnapshots reads the snapshots of the processes that have a queue without one, and
// returns those whose info changed.
func (o *Observer) readSnapshots(procs []discovery.Proc) (described []discovery.Proc) {
	if o.cfg.Snapshot == nil {
		return nil
	}
	for _, proc := range procs {
		without := slices.ContainsFunc(o.cfg.Inventory.QueuesOf(proc.Key), func(q gpreempt.QueueEntry) bool {
			return q.Info.Source&gpreempt.FromSnapshot == 0
		})
		if without && o.describe(proc, nil) {
			described = append(described, proc)
		}
	}
	return described
}

func scanWarnings(s discovery.Snapshot) []gpreempt.Warning {
	if len(s.Warnings) == 0 {
		return nil
	}
	return []gpreempt.Warning{gpreempt.WarnScanIncomplete.Warn(strings.Join(s.Warnings, "; "))}
}

// gfxOf returns the gfx_target_version of a GPU, 0 when it is unknown.
func (o *Observer) gfxOf(id gpreempt.GPUID) uint32 {
	for _, gpu := range o.cfg.Inventory.GPUs() {
		if gpu.ID == id {
			return gpu.GFX
		}
	}
	return 0
}

// describe updates the info of a process's queues from its snapshot and its dumps, and
// reports whether that changed anything. dumps is nil when mqds was not read: then the
// info from earlier dumps stays.
func (o *Observer) describe(proc discovery.Proc, dumps []debugfs.MQD) bool {
	var snapshot map[uint32]gpreempt.QueueInfo
	if o.cfg.Snapshot != nil {
		snapshot = o.cfg.Snapshot(proc.Key)
	}
	if len(snapshot) == 0 && dumps == nil {
		return false
	}
	before := o.cfg.Inventory.Revision()
	infos := make([]gpreempt.QueueInfo, len(proc.Queues))
	for n, q := range o.cfg.Inventory.QueuesOf(proc.Key) { // the same queues as in proc
		reported, ok := snapshot[q.ID]
		switch infos[n] = q.Info; {
		case !ok:
		case infos[n].Source&gpreempt.FromMQD == 0:
			infos[n] = reported
		case infos[n].RingBase == reported.RingBase: // else the snapshot is of an earlier queue
			infos[n].Source |= gpreempt.FromSnapshot
		}
	}
	if dumps != nil {
		known := make([]debugfs.Known, len(proc.Queues))
		for n, q := range proc.Queues {
			known[n] = debugfs.Known{ID: q.ID, GPU: q.GPU, Type: q.Type, RingBytes: q.RingBytes}
			if proc.InOrder {
				known[n].Born = proc.Incarnations[n]
			}
			if infos[n].Source != 0 { // what is certain stays, and helps to match the rest
				infos[n].Note = ""
				known[n].Snapshot = &infos[n]
			}
		}
		infos = debugfs.MatchQueues(known, dumps, o.gfxOf)
	}
	o.cfg.Inventory.SetInfos(o.cfg.Now(), proc, infos)
	return o.cfg.Inventory.Revision() != before
}
