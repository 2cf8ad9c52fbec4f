package mechanism

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

	"github.com/gpreempt/gpreempt/internal/safedir"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// JournalEntry records that a process may be paused.
type JournalEntry struct {
	// Mechanism is the name of the mechanism that pauses it and can undo that:
	// small letters, digits and hyphens.
	Mechanism string
	Target    gpreempt.ProcessKey
	// Cgroup is the cgroup that is frozen, as a path from the root of the cgroup v2
	// hierarchy, and CgroupID its inode number, which no other cgroup has before the
	// next boot. "" and 0 if no cgroup is frozen.
	Cgroup   string
	CgroupID uint64
	// Home is the cgroup where the process was, when Cgroup is one that it was moved to; "" for none.
	Home string
	// At is when the pause began, for a person to read.
	At time.Time
	// BootID is the boot of the pause, from /proc/sys/kernel/random/boot_id. Begin fills
	// it in.
	BootID string
	// NameOnly is set by Entries for a file that cannot be read: only Mechanism and
	// Target are known, from its name.
	NameOnly bool
}

// Errors to match with errors.Is.
var (
	// ErrInUse reports that another process has the journal open.
	ErrInUse = errors.New("another gpreemptd uses it; stop that one first")
	// ErrUnsafe reports that other users than that of this program could have written the
	// journal, so that its entries must not be trusted.
	ErrUnsafe = errors.New("it is not safe to use")
)

// Journal is a directory of entries. Its methods may be called by several
// goroutines at once.
type Journal struct {
	path string
	boot string
	disk disk

	// mu is held for reading while an entry is written, so that Entries, which holds it
	// for writing, does not remove a file that is being written.
	mu sync.RWMutex
	// newer are the names of files of a format this program does not know: only the
	// program that wrote them removes them.
	newer sync.Map
}

// dirMode and fileMode give access to the owner only.
const (
	dirMode  = 0o700
	fileMode = 0o600
)

// bootFile holds the id of the running boot.
const bootFile = "/proc/sys/kernel/random/boot_id"

// OpenJournal opens the journal in dir exclusively, until Close or the death of the process: a
// process must not undo the pauses of another one that runs. It creates the directory if
// necessary. Errors: ErrInUse, ErrUnsafe, others.
func OpenJournal(dir string) (*Journal, error) {
	boot, err := os.ReadFile(bootFile)
	if err != nil {
		return nil, fmt.Errorf("open the journal of pauses %s: read the boot id: %w", dir, err)
	}
	d, err := openDirectory(dir)
	if err != nil {
		return nil, fmt.Errorf("open the journal of pauses %s: %w", dir, err)
	}
	return &Journal{path: dir, boot: strings.TrimSpace(string(boot)), disk: d}, nil
}

// Close releases the journal for other processes. Entries remain.
func (j *Journal) Close() error { return j.disk.close() }

// Begin writes an entry to the disk, before its process is paused. After an error the
// process must not be paused. It replaces an entry of the same mechanism for the same
// process.
func (j *Journal) Begin(e JournalEntry) error {
	e.BootID = j.boot
	if err := e.check(); err != nil {
		return fmt.Errorf("record the pause of process %v: %w", e.Target, err)
	}
	j.mu.RLock()
	defer j.mu.RUnlock()
	if err := j.write(e.name(), e.encode()); err != nil {
		return fmt.Errorf("process %v is not paused, because its pause cannot be recorded in the journal %s: %w", e.Target, j.path, err)
	}
	j.newer.Delete(e.name()) // this program has replaced it
	return nil
}

// write creates the file atomically.
func (j *Journal) write(name string, text []byte) error {
	draft := draftPrefix + name
	err := j.disk.write(draft, text)
	if err == nil {
		err = j.disk.rename(draft, name)
	}
	if err != nil {
		// Entries removes a draft that remains.
		return errors.Join(err, ignoreAbsent(j.disk.remove(draft)))
	}
	return j.disk.sync()
}

// End removes the entry of a pause that the mechanism has ended, if there is one. The
// entry of a newer program stays: it may describe more than this program can undo.
func (j *Journal) End(target gpreempt.ProcessKey, mechanism string) error {
	j.mu.RLock()
	defer j.mu.RUnlock()
	if _, newer := j.newer.Load(fileName(target, mechanism)); newer {
		return nil
	}
	if err := ignoreAbsent(j.disk.remove(fileName(target, mechanism))); err != nil {
		return fmt.Errorf("remove the ended pause of process %v from the journal %s: %w", target, j.path, err)
	}
	return nil
}

