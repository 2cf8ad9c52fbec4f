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

// primaryContext is the number KFD gives the context whose queues stand in the
// process's own directory.
const primaryContext = 0xffff

// knownQueue is a queue as the last scan found it.
type knownQueue struct {
	scan  uint64
	stamp stamp
	// incarnation is a number no other queue has.
	incarnation uint64
	queue       gpreempt.Queue
}

// contexts are the directories of a process that have queues.
type contexts struct {
	// dirs are below KFD's list and belong to bases, index by index: the ids of a
	// context's queues count from its base.
	dirs  []string
	bases []uint32
	// subdirectories is what the process's directory had when it was listed, 0 when
	// that was not known.
	subdirectories uint64
	// listed is the scan that listed it.
	listed uint64
}

// relistEvery is after how many scans a process's directory is listed although
// nothing tells that it changed.
const relistEvery = 64

// contexts brings the contexts of k up to date. The directory, in which each GPU has
// four entries, is listed only when the number of its subdirectories changed.
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

// queues brings the queues of k up to date. It reports whether anything of them
// was read anew, or went.
func (f *FS) queues(k *known, all directory) (fresh bool, warnings []string, err error) {
	if err := f.contexts(k, all); err != nil {
		return false, nil, err
	}
	w := queueWalk{f: f, k: k, all: all}
	if !w.contexts() { // one went, and another may have come in its place
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
		k.list()
	}
	return w.fresh, w.warnings, nil
}

// queueWalk goes through the queue directories of one process.
type queueWalk struct {
	f        *FS
	k        *known
	all      directory // KFD's list of processes
	found    int
	fresh    bool
	warnings []string
}

// contexts goes through all of them. It reports whether they were all there.
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

// context goes through the queues of one context, whose ids are counted from base.
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

// queue looks at one queue, and reads it unless it is known.
func (w *queueWalk) queue(context string, e entry, id uint32) (err error) {
	path := func() string { // made only when it is needed
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
		w.f.incarnations++
		q = &knownQueue{stamp: st, incarnation: w.f.incarnations, queue: queue}
		w.k.queues[id] = q
	}
	q.scan = w.f.scans
	w.found++
	return nil
}

func (w *queueWalk) warn(what string, err error) {
	if !vanished(err) {
		w.warnings = append(w.warnings, fmt.Sprintf("%s of process %d left out: %v", what, w.k.proc.Key.PID, err))
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

// list makes the slices of proc anew: the old ones belong to older snapshots.
func (k *known) list() {
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
}
