// Package observer hides which sources tell of processes and queues, how often each
// is worth reading, and how what they say becomes one inventory.
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

// Config is what an Observer needs. Fields that may be nil say so. The functions
// must not block.
type Config struct {
	// Root is the root directory of the host, FS the reader of its KFD.
	Root fs.FS
	FS   *discovery.FS
	// Inventory is written by this Observer alone.
	Inventory *Inventory
	// Intervals returns those in force.
	Intervals func() Intervals
	// Before is called before each scan, to look for GPUs that come late.
	Before func()
	// Scanned hears what a scan changed, also when that is nothing.
	Scanned func(Diff)
	// Told hears of a process whose queues' facts changed otherwise.
	Told func(discovery.Proc)
	// Snapshot returns the queues of a process by id as the driver's debug interface
	// tells them; nil, or an answer of nil: it does not.
	Snapshot func(gpreempt.ProcessKey) map[uint32]gpreempt.QueueInfo
	// Busy tells that the driver's locks of a process are needed for something more
	// urgent than reading mqds.
	Busy func() bool
	// SMI opens the event stream of a GPU; nil: there is no driver to ask.
	SMI func(gpreempt.GPUID) (Stream, error)
	// Warn replaces what a source has to say to an admin.
	Warn func(source string, now ...gpreempt.Warning)
	// Now is the wall clock.
	Now func() time.Time
	Log *zap.Logger
}

// Intervals says how often sources are read.
type Intervals struct {
	// Shortest and Longest bound the pause between two scans of sysfs: short after a
	// change, longer while nothing happens.
	Shortest, Longest time.Duration
	// MQDs is the shortest pause between two readings of mqds; 0 is never.
	MQDs time.Duration
}

const (
	// mqdsLongest is how much longer than the shortest the pause between readings
	// of mqds gets while nothing changes.
	mqdsLongest = 30
	// mqdsShare is how many times as long as a reading takes the pause may get for it.
	mqdsShare = 50
	// mqdsPatience is how many times the shortest pause a reading is put off while
	// the driver is needed for other things.
	mqdsPatience = 10
	// looks is how many cheap looks there are from one scan to the next while nothing
	// changes: each wakes a processor.
	looks = 5
	// scanGap is the least time between two scans, or a program that creates queues
	// in a loop could keep the daemon at it.
	scanGap = 20 * time.Millisecond
)

// Names of the sources.
const (
	events = "events"
	sysfs  = "sysfs"
	smi    = "smi"
	mqds   = "mqds"
	hqds   = "hqds"
)

// Source is how one source does.
type Source struct {
	Name      string
	Available bool
	// Every is how often it is read now; 0 when on demand or by itself.
	Every time.Duration
	// Took is how long the last reading took, ReadAt when it was, Readings how many
	// there were, and Spent how long they took together.
	Took     time.Duration
	Spent    time.Duration
	ReadAt   time.Time
	Readings uint64
	// Note says what an admin should know.
	Note string
}

// Observer keeps the inventory true. Scan and Run are called by one goroutine;
// everything else by any number.
type Observer struct {
	cfg  Config
	look chan struct{}
	// dumps takes what a reading of mqds gave.
	dumps chan dump
	hqds  hqdReader
	smi   smiReader

	// What follows belongs to the goroutine of Run.
	scanPace, mqdsPace *discovery.Pace
	// reading tells that mqds is being read, since began.
	reading bool
	began   time.Time

	mu      sync.Mutex // guards what follows
	sources map[string]*Source
	// asked are the processes to look at, and all is set to scan all of them.
	asked []gpreempt.ProcessKey
	all   bool
}

// NewObserver returns an Observer. It reads nothing before Scan or Run.
func NewObserver(cfg Config) *Observer {
	o := &Observer{
		cfg: cfg, look: make(chan struct{}, 1), dumps: make(chan dump, 1),
		sources: map[string]*Source{},
	}
	for _, name := range order {
		o.sources[name] = &Source{Name: name}
	}
	o.sources[hqds].Available, o.sources[hqds].Note = true, "read when asked for: gpctl hqd list"
	o.sources[events].Note = "none yet: they come from targets that dbgtrap holds"
	if cfg.SMI == nil {
		o.sources[smi].Note = "there is no driver to ask"
	}
	o.hqds.observer = o
	every := cfg.Intervals()
	o.scanPace = discovery.NewPace(every.Shortest, every.Longest)
	o.mqdsPace = discovery.NewPace(every.MQDs, mqdsLongest*every.MQDs)
	return o
}

