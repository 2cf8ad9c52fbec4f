package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// event is a row of the table. pods has the server first.
type event struct {
	name string
	do   func(t *testing.T, n *node, pods []*corev1.Pod)
	// ends is how many of the pods it ends; with the server there are no turns after it.
	ends int
}

// everyPod are the server and its jobs.
const everyPod = 3

var events = []event{
	{"daemon killed (SIGKILL)", func(t *testing.T, n *node, _ []*corev1.Pod) {
		n.killDaemon(t)
	}, 0},
	{"daemon's pod deleted", func(t *testing.T, n *node, _ []*corev1.Pod) {
		old := n.daemonPod(t)
		if err := n.api.CoreV1().Pods(release).Delete(t.Context(), old.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		n.eventually(t, "another pod replaces it", func() (bool, error) {
			pods, err := n.api.CoreV1().Pods(release).List(t.Context(), metav1.ListOptions{LabelSelector: daemonLabel})
			return err == nil && len(pods.Items) == 1 && pods.Items[0].UID != old.UID, err
		})
		n.available(t)
	}, 0},
	{"daemon upgraded (helm upgrade)", func(t *testing.T, n *node, _ []*corev1.Pod) {
		n.helm(t, "v2", nil)
	}, 0},
	{"daemon rolled back (helm upgrade)", func(t *testing.T, n *node, _ []*corev1.Pod) {
		n.helm(t, "v1", nil)
	}, 0},
	{"kubelet killed, restarted", func(t *testing.T, n *node, _ []*corev1.Pod) {
		n.restart(t, n.kubelet)
		n.heartbeat(t)
	}, 0},
	{"containerd killed, restarted", func(t *testing.T, n *node, _ []*corev1.Pod) {
		n.restart(t, n.containerd)
		n.heartbeat(t)
		n.available(t)
	}, 0},
	{"server's pod deleted", func(t *testing.T, n *node, pods []*corev1.Pod) {
		if err := n.api.CoreV1().Pods(pods[0].Namespace).Delete(t.Context(), pods[0].Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}, 1},
	{"node drained", func(t *testing.T, n *node, pods []*corev1.Pod) {
		n.cordon(t, true)
		for _, p := range pods {
			if err := n.api.PolicyV1().Evictions(p.Namespace).Evict(t.Context(), &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: p.Name, Namespace: p.Namespace}}); err != nil {
				t.Fatal(err)
			}
		}
		n.cordon(t, false)
	}, everyPod},
}

// TestNothingStaysSuspendedAndNoPacketIsLost: two jobs and a server run while something on the node
// ends. Each of the jobs' packets ran exactly once, and nothing is suspended afterwards.
func TestNothingStaysSuspendedAndNoPacketIsLost(t *testing.T) {
	n := cluster(t)
	n.helm(t, "v1", nil)
	n.namespace(t, "team", "restricted")
	var table strings.Builder
	fmt.Fprintf(&table, "%-34s %6s %11s %9s %5s %9s %6s\n", "EMULATED GPU: event", "turns", "unprotected", "packets", "lost", "suspended", "time")
	for i, e := range events {
		t.Run(e.name, func(t *testing.T) {
			began := time.Now()
			pods := n.load(t, i)
			server, jobs := pods[0], len(pods)-1
			before := len(n.preempts(t, server, 0, jobs))
			var ends []func() ended
			for _, p := range pods[:e.ends] {
				ends = append(ends, n.follow(t, p))
			}
			e.do(t, n, pods)
			var turns []turn
			if e.ends == 0 {
				turns = n.preempts(t, server, before, jobs)
			}
			unprotected := 0
			for _, one := range turns {
				if !one.Protected {
					unprotected++
				}
			}
			for _, p := range pods[e.ends:] {
				ends = append(ends, func() ended { return n.end(t, p) })
			}
			var packets, lost uint64
			for j, end := range ends {
				end := end()
				if why := end.lost(); why != "" {
					t.Errorf("%s: %s", pods[j].Name, why)
				}
				if end.Proof != nil {
					packets += end.Proof.Count
					lost += end.Proof.Packets - end.Proof.Count
				}
			}
			n.allRunning(t)
			s, err := n.admin(t).GetStatus(t.Context(), &gpreemptv1.GetStatusRequest{})
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&table, "%-34s %6d %11d %9d %5d %9d %6s\n", e.name, len(turns), unprotected, packets, lost, s.GetSuspendedCount(), since(began))
		})
	}
	fmt.Print(table.String())
}

// load starts a server and two jobs, and waits until they work.
func (n *node) load(t *testing.T, i int) []*corev1.Pod {
	t.Helper()
	pods := []*corev1.Pod{online("team", fmt.Sprintf("chat-%d", i))}
	for j := range everyPod - 1 {
		job := offline("team", fmt.Sprintf("job-%d-%d", i, j))
		job.Labels["gpreempt/class"] = "offline"
		pods = append(pods, job)
	}
	for _, p := range pods {
		n.create(t, p)
	}
	for _, p := range pods {
		n.working(t, p)
	}
	return pods
}

func (n *node) daemonPod(t *testing.T) *corev1.Pod {
	t.Helper()
	pods, err := n.api.CoreV1().Pods(release).List(t.Context(), metav1.ListOptions{LabelSelector: daemonLabel})
	if err != nil || len(pods.Items) != 1 {
		t.Fatalf("the daemon's pods: %d, %v", len(pods.Items), err)
	}
	return &pods.Items[0]
}

// killDaemon kills the daemon's process while a server has the GPU, and waits until the kubelet has
// started another.
func (n *node) killDaemon(t *testing.T) {
	t.Helper()
	restarts := func(p *corev1.Pod) int32 {
		i := slices.IndexFunc(p.Status.ContainerStatuses, func(c corev1.ContainerStatus) bool { return c.Name == "gpreemptd" })
		if i < 0 {
			return -1
		}
		return p.Status.ContainerStatuses[i].RestartCount
	}
	before := restarts(n.daemonPod(t))
	n.eventually(t, "a job is suspended", func() (bool, error) { return n.suspendedQueues() > 0, nil })
	if err := killProgram("gpreemptd"); err != nil {
		t.Fatal(err)
	}
	n.eventually(t, "the kubelet starts the daemon again", func() (bool, error) {
		now := restarts(n.daemonPod(t))
		return now > before, fmt.Errorf("%d restarts, before %d", now, before)
	})
	n.available(t)
}

// heartbeat waits until the kubelet reports the node as ready again, after this moment.
func (n *node) heartbeat(t *testing.T) {
	t.Helper()
	began := metav1.Now()
	n.eventually(t, "the kubelet reports the node as ready", func() (bool, error) {
		node, err := n.api.CoreV1().Nodes().Get(t.Context(), nodeName, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		for _, c := range node.Status.Conditions {
			if c.Type == corev1.NodeReady {
				return c.Status == corev1.ConditionTrue && began.Before(&c.LastHeartbeatTime), fmt.Errorf("%+v", c)
			}
		}
		return false, errors.New("no condition")
	})
}

func (n *node) cordon(t *testing.T, yes bool) {
	t.Helper()
	patch := fmt.Appendf(nil, `{"spec": {"unschedulable": %v}}`, yes)
	if _, err := n.api.CoreV1().Nodes().Patch(context.WithoutCancel(t.Context()), nodeName, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil && !apierrors.IsConflict(err) {
		t.Fatal(err)
	}
}
