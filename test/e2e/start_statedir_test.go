package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// onlyFreezer has the daemon pause by what the kernel does not undo.
const onlyFreezer = atOnce + "mechanisms: [freezer]\n"

// holdJournal opens the journal in a state directory, as a daemon or a cleanup does.
func holdJournal(t *testing.T, dir string) *mechanism.Journal {
	t.Helper()
	j, err := mechanism.OpenJournal(filepath.Join(dir, "journal"))
	if err != nil {
		t.Fatal(err)
	}
	return j
}

// cleanup runs gpreemptd --cleanup on a state directory.
func cleanup(dir string) result {
	var out, errs bytes.Buffer
	cmd := exec.Command(gpreemptd, "--cleanup")
	cmd.Env, cmd.Stdout, cmd.Stderr = environment("RUNTIME_DIRECTORY="+dir), &out, &errs
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		return result{-1, "", err.Error()}
	}
	return result{cmd.ProcessState.ExitCode(), out.String(), errs.String()}
}

const (
	someoneElse  = "gpreemptd is running, or another cleanup is: nothing to do\n"
	nothingLeft  = "nothing was left paused\n"
	oneRunsAgain = "processes resumed: 1\n"
)

func TestCleanupMayRunAtAnyTimeAndAnyNumberOfTimes(t *testing.T) {
	m := emulate(t, kfdemu.Config{})
	job := m.work("--queues", "2", "--duration", "500")
	dir := testutil.TempSocketDir(t)
	d := m.startIn(dir, onlyFreezer)
	d.heldBy("freezer", job, 2)

	// At once, four each time: while a daemon serves, after it died, and after that.
	all := func() map[string]int {
		var mu sync.Mutex
		said := map[string]int{}
		var runs sync.WaitGroup
		for range 4 {
			runs.Go(func() {
				r := cleanup(dir)
				if r.Code != 0 || r.Err != "" {
					t.Errorf("exit status %d: %s", r.Code, r.Err)
				}
				mu.Lock()
				defer mu.Unlock()
				said[r.Out]++
			})
		}
		runs.Wait()
		return said
	}
	d.announce(t.Context())
	if diff := cmp.Diff(map[string]int{someoneElse: 4}, all()); diff != "" {
		t.Errorf("while a daemon serves (-want +got):\n%s", diff)
	}
	m.checkAway("freezer", job, 2)
	d.kill()
	m.checkAway("freezer", job, 2) // or there is nothing to clean up
	if said := all(); said[oneRunsAgain] != 1 || said[oneRunsAgain]+said[someoneElse]+said[nothingLeft] != 4 {
		t.Errorf("after its death: %v", said)
	}
	m.awaitProgress(job)
	if said := all(); said[nothingLeft] == 0 || said[someoneElse]+said[nothingLeft] != 4 {
		t.Errorf("after that: %v", said)
	}

	// A daemon that starts meanwhile waits for them.
	var cleaning sync.WaitGroup
	cleaning.Go(func() { all() })
	d = m.startIn(dir, onlyFreezer)
	cleaning.Wait()
	d.heldBy("freezer", job, 2)
	lease := d.announce(t.Context())
	m.checkAway("freezer", job, 2)
	d.complete(lease.GetLeaseId())
	m.awaitProgress(job)
	job.stop()
}

// stopped is a process that an earlier daemon has paused, and the entry it wrote.
func stopped(t *testing.T, m *emulated, dir string) (job *worker, file string) {
	t.Helper()
	job = m.work("--duration", "500")
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", job.PID))
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := discovery.ParseProcStat(stat)
	if err != nil {
		t.Fatal(err)
	}
	j := holdJournal(t, dir)
	begun := j.Begin(mechanism.JournalEntry{Mechanism: "freezer", Target: gpreempt.ProcessKey{PID: job.PID, Start: parsed.Start}})
	if err := errors.Join(begun, j.Close()); err != nil {
		t.Fatal(err)
	}
	job.signal(syscall.SIGSTOP)
	m.eventually("the job is stopped", func() bool { return procState(t, job.PID) == "T" })
	return job, filepath.Join(dir, "journal", fmt.Sprintf("%d-%d.freezer", job.PID, parsed.Start))
}

