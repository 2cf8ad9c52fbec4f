package freezer

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// roleEnv names what this binary plays when a test starts it again.
const roleEnv = "GPREEMPT_FREEZER_TEST_ROLE"

// The roles.
const (
	roleVictim = "victim" // a process to be stopped
	roleDaemon = "daemon" // suspends and resumes until it is killed
)

func TestMain(m *testing.M) {
	switch role := os.Getenv(roleEnv); role {
	case "":
		os.Exit(testutil.VerifyMain(m))
	case roleVictim:
		playVictim()
	case roleDaemon:
		if err := playDaemon(os.Args[1], os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, "daemon:", err)
			os.Exit(1)
		}
	default:
		fmt.Fprintln(os.Stderr, "no role", role)
		os.Exit(2)
	}
}

// playVictim answers each line of its input, which shows that it runs. Some of its
// threads run every millisecond. The end of the input ends it.
func playVictim() {
	for range 3 {
		go func() {
			for range time.NewTicker(time.Millisecond).C {
			}
		}()
	}
	fmt.Println("ready")
	in := bufio.NewScanner(os.Stdin)
	for n := 1; in.Scan(); n++ {
		if in.Text() == "child" {
			child := exec.CommandContext(context.Background(), "/proc/self/exe")
			if _, err := child.StdinPipe(); err != nil { // closed when this process ends
				panic(err)
			}
			if err := child.Start(); err != nil {
				panic(err)
			}
			fmt.Println(child.Process.Pid)
			continue
		}
		fmt.Println("alive", n)
	}
}

// playDaemon attaches to each process and suspends and resumes all of them
// concurrently until it is killed.
func playDaemon(dir string, targets []string) error {
	j, err := mechanism.OpenJournal(dir)
	if err != nil {
		return err
	}
	m := New(Config{Root: "/", Journal: j, Log: zap.NewNop()})
	failed := make(chan error)
	var ready sync.WaitGroup
	for _, word := range targets {
		target, err := gpreempt.ParseProcessKey(word)
		if err != nil {
			return err
		}
		s, err := m.Attach(context.Background(), target)
		if err != nil {
			return err
		}
		ready.Add(1)
		go func() {
			for n := 0; ; n++ {
				if err := s.Suspend(context.Background(), nil); err != nil {
					failed <- err
				}
				if err := s.Resume(context.Background()); err != nil {
					failed <- err
				}
				if n == 0 {
					ready.Done()
				}
			}
		}()
	}
	go func() { ready.Wait(); fmt.Println("ready") }()
	return <-failed
}

// victim is a running process.
type victim struct {
	key gpreempt.ProcessKey
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
	// pipe is what out reads from, for its deadline.
	pipe *os.File
}