// order is that of cost, the cheapest first.
var order = []string{events, sysfs, smi, mqds, hqds}

// Sources describes how the sources do, the cheapest first.
func (o *Observer) Sources() []Source {
	o.mu.Lock()
	defer o.mu.Unlock()
	all := make([]Source, 0, len(order))
	for _, name := range order {
		all = append(all, *o.sources[name])
	}
	return all
}

// note changes what is known of a source.
func (o *Observer) note(name string, change func(*Source)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	change(o.sources[name])
}

// read notes a reading that began at a time.
func (o *Observer) read(name string, began time.Time, every time.Duration, err error) {
	now := o.cfg.Now()
	o.note(name, func(s *Source) {
		s.Available, s.Every, s.Took, s.ReadAt = err == nil, every, now.Sub(began), now
		s.Spent += s.Took
		s.Readings++
		s.Note = ""
		if err != nil {
			s.Note = err.Error()
		}
	})
}

// LookAt has the queues of one process read at once: a mechanism has seen that the
// process created a queue. It does not block.
func (o *Observer) LookAt(key gpreempt.ProcessKey) {
	now := o.cfg.Now()
	o.note(events, func(s *Source) {
		s.Available, s.ReadAt, s.Note = true, now, ""
		s.Readings++
	})
	o.mu.Lock()
	if !slices.Contains(o.asked, key) {
		o.asked = append(o.asked, key)
	}
	o.mu.Unlock()
	o.wake()
}

// Rescan has all processes scanned at once: what scans read has changed. It does not
// block.
func (o *Observer) Rescan() {
	o.mu.Lock()
	o.all = true
	o.mu.Unlock()
	o.wake()
}

func (o *Observer) wake() {
	select {
	case o.look <- struct{}{}:
	default:
	}
}

// takeAsked returns what was asked for since the last call.
func (o *Observer) takeAsked() (asked []gpreempt.ProcessKey, all bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	asked, all = o.asked, o.all
	o.asked, o.all = nil, false
	return asked, all
}

