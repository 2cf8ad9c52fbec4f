package inventory

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/internal/logkey"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// maxDump is the most that is read of a file of debugfs, in bytes. The MQDs of a
// full host, 4096 queues on 8 XCCs each, take less.
const maxDump = 512 << 20

// dump is one reading of mqds.
type dump struct {
	began time.Time
	took  time.Duration
	mqds  debugfs.MQDDump
	err   error
}

// readMQDs begins a reading when it is due. The driver holds each process still
// while it writes down its queues, and waits while somebody else does: the reading
// is a goroutine's, and nothing on the way to a suspension waits for it.
func (o *Observer) readMQDs(ctx context.Context, every Intervals, due time.Time) {
	now := o.cfg.Now()
	switch {
	case every.MQDs == 0:
		o.cfg.Warn(mqds)
		o.note(mqds, func(s *Source) { s.Available, s.Note = false, "discovery.mqds_interval is 0s" })
		return
	case o.reading:
		o.warnHang(now)
		return
	case now.Before(due):
		return
	case o.cfg.Busy() && now.Sub(due) < mqdsPatience*every.MQDs:
		return
	}
	o.reading, o.began = true, now
	go func() {
		d := dump{began: now}
		var text []byte
		if text, d.err = readFile(o.cfg.Root, debugfs.MQDs); d.err == nil {
			d.mqds, d.err = debugfs.ParseMQDs(text)
		}
		d.took = o.cfg.Now().Sub(d.began)
		select {
		case o.dumps <- d:
		case <-ctx.Done():
		}
	}()
}

// hangs is how long a reading may take before it is called hanging.
const hangs = 10 * time.Second

// warnHang says that a reading does not come back.
func (o *Observer) warnHang(now time.Time) {
	if now.Sub(o.began) < hangs {
		return
	}
	o.note(mqds, func(s *Source) { s.Available, s.Note = false, "it has been read for more than 10s" })
	o.cfg.Warn(mqds, gpreempt.WarnMQDsHangs.Warn("the driver has not answered for more than 10 s what its queues are: it may wait for a GPU that hangs"))
}

// readFile reads a whole file of debugfs. Its size is not known before.
func readFile(root fs.FS, path string) ([]byte, error) {
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
		err = fmt.Errorf("%s: it has more than %d MiB", path, maxDump>>20)
	}
	return text, err
}

// digest takes in what a reading gave, and describes how long to wait for the next.
func (o *Observer) digest(d dump) time.Duration {
	o.reading = false
	every := o.cfg.Intervals().MQDs
	o.mqdsPace.Set(every, max(mqdsLongest*every, mqdsShare*d.took))
	if d.err != nil {
		pause := o.mqdsPace.Next(false, d.took)
		o.read(mqds, d.began, pause, d.err)
		o.cfg.Warn(mqds, unreadable(d.err))
		return pause
	}
	changed := false
	for _, proc := range o.cfg.Inventory.Processes() {
		if len(proc.Queues) == 0 {
			continue
		}
		if o.bornSince(proc.Key, d.began) {
			changed = true
			continue
		}
		dumps := []debugfs.MQD{} // that it has none is known, too
		for _, p := range d.mqds.Processes {
			if p.PID == proc.Key.PID {
				dumps = slices.Concat(dumps, p.Queues)
			}
		}
		if o.describe(proc, dumps) {
			changed = true
			o.cfg.Told(proc)
		}
	}
	var warnings []gpreempt.Warning
	for _, w := range d.mqds.Warnings {
		o.cfg.Log.Debug("the driver's mqds has a line that is odd", logkey.Line(w.Line), logkey.Text(w.Text))
	}
	if len(d.mqds.Warnings) > 0 {
		w := d.mqds.Warnings[0]
		warnings = append(warnings, gpreempt.WarnMQDsOdd.Warn(fmt.Sprintf("line %d of mqds: %s (%d such lines)", w.Line, w.Text, len(d.mqds.Warnings))))
	}
	o.cfg.Warn(mqds, warnings...)
	pause := o.mqdsPace.Next(changed, d.took)
	o.read(mqds, d.began, pause, nil)
	return pause
}

// bornSince reports whether a process has queues that may be younger than a dump: then
// it may be of an earlier process or queue, and the next one is waited for.
func (o *Observer) bornSince(key gpreempt.ProcessKey, began time.Time) bool {
	return slices.ContainsFunc(o.cfg.Inventory.QueuesOf(key), func(q gpreempt.QueueEntry) bool { return !q.FirstSeen.Before(began) })
}

// unreadable says what it means that mqds cannot be read.
func unreadable(err error) gpreempt.Warning {
	code := gpreempt.WarnMQDsUnreadable
	switch {
	case errors.Is(err, fs.ErrNotExist):
		code = gpreempt.WarnDebugfsMissing
	case errors.Is(err, fs.ErrPermission):
		code = gpreempt.WarnDebugfsDenied
	}
	return code.Warn("the queues' MQDs cannot be read, so that ring addresses and queue priorities are known only of held targets: " + err.Error())
}