// Entries returns the pauses that may be in effect, in no order. The errors are about
// files that cannot be read, a *BadEntry each, or about the directory. The name of a
// file that only the owner could have written is used even if its text is damaged:
// resuming a process that runs is harmless, and leaving one paused is not. Entries
// removes files without a pause: those of an earlier boot, and drafts of a Begin that
// did not finish.
func (j *Journal) Entries() ([]JournalEntry, []error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	names, err := j.disk.list()
	if err != nil {
		return nil, []error{fmt.Errorf("list the journal of pauses %s: %w", j.path, err)}
	}
	var entries []JournalEntry
	var errs []error
	for _, name := range names {
		e, err := j.read(name)
		stale := strings.HasPrefix(name, draftPrefix) || err == nil && e.BootID != j.boot
		switch {
		case stale:
			if err := ignoreAbsent(j.disk.remove(name)); err != nil {
				errs = append(errs, fmt.Errorf("remove a file without a pause from the journal %s: %w", j.path, err))
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

func (j *Journal) read(name string) (JournalEntry, error) {
	if strings.HasPrefix(name, draftPrefix) {
		return JournalEntry{}, nil
	}
	bad := &BadEntry{Path: filepath.Join(j.path, name)}
	text, err := j.disk.read(name)
	if err != nil {
		bad.Err = err
		return JournalEntry{}, bad
	}
	e, err := decode(text)
	if err == nil && e.name() != name {
		err = fmt.Errorf("%w: its text is that of %s", errForeign, e.name())
	}
	if err != nil {
		named := nameOnly(name)
		bad.Err, bad.Used = err, named.NameOnly
		return named, bad
	}
	return e, nil
}

func ignoreAbsent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// disk is what the journal needs of a directory.
type disk interface {
	// write creates or replaces a file and returns when it is on the disk.
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
	// All users may list the parent: it has the socket, too.
	var unsafe *safedir.Error
	if err := safedir.Make(filepath.Dir(path)); errors.As(err, &unsafe) {
		return nil, fmt.Errorf("%w: %w", ErrUnsafe, err)
	} else if err != nil {
		return nil, err
	}
	if err := os.Mkdir(path, dirMode); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	// The two flags make open fail with ENOTDIR for a symbolic link.
	fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("it must be a directory and not a symbolic link: %w", os.NewSyscallError("open", err))
	}
	self := os.NewFile(uintptr(fd), path)
	defer func() {
		if err != nil {
			_ = self.Close() // it was only read
		}
	}()
	info, err := self.Stat()
	if err != nil {
		return nil, err
	}
	if err := private(info); err != nil {
		return nil, fmt.Errorf("%w: %w; remove it, and gpreemptd creates it again", ErrUnsafe, err)
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
			_ = root.Close() // it was only read
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

// private returns why other users could have written to a file or directory.
func private(info fs.FileInfo) error {
	stat, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !ok:
		return errors.New("its owner is unknown")
	case int(stat.Uid) != os.Geteuid():
		return fmt.Errorf("it belongs to user %d, not to %d, the user of this program", stat.Uid, os.Geteuid())
	case info.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("its mode is %v: other users may write to it", info.Mode().Perm())
	}
	return nil
}

func (d *directory) write(name string, text []byte) (err error) {
	const flags = os.O_WRONLY | os.O_CREATE | os.O_EXCL | syscall.O_NOFOLLOW
	f, err := d.root.OpenFile(name, flags, fileMode)
	if errors.Is(err, fs.ErrExist) { // the draft of a Begin that did not finish
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
		return nil, fmt.Errorf("%w: it is not a regular file but %v", errForeign, info.Mode().Type())
	}
	if err := private(info); err != nil {
		return nil, fmt.Errorf("%w: %w", errForeign, err)
	}
	if info.Size() > maxSize {
		return nil, fmt.Errorf("%w: it has %d bytes, more than %d", errForeign, info.Size(), maxSize)
	}
	// No other user can write to the directory, so it is still the same file.
	return d.root.ReadFile(name)
}

func (d *directory) close() error { return errors.Join(d.root.Close(), d.self.Close()) }
