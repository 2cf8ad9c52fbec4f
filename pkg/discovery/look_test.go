package discovery_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestLookFindsTheQueuesThatTheNextScanFinds(t *testing.T) {
	for name, dir := range map[string]string{"disk": onDisk(t, tree(t, "host.txt")), "memory": inMemory(t, tree(t, "host.txt"))} {
		f := newFS(discovery.Host(dir))
		before := scan(t, f)
		key := before.Processes[2].Key
		queues := filepath.Join(dir, procs, "4211/queues")
		if err := os.CopyFS(filepath.Join(queues, "11"), os.DirFS(filepath.Join(queues, "0"))); err != nil {
			t.Fatal(err)
		}
		if err := os.RemoveAll(filepath.Join(queues, "1")); err != nil {
			t.Fatal(err)
		}
		looked, known := f.Look(key)
		if !known {
			t.Fatalf("%s: Look needs a scan", name)
		}
		born := before.Processes[2].Queues[0]
		born.ID = 11
		want := []gpreempt.Queue{before.Processes[2].Queues[0], before.Processes[2].Queues[2], born}
		if diff := cmp.Diff(want, looked.Queues); diff != "" {
			t.Errorf("%s: queues (-want +got):\n%s", name, diff)
		}
		before.Processes[2] = looked
		if diff := cmp.Diff(before, scan(t, f)); diff != "" {
			t.Errorf("%s: the next scan (-want +got):\n%s", name, diff)
		}
	}
}

func TestLookNeedsAScanForAProcessThatChangedItsIdentity(t *testing.T) {
	for name, change := range map[string]func(dir string) error{
		"it has ended":         func(dir string) error { return os.RemoveAll(filepath.Join(dir, "proc/4211")) },
		"KFD does not list it": func(dir string) error { return os.RemoveAll(filepath.Join(dir, procs, "4211")) },
		"a queue cannot be read": func(dir string) error {
			queue := filepath.Join(dir, procs, "4211/queues/7")
			if err := os.CopyFS(queue, os.DirFS(filepath.Join(dir, procs, "4211/queues/0"))); err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(queue, "size"), []byte("large"), 0o644)
		},
		"the pid is of another": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "proc/4211/stat"), []byte(stat(4211, "bash", 'S', 1, 999999)), 0o644)
		},
		"it replaced its program": func(dir string) error {
			process := filepath.Join(dir, procs, "4211")
			if err := os.Rename(process, filepath.Join(dir, "old")); err != nil {
				return err
			}
			return os.CopyFS(process, os.DirFS(filepath.Join(dir, "old")))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := inMemory(t, tree(t, "host.txt"))
			f := newFS(discovery.Host(dir))
			key := scan(t, f).Processes[2].Key
			if err := change(dir); err != nil {
				t.Fatal(err)
			}
			if p, known := f.Look(key); known {
				t.Errorf("Look returns %+v", p)
			}
		})
	}
	f := newFS(discovery.Host(inMemory(t, tree(t, "host.txt"))))
	if p, known := f.Look(host()[2].Key); known {
		t.Errorf("before the first scan Look returns %+v", p)
	}
}
