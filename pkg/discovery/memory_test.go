package discovery_test

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/discovery"
)

func TestMain(m *testing.M) { os.Exit(testutil.VerifyMain(m)) }

// smallHost returns processes without queues, the first with pid 1000. Each of its files
// takes two reads.
func smallHost(processes int) fstest.MapFS {
	m := fstest.MapFS{}
	for path, file := range bigHost(processes, 0) {
		if !strings.HasPrefix(path, procs) || strings.HasSuffix(path, "/pasid") {
			m[path] = file
		}
	}
	return m
}

// variables are those that the tests read.
var variables = []string{"GPREEMPT_CLASS", "AMD_QUEUE_TAG", "AMD_QUEUE_PRIORITY"}

// hostEnv is the content of testdata/host.txt with those.
func hostEnv() []discovery.Proc {
	h := host()
	h[0].Env = map[string]string{"AMD_QUEUE_PRIORITY": "11"}
	h[2].Env = map[string]string{"GPREEMPT_CLASS": "offline", "AMD_QUEUE_TAG": "OFFLINE_7=x"}
	return h
}

// unread removes the memory of process 4211.
func unread(procs []discovery.Proc) []discovery.Proc {
	procs[2].Exe, procs[2].Cmdline, procs[2].Env, procs[2].Unread = "", "", nil, true
	return procs
}

// in returns the duration of a call.
func in(call func()) time.Duration {
	began := time.Now()
	call()
	return time.Since(began)
}

const hangs = "reading its memory hangs, which FUSE or userfaultfd can cause"

func TestProcessWhoseMemoryHangsIsShownWithoutIt(t *testing.T) {
	for _, file := range []string{"proc/4211/cmdline", "proc/4211/environ"} {
		synctest.Test(t, func(t *testing.T) {
			h := newHanging(tree(t, "host.txt"))
			release := h.at(file)
			f := discovery.NewFS(h)
			f.SetEnv(variables)
			check := func(when string, want discovery.Snapshot, limit time.Duration) {
				t.Helper()
				var got discovery.Snapshot
				took := in(func() { got = scan(t, f) })
				if diff := cmp.Diff(want, got); diff != "" {
					t.Fatalf("%s %s: snapshot (-want +got):\n%s", file, when, diff)
				}
				if took > limit {
					t.Errorf("%s %s: the scan took %v, want at most %v", file, when, took, limit)
				}
			}
			check("at first", discovery.Snapshot{Processes: unread(hostEnv())}, 10*time.Millisecond)
			check("at once again", discovery.Snapshot{Processes: unread(hostEnv())}, 0)
			time.Sleep(time.Second)
			late := discovery.Snapshot{Processes: unread(hostEnv()), Warnings: []string{
				"command line, program and environment of process 4211 are unknown: " + hangs,
			}}
			check("late", late, 0)
			time.Sleep(time.Hour)
			for range 100 {
				check("after an hour", late, 0)
			}
			if n := h.times(file); n != 1 {
				t.Errorf("%s was read %d times while that hung", file, n)
			}
			if changed, err := f.Changed(); changed || err != nil {
				t.Errorf("Changed() = %v, %v before any change", changed, err)
			}
			release()
			synctest.Wait()
			if changed, err := f.Changed(); !changed || err != nil {
				t.Errorf("Changed() = %v, %v with an answer that no snapshot contains", changed, err)
			}
			check("when it is read", discovery.Snapshot{Processes: hostEnv()}, 0)
			if changed, err := f.Changed(); changed || err != nil {
				t.Errorf("Changed() = %v, %v after the scan", changed, err)
			}
		})
	}
}

func TestMemoryThatHangsLaterKeepsTheOldValues(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHanging(tree(t, "host.txt"))
		f := discovery.NewFS(h)
		f.SetEnv(variables)
		scan(t, f)
		release := h.at("proc/4211/cmdline")
		defer release()
		for range 20 {
			time.Sleep(time.Second)
			scan(t, f)
		}
		want := discovery.Snapshot{Processes: hostEnv(), Warnings: []string{
			"command line, program and environment of process 4211 are outdated: " + hangs,
		}}
		if diff := cmp.Diff(want, scan(t, f)); diff != "" {
			t.Errorf("snapshot (-want +got):\n%s", diff)
		}
	})
}

func TestHangingReadingsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const processes, limit = 40, 32
		h := newHanging(smallHost(processes))
		var release []func()
		for n := range processes {
			release = append(release, h.at("proc/"+strconv.Itoa(1000+n)+"/cmdline"))
		}
		f := discovery.NewFS(h)
		reading := func() (n int) {
			for pid := range processes {
				n += h.times("proc/" + strconv.Itoa(1000+pid) + "/cmdline")
			}
			return n
		}
		for range 50 {
			scan(t, f)
			time.Sleep(100 * time.Millisecond)
		}
		s := scan(t, f)
		if n := reading(); n != limit {
			t.Errorf("%d readings hang, want %d", n, limit)
		}
		if len(s.Processes) != processes || len(s.Warnings) != limit+1 {
			t.Errorf("%d processes and %d warnings, want %d and %d", len(s.Processes), len(s.Warnings), processes, limit+1)
		}
		// A released reading is replaced by the next; others do not hang.
		for _, r := range release[limit+1:] {
			r()
		}
		release[0]()
		synctest.Wait()
		got := scan(t, f).Processes
		known := 0
		for _, p := range got {
			if p.Cmdline == "python3 train.py" {
				known++
			}
		}
		// The released one, and then number 32 hangs instead.
		if known != 1 || reading() != limit+1 {
			t.Errorf("%d command lines are known after %d readings, want 1 after %d", known, reading(), limit+1)
		}
		release[1]()
		synctest.Wait()
		known = 0
		for _, p := range scan(t, f).Processes {
			if p.Cmdline == "python3 train.py" {
				known++
			}
		}
		if known != 2+7 {
			t.Errorf("%d command lines are known, want those of the 2 that were released and of 7 that do not hang", known)
		}
		for _, r := range release[2 : limit+1] {
			r()
		}
		synctest.Wait()
	})
}

func TestWithTooManyHangingReadingsTheRestIsAWarning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHanging(smallHost(32))
		for n := range 32 {
			defer h.at("proc/" + strconv.Itoa(1000+n) + "/cmdline")()
		}
		f := discovery.NewFS(h)
		scan(t, f)
		time.Sleep(time.Hour)
		// No other process uses KFD now: the hanging ones are not listed, and still hang.
		for path, file := range smallHost(33) {
			if strings.Contains(path, "1032") {
				h.put(path, string(file.Data))
			}
		}
		h.mu.Lock()
		for path := range h.files {
			if strings.HasPrefix(path, procs) && !strings.Contains(path, "1032") {
				delete(h.files, path)
			}
		}
		h.mu.Unlock()
		s := scan(t, f)
		want := []string{"command line, program and environment of 1 more processes are not read: 32 readings hang, which is the maximum"}
		if diff := cmp.Diff(want, s.Warnings); diff != "" || len(s.Processes) != 1 {
			t.Errorf("%d processes; warnings (-want +got):\n%s", len(s.Processes), diff)
		}
	})
}

func TestSlowMemoriesAreReadConcurrently(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const processes = 200
		h := newHanging(smallHost(processes))
		for n := range processes {
			h.hang["proc/"+strconv.Itoa(1000+n)+"/cmdline"] = func() { time.Sleep(4 * time.Millisecond) }
		}
		f := discovery.NewFS(h)
		var s discovery.Snapshot
		if took := in(func() { s = scan(t, f) }); took > 100*time.Millisecond {
			t.Errorf("the scan took %v", took)
		}
		if n := slices.IndexFunc(s.Processes, func(p discovery.Proc) bool { return p.Cmdline == "" }); n >= 0 {
			t.Errorf("process %v has no command line at first, although nothing blocks", s.Processes[n].Key)
		}
	})
}

func TestScanWaitsAtMostATenthOfASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const processes = 450
		h := newHanging(smallHost(processes))
		for n := range processes {
			h.hang["proc/"+strconv.Itoa(1000+n)+"/cmdline"] = func() { time.Sleep(4 * time.Millisecond) }
		}
		f := discovery.NewFS(h)
		unknown := processes
		for range 3 {
			var s discovery.Snapshot
			if took := in(func() { s = scan(t, f) }); took > 100*time.Millisecond {
				t.Fatalf("a scan took %v", took)
			}
			unknown = 0
			for _, p := range s.Processes {
				if p.Cmdline == "" {
					unknown++
				}
			}
			time.Sleep(50 * time.Millisecond)
		}
		if unknown != 0 {
			t.Errorf("%d of %d command lines are not known after 3 scans", unknown, processes)
		}
	})
}

func TestReusedPidDoesNotGetTheAnswerOfItsPredecessor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHanging(tree(t, "host.txt"))
		release := h.at("proc/4211/cmdline")
		f := discovery.NewFS(h)
		f.SetEnv(variables)
		scan(t, f)
		// The open file is the predecessor's and keeps hanging.
		h.mu.Lock()
		delete(h.hang, "proc/4211/cmdline")
		h.mu.Unlock()
		h.put("proc/4211/stat", stat(4211, "python (train) x", 'S', 64, 999999))
		h.put("proc/4211/cmdline", "python3\x00infer.py\x00")
		h.put("proc/4211/environ", "GPREEMPT_CLASS=online\x00")
		want := hostEnv()
		want[2].Key.Start = 999999
		want[2].Cmdline = "python3 infer.py"
		want[2].Env = map[string]string{"GPREEMPT_CLASS": "online"}
		for n := range want[2].Queues {
			want[2].Queues[n].Process = want[2].Key
		}
		for _, when := range []string{"while the old reading hangs", "after it"} {
			if diff := cmp.Diff(want, scan(t, f).Processes); diff != "" {
				t.Errorf("%s (-want +got):\n%s", when, diff)
			}
			if release != nil {
				release()
				release = nil
			}
			synctest.Wait()
		}
	})
}

// The answer is right when it is sent, and arrives while the next scan reads another
// process.
func TestAnswerDuringAScanIsNotThatOfTheSuccessor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHanging(tree(t, "host.txt"))
		release := h.at("proc/4211/cmdline")
		armed := false
		f := discovery.NewFS(onOpen{h, func(path string) error {
			if path == "proc/977/stat" && armed {
				armed = false
				release()
				synctest.Wait()
				h.put("proc/4211/stat", stat(4211, "python (train) x", 'S', 64, 999999))
				release = h.at("proc/4211/cmdline")
			}
			return nil
		}})
		scan(t, f)
		armed = true
		if got := scan(t, f).Processes[2]; got.Key.Start != 999999 || got.Cmdline != "" {
			t.Errorf("%v has the command line %q, which could not be read", got.Key, got.Cmdline)
		}
		release()
		synctest.Wait()
	})
}

func TestPidReusedDuringAReadingIsNotUsed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHanging(tree(t, "host.txt"))
		h.hang["proc/4211/cmdline"] = func() {
			h.put("proc/4211/stat", stat(4211, "python (train) x", 'S', 64, 999999))
		}
		f := discovery.NewFS(h)
		if diff := cmp.Diff(unread(host()), scan(t, f).Processes); diff != "" {
			t.Errorf("processes (-want +got):\n%s", diff)
		}
		if got := scan(t, f).Processes[2]; got.Key.Start != 999999 || got.Cmdline == "" {
			t.Errorf("the next scan has %v with the command line %q", got.Key, got.Cmdline)
		}
	})
}

func TestEnvironmentHasTheGivenNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHanging(tree(t, "host.txt"))
		f := discovery.NewFS(h)
		env := func() map[string]string { return scan(t, f).Processes[2].Env }
		steps := []struct {
			names []string
			want  map[string]string
		}{
			{nil, nil},
			{[]string{"NOTHING"}, nil},
			{[]string{"PATH"}, map[string]string{"PATH": "/usr/bin"}},
			{variables, map[string]string{"GPREEMPT_CLASS": "offline", "AMD_QUEUE_TAG": "OFFLINE_7=x"}},
			{[]string{"PATH", "AMD_QUEUE_TAG"}, map[string]string{"PATH": "/usr/bin", "AMD_QUEUE_TAG": "OFFLINE_7=x"}},
			{nil, nil},
		}
		for _, step := range steps {
			f.SetEnv(step.names)
			if diff := cmp.Diff(step.want, env()); diff != "" {
				t.Errorf("%v (-want +got):\n%s", step.names, diff)
			}
		}
		if n := h.times("proc/4211/environ"); n != len(steps)-2 {
			t.Errorf("the environment was read %d times", n)
		}
	})
}

func TestFirstEnvironmentIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHanging(tree(t, "host.txt"))
		f := discovery.NewFS(h)
		f.SetEnv(variables)
		scan(t, f)
		// Like programs that overwrite their arguments with a title.
		h.put("proc/4211/cmdline", "train: epoch 3")
		h.put("proc/4211/environ", "GPREEMPT_PRIORITY=4\x00GPREEMPT_CLASS=online\x00AMD_QUEUE_PRIORITY=3\x00")
		time.Sleep(20 * time.Second)
		f.SetEnv(append(slices.Clone(variables), "GPREEMPT_PRIORITY"))
		want := hostEnv()
		want[2].Cmdline = "train: epoch 3"
		want[2].Env["GPREEMPT_PRIORITY"] = "4" // not looked for before
		if diff := cmp.Diff(want, scan(t, f).Processes); diff != "" {
			t.Errorf("processes (-want +got):\n%s", diff)
		}
	})
}

func TestMemoryWithoutPermissionIsAWarning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := discovery.NewFS(failing(tree(t, "host.txt"), "proc/4211/environ", syscall.EACCES))
		f.SetEnv(variables)
		want := discovery.Snapshot{Processes: hostEnv(), Warnings: []string{
			"environment of process 4211 omitted: open proc/4211/environ: permission denied",
		}}
		want.Processes[2].Env = nil
		for range 3 {
			if diff := cmp.Diff(want, scan(t, f)); diff != "" {
				t.Errorf("snapshot (-want +got):\n%s", diff)
			}
			time.Sleep(10 * time.Second)
		}
	})
}

func TestLongEnvironmentsAreCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := tree(t, "host.txt")
		long := func(bytes int) string { return "LONG=" + strings.Repeat("x", bytes-len("LONG=")-1) + "\x00" }
		f := discovery.NewFS(m)
		f.SetEnv(append(slices.Clone(variables), "LONG"))
		m["proc/977/environ"].Data = []byte(long(256<<10-18) + "GPREEMPT_CLASS=no\x00")
		m["proc/4211/environ"].Data = []byte(long(256<<10-10) + "GPREEMPT_CLASS=no\x00")
		m["proc/1200/environ"] = &fstest.MapFile{Data: []byte(long(100<<10) + "GPREEMPT_CLASS=yes\x00")}
		want := host()
		value := strings.Repeat("x", 4096)
		want[0].Env = map[string]string{"LONG": value, "GPREEMPT_CLASS": "no"}
		want[1].Env = map[string]string{"LONG": value, "GPREEMPT_CLASS": "yes"}
		want[2].Env = map[string]string{"LONG": value}
		s := scan(t, f)
		if diff := cmp.Diff(want, s.Processes); diff != "" {
			t.Errorf("processes (-want +got):\n%s", diff)
		}
		if want := []string{
			"environment of process 977 is cut after 256 KiB", "environment of process 4211 is cut after 256 KiB",
		}; !slices.Equal(s.Warnings, want) {
			t.Errorf("warnings %q, want %q", s.Warnings, want)
		}
	})
}
