package cluster

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

const (
	mechanismLabel = "gpreempt/mechanism"
	slotsResource  = corev1.ResourceName("gpreempt/offline")
)

// info waits until the node has this label and resource; "" for none.
func (n *node) info(t *testing.T, mechanism, slots string) {
	t.Helper()
	n.eventually(t, fmt.Sprintf("the node has the mechanism %q and %q slots", mechanism, slots), func() (bool, error) {
		node, err := n.api.CoreV1().Nodes().Get(t.Context(), nodeName, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		got := ""
		if q, ok := node.Status.Allocatable[slotsResource]; ok {
			got = q.String()
		}
		return node.Labels[mechanismLabel] == mechanism && got == slots, fmt.Errorf("it has %q and %q", node.Labels[mechanismLabel], got)
	})
}

// TestSchedulerPlacesOfflinePodsWherePreemptionWorks by the node's label and resource, which follow the
// daemon.
func TestSchedulerPlacesOfflinePodsWherePreemptionWorks(t *testing.T) {
	n := cluster(t)
	n.helm(t, "v1", map[string]any{"node": map[string]any{"enabled": true, "offlinePerGPU": 2}})
	n.namespace(t, "team", "restricted")
	n.info(t, "dbgtrap", "2")
	ask := func(name, mechanism, slots string) *corev1.Pod {
		p := offline("team", name)
		p.Labels["gpreempt/class"] = "offline"
		p.Spec.NodeSelector = map[string]string{mechanismLabel: mechanism}
		p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{slotsResource: resource.MustParse(slots)}
		return n.create(t, p)
	}
	fits := ask("fits", "dbgtrap", "1")
	n.working(t, fits)
	n.target(t, fits, gpreemptv1.Class_CLASS_OFFLINE)
	n.pending(t, ask("too-many", "dbgtrap", "2"), "Insufficient gpreempt/offline")
	n.pending(t, ask("another-mechanism", "criu", "1"), "node affinity/selector")
	if lost := n.end(t, fits).lost(); lost != "" {
		t.Errorf("the pod that fits: %s", lost)
	}

	admin := n.admin(t)
	if _, err := admin.SetDrain(t.Context(), &gpreemptv1.SetDrainRequest{Drain: true}); err != nil {
		t.Fatal(err)
	}
	n.info(t, "", "")
	if _, err := admin.SetDrain(t.Context(), &gpreemptv1.SetDrainRequest{}); err != nil {
		t.Fatal(err)
	}
	n.info(t, "dbgtrap", "2")
}

// pending waits until the scheduler says that a pod does not fit, and why.
func (n *node) pending(t *testing.T, p *corev1.Pod, why string) {
	t.Helper()
	n.eventually(t, p.Name+" is pending", func() (bool, error) {
		now, err := n.api.CoreV1().Pods(p.Namespace).Get(t.Context(), p.Name, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		for _, c := range now.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && strings.Contains(c.Message, why) {
				return now.Spec.NodeName == "", nil
			}
		}
		return false, fmt.Errorf("phase %s, %+v", now.Status.Phase, now.Status.Conditions)
	})
}

// TestAccountOfTheDaemonMayChangeOnlyWhatIsItsOwn with a token of the daemon's pod.
func TestAccountOfTheDaemonMayChangeOnlyWhatIsItsOwn(t *testing.T) {
	n := cluster(t)
	n.helm(t, "v1", map[string]any{"node": map[string]any{"enabled": true, "offlinePerGPU": 2}})
	n.info(t, "dbgtrap", "2")
	_, err := n.api.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "other"}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.api.CoreV1().Nodes().Delete(t.Context(), "other", metav1.DeleteOptions{}); err != nil && t.Context().Err() == nil {
			t.Error(err)
		}
	})
	daemon := n.daemonPod(t)
	token, err := n.api.CoreV1().ServiceAccounts(release).CreateToken(t.Context(), release, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: daemon.Name, UID: daemon.UID}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	config := rest.AnonymousClientConfig(n.rest)
	config.BearerToken = token.Status.Token
	account, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		node, patch, part string
		allowed           bool
	}{
		{nodeName, `{"metadata": {"labels": {"gpreempt/mechanism": "dbgtrap"}}}`, "", true},
		{nodeName, `{"status": {"capacity": {"gpreempt/offline": "2"}}}`, "status", true},
		{nodeName, `{"metadata": {"labels": {"other/label": "x"}}}`, "", false},
		{nodeName, `{"metadata": {"labels": {"` + gpuLabel + `": null}}}`, "", false},
		{nodeName, `{"metadata": {"annotations": {"x": "y"}}}`, "", false},
		{nodeName, `{"spec": {"unschedulable": true}}`, "", false},
		{nodeName, `{"status": {"capacity": {"cpu": "1000"}}}`, "status", false},
		{nodeName, `{"status": {"allocatable": {"memory": null}}}`, "status", false},
		{nodeName, `{"status": {"conditions": [{"type": "Ready", "status": "False"}]}}`, "status", false},
		{"other", `{"metadata": {"labels": {"gpreempt/mechanism": "dbgtrap"}}}`, "", false},
	} {
		var parts []string
		if test.part != "" {
			parts = []string{test.part}
		}
		_, err := account.CoreV1().Nodes().Patch(t.Context(), test.node, types.MergePatchType, []byte(test.patch), metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}}, parts...)
		if allowed := err == nil; allowed != test.allowed {
			t.Errorf("%s of %s: allowed %v, want %v: %v", test.patch, test.node, allowed, test.allowed, err)
		} else if err != nil && !strings.Contains(err.Error(), "ValidatingAdmissionPolicy") {
			t.Errorf("%s of %s is refused by something else: %v", test.patch, test.node, err)
		}
	}
	for _, test := range []struct {
		verb, resource, part string
		allowed              bool
	}{
		{"get", "nodes", "pods", true},
		{"get", "nodes", "proxy", false},
		{"list", "nodes", "", false},
		{"list", "pods", "", false},
		{"get", "secrets", "", false},
		{"create", "pods", "", false},
	} {
		review, err := account.AuthorizationV1().SelfSubjectAccessReviews().Create(t.Context(), &authorizationv1.SelfSubjectAccessReview{
			Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authorizationv1.ResourceAttributes{
				Verb: test.verb, Resource: test.resource, Subresource: test.part, Namespace: release,
			}},
		}, metav1.CreateOptions{})
		if err != nil || review.Status.Allowed != test.allowed {
			t.Errorf("%s %s/%s: %+v, want %v: %v", test.verb, test.resource, test.part, review.Status, test.allowed, errors.Join(err))
		}
	}
}

// TestOnlineNamespacesNeedNoPrivilege: the level baseline refuses hostPath and takes the chart's volume.
func TestOnlineNamespacesNeedNoPrivilege(t *testing.T) {
	n := cluster(t)
	n.namespace(t, "guarded", "baseline")
	p := online("guarded", "chat")
	create := func() error {
		_, err := n.api.CoreV1().Pods("guarded").Create(t.Context(), p, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
	if err := create(); err != nil {
		t.Error(err)
	}
	p.Spec.Volumes[0].VolumeSource = corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/run/gpreempt"}}
	if err := create(); !apierrors.IsForbidden(err) {
		t.Errorf("with hostPath: %v", err)
	}
}
