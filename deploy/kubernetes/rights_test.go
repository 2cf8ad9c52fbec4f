package kubernetes

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

// suspends runs a daemon and a job of another user, which its environment tags as offline,
// and succeeds when the daemon has suspended the job. The arguments are those of setpriv
// and then of gpreemptd.
const suspends = `
trap 'kill $job $daemon 2>/dev/null' EXIT
mkfifo orders
exec 3<>orders # the job ends with its orders
KUBERNETES_TEST=yes setpriv --reuid 10002 --regid 10002 --clear-groups \
	./train work --runtime --queues 1 --duration 500 <&3 >job.log 2>&1 &
job=$!
"$@" &
daemon=$!
until gpctl target list 2>/dev/null | grep -q "^ *$job .* offline .* running"; do kill -0 $daemon $job; sleep 0.1; done
until gpctl target suspend $job --ttl 1s >suspend.log 2>&1; gpctl target list | grep -q "^ *$job .* suspended  *[0-9]"; do
	kill -0 $daemon $job
	sleep 0.5
done
gpctl status
`

// TestNoCapabilityIsMissingOrUnnecessary: on an emulated machine, by real system calls. The
// emulator has no device cgroup, seccomp filter or security module of a container, and no
// checkpoints (criu).
func TestNoCapabilityIsMissingOrUnnecessary(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("it takes root to run a job as another user")
	}
	if _, err := exec.LookPath("setpriv"); err != nil {
		t.Skip("setpriv of util-linux is not installed")
	}
	if out, err := exec.Command(program(t, "kfdemu"), "check", "--trace").CombinedOutput(); err != nil {
		t.Skipf("no machine can be emulated here: %s", bytes.TrimSpace(out))
	}
	const longWait, shortWait = time.Minute, 8 * time.Second
	for _, mechanism := range []string{"dbgtrap", "freezer"} {
		objects := decode(t, "chart", render(t, withImage(values{
			"mechanisms": []any{mechanism}, "deviceResources": values{"squat.ai/gpreempt": "1"}, "runtimeSocket": "",
			"rules": []any{values{"name": "t", "class": "offline", "match": values{"env": values{"KUBERNETES_TEST": "yes"}}}},
		})))
		config := find[*corev1.ConfigMap](t, objects).Data["gpreemptd.yaml"]
		container := find[*appsv1.DaemonSet](t, objects).Spec.Template.Spec.Containers[0]
		given := container.SecurityContext.Capabilities.Add

		root, err := emulate(t, longWait, config, container.Args, nil)
		if err != nil {
			t.Fatalf("as root: %v", err)
		}
		warnings, err := emulate(t, longWait, config, container.Args, given)
		if diff := cmp.Diff(root, warnings); err != nil || diff != "" {
			t.Errorf("%s with %v: %v, warnings of root and of this daemon:\n%s", mechanism, given, err, diff)
		}
		for i, capability := range given {
			t.Run(mechanism+" without "+string(capability), func(t *testing.T) {
				if restrict, _ := os.ReadFile("/proc/sys/kernel/dmesg_restrict"); capability == "SYSLOG" &&
					(strings.TrimSpace(string(restrict)) != "1" || slices.Contains(root, "KERNEL_LOG_UNREADABLE")) {
					t.Skip("everybody may read the kernel's log here, or nobody")
				}
				t.Parallel()
				rest := slices.Delete(slices.Clone(given), i, i+1)
				if warnings, err := emulate(t, shortWait, config, container.Args, rest); err == nil && slices.Equal(root, warnings) {
					t.Error("nothing is missing")
				}
			})
		}
	}
}

// warning matches a warning of gpctl status.
var warning = regexp.MustCompile(`(?m)^(?:warning|error) ([A-Z_]+):`)

// emulate runs suspends on an emulated machine and returns the daemon's warnings; without
// a list of capabilities it has all.
func emulate(t *testing.T, longWait time.Duration, config string, args []string, capabilities []corev1.Capability) ([]string, error) {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "gpreemptd.yaml")
	for _, err := range []error{
		os.WriteFile(file, []byte(config), 0o600),
		os.Symlink(program(t, "kfdemu"), filepath.Join(dir, "train")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	args = slices.Clone(args)
	args[slices.Index(args, "/etc/gpreempt/gpreemptd.yaml")] = file
	command := []string{"run", "--", "sh", "-euc", suspends, "sh"}
	if capabilities != nil {
		bounds := "-all"
		for _, c := range capabilities {
			bounds += ",+" + strings.ToLower(string(c))
		}
		command = append(command, "setpriv", "--no-new-privs", "--inh-caps", "-all", "--bounding-set", bounds)
	}
	command = append(append(append(command, program(t, "gpreemptd")), args...), "--socket", filepath.Join(dir, "s"))

	ctx, cancel := context.WithTimeout(t.Context(), longWait)
	defer cancel()
	cmd := exec.CommandContext(ctx, program(t, "kfdemu"), command...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(program(t, "gpctl"))+":"+os.Getenv("PATH"),
		"GPREEMPT_SOCKET="+filepath.Join(dir, "s"), "RUNTIME_DIRECTORY="+filepath.Join(dir, "run"))
	// The whole process group, like a terminal.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%w\n%s", err, out)
	}
	var warnings []string
	for _, match := range warning.FindAllStringSubmatch(string(out), -1) {
		warnings = append(warnings, match[1])
	}
	return warnings, err
}
