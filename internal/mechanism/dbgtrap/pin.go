package dbgtrap

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// pin is the directory of one process in proc, held open. When the process is gone
// its files can no longer be read, whoever has its number then.
type pin struct {
	dir   *os.Root
	start uint64
	// mem is the memory of the program there was, nil where it cannot be had. It keeps
	// nothing of it alive.
	mem *os.File
}

// pinProcess returns mechanism.ErrGone when the process is gone.
func pinProcess(root string, target gpreempt.ProcessKey) (*pin, error) {
	dir, err := os.OpenRoot(filepath.Join(root, "proc", strconv.Itoa(int(target.PID))))
	if vanished(err) {
		return nil, mechanism.ErrGone
	}
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", target.PID, err)
	}
	p := &pin{dir: dir, start: target.Start}
	stat, err := p.stat()
	if err == nil && !stat.Alive() {
		err = mechanism.ErrGone
	}
	if err != nil {
		p.close()
		return nil, err
	}
	p.mem, _ = p.dir.Open("mem") // without it a new program is told from what the driver says
	return p, nil
}

// replaced reports whether the program there was is no more: reading its memory gives
// nothing then (mem_rw), and before it an error or what is there.
func (p *pin) replaced() bool {
	if p.mem == nil {
		return false
	}
	_, err := p.mem.ReadAt(make([]byte, 1), 0)
	return errors.Is(err, io.EOF)
}

// stat reads the process's state: mechanism.ErrGone when it is gone.
func (p *pin) stat() (discovery.ProcStat, error) {
	stat, err := p.read("stat")
	if err == nil && stat.Start != p.start {
		err = mechanism.ErrGone
	}
	return stat, err
}

func (p *pin) read(file string) (discovery.ProcStat, error) {
	text, err := p.dir.ReadFile(file)
	if vanished(err) {
		return discovery.ProcStat{}, mechanism.ErrGone
	}
	var stat discovery.ProcStat
	if err == nil {
		stat, err = discovery.ParseProcStat(text)
	}
	if err != nil {
		return discovery.ProcStat{}, fmt.Errorf("%s: %w", filepath.Join(p.dir.Name(), file), err)
	}
	return stat, nil
}

// living returns a thread of the process that is not on its way out: the main one if
// it can be that. It is mechanism.ErrGone when there is none. The driver forgets a
// process that exits when its last thread has given up its memory, and each has the
// mark of an exiting thread by then.
func (p *pin) living() (tid int32, err error) {
	stat, err := p.stat()
	switch {
	case err != nil:
		return 0, err
	case !stat.Alive():
		return 0, mechanism.ErrGone
	case !ending(stat):
		return stat.PID, nil
	}
	tasks, err := fs.ReadDir(p.dir.FS(), "task")
	if vanished(err) {
		return 0, mechanism.ErrGone
	}
	if err != nil {
		return 0, fmt.Errorf("process %d: %w", stat.PID, err)
	}
	for _, task := range tasks {
		thread, err := p.read(filepath.Join("task", task.Name(), "stat"))
		if err == nil && !ending(thread) { // the error is that of a thread that went
			return thread.PID, nil
		}
	}
	return 0, mechanism.ErrGone
}

// ending reports whether the thread whose stat it is has ended, or is about to.
func ending(stat discovery.ProcStat) bool {
	return stat.MainEnded() || stat.Flags&discovery.FlagExiting != 0
}

// gone reports why the driver knows the process no longer: mechanism.ErrGone, or
// mechanism.ErrReplaced when it lives.
func (p *pin) gone() error {
	tid, err := p.living()
	if err != nil {
		return err
	}
	return fmt.Errorf("process %d: %w: attach to it again when it uses the GPU", tid, mechanism.ErrReplaced)
}

// close loses nothing: the directory was only read.
func (p *pin) close() {
	_ = p.dir.Close()
	if p.mem != nil {
		_ = p.mem.Close()
	}
}

// vanished tells that a file of a process could not be read because the process
// ended.
func vanished(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH)
}
