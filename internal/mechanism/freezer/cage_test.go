package freezer

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// newStop returns a machine with the mechanism stop.
func newStop(t *testing.T) machine {
	t.Helper()
	m := newMachine(t)
	m.Mechanism = NewStop(Config{Root: "/", Journal: m.journal, Log: zap.NewNop()})
	return m
}

// at returns the cgroup of a process.
func at(t *testing.T, v *victim) string {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", v.key.PID))
	if err != nil {
		t.Fatal(err)
	}
	return discovery.CgroupV2Path(text)
}

// cageState is what is left of a pause.
type cageState struct {
	At, Frozen string
	Noted      map[gpreempt.ProcessKey]string
}

func (m machine) cageState(t *testing.T, v *victim, cage string) cageState {
	t.Helper()
	frozen, err := os.ReadFile(filepath.Join(cage, "cgroup.freeze"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return cageState{at(t, v), strings.TrimSpace(string(frozen)), m.noted(t)}
}

// A stopped process, which shares its cgroup with another, is in a frozen cgroup of this program's
// below its own, which does not stop, and back there afterwards. A daemon that died is made up for.
func TestStopMovesAProcessToAFrozenCgroupAndBack(t *testing.T) {
	path, dir := newCgroup(t)
	v, other := startVictim(t, dir), startVictim(t, dir)
	name := cageName(v.key)
	cage := filepath.Join(dir.Name(), name)
	m := newStop(t)
	s := m.attach(t, v.key)
	stopped := cageState{path + "/" + name, "1", map[gpreempt.ProcessKey]string{v.key: "stop" + path + "/" + name}}
	runs := cageState{path, "", map[gpreempt.ProcessKey]string{}}
	for _, undo := range []func(){
		func() { m.resume(t, s) },
		func() {
			entries, errs := m.journal.Entries()
			if len(entries) != 1 || len(errs) > 0 {
				t.Fatalf("the journal has %v, %v", entries, errs)
			}
			for range 2 {
				if err := newStop(t).undo(entries[0]); err != nil {
					t.Error(err)
				}
			}
			entries[0].NameOnly, entries[0].Cgroup, entries[0].CgroupID, entries[0].Home = true, "", 0, ""
			if err := m.Undo(t.Context(), entries[0]); err != nil {
				t.Error(err)
			}
			m.resume(t, s)
		},
	} {
		m.suspend(t, s)
		m.suspend(t, s)
		if diff := cmp.Diff(stopped, m.cageState(t, v, cage)); diff != "" {
			t.Errorf("stopped (-want +got):\n%s", diff)
		}
		other.mustRun(t)
		undo()
		v.mustRun(t)
		if diff := cmp.Diff(runs, m.cageState(t, v, cage)); diff != "" {
			t.Errorf("resumed (-want +got):\n%s", diff)
		}
	}
}

// By the name of a journal file alone, a process that is in its cage runs again.
func TestStopIsUndoneByNameAlone(t *testing.T) {
	path, dir := newCgroup(t)
	v := startVictim(t, dir)
	m := newStop(t)
	s := m.attach(t, v.key)
	m.suspend(t, s)
	entries, _ := m.journal.Entries()
	if len(entries) != 1 {
		t.Fatalf("the journal has %v", entries)
	}
	if err := newStop(t).emptyUnknown(s.(*session).process); err != nil {
		t.Fatal(err)
	}
	v.mustRun(t)
	if got := at(t, v); got != path {
		t.Errorf("the process is in %s, want %s", got, path)
	}
}

// A user who owns the cgroup of the job could move it out of a cgroup below: the cage is above.
// When the job's cgroup is removed meanwhile, it runs in the cage.
func TestStopOfAProcessInADelegatedCgroup(t *testing.T) {
	path, dir := newCgroup(t)
	inner := filepath.Join(dir.Name(), "delegated")
	if err := os.Mkdir(inner, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(filepath.Join(inner, "cgroup.procs"), 30010, -1); err != nil {
		t.Fatal(err)
	}
	delegated, err := os.Open(inner)
	if err != nil {
		t.Fatal(err)
	}
	defer delegated.Close()
	v := startVictim(t, delegated)
	m := newStop(t)
	s := m.attach(t, v.key)
	m.suspend(t, s)
	cage := path + "/" + cageName(v.key)
	if got := at(t, v); got != cage {
		t.Errorf("stopped, it is in %s, want %s", got, cage)
	}
	if err := os.Remove(inner); err != nil {
		t.Fatal(err)
	}
	m.resume(t, s)
	v.mustRun(t)
	if got := at(t, v); got != cage {
		t.Errorf("resumed, it is in %s, want %s", got, cage)
	}
	m.suspend(t, s) // and once more, from there
	m.resume(t, s)
	v.mustRun(t)
	v.kill()
	empty(t, dir)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	_ = os.Remove(filepath.Join(dir.Name(), cageName(v.key))) // it is left where the process has ended in it
}
