package discovery

import (
	"cmp"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// primaryContext is the number KFD gives the context whose queues stand in the
// process's own directory.
const primaryContext = 0xffff

// queues brings the queues of k up to date. It tells whether anything of them
// was read anew, or went.
func (f *FS) queues(k *known) (fresh bool, warnings []string, err error) {
	dir := procsDir + "/" + strconv.Itoa(int(k.proc.Key.PID))
	entries, err := fs.ReadDir(f.root, dir)
	if err != nil {
		return false, nil, err
	}
	w := queueWalk{f: f, k: k}
	for _, entry := range entries {
		name := entry.Name()
		if name == "queues" {
			w.context(dir+"/queues", 0)
			continue
		}
		number, found := strings.CutPrefix(name, "context_")
		if !found {
			continue
		}
		if n, err := strconv.ParseUint(number, 10, 16); err == nil && n < primaryContext {
			w.context(dir+"/"+name+"/queues", ContextQueueID(uint16(n), 0))
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
	found    int
	fresh    bool
	warnings []string
}

// context goes through the queues of one context, whose ids are counted from
// base.
func (w *queueWalk) context(dir string, base uint32) {
	entries, err := fs.ReadDir(w.f.root, dir)
	if err != nil {
		w.warn("queues", w.k.proc.Key.PID, err)
		return
	}
	for _, entry := range entries {
		number, err := strconv.ParseUint(entry.Name(), 10, 16)
		if err != nil {
			continue
		}
		id := base | uint32(number)
		if err := w.queue(dir+"/"+entry.Name(), id); err != nil {
			w.warn("queue "+strconv.FormatUint(uint64(id), 10), w.k.proc.Key.PID, err)
		}
	}
}

// queue looks at one queue, and reads it unless it is known.
func (w *queueWalk) queue(dir string, id uint32) error {
	info, err := fs.Stat(w.f.root, dir)
	if err != nil {
		return err
	}
	st := stampOf(info)
	q, isKnown := w.k.queues[id]
	if !isKnown || st.inode == 0 || q.stamp != st {
		w.fresh = true
		queue, err := w.f.queue(dir)
		if err != nil {
			return err
		}
		queue.Process = w.k.proc.Key
		queue.ID = id
		q = knownQueue{stamp: st, queue: queue}
	}
	q.scan = w.f.scans
	w.k.queues[id] = q
	w.found++
	return nil
}

func (w *queueWalk) warn(what string, pid int32, err error) {
	if !vanished(err) {
		w.warnings = append(w.warnings, fmt.Sprintf("%s of process %d left out: %v", what, pid, err))
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
	b, err := f.read(path, maxFile)
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
	all := make([]knownQueue, 0, len(k.queues))
	identified := true
	for _, q := range k.queues {
		all = append(all, q)
		identified = identified && q.stamp.inode != 0
	}
	slices.SortFunc(all, func(a, b knownQueue) int { return cmp.Compare(a.queue.ID, b.queue.ID) })
	k.proc.Queues, k.proc.Incarnations = nil, nil
	for _, q := range all {
		k.proc.Queues = append(k.proc.Queues, q.queue)
		if identified {
			k.proc.Incarnations = append(k.proc.Incarnations, q.stamp.inode)
		}
	}
}

// stampOf gives the stamp of a directory; its inode is 0 when the file system
// has none.
func stampOf(info fs.FileInfo) stamp {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return stamp{}
	}
	return stamp{inode: st.Ino, change: st.Ctim}
}
