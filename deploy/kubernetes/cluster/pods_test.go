package cluster

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"

	"github.com/gpreempt/gpreempt/emu/workload"
)

// wait is the longest that a test waits for one condition.
const wait = 90 * time.Second

// eventually waits until a condition holds; what it returns is shown if it does not.
func (n *node) eventually(t *testing.T, what string, holds func() (bool, error)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	if err := await(ctx, n.kubelet, what, holds); err != nil {
		t.Fatal(err)
	}
}

// namespace makes a namespace that enforces a level of Pod Security.
func (n *node) namespace(t *testing.T, name, level string) {
	t.Helper()
	_, err := n.api.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: name, Labels: map[string]string{"pod-security.kubernetes.io/enforce": level},
	}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	n.eventually(t, "the namespace has its service account", func() (bool, error) {
		_, err := n.api.CoreV1().ServiceAccounts(name).Get(t.Context(), "default", metav1.GetOptions{})
		return err == nil, err
	})
}

// pod returns a pod that Pod Security admits at the level restricted, with one container.
func pod(namespace, name string, user int64, command ...string) *corev1.Pod {
	no, yes := false, true
	seconds := int64(60)
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{}},
		Spec: corev1.PodSpec{
			RestartPolicy: corev1.RestartPolicyNever, AutomountServiceAccountToken: &no, TerminationGracePeriodSeconds: &seconds,
			SecurityContext: &corev1.PodSecurityContext{
				RunAsNonRoot: &yes, RunAsUser: &user, RunAsGroup: &user,
				SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
			},
			Containers: []corev1.Container{{
				Name: "main", Image: workImage, Command: command,
				SecurityContext: &corev1.SecurityContext{
					AllowPrivilegeEscalation: &no, Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
				},
			}},
		},
	}
}

// offline is a pod that keeps a queue busy. Nothing in it refers to gpreempt.
func offline(namespace, name string) *corev1.Pod {
	return pod(namespace, name, 10002, "kfdemu", "work", "--runtime", "--queues", "1", "--duration", "2000", "--occupancy", "300000")
}

// create makes a pod; it is removed when the test ends.
func (n *node) create(t *testing.T, p *corev1.Pod) *corev1.Pod {
	t.Helper()
	made, err := n.api.CoreV1().Pods(p.Namespace).Create(t.Context(), p, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// Unless the test ended it. A failure of the test is more important.
		_ = n.api.CoreV1().Pods(p.Namespace).Delete(context.Background(), p.Name, *metav1.NewDeleteOptions(1))
	})
	return made
}

// running waits until a pod runs.
func (n *node) running(t *testing.T, p *corev1.Pod) {
	t.Helper()
	n.eventually(t, p.Name+" runs", func() (bool, error) {
		now, err := n.api.CoreV1().Pods(p.Namespace).Get(t.Context(), p.Name, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		return now.Status.Phase == corev1.PodRunning, fmt.Errorf("phase %s, %s %+v", now.Status.Phase, now.Status.Message, now.Status.ContainerStatuses)
	})
}

// messages returns what a pod's program has written.
func (n *node) messages(ctx context.Context, p *corev1.Pod) ([]workload.Message, error) {
	text, err := n.api.CoreV1().Pods(p.Namespace).GetLogs(p.Name, &corev1.PodLogOptions{}).DoRaw(ctx)
	if err != nil {
		return nil, err
	}
	return parseMessages(text)
}

func parseMessages(text []byte) ([]workload.Message, error) {
	var all []workload.Message
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var m workload.Message
		if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
			return nil, fmt.Errorf("%q: %w", lines.Text(), err)
		}
		all = append(all, m)
	}
	return all, lines.Err()
}

// ready waits until a pod's program has its queues.
func (n *node) working(t *testing.T, p *corev1.Pod) {
	t.Helper()
	n.running(t, p)
	n.eventually(t, p.Name+" has queues", func() (bool, error) {
		all, err := n.messages(t.Context(), p)
		return slices.ContainsFunc(all, func(m workload.Message) bool { return m.Event == "ready" }), err
	})
}

// ended is how a pod's container ended, and what it proved.
type ended struct {
	Code  int32
	Proof *workload.Tally
}

// end deletes a pod and returns how it ended: with 0, each of its packets ran exactly once and in
// order.
func (n *node) end(t *testing.T, p *corev1.Pod) ended {
	t.Helper()
	wait := n.follow(t, p)
	if err := n.api.CoreV1().Pods(p.Namespace).Delete(t.Context(), p.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	return wait()
}

// follow returns a function that waits until a pod, which something else ends, is removed.
func (n *node) follow(t *testing.T, p *corev1.Pod) func() ended {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	t.Cleanup(cancel)
	pods := n.api.CoreV1().Pods(p.Namespace)
	now, err := pods.Get(ctx, p.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	// The API server may end a watch at any time; this one goes on where it ended.
	changes, err := watchtools.NewRetryWatcherWithContext(ctx, now.ResourceVersion, &cache.ListWatch{
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.FieldSelector = "metadata.name=" + p.Name
			return pods.Watch(ctx, options)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	logs, err := pods.GetLogs(p.Name, &corev1.PodLogOptions{Follow: true}).Stream(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return func() ended {
		t.Helper()
		defer changes.Stop()
		defer logs.Close()
		result := ended{Code: -1}
		lines := bufio.NewScanner(logs)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			if all, err := parseMessages(lines.Bytes()); err == nil && len(all) == 1 && all[0].Event == "done" {
				result.Proof = all[0].Tally
			}
		}
		for event := range changes.ResultChan() {
			now, _ := event.Object.(*corev1.Pod)
			if now == nil {
				continue
			}
			for _, c := range now.Status.ContainerStatuses {
				if c.State.Terminated != nil {
					result.Code = c.State.Terminated.ExitCode
				}
			}
			if event.Type == watch.Deleted {
				return result
			}
		}
		t.Fatalf("%s was not removed; so far: %+v", p.Name, result)
		return result
	}
}

// lost returns what is wrong with the end of a pod, "" for nothing.
func (e ended) lost() string {
	switch {
	case e.Code != 0:
		return fmt.Sprintf("exit status %d", e.Code)
	case e.Proof == nil:
		return "no proof"
	case !e.Proof.OK || e.Proof.Packets != e.Proof.Count || e.Proof.Packets == 0:
		return strings.TrimSpace(fmt.Sprintf("%d packets, %d ran", e.Proof.Packets, e.Proof.Count))
	}
	return ""
}
