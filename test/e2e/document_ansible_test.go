package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/config"
)

// play runs a playbook of the example for this host, with a variable file, and returns its output.
func play(t *testing.T, vars map[string]any, playbook string, args ...string) (string, error) {
	t.Helper()
	text, err := json.Marshal(vars)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	inventory, file := filepath.Join(dir, "inventory.ini"), filepath.Join(dir, "vars.json")
	for path, data := range map[string]string{inventory: "[gpu]\nlocalhost ansible_connection=local\n", file: string(text)} {
		if err := os.WriteFile(path, []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	path, err := exec.LookPath("ansible-playbook")
	if err != nil {
		t.Skip("needs ansible-playbook (apt-get install ansible-core)")
	}
	cmd := exec.CommandContext(t.Context(), path, append([]string{"-i", inventory, "-e", "@" + file, playbook}, args...)...)
	cmd.Dir = filepath.Join(examples, "ansible")
	cmd.Env = append(os.Environ(), "ANSIBLE_NOCOLOR=1", "ANSIBLE_LOCAL_TEMP="+dir, "ANSIBLE_REMOTE_TEMP="+dir, "ANSIBLE_GATHERING=explicit")
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// changes returns what the recap of a play says.
func changes(out string) string {
	var changed, failed string
	for line := range strings.Lines(out) {
		for word := range strings.FieldsSeq(line) {
			for name, to := range map[string]*string{"changed=": &changed, "failed=": &failed} {
				if value, is := strings.CutPrefix(word, name); is {
					*to = value
				}
			}
		}
	}
	return fmt.Sprintf("changed %s, failed %s", changed, failed)
}

func TestPlaybooksOfTheAnsibleExampleAreValid(t *testing.T) {
	for _, name := range []string{"site.yml", "rollback.yml"} {
		if out, err := play(t, map[string]any{}, name, "--syntax-check"); err != nil {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
	}
}

// TestAnsibleWritesOnlyAConfigThatTheDaemonAccepts runs the role on this host, with another directory than /etc/gpreempt
// and without packages and service.
func TestAnsibleWritesOnlyAConfigThatTheDaemonAccepts(t *testing.T) {
	w := overTCP(t)
	cert, key := w.ca.Issue(opsHolder)
	d := start(t, atOnce)
	dir := t.TempDir()
	gpctlHere := filepath.Join(dir, "gpctl")
	script := fmt.Sprintf("#!/bin/sh\nexec %s --socket %s \"$@\"\n", gpctl, d.socket)
	if err := os.WriteFile(gpctlHere, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	vars := map[string]any{
		"gpreempt_config_dir": dir, "gpreempt_manage_service": false, "gpreempt_gpreemptd": gpreemptd, "gpreempt_gpctl": gpctlHere,
		"gpreempt_owner": os.Geteuid(), "gpreempt_watch_seconds": 0,
		"gpreempt_tcp_admin": []string{"cn:ops"}, "gpreempt_tcp_address": "127.0.0.1:7443",
		"gpreempt_tcp_certificate": cert, "gpreempt_tcp_key": key, "gpreempt_tcp_client_ca": w.ca.File,
		"gpreempt_policy": map[string]any{"preset": "balanced", "share_floor": 0.3},
		"gpreempt_rules":  []any{map[string]any{"name": "batch", "match": map[string]any{"slice": "batch.slice"}, "class": "offline"}},
	}
	file := filepath.Join(dir, "gpreemptd.yaml")
	step := func(want string, args ...string) {
		t.Helper()
		out, err := play(t, vars, "site.yml", args...)
		if got := changes(out); got != want {
			t.Fatalf("%v: %s, want %s: %v\n%s", args, got, want, err, out)
		}
	}
	step("changed 2, failed 0", "--check")
	if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("check mode left a config file: %v", err)
	}
	step("changed 2, failed 0")
	step("changed 0, failed 0")
	got, err := config.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	want := []any{"cn:ops", filepath.Join(dir, "host.key"), "batch", 0.3}
	if diff := cmp.Diff(want, []any{got.TCP.Admin[0], got.TCP.Key, got.Rules[0].Name, got.Policy.ShareFloor}); diff != "" {
		t.Errorf("the config file (-want +got):\n%s", diff)
	}
	if info, err := os.Stat(filepath.Join(dir, "host.key")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the key has the mode %v: %v", info, err)
	}

	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	vars["gpreempt_policy"] = map[string]any{"share_floor": 2}
	step("changed 0, failed 1")
	after, err := os.ReadFile(file)
	if diff := cmp.Diff(string(before), string(after)); diff != "" || err != nil {
		t.Errorf("a wrong config replaced the file: %v\n%s", err, diff)
	}
}

// TestAnsibleEndsTheRolloutAtAHostThatDoesNotAnswer has the watched host fail.
func TestAnsibleEndsTheRolloutAtAHostThatDoesNotAnswer(t *testing.T) {
	d := start(t, atOnce)
	script := filepath.Join(t.TempDir(), "gpctl")
	if err := os.WriteFile(script, fmt.Appendf(nil, "#!/bin/sh\nexec %s --socket %s \"$@\"\n", gpctl, d.socket), 0o700); err != nil {
		t.Fatal(err)
	}
	vars := map[string]any{"gpreempt_gpctl": script, "gpreempt_watch_seconds": 0, "gpreempt_start_seconds": 1}
	if out, err := play(t, vars, "site.yml", "--tags", "watch"); err != nil {
		t.Errorf("a healthy host: %v\n%s", err, out)
	}
	if out, err := play(t, vars, "rollback.yml", "--check"); err != nil {
		t.Errorf("rollback in check mode: %v\n%s", err, out)
	}
	if out, err := play(t, vars, "rollback.yml"); err != nil || changes(out) != "changed 1, failed 0" {
		t.Errorf("rollback: %v\n%s", err, out)
	}
	policy, err := d.admin.GetPolicy(t.Context(), &gpreemptv1.GetPolicyRequest{})
	if got := policy.GetPolicy().GetPreset(); got != "shadow" || err != nil {
		t.Errorf("policy %q after the rollback: %v", got, err)
	}
	d.kill()
	if out, err := play(t, vars, "site.yml", "--tags", "watch"); err == nil || changes(out) != "changed 0, failed 1" {
		t.Errorf("a host without a daemon: %v\n%s", err, out)
	}
	if out, err := play(t, vars, "rollback.yml"); err != nil {
		t.Errorf("rollback without a daemon: %v\n%s", err, out)
	}
}
