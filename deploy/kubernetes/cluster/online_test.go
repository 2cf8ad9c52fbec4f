package cluster

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

const socketGroup = 20064 // the chart's socketGroup

// online is a pod that announces each of its turns by the socket in the chart's volume.
func online(namespace, name string) *corev1.Pod {
	p := pod(namespace, name, 10001, "node", "chat", "--packets", "20", "--duration", "500")
	p.Labels["gpreempt/class"] = "online"
	p.Spec.SecurityContext.SupplementalGroups = []int64{socketGroup}
	yes := true
	p.Spec.Volumes = []corev1.Volume{{Name: "gpreempt", VolumeSource: corev1.VolumeSource{
		CSI: &corev1.CSIVolumeSource{Driver: "csi.gpreempt", ReadOnly: &yes},
	}}}
	p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "gpreempt", MountPath: "/run/gpreempt", ReadOnly: true}}
	return p
}

// turn is a turn of the server, as node chat prints it.
type turn struct {
	Event     string
	Turn      int
	Protected bool
	Quiet     bool
	Suspended int
	Cause     string
}

// turns returns those of an online pod.
func (n *node) turns(t *testing.T, p *corev1.Pod) ([]turn, error) {
	text, err := n.api.CoreV1().Pods(p.Namespace).GetLogs(p.Name, &corev1.PodLogOptions{}).DoRaw(t.Context())
	if err != nil {
		return nil, err
	}
	var all []turn
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var one turn
		if err := json.Unmarshal(lines.Bytes(), &one); err != nil {
			return nil, fmt.Errorf("%q: %w", lines.Text(), err)
		}
		if one.Event == "turn" {
			all = append(all, one)
		}
	}
	return all, lines.Err()
}

// preempts waits until the server has a turn, after the given number of them, for which all of the
// offline pods were suspended in time. It returns all turns.
func (n *node) preempts(t *testing.T, server *corev1.Pod, after, jobs int) []turn {
	t.Helper()
	var all []turn
	n.eventually(t, fmt.Sprintf("%s preempts %d jobs", server.Name, jobs), func() (bool, error) {
		var err error
		all, err = n.turns(t, server)
		return slices.ContainsFunc(all[min(after, len(all)):], func(one turn) bool {
			return one.Protected && one.Quiet && one.Suspended >= jobs
		}), errors.Join(err, fmt.Errorf("the last turns: %+v", all[max(0, len(all)-3):]))
	})
	return all
}

// TestOfflinePodsAreRecognisedAndPreempted: by label and by namespace. The server is
// in a namespace of the level restricted.
func TestOfflinePodsAreRecognisedAndPreempted(t *testing.T) {
	n := cluster(t)
	n.helm(t, "v1", nil)
	n.namespace(t, "team", "restricted")
	n.namespace(t, batchSpace, "restricted")
	byLabel, byNamespace := offline("team", "by-label"), offline(batchSpace, "by-namespace")
	byLabel.Labels["gpreempt/class"] = "offline"
	unmanaged := offline("team", "unmanaged")
	jobs := map[*corev1.Pod]string{byLabel: "offline-pods", byNamespace: "batch-namespaces"}
	for _, p := range []*corev1.Pod{byLabel, byNamespace, unmanaged} {
		n.create(t, p)
	}
	ids := map[string]bool{}
	for p, rule := range jobs {
		n.working(t, p)
		target := n.target(t, p, gpreemptv1.Class_CLASS_OFFLINE)
		ids[target.GetTargetId()] = true
		if !strings.Contains(target.GetDecidedBy(), rule) {
			t.Errorf("%s is offline by %q, want the rule %s", p.Name, target.GetDecidedBy(), rule)
		}
	}
	n.working(t, unmanaged)
	ids[n.target(t, unmanaged, gpreemptv1.Class_CLASS_UNMANAGED).GetTargetId()] = false
	server := online("team", "chat")
	n.create(t, server)
	n.working(t, server)
	ids[n.target(t, server, gpreemptv1.Class_CLASS_ONLINE).GetTargetId()] = false
	n.preempts(t, server, 0, len(jobs))

	suspends, got := n.suspends(t), map[string]bool{}
	for id := range ids {
		got[id] = suspends[id] > 0
	}
	if diff := cmp.Diff(ids, got); diff != "" {
		t.Errorf("targets with an event of a suspend (-want +got):\n%s", diff)
	}
	if got := n.metric(t, `gpreempt_preemptions_total{cause="lease"}`); got < 2 {
		t.Errorf("/metrics counts %v preemptions, want 2 or more", got)
	}
	for _, p := range []*corev1.Pod{server, byLabel, byNamespace, unmanaged} {
		if lost := n.end(t, p).lost(); lost != "" {
			t.Errorf("%s: %s", p.Name, lost)
		}
	}
	n.allRunning(t)
}

// suspends counts suspends by target, in the daemon's events.
func (n *node) suspends(t *testing.T) map[string]int {
	t.Helper()
	stream, err := n.admin(t).WatchEvents(t.Context(), &gpreemptv1.WatchEventsRequest{FromStart: true, NoFollow: true})
	if err != nil {
		t.Fatal(err)
	}
	counts := map[string]int{}
	for {
		answer, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return counts
		}
		if err != nil {
			t.Fatal(err)
		}
		if e := answer.GetEvent(); e.GetToTarget() == gpreemptv1.TargetState_TARGET_STATE_SUSPENDED {
			counts[e.GetTargetId()]++
		}
	}
}

// metric returns a sample of the daemon's /metrics, from its pod's address.
func (n *node) metric(t *testing.T, sample string) float64 {
	t.Helper()
	pods, err := n.api.CoreV1().Pods(release).List(t.Context(), metav1.ListOptions{LabelSelector: daemonLabel})
	if err != nil || len(pods.Items) != 1 {
		t.Fatalf("the daemon's pods: %d, %v", len(pods.Items), err)
	}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+pods.Items[0].Status.PodIP+":9477/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	match := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(sample) + ` (\S+)$`).FindSubmatch(text)
	if match == nil {
		t.Fatalf("there is no %s in\n%s", sample, text)
	}
	value, err := strconv.ParseFloat(string(match[1]), 64)
	if err != nil {
		t.Fatal(err)
	}
	return value
}

// allRunning waits until the daemon answers and nothing is suspended, nor in the emulated driver.
func (n *node) allRunning(t *testing.T) {
	t.Helper()
	admin := n.admin(t)
	n.eventually(t, "nothing is suspended", func() (bool, error) {
		s, err := admin.GetStatus(t.Context(), &gpreemptv1.GetStatusRequest{})
		queues := n.suspendedQueues()
		return err == nil && s.GetSuspendedCount() == 0 && queues == 0, errors.Join(err, fmt.Errorf("%d targets are suspended, %d queues", s.GetSuspendedCount(), queues))
	})
}

// suspendedQueues counts queues that the emulated driver keeps from the GPU.
func (n *node) suspendedQueues() int {
	count := 0
	for _, p := range n.machine.Driver().Processes() {
		for _, q := range p.Queues {
			if q.Suspended {
				count++
			}
		}
	}
	return count
}
