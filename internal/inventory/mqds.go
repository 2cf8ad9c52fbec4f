package inventory

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// maxDump is the largest size of a file of debugfs, in bytes. The MQDs of a full host,
// 4096 queues on 8 XCCs each, take less.
const maxDump = 512 << 20

// dump is one reading of mqds.
type dump struct {
	began time.Time
	mqds  debugfs.MQDDump
	err   error
}

// readMQDs starts a reading when it is due, in a goroutine: the driver locks each process
// while it dumps the queues, and waits for locks that others hold. No suspension waits
// for the goroutine.
func (o *Observer) readMQDs(ctx context.Context, every Intervals, due time.Time) {
	now := o.cfg.Now()
	switch {
	case !every.Debugfs:
		o.cfg.Warn(mqds)
		o.update(mqds, func(s *Source) { s.Available, s.Note = false, errOff.Error() })
		return
	case !o.reading && !o.cfg.Inventory.hasQueues():
		o.update(mqds, func(s *Source) { s.Available, s.Note = true, "read when there are queues" })
		return
	case o.reading, now.Before(due):
		return
	case o.cfg.Busy() && now.Sub(due) < mqdsDelay:
		return
	}
	o.reading = true
	go func() {
		select {
		case o.dumps <- o.take(now):
		case <-ctx.Done():
		}
	}()
}

// take reads mqds.
func (o *Observer) take(began time.Time) dump {
	d := dump{began: began}
	var text []byte
	if text, d.err = o.dump(debugfs.MQDs); d.err == nil {
		d.mqds, d.err = debugfs.ParseMQDs(text)
	}
	return d
}

// ReadOnce reads all processes and queues, and mqds if that is permitted: unread is why the details of queues
// beyond sysfs are not known. It is called in place of Run.
func (o *Observer) ReadOnce() (unread error) {
	o.Scan()
	if !o.cfg.Intervals().Debugfs {
		return errOff
	}
	time.Sleep(settled) // a dump counts for queues that are older
	d := o.take(o.cfg.Now())
	o.applyDump(d)
	return d.err
}

var errOff = errors.New("discovery.debugfs is false")

// BusyError reports that mqds was not read: its reader would wait for the lock of a process, and until
// then no process of the driver could end (kfd_debugfs_mqds_by_process holds kfd_processes_srcu).
type BusyError struct {
	PID int32
	// Ours: it is a helper of the daemon.
	Ours bool
}

func (e *BusyError) Error() string {
	if e.Ours {
		return "not read now: the daemon suspends or resumes a process"
	}
	return fmt.Sprintf("not read now: process %d is in a call of the driver, and may hold its lock there", e.PID)
}

// ErrHangs reports that the driver has not returned a dump, and that its reader is abandoned.
var ErrHangs = errors.New("the driver has not returned it: it waits for a process or a GPU")

// dump reads a file of debugfs.
func (o *Observer) dump(path string) ([]byte, error) {
	if o.cfg.Dump != nil {
		return o.cfg.Dump(path)
	}
	return ReadFile(o.cfg.Root, path)
}

// ReadFile reads a whole file of debugfs, whose size is unknown before.
func ReadFile(root fs.FS, path string) ([]byte, error) {
	file, err := root.Open(path)
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		return nil, fmt.Errorf("%s /%s: %w", e.Op, path, e.Err)
	}
	if err != nil {
		return nil, err
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, maxDump+1))
	if err == nil && len(text) > maxDump {
		err = fmt.Errorf("%s is larger than %d MiB", path, maxDump>>20)
	}
	return text, err
}

// applyDump updates the inventory from a reading, and returns the time to wait before the
// next one.
func (o *Observer) applyDump(d dump) time.Duration {
	o.reading = false
	_, busy := errors.AsType[*BusyError](d.err)
	if d.err != nil {
		pause := o.rest(d, busy)
		o.noteReading(mqds, d.began, pause, d.err)
		if !busy {
			o.cfg.Warn(mqds, unreadable(d.err))
		}
		return pause
	}
	_, changed := o.Scan() // the queues of now, with which the dump must agree
	for _, proc := range o.cfg.Inventory.Processes() {
		if len(proc.Queues) == 0 {
			continue
		}
		if o.bornSince(proc.Key, d.began.Add(-settled/2)) {
			changed = true
			continue
		}
		dumps := []debugfs.MQD{} // not nil: mqds was read
		for _, p := range d.mqds.Processes {
			if p.PID == proc.Key.PID {
				dumps = slices.Concat(dumps, p.Queues)
			}
		}
		if o.describe(proc, dumps) {
			changed = true
			o.cfg.Described(proc)
		}
	}
	var warnings []gpreempt.Warning
	for _, w := range d.mqds.Warnings {
		o.cfg.Log.Debug("the driver's mqds has an unexpected line", log.Line(w.Line), log.Text(w.Text))
	}
	if len(d.mqds.Warnings) > 0 {
		w := d.mqds.Warnings[0]
		warnings = append(warnings, gpreempt.WarnMQDsOdd.Warn(fmt.Sprintf("line %d of mqds: %s (%d such lines)", w.Line, w.Text, len(d.mqds.Warnings))))
	}
	o.cfg.Warn(mqds, warnings...)
	pause := o.rest(d, changed)
	o.noteReading(mqds, d.began, pause, nil)
	o.update(mqds, func(s *Source) {
		s.Note = fmt.Sprintf("reading takes %.2f %% of the time", 100*s.Spent.Seconds()/max(time.Second, o.cfg.Now().Sub(o.began)).Seconds())
	})
	return pause
}

// rest returns the time to wait after a reading, and its use, that end now.
func (o *Observer) rest(d dump, changed bool) time.Duration {
	now := o.cfg.Now()
	took := now.Sub(d.began)
	o.rested = now.Add(min(mqdsMost, max(mqdsShortest, mqdsSoon*took)))
	if pause := o.mqdsPace.Next(changed, took); !changed {
		return min(mqdsMost, max(mqdsShare*took, pause))
	}
	return o.rested.Sub(now)
}

// bornSince reports whether a process has queues that may be younger than a dump: then
// the dump may be of an earlier process or queue, and only the next one counts.
func (o *Observer) bornSince(key gpreempt.ProcessKey, began time.Time) bool {
	return slices.ContainsFunc(o.cfg.Inventory.QueuesOf(key), func(q gpreempt.QueueEntry) bool { return !q.FirstSeen.Before(began) })
}

// unreadable returns the warning for mqds that cannot be read.
func unreadable(err error) gpreempt.Warning {
	code := gpreempt.WarnMQDsUnreadable
	switch {
	case errors.Is(err, ErrHangs):
		return gpreempt.WarnMQDsHangs.Warn(err.Error())
	case errors.Is(err, fs.ErrNotExist):
		code = gpreempt.WarnDebugfsMissing
	case errors.Is(err, fs.ErrPermission):
		code = gpreempt.WarnDebugfsDenied
	}
	return code.Warn("cannot read the queues' MQDs: ring addresses and queue priorities are known only for targets that dbgtrap is attached to: " + err.Error())
}
