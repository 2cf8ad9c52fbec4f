package kubernetes

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	podsecurity "k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
	"sigs.k8s.io/yaml"
)

// TestProbesDetectAHungDaemon runs the commands of the DaemonSet on this host, with another
// socket and directory.
func TestProbesDetectAHungDaemon(t *testing.T) {
	objects := decode(t, "chart", render(t, withImage(values{})))
	spec := find[*appsv1.DaemonSet](t, objects).Spec.Template.Spec
	container := spec.Containers[0]
	dir := t.TempDir()
	config, socket := filepath.Join(dir, "gpreemptd.yaml"), filepath.Join(dir, "s")
	if err := os.WriteFile(config, []byte(find[*corev1.ConfigMap](t, objects).Data["gpreemptd.yaml"]), 0o600); err != nil {
		t.Fatal(err)
	}
	args := slices.Clone(container.Args)
	args[slices.Index(args, "/etc/gpreempt/gpreemptd.yaml")] = config
	daemon := exec.Command(program(t, "gpreemptd"), append(args, "--socket", socket)...)
	daemon.Env = append(os.Environ(), "RUNTIME_DIRECTORY="+dir)
	daemon.Stderr = t.Output()
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- daemon.Wait() }()
	t.Cleanup(func() {
		_ = daemon.Process.Kill() // unless it has ended
	})

	// probe runs a probe like the kubelet. The command gives up before the kubelet does; that it also
	// has to be started may take a while here.
	probe := func(p *corev1.Probe) error {
		limit := time.Duration(p.TimeoutSeconds) * time.Second
		flag := slices.Index(p.Exec.Command, "--timeout")
		if own, err := time.ParseDuration(p.Exec.Command[flag+1]); err != nil || own >= limit {
			t.Errorf("%v does not give up before the probe's timeout, %v: %v", p.Exec.Command, limit, err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), limit+20*time.Second)
		defer cancel()
		cmd := exec.CommandContext(ctx, program(t, p.Exec.Command[0]), p.Exec.Command[1:]...)
		cmd.Env = append(os.Environ(), "GPREEMPT_SOCKET="+socket)
		err := cmd.Run()
		if ctx.Err() != nil {
			t.Errorf("%v does not give up", p.Exec.Command)
		}
		return err
	}
	serves := false
	for range container.StartupProbe.FailureThreshold {
		if serves = probe(container.StartupProbe) == nil; serves {
			break
		}
		select {
		case err := <-ended:
			t.Fatalf("the daemon ended: %v", err)
		case <-time.After(time.Duration(container.StartupProbe.PeriodSeconds) * time.Second):
		}
	}
	if !serves {
		t.Fatal("the startup probe never succeeded")
	}
	check := func(state string, healthy bool) {
		for name, p := range map[string]*corev1.Probe{"readiness": container.ReadinessProbe, "liveness": container.LivenessProbe} {
			if err := probe(p); (err == nil) != healthy {
				t.Errorf("%s probe of a daemon that %s: %v", name, state, err)
			}
		}
	}
	check("serves", true)
	signal(t, daemon, syscall.SIGSTOP)
	check("hangs", false)
	signal(t, daemon, syscall.SIGCONT)
	check("serves again", true)

	signal(t, daemon, syscall.SIGTERM)
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("the daemon ended with %v", err)
		}
	case <-time.After(time.Duration(*spec.TerminationGracePeriodSeconds) * time.Second):
		t.Error("the daemon does not end within the grace period")
	}
}

func signal(t *testing.T, cmd *exec.Cmd, s syscall.Signal) {
	t.Helper()
	if err := cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// TestExamplesFitTheChart: the daemon's directory, group and labels are repeated in files
// without templates.
func TestExamplesFitTheChart(t *testing.T) {
	objects := decode(t, "chart", render(t, withImage(values{})))
	all := everything(t)
	online := find[*appsv1.Deployment](t, decode(t, "online", all["examples/online.yaml"])).Spec.Template
	offline := find[*batchv1.Job](t, decode(t, "offline", all["examples/offline.yaml"])).Spec.Template
	daemon := find[*appsv1.DaemonSet](t, objects).Spec.Template

	type facts struct {
		Driver, Mount string
		ReadOnly      bool
		Groups        []int64
		Classes       []string
	}
	var chart struct {
		SocketGroup int64
		Rules       []struct {
			Class string
			Match struct {
				Pod struct{ Labels map[string]string }
			}
		}
	}
	text, err := os.ReadFile("chart/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(text, &chart); err != nil {
		t.Fatal(err)
	}
	var want facts
	for _, v := range daemon.Spec.Volumes {
		if v.Name == "run" {
			want.Mount = v.HostPath.Path // where clients look for the socket
		}
	}
	want.Driver, want.ReadOnly, want.Groups = find[*storagev1.CSIDriver](t, objects).Name, true, []int64{chart.SocketGroup}
	for _, rule := range chart.Rules {
		if rule.Match.Pod.Labels["gpreempt/class"] == rule.Class {
			want.Classes = append(want.Classes, rule.Class)
		}
	}
	mount, volume := online.Spec.Containers[0].VolumeMounts[0], online.Spec.Volumes[0].CSI
	got := facts{
		Driver: volume.Driver, Mount: mount.MountPath, ReadOnly: mount.ReadOnly && volume.ReadOnly != nil && *volume.ReadOnly,
		Groups:  online.Spec.SecurityContext.SupplementalGroups,
		Classes: []string{offline.Labels["gpreempt/class"], online.Labels["gpreempt/class"]},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-chart +examples):\n%s", diff)
	}
}

// Online pods once needed hostPath, which the level baseline forbids.
func TestExamplesRunInNamespacesOfTheLevelRestricted(t *testing.T) {
	restricted, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		t.Fatal(err)
	}
	evaluate := func(template corev1.PodTemplateSpec) string {
		level := podsecurity.LevelVersion{Level: podsecurity.LevelRestricted, Version: podsecurity.LatestVersion()}
		result := policy.AggregateCheckResults(restricted.EvaluatePod(level, &template.ObjectMeta, &template.Spec))
		return result.ForbiddenDetail()
	}
	all := everything(t)
	online := find[*appsv1.Deployment](t, decode(t, "online", all["examples/online.yaml"])).Spec.Template
	got := map[string]string{
		"online":  evaluate(online),
		"offline": evaluate(find[*batchv1.Job](t, decode(t, "offline", all["examples/offline.yaml"])).Spec.Template),
		"batch":   evaluate(find[*batchv1.Job](t, decode(t, "batch", all["examples/batch/job.yaml"])).Spec.Template),
	}
	if diff := cmp.Diff(map[string]string{"online": "", "offline": "", "batch": ""}, got); diff != "" {
		t.Errorf("refused (-want +got):\n%s", diff)
	}
	online.Spec.Volumes[0].VolumeSource = corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/run/gpreempt"}}
	if evaluate(online) == "" {
		t.Error("hostPath is permitted: this test proves nothing")
	}
}
