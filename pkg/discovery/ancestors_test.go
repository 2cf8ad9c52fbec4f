package discovery_test

import (
	"fmt"
	"strconv"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// family is a tree in which process 100 uses the driver.
type family struct{ fstest.MapFS }

// put adds a process, or changes it; ids are its pids in its own pid namespaces, outermost first.
func (f family) put(pid, parent, session int, start uint64, ids string) {
	dir := "proc/" + strconv.Itoa(pid)
	f.MapFS[dir+"/stat"] = &fstest.MapFile{Data: fmt.Appendf(nil, "%d (p) S %d %d %d 0 -1 4194304 10 0 0 0 5 6 0 0 20 0 1 0 %d 1000 20 0\n", pid, parent, session, session, start)}
	f.MapFS[dir+"/status"] = &fstest.MapFile{Data: []byte("Name:\tp\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nNSpid:\t" + strconv.Itoa(pid) + ids + "\n")}
}

func newFamily() family {
	f := family{fstest.MapFS{}}
	f.MapFS[procs+"100/pasid"] = &fstest.MapFile{Data: []byte("7\n")}
	f.put(1, 0, 1, 0, "")
	return f
}

func keys(pairs ...uint64) (all []gpreempt.ProcessKey) {
	for i := 0; i < len(pairs); i += 2 {
		all = append(all, gpreempt.ProcessKey{PID: int32(pairs[i]), Start: pairs[i+1]})
	}
	return all
}

func TestAncestorsOfAProcess(t *testing.T) {
	for name, test := range map[string]struct {
		put  func(family)
		want []gpreempt.ProcessKey
	}{
		"a worker of an engine of a server": {func(f family) {
			f.put(100, 90, 80, 30, "")
			f.put(90, 80, 80, 30, "")
			f.put(80, 1, 80, 10, "")
		}, keys(90, 30, 80, 10)},
		"a child in a session of its own": {func(f family) {
			f.put(100, 90, 100, 30, "")
			f.put(90, 1, 90, 10, "")
		}, keys(90, 10)},
		"a parent that has exited, whose pid another process has": {func(f family) {
			f.put(100, 90, 90, 30, "")
			f.put(90, 80, 80, 31, "")
			f.put(80, 1, 80, 10, "")
		}, nil},
		"a parent that has exited": {func(f family) { f.put(100, 90, 90, 30, "") }, nil},
		"a server that is the first process of its container": {func(f family) {
			f.put(100, 90, 90, 30, "\t7")
			f.put(90, 50, 90, 10, "\t1")
			f.put(50, 1, 50, 5, "")
		}, keys(90, 10, 50, 5)},
		"a process that the first one of its container has adopted": {func(f family) {
			f.put(100, 90, 95, 30, "\t7")
			f.put(90, 50, 90, 10, "\t1")
			f.put(50, 1, 50, 5, "")
		}, nil},
		"a chain without end": {func(f family) {
			f.put(100, 101, 1, 30, "")
			for pid := 101; pid < 200; pid++ {
				f.put(pid, pid+1, 1, 30, "")
			}
		}, func() (all []gpreempt.ProcessKey) {
			for pid := range uint64(32) {
				all = append(all, keys(101+pid, 30)...)
			}
			return all
		}()},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFamily()
			test.put(f)
			got := scan(t, newFS(f)).Processes
			if len(got) != 1 {
				t.Fatalf("%d processes", len(got))
			}
			if diff := cmp.Diff(test.want, got[0].Ancestors); diff != "" {
				t.Errorf("ancestors (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAncestorsAreRememberedWhenTheyExit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFamily()
		f.put(100, 90, 80, 30, "")
		f.put(90, 80, 80, 20, "")
		f.put(80, 1, 80, 10, "")
		reader := newFS(f)
		scan(t, reader)
		delete(f.MapFS, "proc/90/stat")
		f.put(100, 70, 80, 30, "")
		f.put(70, 1, 70, 5, "") // a subreaper
		time.Sleep(15 * time.Second)
		if diff := cmp.Diff(keys(70, 5, 90, 20, 80, 10), scan(t, reader).Processes[0].Ancestors); diff != "" {
			t.Errorf("ancestors (-want +got):\n%s", diff)
		}
		// Another process with the pid has none of them.
		f.put(100, 70, 70, 40, "")
		if diff := cmp.Diff(keys(70, 5), scan(t, reader).Processes[0].Ancestors); diff != "" {
			t.Errorf("ancestors (-want +got):\n%s", diff)
		}
	})
}
