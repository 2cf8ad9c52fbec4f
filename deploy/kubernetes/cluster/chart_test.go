package cluster

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"helm.sh/helm/v3/pkg/action"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/cli"
	"helm.sh/helm/v3/pkg/storage/driver"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/client"
)

const (
	release       = "gpreempt"
	daemonLabel   = "app.kubernetes.io/name=gpreempt"
	batchSpace    = "batch-night"
	policyForTest = "batch-*"
)

// values are those of the chart for a version of the daemon.
func values(version string) map[string]any {
	rule := func(name string, pod map[string]any, class string) map[string]any {
		return map[string]any{"name": name, "match": map[string]any{"pod": pod}, "class": class}
	}
	return map[string]any{
		"image": fmt.Sprintf(daemonImage, version), "metrics": map[string]any{"enabled": true},
		"rules": []any{
			rule("offline-pods", map[string]any{"labels": map[string]any{"gpreempt/class": "offline"}}, "offline"),
			rule("online-pods", map[string]any{"labels": map[string]any{"gpreempt/class": "online"}}, "online"),
			rule("batch-namespaces", map[string]any{"namespace": policyForTest}, "offline"),
		},
	}
}

// helm installs a version of the daemon, or upgrades to it, as the helm program does, and waits until its
// DaemonSet is available.
func (n *node) helm(t *testing.T, version string, more map[string]any) {
	t.Helper()
	n.namespace(t, release, "privileged")
	settings := cli.New()
	settings.KubeConfig = adminConfig
	settings.SetNamespace(release)
	var config action.Configuration
	if err := config.Init(settings.RESTClientGetter(), release, "secret", func(string, ...any) {}); err != nil {
		t.Fatal(err)
	}
	chart, err := loader.LoadDir("../chart")
	if err != nil {
		t.Fatal(err)
	}
	all := values(version)
	for key, value := range more {
		all[key] = value
	}
	if _, err = config.Releases.Last(release); errors.Is(err, driver.ErrReleaseNotFound) {
		install := action.NewInstall(&config)
		install.ReleaseName, install.Namespace = release, release
		_, err = install.RunWithContext(t.Context(), chart, all)
	} else {
		upgrade := action.NewUpgrade(&config)
		upgrade.Namespace = release
		_, err = upgrade.RunWithContext(t.Context(), release, chart, all)
	}
	if err != nil {
		t.Fatal(err)
	}
	n.available(t)
	n.answers(t, version)
}

// available waits until the DaemonSet's pods are those of its template, ready for minReadySeconds.
func (n *node) available(t *testing.T) {
	t.Helper()
	n.eventually(t, "the DaemonSet is available", func() (bool, error) {
		set, err := n.api.AppsV1().DaemonSets(release).Get(t.Context(), release, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		done := set.Status.ObservedGeneration == set.Generation && set.Status.UpdatedNumberScheduled == 1 && set.Status.NumberAvailable == 1
		if done {
			return true, nil
		}
		return false, fmt.Errorf("%+v%s", set.Status, n.daemonState(t, set))
	})
}

// daemonState describes the daemon's pods.
func (n *node) daemonState(t *testing.T, _ *appsv1.DaemonSet) string {
	pods, err := n.api.CoreV1().Pods(release).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		return err.Error()
	}
	text := ""
	for i := range pods.Items {
		p := &pods.Items[i]
		text += fmt.Sprintf("\n%s %s %+v %+v", p.Name, p.Status.Phase, p.Status.InitContainerStatuses, p.Status.ContainerStatuses)
		log, err := n.api.CoreV1().Pods(release).GetLogs(p.Name, &corev1.PodLogOptions{Container: "gpreemptd", TailLines: new(int64(10))}).DoRaw(t.Context())
		text += fmt.Sprintf("\n%s %v", log, err)
	}
	events, err := n.api.CoreV1().Events(release).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		return text + err.Error()
	}
	for i := range events.Items {
		text += "\n" + events.Items[i].Message
	}
	return text
}

// admin returns the node's root as a client of the daemon: its directory is the node's.
func (n *node) admin(t *testing.T) gpreemptv1.AdminServiceClient {
	t.Helper()
	c, err := client.Dial("")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c.Admin()
}

// answers waits until the daemon of that version answers.
func (n *node) answers(t *testing.T, version string) {
	t.Helper()
	admin := n.admin(t)
	n.eventually(t, "the daemon "+version+" answers", func() (bool, error) {
		s, err := admin.GetStatus(t.Context(), &gpreemptv1.GetStatusRequest{})
		return s.GetVersion() == version, errors.Join(err, fmt.Errorf("it is %s", s.GetVersion()))
	})
}

// target waits until a pod's process is a target of this class, decided by this rule.
func (n *node) target(t *testing.T, p *corev1.Pod, class gpreemptv1.Class) *gpreemptv1.Target {
	t.Helper()
	admin := n.admin(t)
	var found *gpreemptv1.Target
	n.eventually(t, fmt.Sprintf("%s is %s", p.Name, class), func() (bool, error) {
		list, err := admin.ListTargets(t.Context(), &gpreemptv1.ListTargetsRequest{})
		for _, target := range list.GetTargets() {
			if c := target.GetContainer(); c.GetPod() == p.Name && c.GetNamespace() == p.Namespace {
				found = target
				suspendable := class != gpreemptv1.Class_CLASS_OFFLINE || target.GetMechanism() == "dbgtrap"
				return target.GetClass() == class && suspendable, fmt.Errorf("%v", target)
			}
		}
		return false, errors.Join(err, fmt.Errorf("it is not a target: %v", list.GetTargets()))
	})
	return found
}

func since(began time.Time) string { return fmt.Sprintf("%.0f s", time.Since(began).Seconds()) }