// What is left of an entry is enough to let its process run.
func TestProcessWithADamagedEntryIsResumed(t *testing.T) {
	for name, damage := range map[string]func([]byte) []byte{
		"empty":               func([]byte) []byte { return nil },
		"torn":                func(text []byte) []byte { return text[:len(text)/2] },
		"a bit of the boot":   func(text []byte) []byte { text[len(text)-10] ^= 4; return text },
		"of a later format":   func(text []byte) []byte { return bytes.Replace(text, []byte("pause 1"), []byte("pause 9"), 1) },
		"overwritten by hand": func([]byte) []byte { return []byte("hello\n") },
	} {
		for _, by := range []string{"the next daemon", "--cleanup"} {
			t.Run(name+"/"+by, func(t *testing.T) {
				m := emulate(t, kfdemu.Config{})
				dir := testutil.TempSocketDir(t)
				job, file := stopped(t, m, dir)
				text, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(file, damage(text), 0o600); err != nil {
					t.Fatal(err)
				}
				var reported string
				if by == "--cleanup" {
					r := cleanup(dir)
					if r.Code != 1 || r.Out != oneRunsAgain {
						t.Errorf("it ended with %+v; want the process resumed, and the error reported", r)
					}
					reported = r.Err
				} else {
					reported = m.startIn(dir, onlyFreezer).warned("JOURNAL_UNREADABLE").GetText()
				}
				says(t, reported, file, fmt.Sprintf("process %d", job.PID), "check that it runs")
				m.awaitProgress(job)
				_, err = os.Stat(file)
				if later := strings.Contains(name, "later"); errors.Is(err, fs.ErrNotExist) == later {
					t.Errorf("the file is there: %v; want it to stay only if a newer program wrote it", err == nil)
				}
				job.stop()
			})
		}
	}
}

// Of another boot is another process, whatever its pid and start time.
func TestEntryOfAnotherBootIsForgotten(t *testing.T) {
	m := emulate(t, kfdemu.Config{})
	dir := testutil.TempSocketDir(t)
	job, file := stopped(t, m, dir)
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	_, body, _ := strings.Cut(string(text), "\n")
	body = strings.Replace(body, strings.TrimSpace(string(boot)), "0d5e4b05-0000-4000-8000-3cf0a5b4d1a7", 1)
	sum := crc32.Checksum([]byte(body), crc32.MakeTable(crc32.Castagnoli))
	if err := os.WriteFile(file, fmt.Appendf(nil, "gpreempt-pause 1 crc32c=%08x\n%s", sum, body), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := cleanup(dir); r != (result{0, nothingLeft, ""}) {
		t.Errorf("it ended with %+v", r)
	}
	if s := procState(t, job.PID); s != "T" {
		t.Errorf("the process is in state %s, want it left alone", s)
	}
	if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file is there: %v", err)
	}
	job.signal(syscall.SIGCONT)
	job.stop()
}

