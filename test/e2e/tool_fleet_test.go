package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// fleetOf starts daemons with TCP and the same authority, and returns them with the flags by which gpctl reaches
// all of them.
func fleetOf(t *testing.T, names ...string) (daemons []*daemon, flags []string) {
	t.Helper()
	var first *tcp
	var hosts []string
	for _, name := range names {
		w := overTCP(t)
		if first == nil {
			first = w
		}
		w.install(first.ca)
		daemons = append(daemons, start(t, w.config))
		hosts = append(hosts, name+"="+w.address)
	}
	cert, key := first.ca.Issue(opsHolder)
	return daemons, []string{"--hosts", strings.Join(hosts, ","), "--cert", cert, "--key", key, "--ca", first.ca.File}
}

// presets returns the policies in force.
func presets(t *testing.T, daemons []*daemon) (all []string) {
	t.Helper()
	for _, d := range daemons {
		resp, err := d.admin.GetPolicy(t.Context(), &gpreemptv1.GetPolicyRequest{})
		if err != nil {
			all = append(all, "none")
			continue
		}
		all = append(all, fmt.Sprint(resp.GetPolicy().GetPreset(), " floor ", resp.GetPolicy().GetShareFloor(), " shadow ", resp.GetPolicy().GetShadow()))
	}
	return all
}

func TestFleetIsShownTogetherAndItsAbsentHostsAreNamed(t *testing.T) {
	t.Parallel()
	daemons, flags := fleetOf(t, "gpu1", "gpu2", "gpu3")
	daemons[1].startOffline()
	daemons[1].eventually("the job is known", func() bool {
		r := (&tcp{t: t}).gpctl(nil, append(flags, "target", "list")...)
		return r.Code == 0 && strings.Contains(r.Out, "gpu2")
	})
	daemons[2].kill()
	r := (&tcp{t: t}).gpctl(nil, append(flags, "fleet", "status", "-o", "json")...)
	var view struct {
		Summary struct {
			Hosts     int `json:"host_count"`
			Answering int `json:"answering_count"`
			Offline   int `json:"offline_count"`
		} `json:"summary"`
	}
	if err := json.Unmarshal([]byte(r.Out), &view); err != nil {
		t.Fatalf("%v in %+v", err, r)
	}
	if s := view.Summary; s.Hosts != 3 || s.Answering != 2 || s.Offline != 1 || r.Code != 10 || !strings.Contains(r.Err, "host gpu3: ") {
		t.Errorf("summary %+v, exit code %d, errors %s", s, r.Code, r.Err)
	}
}

func TestRolloutReachesTheFleetInStages(t *testing.T) {
	t.Parallel()
	daemons, flags := fleetOf(t, "gpu1", "gpu2", "gpu3")
	r := (&tcp{t: t}).gpctl(nil, append(flags, "fleet", "policy", "set", "share", "--knob", "share_floor=0.4", "--shadow", "1ms", "--observe", "1ms", "--batch", "1")...)
	if r.Code != 0 {
		t.Fatalf("%+v", r)
	}
	for stage, want := range []string{"stage 1 of 4, shadow", "stage 2 of 4, canary", "stage 3 of 4, rest", "stage 4 of 4, rest"} {
		if !strings.Contains(r.Out, want) {
			t.Errorf("stage %d is missing in %s", stage+1, r.Out)
		}
	}
	want := "custom floor 0.4 shadow false"
	for i, got := range presets(t, daemons) {
		if got != want {
			t.Errorf("host %d has %s, want %s", i+1, got, want)
		}
	}
	// It can be repeated.
	if r := (&tcp{t: t}).gpctl(nil, append(flags, "fleet", "policy", "set", "share", "--knob", "share_floor=0.4", "--shadow", "0s", "--observe", "1ms")...); r.Code != 0 {
		t.Errorf("repeated: %+v", r)
	}
}

// rolloutAt begins a rollout and returns when a line of its output contains text; end waits for its end.
func rolloutAt(t *testing.T, flags []string, text string, args ...string) (cmd *exec.Cmd, end func() result) {
	t.Helper()
	cmd = exec.CommandContext(t.Context(), gpctl, append(append(flags, "fleet", "policy", "set"), args...)...)
	var errs strings.Builder
	cmd.Env, cmd.Stderr = environment(), &errs
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	lines := bufio.NewScanner(out)
	for lines.Scan() && !strings.Contains(lines.Text(), text) {
		fmt.Fprintln(&all, lines.Text())
	}
	return cmd, func() result {
		for lines.Scan() {
			fmt.Fprintln(&all, lines.Text())
		}
		_ = cmd.Wait() // the state has the exit code
		return result{cmd.ProcessState.ExitCode(), all.String(), errs.String()}
	}
}

func TestRolloutStopsByItselfWhenTheCanaryRaisesAnAlarm(t *testing.T) {
	t.Parallel()
	daemons, flags := fleetOf(t, "gpu1", "gpu2", "gpu3")
	before := presets(t, daemons)
	_, end := rolloutAt(t, flags, "canary: set", "share", "--canary", "gpu1,gpu2", "--shadow", "0s", "--observe", "1h")
	if got := presets(t, daemons); got[0] == before[0] || got[1] == before[1] || got[2] != before[2] {
		t.Errorf("policies %q with the canary, before %q", got, before)
	}
	daemons[0].kill()
	r := end()
	if r.Code != 10 || !strings.Contains(r.Err, "the rollout stopped: host gpu1 does not answer any more; the old policy is set again on gpu1, gpu2") {
		t.Errorf("%+v", r)
	}
	if got := presets(t, daemons[1:]); got[0] != before[1] || got[1] != before[2] {
		t.Errorf("policies %q afterwards, want %q", got, before[1:])
	}
}

func TestInterruptedRolloutTakesThePolicyBack(t *testing.T) {
	t.Parallel()
	daemons, flags := fleetOf(t, "gpu1", "gpu2")
	before := presets(t, daemons)
	cmd, end := rolloutAt(t, flags, "shadow: set", "share", "--observe", "1h", "--shadow", "1h")
	if got := presets(t, daemons); !strings.HasSuffix(got[0], "shadow true") || got[1] != before[1] {
		t.Errorf("policies %q with the canary in shadow, before %q", got, before)
	}
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if r := end(); r.Code != 10 || !strings.Contains(r.Err, "the rollout stopped: interrupted") {
		t.Errorf("%+v", r)
	}
	if got := presets(t, daemons); got[0] != before[0] || got[1] != before[1] {
		t.Errorf("policies %q afterwards, want %q", got, before)
	}
}
