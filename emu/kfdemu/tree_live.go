package kfdemu

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"
)

// folder is a directory as it was read or written.
type folder struct {
	files map[string]string
	dirs  map[string]folder
}

// Processes updates kfd/proc: the processes with these pids, or all of them without pids.
// It does not touch files and directories that have not changed, and adds and removes
// directories as a whole.
//
// Two successive queues with the same ID and the same files in sysfs differ only in their
// directories: call Processes after the first one was destroyed and before the second one
// is created. The same applies to processes with one pid.
func (t *Tree) Processes(pids ...int32) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return fmt.Errorf("write the emulated sysfs: %w", fs.ErrClosed)
	}
	files := t.files()
	var names []string
	for _, pid := range pids {
		names = append(names, strconv.Itoa(int(pid)))
	}
	if len(pids) == 0 {
		entries, err := fs.ReadDir(files, classDir+"/proc")
		if err != nil {
			return fmt.Errorf("write the emulated sysfs: %w", err)
		}
		for _, e := range entries {
			names = append(names, e.Name())
		}
		for name := range t.procs.dirs {
			names = append(names, name)
		}
	}
	want := folder{dirs: map[string]folder{}}
	for _, name := range names {
		process, err := read(files, classDir+"/proc/"+name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("write the emulated sysfs: %w", err)
		}
		addStatistics(process)
		want.dirs[name] = process
	}
	have := t.procs.dirs
	if have == nil {
		have = map[string]folder{}
		t.procs.dirs = have
	}
	var failed error
	for _, name := range names {
		was, there := have[name]
		is, stays := want.dirs[name]
		if !there && !stays {
			continue
		}
		if err := t.replaceDir(procDir+"/"+name, was, there, is, stays); err != nil {
			failed = errors.Join(failed, fmt.Errorf("write the emulated sysfs: process %s: %w", name, err))
			// The state on disk is not known: the next call writes all of it.
			_ = os.RemoveAll(t.path(procDir + "/" + name))
			delete(have, name)
			continue
		}
		if stays {
			have[name] = is
		} else {
			delete(have, name)
		}
	}
	return failed
}

// Debugfs writes the debugfs files names, of "mqds" and "hqds", or both without names. A
// program that has a file open keeps its content.
func (t *Tree) Debugfs(names ...string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return fmt.Errorf("write the emulated debugfs: %w", fs.ErrClosed)
	}
	files := t.files()
	if len(names) == 0 {
		entries, err := fs.ReadDir(files, debugDir)
		if err != nil {
			return fmt.Errorf("write the emulated debugfs: %w", err)
		}
		for _, e := range entries {
			names = append(names, e.Name())
		}
	}
	for _, name := range names {
		name = debugDir + "/" + name
		b, err := fs.ReadFile(files, name)
		if err == nil {
			err = t.replaceFile(name, string(b))
		}
		if err != nil {
			return fmt.Errorf("write the emulated debugfs: %w", err)
		}
	}
	return nil
}

// read returns a directory with all its contents. It skips entries that vanish meanwhile,
// but fails if the directory itself does.
func read(files fs.FS, dir string) (folder, error) {
	entries, err := fs.ReadDir(files, dir)
	if err != nil {
		return folder{}, err
	}
	f := folder{files: map[string]string{}, dirs: map[string]folder{}}
	for _, e := range entries {
		name := dir + "/" + e.Name()
		if e.IsDir() {
			sub, err := read(files, name)
			if err == nil {
				f.dirs[e.Name()] = sub
			} else if !errors.Is(err, fs.ErrNotExist) {
				return folder{}, err
			}
			continue
		}
		b, err := fs.ReadFile(files, name)
		if err == nil {
			f.files[e.Name()] = string(b)
		} else if !errors.Is(err, fs.ErrNotExist) {
			return folder{}, err
		}
	}
	return f, nil
}

// addStatistics adds the driver's counters that gpumodel does not have to the directory of
// a process (kfd_procfs_add_sysfs_files and others).
func addStatistics(process folder) {
	for name := range process.files {
		gpu, ok := strings.CutPrefix(name, "vram_")
		if !ok {
			continue
		}
		process.files["sdma_"+gpu] = "0\n"
		process.dirs["stats_"+gpu] = folder{files: map[string]string{"evicted_ms": "0\n", "cu_occupancy": "0\n"}}
		process.dirs["counters_"+gpu] = folder{files: map[string]string{"faults": "0\n", "page_in": "0\n", "page_out": "0\n"}}
	}
}

// replaceDir changes a directory from the content was to the content is.
func (t *Tree) replaceDir(name string, was folder, there bool, is folder, stays bool) error {
	if there && (!stays || isOther(name, was, is)) {
		if err := t.removeDir(name); err != nil {
			return err
		}
		there = false
	}
	switch {
	case !stays:
		return nil
	case !there:
		return t.addDir(name, is)
	}
	for file, text := range is.files {
		if old, ok := was.files[file]; !ok || old != text {
			if err := t.replaceFile(name+"/"+file, text); err != nil {
				return err
			}
		}
	}
	for file := range was.files {
		if _, ok := is.files[file]; !ok {
			if err := os.Remove(t.path(name + "/" + file)); err != nil {
				return err
			}
		}
	}
	for dir, sub := range is.dirs {
		old, ok := was.dirs[dir]
		if err := t.replaceDir(name+"/"+dir, old, ok, sub, true); err != nil {
			return err
		}
	}
	for dir, old := range was.dirs {
		if _, ok := is.dirs[dir]; !ok {
			if err := t.replaceDir(name+"/"+dir, old, true, folder{}, false); err != nil {
				return err
			}
		}
	}
	return nil
}

// isOther reports whether a queue's directory is now that of another queue: these two files
// of a queue never change.
func isOther(name string, was, is folder) bool {
	return path.Base(path.Dir(name)) == "queues" && (was.files["gpuid"] != is.files["gpuid"] || was.files["type"] != is.files["type"])
}

// scratch returns a name for a file or directory before it is renamed to its place, or
// after it was moved away from it.
func (t *Tree) scratch() string {
	t.made++
	return t.path(scratchDir + "/" + strconv.FormatUint(t.made, 10))
}

func (t *Tree) replaceFile(name, text string) error {
	scratch := t.scratch()
	if err := write(scratch, text); err != nil {
		return err
	}
	return os.Rename(scratch, t.path(name))
}

func (t *Tree) addDir(name string, f folder) error {
	scratch := t.scratch()
	if err := writeFolder(scratch, f); err != nil {
		return err
	}
	return os.Rename(scratch, t.path(name))
}

func writeFolder(at string, f folder) error {
	if err := mkdirAll(at); err != nil {
		return err
	}
	for name, text := range f.files {
		if err := write(at+"/"+name, text); err != nil {
			return err
		}
	}
	for name, sub := range f.dirs {
		if err := writeFolder(at+"/"+name, sub); err != nil {
			return err
		}
	}
	return nil
}

func (t *Tree) removeDir(name string) error {
	scratch := t.scratch()
	if err := os.Rename(t.path(name), scratch); err != nil {
		return err
	}
	return os.RemoveAll(scratch)
}