// Run keeps the inventory true until ctx ends.
func (o *Observer) Run(ctx context.Context) {
	defer o.smi.close()
	every := o.cfg.Intervals()
	now := o.cfg.Now()
	pause := every.Shortest
	nextScan, nextDump := now.Add(pause), now
	tick := time.NewTimer(every.Shortest)
	defer tick.Stop()
	for {
		looked := false
		select {
		case <-ctx.Done():
			return
		case <-o.look:
			looked = true
		case d := <-o.dumps:
			nextDump = o.cfg.Now().Add(o.digest(d))
			continue
		case <-tick.C:
		}
		every = o.cfg.Intervals()
		o.scanPace.Set(every.Shortest, every.Longest)
		o.readSMI()
		asked, scan := o.takeAsked()
		changed := false
		if now = o.cfg.Now(); !scan && now.Before(nextScan) && !o.processesChanged() {
			for _, key := range asked {
				known, changes := o.lookAt(key)
				scan, changed = scan || !known, changed || changes
			}
		} else {
			scan = true
		}
		if scan {
			pause, changed = o.Scan()
			nextScan = o.cfg.Now().Add(pause)
		}
		if changed {
			nextDump = earlier(nextDump, o.cfg.Now().Add(every.MQDs))
		}
		o.readMQDs(ctx, every, nextDump)
		tick.Reset(min(max(every.Shortest, pause/looks), max(nextScan.Sub(o.cfg.Now()), scanGap)))
		if looked { // not again at once
			select {
			case <-ctx.Done():
				return
			case <-time.After(scanGap):
			}
		}
	}
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// processesChanged is the cheap look between scans. What it cannot tell the next
// scan does.
func (o *Observer) processesChanged() bool {
	changed, err := o.cfg.FS.Changed()
	return err == nil && changed
}

// Scan reads the processes and queues there are, and describes how long to wait for
// the next time, and whether queues or processes came or went. It is called by the
// goroutine of Run, or before that.
func (o *Observer) Scan() (pause time.Duration, changed bool) {
	o.cfg.Before()
	began := o.cfg.Now()
	snapshot, err := o.cfg.FS.Scan()
	took := o.cfg.Now().Sub(began)
	if err != nil {
		pause = o.scanPace.Next(false, took)
		o.read(sysfs, began, pause, err)
		if !errors.Is(err, fs.ErrNotExist) { // that there is no driver is told elsewhere
			o.cfg.Warn(sysfs, gpreempt.WarnScanFailed.Warn("the queues cannot be read: "+err.Error()))
		}
		o.cfg.Scanned(Diff{}) // what is due by time alone is due
		return pause, false
	}
	o.cfg.Warn(sysfs, scanWarnings(snapshot)...)
	diff := o.cfg.Inventory.Apply(o.cfg.Now(), snapshot)
	pause = o.scanPace.Next(!diff.Empty(), took)
	o.read(sysfs, began, pause, nil)
	told := o.takeSnapshots()
	o.cfg.Scanned(diff)
	for _, proc := range told {
		o.cfg.Told(proc)
	}
	return pause, len(diff.Queues)+len(told) > 0
}

// lookAt reads the queues of one process and reports whether that was possible without
// a scan of all, and whether queues came or went.
func (o *Observer) lookAt(key gpreempt.ProcessKey) (known, changed bool) {
	proc, known := o.cfg.FS.Look(key)
	if !known {
		return false, false
	}
	diff := o.cfg.Inventory.ApplyOne(o.cfg.Now(), proc)
	told := o.cfg.Snapshot != nil && o.unseen(proc) && o.describe(proc, nil)
	o.cfg.Scanned(diff)
	if told {
		o.cfg.Told(proc)
	}
	return true, told || len(diff.Queues) > 0
}

// takeSnapshots looks at the snapshots of processes that have queues of which none
// was seen, and gives those of which that told something.
func (o *Observer) takeSnapshots() (told []discovery.Proc) {
	if o.cfg.Snapshot == nil {
		return nil
	}
	for _, proc := range o.cfg.Inventory.Processes() {
		if o.unseen(proc) && o.describe(proc, nil) {
			told = append(told, proc)
		}
	}
	return told
}

// unseen reports whether a process has queues of which no snapshot was seen.
func (o *Observer) unseen(proc discovery.Proc) bool {
	return slices.ContainsFunc(o.cfg.Inventory.QueuesOf(proc.Key), func(q gpreempt.QueueEntry) bool {
		return q.Info.Source&gpreempt.FromSnapshot == 0
	})
}

func scanWarnings(s discovery.Snapshot) []gpreempt.Warning {
	if len(s.Warnings) == 0 {
		return nil
	}
	return []gpreempt.Warning{gpreempt.WarnScanIncomplete.Warn(strings.Join(s.Warnings, "; "))}
}

// gfxOf returns the gfx_target_version of a GPU, 0 when it is not known.
func (o *Observer) gfxOf(id gpreempt.GPUID) uint32 {
	for _, gpu := range o.cfg.Inventory.GPUs() {
		if gpu.ID == id {
			return gpu.GFX
		}
	}
	return 0
}

// describe finds out what sysfs does not tell of the queues of a process, from its
// snapshot and its dumps, of which nil means that none were read now: then what an
// earlier one told stands. It reports whether that changed anything.
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
	for n, q := range o.cfg.Inventory.QueuesOf(proc.Key) { // proc is as it is there
		told, ok := snapshot[q.ID]
		switch infos[n] = q.Info; {
		case !ok:
		case infos[n].Source&gpreempt.FromMQD == 0:
			infos[n] = told
		case infos[n].RingBase == told.RingBase: // else the snapshot is of its predecessor
			infos[n].Source |= gpreempt.FromSnapshot
		}
	}
	if dumps != nil {
		known := make([]debugfs.Known, len(proc.Queues))
		for n, q := range proc.Queues {
			known[n] = debugfs.Known{ID: q.ID, GPU: q.GPU, Type: q.Type, RingBytes: q.RingBytes}
			if infos[n].Source != 0 { // what was certain stays so, and tells the rest apart
				infos[n].Note = ""
				known[n].Snapshot = &infos[n]
			}
		}
		infos = debugfs.MatchQueues(known, dumps, o.gfxOf)
	}
	o.cfg.Inventory.SetInfos(o.cfg.Now(), proc, infos)
	return o.cfg.Inventory.Revision() != before
}