// startVictim starts a process, in a cgroup unless dir is nil.
func startVictim(t *testing.T, dir *os.File) *victim {
	t.Helper()
	cmd := exec.CommandContext(context.Background(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), roleEnv+"="+roleVictim, "GORACE=atexit_sleep_ms=0")
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if dir != nil {
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(dir.Fd())
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	v := &victim{cmd: cmd, in: in, out: bufio.NewReader(out), pipe: out.(*os.File)}
	t.Cleanup(func() { v.kill() })
	if got := v.line(t); got != "ready" {
		t.Fatalf("the victim said %q, want ready", got)
	}
	v.key = keyOf(t, cmd.Process.Pid)
	return v
}

func keyOf(t *testing.T, pid int) gpreempt.ProcessKey {
	t.Helper()
	p, err := proc.Open("/", gpreempt.ProcessKey{PID: int32(pid)})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	return p.Key()
}

// kill kills and reaps it. SIGKILL reaches what is frozen or stopped too.
func (v *victim) kill() {
	_ = v.cmd.Process.Kill()
	_ = v.cmd.Wait()
}

func (v *victim) line(t *testing.T) string {
	t.Helper()
	if err := v.pipe.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	line, err := v.out.ReadString('\n')
	if err != nil {
		t.Fatalf("process %v does not run: %v; state %s", v.key, err, v.states(t))
	}
	return strings.TrimSpace(line)
}

// ask sends a line and returns the answer of a victim that runs.
func (v *victim) ask(t *testing.T, what string) string {
	t.Helper()
	if _, err := fmt.Fprintln(v.in, what); err != nil {
		t.Fatal(err)
	}
	return v.line(t)
}

func (v *victim) mustRun(t *testing.T) {
	t.Helper()
	if got := v.ask(t, "ping"); !strings.HasPrefix(got, "alive") {
		t.Fatalf("process %v said %q", v.key, got)
	}
}

// states returns the states of its threads, each once.
func (v *victim) states(t *testing.T) string {
	t.Helper()
	return statesOf(t, v.key.PID)
}

func statesOf(t *testing.T, pid int32) string {
	t.Helper()
	p, err := proc.Open("/", gpreempt.ProcessKey{PID: pid})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	threads, err := p.Threads()
	if err != nil {
		t.Fatal(err)
	}
	var states []byte
	for _, stat := range threads {
		states = append(states, stat.State)
	}
	slices.Sort(states)
	return string(slices.Compact(states))
}

// machine is a mechanism with a journal.
type machine struct {
	*Mechanism
	journal *mechanism.Journal
}

func newMachine(t *testing.T) machine {
	t.Helper()
	j := openJournal(t, filepath.Join(t.TempDir(), "journal"))
	t.Cleanup(func() {
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
	return machine{New(Config{Root: "/", Journal: j, Log: zap.NewNop()}), j}
}

func openJournal(t *testing.T, dir string) *mechanism.Journal {
	t.Helper()
	j, err := mechanism.OpenJournal(dir)
	if err != nil {
		t.Fatal(err)
	}
	return j
}

func (m machine) attach(t *testing.T, target gpreempt.ProcessKey) mechanism.Session {
	t.Helper()
	s, err := m.Attach(t.Context(), target)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func (m machine) suspend(t *testing.T, s mechanism.Session) {
	t.Helper()
	if err := s.Suspend(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
}

func (m machine) resume(t *testing.T, s mechanism.Session) {
	t.Helper()
	if err := s.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// noted returns the mechanism of each process in the journal, with the cgroup of a
// frozen one.
func (m machine) noted(t *testing.T) map[gpreempt.ProcessKey]string {
	t.Helper()
	entries, errs := m.journal.Entries()
	for _, err := range errs {
		t.Error(err)
	}
	noted := map[gpreempt.ProcessKey]string{}
	for _, e := range entries {
		noted[e.Target] = e.Mechanism + e.Cgroup
	}
	return noted
}

// newCgroup makes a cgroup below that of this program, which the end of the test
// removes. It returns its path in the hierarchy and its directory.
func newCgroup(t *testing.T) (string, *os.File) {
	t.Helper()
	mnt, err := findMount("/")
	if mnt == nil || err != nil {
		t.Skipf("needs a writable cgroup2 mount: none found, error %v", err)
	}
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	own := discovery.CgroupV2Path(text)
	path := filepath.Join(own, "gpreempt-test-"+strconv.Itoa(os.Getpid())+"-"+strconv.FormatInt(time.Now().UnixNano(), 36))
	below, ok := mnt.below(path)
	if !ok {
		t.Skipf("needs a writable cgroup2 mount: that at %s does not show the cgroup %s", mnt.point, own)
	}
	name := filepath.Join(mnt.point, below)
	if err := os.Mkdir(name, 0o755); err != nil {
		t.Skipf("needs a writable cgroup2 mount: %v", err)
	}
	dir, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// Kills what a failed test left running, on Linux 5.14 and newer.
		_ = os.WriteFile(filepath.Join(name, "cgroup.kill"), []byte("1"), 0)
		empty(t, dir)
		_ = dir.Close()
		if err := os.Remove(name); err != nil {
			t.Error(err)
		}
	})
	return path, dir
}

// control reads a file of a cgroup.
func control(t *testing.T, dir *os.File, file string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir.Name(), file))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(text))
}

// frozen returns the frozen state in cgroup.events, "0" or "1".
func frozen(t *testing.T, dir *os.File) string {
	t.Helper()
	return flat(control(t, dir, "cgroup.events"), "frozen")
}

func setControl(t *testing.T, dir *os.File, file, value string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir.Name(), file), []byte(value), 0); err != nil {
		t.Fatal(err)
	}
}
