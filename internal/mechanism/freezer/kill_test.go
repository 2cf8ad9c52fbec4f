package freezer

import (
	"bufio"
	"context"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// The daemon is killed at random times, GPREEMPT_CRASHES times.
func TestNoProcessStaysPausedAfterTheDaemonIsKilled(t *testing.T) {
	victims := []*victim{startVictim(t, nil), startVictim(t, nil), startVictim(t, nil)}
	t.Run("frozen", func(t *testing.T) {
		_, dir := newCgroup(t)
		killDaemons(t, []*victim{startVictim(t, dir), victims[0]}, testutil.Number(t, "GPREEMPT_CRASHES", 40)/2)
	})
	t.Run("stopped", func(t *testing.T) {
		killDaemons(t, victims, testutil.Number(t, "GPREEMPT_CRASHES", 40)/2)
	})
}

func killDaemons(t *testing.T, victims []*victim, kills int) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "journal")
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	noted := 0
	for range kills {
		killDaemon(t, dir, victims, time.Duration(random.Int64N(int64(3*time.Millisecond))))
		noted += cleanUp(t, dir)
		for _, v := range victims {
			v.mustRun(t)
		}
	}
	t.Logf("%d daemons were killed and left %d pauses in the journal; every process runs", kills, noted)
	if noted == 0 {
		t.Error("no daemon was killed in the middle of a pause: nothing was tested")
	}
}

// killDaemon starts a daemon and kills it some time after its first suspends and
// resumes.
func killDaemon(t *testing.T, dir string, victims []*victim, after time.Duration) {
	t.Helper()
	args := []string{dir}
	for _, v := range victims {
		args = append(args, v.key.String())
	}
	cmd := exec.CommandContext(context.Background(), "/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), roleEnv+"="+roleDaemon)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err == nil {
		<-time.After(after)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if err != nil || line != "ready\n" {
		t.Fatalf("the daemon said %q, error %v", line, err)
	}
}

// cleanUp does what gpreemptd --cleanup does, and returns the number of entries.
func cleanUp(t *testing.T, dir string) int {
	t.Helper()
	j := openJournal(t, dir)
	defer j.Close()
	m := machine{New(Config{Root: "/", Journal: j, Log: zap.NewNop()}), j}
	entries, errs := j.Entries()
	for _, err := range errs {
		t.Error(err)
	}
	for _, e := range entries {
		if err := m.Undo(t.Context(), e); err != nil {
			t.Error(err)
		}
	}
	if diff := cmp.Diff(map[gpreempt.ProcessKey]string{}, m.noted(t)); diff != "" {
		t.Fatalf("journal after the clean-up (-want +got):\n%s", diff)
	}
	return len(entries)
}

// It logs how long Suspend and Resume take on real processes of this machine, over
// GPREEMPT_FREEZER_CYCLES cycles, with a journal on the disk of temporary files.
func TestSuspendedProcessesAreStoppedInEveryCycle(t *testing.T) {
	cycles := testutil.Number(t, "GPREEMPT_FREEZER_CYCLES", 100)
	_, dir := newCgroup(t)
	for name, dir := range map[string]*os.File{"SIGSTOP": nil, "cgroup": dir} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			v := startVictim(t, dir)
			s := m.attach(t, v.key)
			var suspends, resumes []time.Duration
			for range cycles {
				begin := time.Now()
				m.suspend(t, s)
				suspended := time.Now()
				if dir != nil && frozen(t, dir) != "1" || dir == nil && strings.Trim(v.states(t), "T") != "" {
					t.Fatalf("suspended, it is in state %s", v.states(t))
				}
				middle := time.Now()
				m.resume(t, s)
				suspends, resumes = append(suspends, suspended.Sub(begin)), append(resumes, time.Since(middle))
				v.mustRun(t)
			}
			for what, took := range map[string][]time.Duration{"suspend": suspends, "resume": resumes} {
				slices.Sort(took)
				t.Logf("%s of a real process by %s: p50 %v, p99 %v of %d", what, name, took[len(took)/2], took[len(took)*99/100], len(took))
			}
		})
	}
}
