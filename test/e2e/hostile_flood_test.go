package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/stat"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

const (
	floodRate = 100_000
	// floodMemory is what the daemon may need more under a flood, in KiB.
	floodMemory = 64 << 10
	// stranger is the user of the hostile client, when the tests run as root.
	stranger = 65534
)

// forStrangers is a config with the right to announce for the stranger.
const forStrangers = `
access:
  online_groups: ["65534"]
  admin_groups: []
`

// startForStrangers starts a daemon whose socket the stranger can reach. Its config may have more
// sections.
func startForStrangers(t *testing.T, more ...string) *daemon {
	t.Helper()
	dir := testutil.TempSocketDir(t)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return startIn(t, dir, forStrangers+strings.Join(more, ""))
}

// asStranger has a command run as another user than the test's, if it can.
func asStranger(cmd *exec.Cmd) *exec.Cmd {
	if os.Getuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: stranger, Gid: stranger}}
	}
	return cmd
}

// attack starts a hostile client, and returns when its connections stand. outcome
// waits for its end.
func (d *daemon) attack(a attack) (outcome func() tally) {
	d.t.Helper()
	return d.attackAs(asStranger(&exec.Cmd{}).SysProcAttr, a)
}

// attackAs is attack as another user, or in other namespaces.
func (d *daemon) attackAs(who *syscall.SysProcAttr, a attack) (outcome func() tally) {
	d.t.Helper()
	_, out := d.hostile(who, a)
	if line, _ := out.ReadString('\n'); line != "ready\n" {
		d.t.Fatalf("the hostile client says %q", line)
	}
	return func() (is tally) {
		d.t.Helper()
		if err := json.NewDecoder(out).Decode(&is); err != nil {
			d.t.Fatalf("the hostile client says nothing of its end: %v", err)
		}
		return is
	}
}

// hostile starts a hostile client. The test ends its input at its end.
func (d *daemon) hostile(who *syscall.SysProcAttr, a attack) (in io.Writer, out *bufio.Reader) {
	d.t.Helper()
	a.Socket = d.socket
	text, err := json.Marshal(a)
	if err != nil {
		d.t.Fatal(err)
	}
	cmd := exec.Command(strangersBinary)
	cmd.Env, cmd.Stderr, cmd.SysProcAttr = environment(hostileEnv+"="+string(text)), os.Stderr, who
	stdin, err := cmd.StdinPipe()
	if err != nil {
		d.t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		d.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() {
		_ = stdin.Close()
		if a.Hold == 0 && !a.Leases {
			_ = cmd.Process.Kill() // it may have ended
		}
		_ = cmd.Wait()
	})
	return stdin, bufio.NewReader(stdout)
}

// refusals is what the daemon counted, by reason.
func (d *daemon) refusals() map[string]uint64 {
	d.t.Helper()
	st, err := d.admin.GetStatistics(d.t.Context(), &gpreemptv1.GetStatisticsRequest{})
	if err != nil {
		d.t.Fatal(err)
	}
	all := map[string]uint64{}
	for _, r := range st.GetStatistics().GetRefusals() {
		all[r.GetReason()] = r.GetCount()
	}
	return all
}

// kib reads a line of /proc/PID/status of the daemon, such as VmRSS.
func (d *daemon) kib(name string) int {
	d.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.process.Process.Pid))
	if err != nil {
		d.t.Fatal(err)
	}
	for line := range bytes.Lines(status) {
		if f := bytes.Fields(line); len(f) > 1 && string(f[0]) == name+":" {
			n, err := strconv.Atoi(string(f[1]))
			if err != nil {
				d.t.Fatal(err)
			}
			return n
		}
	}
	d.t.Fatalf("no %s in /proc", name)
	return 0
}

// serveUntil announces and completes as an inference server does, some hundred times a
// second, and returns how long the announcements took.
func (d *daemon) serveUntil(done <-chan struct{}) (took []time.Duration) {
	d.t.Helper()
	tick := time.NewTicker(3 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return took
		case <-tick.C:
		}
		began := time.Now()
		lease, err := d.online.NotifyOnline(d.t.Context(), &gpreemptv1.NotifyOnlineRequest{MaxWait: durationpb.New(time.Second)})
		took = append(took, time.Since(began))
		if err != nil {
			d.t.Errorf("the legitimate client is refused: %v", err)
			return took
		}
		d.complete(lease.GetLeaseId())
	}
}

func percentile(took []time.Duration, percent float64) time.Duration {
	return stat.Quantile(slices.Sorted(slices.Values(took)), percent/100)
}

// TestFloodOfAnnouncements: a hostile client offers 10^5 announcements a second, by
// streams and by calls; the legitimate client beside it is served, the daemon
// stays small, and it counts as many refusals as the hostile client receives.
func TestFloodOfAnnouncements(t *testing.T) {
	const length = 3 * time.Second
	d := startForStrangers(t)
	before, rss := d.refusals(), d.kib("VmRSS")
	outcome := d.attack(attack{PerSecond: floodRate, Length: length, Sessions: 4, Calls: 4})
	ctx, cancel := context.WithTimeout(t.Context(), length)
	defer cancel()
	served := d.serveUntil(ctx.Done())
	is := outcome()
	peak := d.kib("VmHWM")

	var counted uint64
	reasons := d.refusals()
	for reason, n := range reasons {
		reasons[reason] = n - before[reason]
		counted += reasons[reason]
	}
	t.Logf("offered %.0f/s for %v: %d, of which %d were sent, %d accepted, %d refused (the daemon counts %d), %d reset; "+
		"%d announcements of the legitimate client, p50 %v, p99 %v; RSS %d KiB before, %d KiB at most",
		float64(is.Offered)/length.Seconds(), length, is.Offered, is.Sent, is.Accepted, is.Refused, counted, is.Reset,
		len(served), percentile(served, 50), percentile(served, 99), rss, peak)
	if is.Failure != "" {
		t.Errorf("the hostile client ended by: %s", is.Failure)
	}
	if is.Sent != is.Accepted+is.Refused || is.Refused > counted || is.Refused == 0 {
		t.Errorf("%d sent, %d accepted, %d refused, %d counted by the daemon as %v; every refusal must be sent and counted", is.Sent, is.Accepted, is.Refused, counted, reasons)
	}
	if grown := peak - rss; grown > floodMemory && !racing() {
		t.Errorf("the daemon grew by %d KiB, want at most %d", grown, floodMemory)
	}
}
