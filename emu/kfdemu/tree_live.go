package kfdemu

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
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
	return t.while("write the emulated sysfs", func() error {
		files := t.files()
		var names []string
		for _, pid := range pids {
			names = append(names, strconv.Itoa(int(pid)))
		}
		if len(pids) == 0 {
			entries, err := fs.ReadDir(files, classDir+"/proc")
			if err != nil {
				return err
			}
			names = slices.Collect(maps.Keys(t.procs))
			for _, e := range entries {
				if _, there := t.procs[e.Name()]; !there {
					names = append(names, e.Name())
				}
			}
		}
		var failed []error
		for _, name := range names {
			if err := t.updateProcess(files, name); err != nil {
				failed = append(failed, fmt.Errorf("process %s: %w", name, err))
			}
		}
		return errors.Join(failed...)
	})
}

func (t *Tree) updateProcess(files fs.FS, name string) error {
	is, was := folder{dirs: map[string]folder{}}, folder{dirs: map[string]folder{}}
	process, err := read(files, classDir+"/proc/"+name)
	if err == nil {
		addStatistics(process)
		is.dirs[name] = process
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if before, there := t.procs[name]; there {
		was.dirs[name] = before
	}
	delete(t.procs, name)
	if err := t.update(procDir, was, is); err != nil {
		// The state on disk is not known: the next call writes all of it.
		_ = os.RemoveAll(t.path(procDir + "/" + name))
		return err
	}
	maps.Copy(t.procs, is.dirs)
	return nil
}

// while calls f with the lock held, unless the tree is closed.
func (t *Tree) while(what string, f func() error) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	err := fs.ErrClosed
	if !t.closed {
		err = f()
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// Debugfs writes the debugfs files names, of "mqds" and "hqds", or both without names. A
// program that has a file open keeps its content.
func (t *Tree) Debugfs(names ...string) error {
	if len(names) == 0 {
		names = []string{"mqds", "hqds"}
	}
	return t.while("write the emulated debugfs", func() error {
		files := t.files()
		for _, name := range names {
			name = debugDir + "/" + name
			b, err := fs.ReadFile(files, name)
			if err == nil {
				err = t.replaceFile(name, string(b))
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// firstPASID is the lowest PASID of a VM here. Programs know them as what is not 0.
const firstPASID = 0x8000

// VMs writes the debugfs files that show on which GPUs each process has acquired a VM. The
// driver of Linux 7.2 has them; here each does, because the other signs are in files of the
// host (/proc/PID/fdinfo).
func (t *Tree) VMs(all map[int32][]gpreempt.GPUID) error {
	return t.while("write the emulated debugfs", func() error {
		is := folder{dirs: map[string]folder{}}
		for pid, vms := range all {
			files := map[string]string{}
			for i, n := range t.nodes {
				if !n.GPU() {
					continue
				}
				id, pasid := strings.TrimSpace(n.files["gpu_id"]), 0
				if slices.ContainsFunc(vms, func(vm gpreempt.GPUID) bool { return vm.String() == id }) {
					pasid = firstPASID + i
				}
				files["pasid_"+id] = strconv.Itoa(pasid) + "\n"
			}
			is.dirs[strconv.Itoa(int(pid))] = folder{files: files}
		}
		err := t.update(debugDir+"/proc", t.vms, is)
		t.vms = is
		return err
	})
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

// update changes a directory from the content was to the content is.
func (t *Tree) update(name string, was, is folder) error {
	for dir, old := range was.dirs {
		if sub, stays := is.dirs[dir]; stays && !isOther(name, old, sub) {
			continue
		}
		delete(was.dirs, dir)
		scratch := t.scratch()
		if err := errors.Join(os.Rename(t.path(name+"/"+dir), scratch), os.RemoveAll(scratch)); err != nil {
			return err
		}
	}
	for dir, sub := range is.dirs {
		at := name + "/" + dir
		if old, there := was.dirs[dir]; there {
			if err := t.update(at, old, sub); err != nil {
				return err
			}
			continue
		}
		scratch := t.scratch()
		if err := writeFolder(scratch, sub); err != nil {
			return err
		}
		if err := os.Rename(scratch, t.path(at)); err != nil {
			return err
		}
	}
	for file := range was.files {
		if _, stays := is.files[file]; !stays {
			if err := os.Remove(t.path(name + "/" + file)); err != nil {
				return err
			}
		}
	}
	for file, text := range is.files {
		if old, there := was.files[file]; !there || old != text {
			if err := t.replaceFile(name+"/"+file, text); err != nil {
				return err
			}
		}
	}
	return nil
}

// isOther reports whether a directory in dir is now that of another queue: these two files of
// a queue never change.
func isOther(dir string, was, is folder) bool {
	return path.Base(dir) == "queues" && (was.files["gpuid"] != is.files["gpuid"] || was.files["type"] != is.files["type"])
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