// mount mounts a filesystem on a directory until the test ends. It skips where that is
// not allowed.
func mount(t *testing.T, source, dir, kind string, flags uintptr, options string) {
	t.Helper()
	if err := syscall.Mount(source, dir, kind, flags, options); err != nil {
		t.Skipf("mounting needs CAP_SYS_ADMIN: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
}

// fill uses up a filesystem.
func fill(t *testing.T, dir string) (file string) {
	t.Helper()
	file = filepath.Join(dir, "ballast")
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	return file
}

// runsOn checks that an announcement leaves a job of the freezer running.
func (m *emulated) runsOn(d *daemon, job *worker) {
	m.t.Helper()
	lease, answer := d.ask(longest)
	if answer.Quiesced || answer.Suspended != 0 {
		m.t.Errorf("the announcement is answered %+v; want not quiet", answer)
	}
	if s := procState(m.t, job.PID); s == "T" {
		m.t.Error("the job is stopped, and no journal says so")
	}
	m.awaitProgress(job)
	d.complete(lease)
	d.eventually("the log says why", func() bool { // it is written after the answer
		return strings.Contains(d.log.String(), "because its pause cannot be recorded in the journal")
	})
}

func TestPauseWithoutAJournalEntryIsNotMade(t *testing.T) {
	for name, damage := range map[string]func(t *testing.T, dir string) (later func()){
		"full disk": func(t *testing.T, dir string) func() {
			mount(t, "none", dir, "tmpfs", 0, "size=256k,mode=755")
			return func() { fill(t, dir) }
		},
		"read-only journal": func(t *testing.T, dir string) func() {
			journal := filepath.Join(dir, "journal")
			if err := os.Mkdir(journal, 0o700); err != nil {
				t.Fatal(err)
			}
			mount(t, journal, journal, "", syscall.MS_BIND, "")
			if err := syscall.Mount("", journal, "", syscall.MS_BIND|syscall.MS_REMOUNT|syscall.MS_RDONLY, ""); err != nil {
				t.Skip(err)
			}
			return func() {}
		},
		"state directory that is removed": func(_ *testing.T, dir string) func() {
			return func() {
				if err := os.RemoveAll(filepath.Join(dir, "journal")); err != nil {
					t.Error(err)
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := testutil.TempSocketDir(t)
			later := damage(t, dir) // before there is a machine, whose mounts are its own
			m := emulate(t, kfdemu.Config{})
			job := m.work("--queues", "2", "--duration", "500")
			d := m.startIn(dir, onlyFreezer)
			d.heldBy("freezer", job, 2)
			later()
			m.runsOn(d, job)
			d.stop()
			job.stop()
		})
	}
}

// What was paused before the disk was full is resumed all the same, by the daemon that
// paused it and by the next one.
func TestPausesAreUndoneOnAFullDisk(t *testing.T) {
	dir, state := testutil.TempSocketDir(t), testutil.TempSocketDir(t)
	mount(t, "none", state, "tmpfs", 0, "size=256k,mode=755")
	m := emulate(t, kfdemu.Config{})
	job := m.work("--queues", "2", "--duration", "500")
	serve := func() *daemon {
		d := m.launchWith(dir, state, onlyFreezer)
		d.awaitServing()
		d.events = watchEvents(t, d.admin)
		return d
	}
	d := serve()
	d.heldBy("freezer", job, 2)
	lease := d.announce(t.Context())
	m.checkAway("freezer", job, 2)
	ballast := fill(t, state)
	d.complete(lease.GetLeaseId())
	m.awaitProgress(job)
	d.eventually("the journal is empty", func() bool { return names(t, filepath.Join(state, "journal")) == nil })

	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	d.announce(t.Context())
	m.checkAway("freezer", job, 2)
	d.kill()
	if err := os.Remove(filepath.Join(state, "gpreemptd.lock")); err != nil { // there is no room for the next one's pid
		t.Fatal(err)
	}
	fill(t, state)
	serve()
	m.awaitProgress(job)
	job.stop()
}

func TestUnwritableStateDirectoryRefusesTheStart(t *testing.T) {
	dir, state := testutil.TempSocketDir(t), testutil.TempSocketDir(t)
	mount(t, "none", state, "tmpfs", syscall.MS_RDONLY, "size=64k")
	m := emulate(t, kfdemu.Config{})
	job := m.work("--queues", "2", "--duration", "500")
	d := m.launchWith(dir, state, onlyFreezer)
	d.checkExit(1)
	says(t, d.log.String(), "instance lock", state, "read-only file system")
	m.awaitProgress(job)
	job.stop()
}

// Nobody has to make it.
func TestMissingStateDirectoryIsCreated(t *testing.T) {
	m := emulate(t, kfdemu.Config{})
	job := m.work("--queues", "2", "--duration", "500")
	dir := filepath.Join(testutil.TempSocketDir(t), "run", "gpreempt")
	if r := cleanup(dir); r != (result{0, nothingLeft, ""}) {
		t.Errorf("cleanup without one ends with %+v", r)
	}
	if err := os.RemoveAll(filepath.Dir(dir)); err != nil {
		t.Fatal(err)
	}
	d := m.launchWith(filepath.Dir(filepath.Dir(dir)), dir, onlyFreezer)
	d.awaitServing()
	d.events = watchEvents(t, d.admin)
	d.heldBy("freezer", job, 2)
	lease := d.announce(t.Context())
	m.checkAway("freezer", job, 2)
	d.complete(lease.GetLeaseId())
	m.awaitProgress(job)
	job.stop()
}
