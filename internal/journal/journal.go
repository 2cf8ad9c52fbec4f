// Package journal hides how it is remembered, over the death of the daemon, which
// processes are paused in a way the kernel does not undo by itself.
//
// A pause is written down before it is made and crossed out after it was undone.
// So whatever the daemon died of, the entries name every process that may be
// paused, and some that are not: undoing is for both. The entry of a pause is a
// file of its own; one that cannot be read stands in the way of no other.
package journal

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Entry says that a process may be paused.
type Entry struct {
	// Mechanism is the name of the mechanism that pauses it, and knows how to undo it:
	// small letters, digits and hyphens.
	Mechanism string
	Target    gpreempt.ProcessKey
	// Cgroup is the cgroup that is frozen, as a path from the root of the cgroup v2
	// hierarchy, and CgroupID its inode number, which no other cgroup has before the
	// next boot. "" and 0: no cgroup is.
	Cgroup   string
	CgroupID uint64
	// At is when the pause was begun, for people.
	At time.Time
	// BootID is the boot the pause belongs to, as /proc/sys/kernel/random/boot_id
	// says it. Begin fills it in.
	BootID string
	// NameOnly says that the file cannot be read, and that its name is all there is to
	// go by: what is known is Mechanism and Target. Entries sets it.
	NameOnly bool
}

// Errors to match with errors.Is.
var (
	// ErrInUse says that another process has the journal open.
	ErrInUse = errors.New("another gpreemptd uses it; stop that one first")
	// ErrUnsafe says that others than the user of this program could have written the
	// journal, so that nothing in it may be acted on.
	ErrUnsafe = errors.New("it is not safe to use")
)

// Journal is a directory of entries. Its methods may be called by several
// goroutines at once.
type Journal struct {
	path string
	boot string
	disk disk

	// mu is held for reading by what writes single entries, so that Entries, which
	// holds it for writing, does not take a file that is being written for a left-over.
	mu sync.RWMutex
	// newer are the files of a format this program does not know, by name: they are for
	// the program that wrote them to remove.
	newer sync.Map
}

// dirMode and fileMode keep the journal to its owner.
const (
	dirMode  = 0o700
	fileMode = 0o600
)

// bootFile holds the id of the running boot.
const bootFile = "/proc/sys/kernel/random/boot_id"

// Open opens the journal in dir for this process alone, until Close or the death of
// the process: what another has paused must not be undone behind its back. It makes
// the directory when there is none. Errors: ErrInUse, ErrUnsafe, others.
func Open(dir string) (*Journal, error) {
	boot, err := os.ReadFile(bootFile)
	if err != nil {
		return nil, fmt.Errorf("open the journal of pauses %s: which boot this is: %w", dir, err)
	}
	d, err := openDirectory(dir)
	if err != nil {
		return nil, fmt.Errorf("open the journal of pauses %s: %w", dir, err)
	}
	return &Journal{path: dir, boot: strings.TrimSpace(string(boot)), disk: d}, nil
}

// Close lets another process open the journal. Entries stay.
func (j *Journal) Close() error { return j.disk.close() }

// Begin notes that a process is about to be paused; the note is on the disk when it
// returns. After an error the process must not be paused. A note of the same
// mechanism on the same process is replaced.
func (j *Journal) Begin(e Entry) error {
	e.BootID = j.boot
	if err := e.check(); err != nil {
		return fmt.Errorf("note the pause of process %v: %w", e.Target, err)
	}
	j.mu.RLock()
	defer j.mu.RUnlock()
	if err := j.write(e.name(), e.encode()); err != nil {
		return fmt.Errorf("note the pause of process %v in the journal %s, without which it is not paused: %w", e.Target, j.path, err)
	}
	j.newer.Delete(e.name()) // it is ours now
	return nil
}

// write makes the file appear whole or not at all.
func (j *Journal) write(name string, text []byte) error {
	draft := draftPrefix + name
	err := j.disk.write(draft, text)
	if err == nil {
		err = j.disk.rename(draft, name)
	}
	if err != nil {
		// What cannot be removed now is when Entries next looks.
		return errors.Join(err, ignoreAbsent(j.disk.remove(draft)))
	}
	return j.disk.sync()
}

// End notes that the process is no longer paused by the mechanism. No note of the
// pause is no error. The note of a newer program stays: it may say more than this one
// can undo.
func (j *Journal) End(target gpreempt.ProcessKey, mechanism string) error {
	j.mu.RLock()
	defer j.mu.RUnlock()
	if _, newer := j.newer.Load(fileName(target, mechanism)); newer {
		return nil
	}
	if err := ignoreAbsent(j.disk.remove(fileName(target, mechanism))); err != nil {
		return fmt.Errorf("remove the note of a pause of process %v, which is over, from the journal %s: %w", target, j.path, err)
	}
	return nil
}

