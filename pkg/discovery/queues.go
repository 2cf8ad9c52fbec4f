package discovery

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// primaryContext is KFD's number of the context whose queues are in the process's own
// directory.
const primaryContext = 0xffff

// knownQueue is a queue as of the last scan.
type knownQueue struct {
	scan  uint64
	stamp stamp
	// incarnation is a unique number: that of the inode, which ascend, where FS.unique.
	incarnation uint64
	queue       gpreempt.Queue
}

// contexts are the directories of a process that have queues.
type contexts struct {
	// dirs are below KFD's list. The ids of the queues of dirs[i] count from bases[i].
	dirs  []string
	bases []uint32
	// subdirectories is that of the process's directory when it was listed, 0 when
	// unknown.
	subdirectories uint64
	// listed is the scan that listed it.
	listed uint64
}

// relistEvery is after how many scans a process's directory is listed without a sign of a
// change.
const relistEvery = 64

// contexts updates the contexts of k. The directory, in which each GPU has four entries, is
// listed only when the number of its subdirectories changed.
func (f *FS) contexts(k *known, all directory) error {
	pid := strconv.Itoa(int(k.proc.Key.PID))
	n := all.subdirectories(pid)
	if n != 0 && n == k.contexts.subdirectories && f.scans-k.contexts.listed < relistEvery {
		return nil
	}
	dir, err := all.open(pid)
	if err != nil {
		return err
	}
	defer dir.close()
	c := contexts{subdirectories: n, listed: f.scans}
	err = dir.list(func(name []byte, _ uint64) {
		if string(name) == "queues" {
			c.dirs, c.bases = append(c.dirs, pid+"/queues"), append(c.bases, 0)
			return
		}
		digits, found := bytes.CutPrefix(name, []byte("context_"))
		if !found {
			return
		}
		if n, err := strconv.ParseUint(string(digits), 10, 16); err == nil && n < primaryContext {
			c.dirs, c.bases = append(c.dirs, pid+"/"+string(name)+"/queues"), append(c.bases, ContextQueueID(uint16(n), 0))
		}
	})
	if err == nil {
		k.contexts = c
	}
	return err
}

// queues updates the queues of k. It reports whether any was read or disappeared.
func (f *FS) queues(k *known, all directory) (fresh bool, warnings []string, err error) {
	if err := f.contexts(k, all); err != nil {
		return false, nil, err
	}
	w := queueWalk{f: f, k: k, all: all}
	if !w.contexts() { // one disappeared, and another may have replaced it
		k.contexts.subdirectories = 0
		if err := f.contexts(k, all); err != nil {
			return false, nil, err
		}
		w.found, w.warnings = 0, nil
		if !w.contexts() {
			k.contexts.subdirectories = 0
		}
	}
	if len(k.queues) != w.found {
		w.fresh = true
		for id, q := range k.queues {
			if q.scan != f.scans {
				delete(k.queues, id)
			}
		}
	}
	if w.fresh {
		k.list(f.unique)
	}
	return w.fresh, w.warnings, nil
}

// queueWalk reads the queue directories of one process.
type queueWalk struct {
	f        *FS
	k        *known
	all      directory // KFD's list of processes
	found    int
	fresh    bool
	warnings []string
}

// contexts reads all of them. It reports whether they all exist.
func (w *queueWalk) contexts() bool {
	all := true
	for n, dir := range w.k.contexts.dirs {
		if err := w.context(dir, w.k.contexts.bases[n]); err != nil {
			all = all && !errors.Is(err, fs.ErrNotExist)
			w.warn("queues", err)
		}
	}
	return all
}

// context reads the queues of one context, whose ids count from base.
func (w *queueWalk) context(name string, base uint32) error {
	dir, err := w.all.open(name)
	if err != nil {
		return err
	}
	defer dir.close()
	entries := w.f.entries[:0]
	err = dir.list(func(name []byte, inode uint64) {
		if number, err := strconv.ParseUint(string(name), 10, 16); err == nil {
			entries = append(entries, entry{number: uint32(number), inode: inode})
		}
	})
	w.f.entries = entries
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := w.queue(name, e, base|e.number); err != nil {
			w.warn("queue "+strconv.FormatUint(uint64(base|e.number), 10), err)
		}
	}
	return nil
}

// queue reads one queue unless it is known.
func (w *queueWalk) queue(context string, e entry, id uint32) (err error) {
	path := func() string { // only when needed
		return procsDir + "/" + context + "/" + strconv.Itoa(int(e.number))
	}
	st := stamp{inode: e.inode}
	if !w.f.unique {
		if st, err = w.f.tree.stamp(path()); err != nil {
			return err
		}
	}
	q := w.k.queues[id]
	if q == nil || st.inode == 0 || q.stamp != st {
		w.fresh = true
		queue, err := w.f.queue(path())
		if err != nil {
			return err
		}
		queue.Process = w.k.proc.Key
		queue.ID = id
		incarnation := st.inode
		if !w.f.unique {
			w.f.incarnations++
			incarnation = w.f.incarnations
		}
		q = &knownQueue{stamp: st, incarnation: incarnation, queue: queue}
		w.k.queues[id] = q
	}
	q.scan = w.f.scans
	w.found++
	return nil
}

func (w *queueWalk) warn(what string, err error) {
	if !vanished(err) {
		w.warnings = append(w.warnings, fmt.Sprintf("%s of process %d omitted: %v", what, w.k.proc.Key.PID, err))
	}
}

// queue reads the files of one queue.
func (f *FS) queue(dir string) (gpreempt.Queue, error) {
	gpu, err := f.number(dir+"/gpuid", 32)
	if err != nil {
		return gpreempt.Queue{}, err
	}
	size, err := f.number(dir+"/size", 64)
	if err != nil {
		return gpreempt.Queue{}, err
	}
	path := dir + "/type"
	b, err := f.read(path)
	if err != nil {
		return gpreempt.Queue{}, err
	}
	kind, err := ParseQueueType(b)
	if err != nil {
		return gpreempt.Queue{}, inFile(path, err)
	}
	return gpreempt.Queue{GPU: gpreempt.GPUID(gpu), Type: kind, RingBytes: size}, nil
}

// list makes new slices for proc: the old ones belong to older snapshots. unique is FS.unique.
func (k *known) list(unique bool) {
	all := make([]*knownQueue, 0, len(k.queues))
	identified := true
	for _, q := range k.queues {
		all = append(all, q)
		identified = identified && q.stamp.inode != 0
	}
	slices.SortFunc(all, func(a, b *knownQueue) int { return cmp.Compare(a.queue.ID, b.queue.ID) })
	k.proc.Queues, k.proc.Incarnations = nil, nil
	for _, q := range all {
		k.proc.Queues = append(k.proc.Queues, q.queue)
		if identified {
			k.proc.Incarnations = append(k.proc.Incarnations, q.incarnation)
		}
	}
	k.proc.InOrder = unique && identified && len(k.contexts.dirs) == 1
}
