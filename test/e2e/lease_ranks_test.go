package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

// defaults is the default config with a rule for the jobs of the tests.
const defaults = `
access: {online_groups: [], admin_groups: []}
rules:
  - {name: training, match: {comm: "train*"}, class: offline}
`

// containerOf moves a process into a control group of its own, named as Docker names those of
// containers.
func containerOf(t *testing.T, w *worker) {
	t.Helper()
	// systemd's hierarchy of cgroup v1, or cgroup v2.
	root := "/sys/fs/cgroup/systemd"
	if _, err := os.Stat(root); errors.Is(err, os.ErrNotExist) {
		root = "/sys/fs/cgroup"
	}
	dir := filepath.Join(root, "docker", fmt.Sprintf("%064x", w.PID))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Skip("needs a hierarchy of control groups to write to: ", err)
	}
	t.Cleanup(func() {
		w.kill()
		if err := os.Remove(dir); err != nil {
			t.Error(err)
		}
		_ = os.Remove(filepath.Dir(dir)) // the last one removes it
	})
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(int(w.PID))), 0o644); err != nil {
		t.Skip("needs a hierarchy of control groups to write to: ", err)
	}
}

// serveHalf announces work on a GPU for half of the time, in requests of 30 to 70 ms with
// pauses of the same length, until ctx ends.
func (d *daemon) serveHalf(ctx context.Context, gpu uint32) error {
	some := func() bool {
		timer := time.NewTimer(30*time.Millisecond + time.Duration(rand.IntN(40))*time.Millisecond)
		defer timer.Stop()
		select {
		case <-ctx.Done():
			return false
		case <-timer.C:
			return true
		}
	}
	for some() {
		lease, err := d.online.NotifyOnline(ctx, &gpreemptv1.NotifyOnlineRequest{Gpus: []*gpreemptv1.GpuSelector{{By: &gpreemptv1.GpuSelector_GpuId{GpuId: gpu}}}, Ttl: durationpb.New(10 * time.Second)})
		if err == nil && some() {
			_, err = d.online.Complete(ctx, &gpreemptv1.CompleteRequest{LeaseId: lease.GetLeaseId()})
		}
		if err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}

// Eight ranks on eight GPUs, each in a container of its own, with the variables of torchrun.
// Online work that takes each GPU for half of the time, whenever it comes, leaves nearly no
// time in which all of them run. The daemon finds out that they are one job, and suspends them
// together: they run together for the share floor, and gpctl shows that.
func TestRanksInContainersProgressTogetherByDefault(t *testing.T) {
	lasts(t)
	m := emulate(t, kfdemu.Config{GPUs: 8})
	address := testutil.FreeAddress(t)
	// The window of share is 2s: the progress is that of a minute then.
	d := m.start(defaults + "policy: {preset: share, share_floor: 0.1, max_suspend: 10s}\nmetrics: {address: \"" + address + "\"}\n")
	gpus, err := d.admin.ListGpus(t.Context(), &gpreemptv1.ListGpusRequest{})
	if err != nil || len(gpus.GetGpus()) != 8 {
		t.Fatal(gpus, err)
	}
	var ranks []*worker
	for i, gpu := range gpus.GetGpus() {
		id := strconv.Itoa(int(gpu.GetGpuId()))
		cmd := m.Command(t.Context(), trainBinary, "work", "--gpus", id, "--duration", "5000", "--rate", "20", "--runtime")
		cmd.Env = []string{"MASTER_ADDR=node7", "MASTER_PORT=29500", "WORLD_SIZE=8", "RANK=" + strconv.Itoa(i)}
		rank := m.spawn(cmd)
		containerOf(t, rank)
		ranks = append(ranks, rank)
	}
	var job *gpreemptv1.Job
	d.eventually("the ranks are one job", func() bool {
		for _, rank := range ranks {
			target := d.target(rank.PID)
			if target.GetContainer().GetContainerId() != fmt.Sprintf("%064x", rank.PID) || target.GetJob().GetTargetCount() != 8 {
				return false
			}
			job = target.GetJob()
		}
		return true
	})
	const why = `rule torch: env.MASTER_ADDR "node7", env.MASTER_PORT "29500", uid 0, in a container`
	if job.GetName() != "torch-"+strings.TrimPrefix(job.GetName(), "torch-") || job.GetWhy() != why {
		t.Errorf("the job is %v, want %s", job, why)
	}

	ctx, cancel := context.WithCancel(t.Context())
	var serving sync.WaitGroup
	for _, gpu := range gpus.GetGpus() {
		serving.Go(func() {
			if err := d.serveHalf(ctx, gpu.GetGpuId()); err != nil {
				t.Errorf("serve GPU %d: %v", gpu.GetGpuId(), err)
			}
		})
	}
	// The progress is that of a minute, and the share floor permits to borrow for some seconds
	// before it.
	begin := d.status().GetClock().AsDuration()
	late := time.After(5 * time.Minute)
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for d.status().GetClock().AsDuration() < begin+75*time.Second {
		select {
		case <-tick.C:
		case <-d.exited:
			t.Fatal("gpreemptd is gone")
		case <-late:
			t.Fatal("75 s of the daemon's clock have not passed in 5 minutes")
		}
	}
	explained := d.ctl("target", "explain", strconv.Itoa(int(ranks[3].PID))).Out
	listed := d.ctl("target", "list", "-o", "wide").Out
	warned := d.ctl("status").Out
	scraped := scrapeJob(t, address)
	cancel()
	serving.Wait()
	says(t, explained, why)
	shown := regexp.MustCompile(`job +` + job.GetName() + `: 8 processes, all running ([0-9.]+)% of the last 5[5-9](\.[0-9]+)?s`).FindStringSubmatch(explained)
	if shown == nil {
		t.Fatalf("no progress of the job is shown:\n%s", explained)
	}
	share, err := strconv.ParseFloat(shown[1], 64)
	// What was borrowed within the minute, or a little before, is less than a tenth of the floor.
	if err != nil || share < 9 || share > 50 {
		t.Errorf("the ranks run together %s%% of the time, want the share floor of 10%%", shown[1])
	}
	if n := strings.Count(listed, job.GetName()+" "); n != 8 {
		t.Errorf("%d processes of %s are listed, want 8:\n%s", n, job.GetName(), listed)
	}
	if scraped < 0.09 || scraped > 0.5 {
		t.Errorf("gpreempt_job_running_ratio is %v, and gpctl shows %s%%", scraped, shown[1])
	}
	if strings.Contains(warned, "JOB_SLOW") {
		t.Errorf("a job that keeps the share floor is called slow:\n%s", warned)
	}
	t.Logf("emulated: eight ranks ran together %s%% of a minute", shown[1])

	d.eventually("the job runs", func() bool {
		for _, rank := range ranks {
			if d.target(rank.PID).GetState() != running {
				return false
			}
		}
		return true
	})
	// A rank that is still being suspended when the others are resumed may stay suspended for the
	// next lease.
	suspends := d.target(ranks[0].PID).GetSuspends()
	for _, rank := range ranks {
		if got := d.target(rank.PID).GetSuspends(); got < 10 || 10*got < 8*suspends || 8*got > 10*suspends {
			t.Errorf("rank %d was suspended %d times, and another %d times", rank.PID, got, suspends)
		}
		rank.stop()
	}
}

// scrapeJob returns the metric of the progress of the job.
func scrapeJob(t *testing.T, address string) float64 {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+"/metrics", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`(?m)^gpreempt_job_running_ratio ([0-9.e-]+)$`).FindSubmatch(text)
	if found == nil {
		t.Fatal("the scrape has no gpreempt_job_running_ratio")
	}
	ratio, err := strconv.ParseFloat(string(found[1]), 64)
	if err != nil {
		t.Fatal(err)
	}
	return ratio
}