// Entries lists the pauses that may be in effect, in no order. The errors are about
// files that cannot be read, a *BadEntry each, or about the directory. Of a file that
// only the owner could have written, the name is believed whatever became of the text:
// to let run what runs harms nobody, and to leave a process paused does. Files that
// stand for no pause are removed: those of an earlier boot, and what a Begin that was
// cut short left.
func (j *Journal) Entries() ([]Entry, []error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	names, err := j.disk.list()
	if err != nil {
		return nil, []error{fmt.Errorf("list the journal of pauses %s: %w", j.path, err)}
	}
	var entries []Entry
	var errs []error
	for _, name := range names {
		e, err := j.read(name)
		stale := strings.HasPrefix(name, draftPrefix) || err == nil && e.BootID != j.boot
		switch {
		case stale:
			if err := ignoreAbsent(j.disk.remove(name)); err != nil {
				errs = append(errs, fmt.Errorf("remove a file that stands for no pause from the journal %s: %w", j.path, err))
			}
		case err != nil:
			errs = append(errs, err)
			if e.NameOnly {
				entries = append(entries, e)
			}
			if errors.Is(err, errNewer) {
				j.newer.Store(name, nil)
			}
		default:
			entries = append(entries, e)
		}
	}
	return entries, errs
}

func (j *Journal) read(name string) (Entry, error) {
	if strings.HasPrefix(name, draftPrefix) {
		return Entry{}, nil
	}
	bad := &BadEntry{Path: filepath.Join(j.path, name)}
	text, err := j.disk.read(name)
	if err != nil {
		bad.Err = err
		return Entry{}, bad
	}
	e, err := decode(text)
	if err == nil && e.name() != name {
		err = fmt.Errorf("%w: it says that it is %s", errForeign, e.name())
	}
	if err != nil {
		bad.Err = err
		return nameOnly(name), bad
	}
	return e, nil
}

func ignoreAbsent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// disk is the directory as the journal uses it. A test stops it at any step.
type disk interface {
	// write makes a file, in place of one that has the name, and returns when it is
	// on the disk.
	write(name string, text []byte) error
	rename(from, to string) error
	remove(name string) error
	// sync returns when the names are on the disk.
	sync() error
	list() ([]string, error)
	read(name string) ([]byte, error)
	close() error
}

// directory is the disk of this machine.
type directory struct {
	root *os.Root
	// self is the directory, open for fsync and for the lock.
	self *os.File
}

func openDirectory(path string) (_ *directory, err error) {
	// What lies above may be listed by all: the socket is there too.
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil { //nolint:gosec // see above
		return nil, err
	}
	if err := os.Mkdir(path, dirMode); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	// ENOTDIR is what the two flags give for a symbolic link.
	fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("a directory that is no symbolic link is needed: %w", os.NewSyscallError("open", err))
	}
	self := os.NewFile(uintptr(fd), path)
	defer func() {
		if err != nil {
			_ = self.Close() // opened for reading only: nothing is lost
		}
	}()
	info, err := self.Stat()
	if err != nil {
		return nil, err
	}
	if err := private(info); err != nil {
		return nil, fmt.Errorf("%w: %w; remove it, and it is made anew", ErrUnsafe, err)
	}
	if err := syscall.Flock(fd, syscall.LOCK_EX|syscall.LOCK_NB); errors.Is(err, syscall.EWOULDBLOCK) {
		return nil, ErrInUse
	} else if err != nil {
		return nil, os.NewSyscallError("flock", err)
	}
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = root.Close() // opened for reading only: nothing is lost
		}
	}()
	again, err := root.Stat(".")
	if err != nil {
		return nil, err
	}
	if !os.SameFile(info, again) {
		return nil, fmt.Errorf("%w: it was replaced while it was opened", ErrUnsafe)
	}
	return &directory{root: root, self: self}, nil
}

// private reports why others could have written to a file or directory.
func private(info fs.FileInfo) error {
	stat, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !ok:
		return errors.New("its owner is not known")
	case int(stat.Uid) != os.Geteuid():
		return fmt.Errorf("it belongs to user %d, not to %d, the user of this program", stat.Uid, os.Geteuid())
	case info.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("its mode is %v, so that others may write to it", info.Mode().Perm())
	}
	return nil
}

func (d *directory) write(name string, text []byte) (err error) {
	const flags = os.O_WRONLY | os.O_CREATE | os.O_EXCL | syscall.O_NOFOLLOW
	f, err := d.root.OpenFile(name, flags, fileMode)
	if errors.Is(err, fs.ErrExist) { // left by a Begin that was cut short
		if err = d.root.Remove(name); err == nil {
			f, err = d.root.OpenFile(name, flags, fileMode)
		}
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if _, err := f.Write(text); err != nil {
		return err
	}
	return f.Sync()
}

func (d *directory) rename(from, to string) error { return d.root.Rename(from, to) }
func (d *directory) remove(name string) error     { return d.root.Remove(name) }
func (d *directory) sync() error                  { return d.self.Sync() }

func (d *directory) list() ([]string, error) {
	entries, err := fs.ReadDir(d.root.FS(), ".")
	if err != nil {
		return nil, err
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, nil
}

func (d *directory) read(name string) ([]byte, error) {
	info, err := d.root.Lstat(name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%w: it is no regular file but %v", errForeign, info.Mode().Type())
	}
	if err := private(info); err != nil {
		return nil, fmt.Errorf("%w: %w", errForeign, err)
	}
	if info.Size() > maxSize {
		return nil, fmt.Errorf("%w: it has %d bytes, no entry has more than %d", errForeign, info.Size(), maxSize)
	}
	// Nobody else can write to the directory, so it is that file still.
	return d.root.ReadFile(name)
}

func (d *directory) close() error { return errors.Join(d.root.Close(), d.self.Close()) }
