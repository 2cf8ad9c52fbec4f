package kubernetes

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
)

// node returns what gpreempt-node publishes about a node.
func (a *api) node(t *testing.T, name string) map[string]string {
	t.Helper()
	status, answer, err := a.call(t.Context(), http.MethodGet, "api/v1/nodes/"+name, nil)
	if err != nil || status != http.StatusOK {
		t.Fatal(status, answer, err)
	}
	var n corev1.Node
	if err := json.Unmarshal([]byte(answer), &n); err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for key, value := range n.Labels {
		if strings.HasPrefix(key, "gpreempt/") {
			all[key] = value
		}
	}
	for key, value := range n.Status.Allocatable {
		if strings.HasPrefix(string(key), "gpreempt/") {
			all[string(key)] = value.String()
		}
	}
	return all
}

// await waits until a node has what is wanted.
func (a *api) await(t *testing.T, name string, want map[string]string) {
	t.Helper()
	for late := time.Now().Add(time.Minute); ; <-time.After(50 * time.Millisecond) {
		got := a.node(t, name)
		if cmp.Equal(want, got) {
			return
		}
		if time.Now().After(late) {
			t.Fatalf("node %s has %v, want %v", name, got, want)
		}
	}
}

// patch applies a JSON merge patch with a token, and returns the status and the message of the answer.
func (a *api) patch(t *testing.T, token, path, change string) (int, string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPatch, "https://"+a.address+"/"+path, strings.NewReader(change))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Authorization", "Bearer "+token)
	request.Header.Set("Content-Type", "application/merge-patch+json")
	response, err := a.client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(text)
}

// TestAPIServerLetsANodeBePublishedAndNothingElse runs gpreempt-node with the rights of the chart on a real API server, for a
// node that is an object only.
func TestAPIServerLetsANodeBePublishedAndNothingElse(t *testing.T) {
	api := startAPI(t)
	objects := []string{"{apiVersion: v1, kind: Namespace, metadata: {name: gpreempt}}"}
	for _, document := range documents(render(t, installs["labels and a resource of the nodes"])) {
		for _, kind := range []string{"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"} {
			if strings.Contains(document, "\nkind: "+kind+"\n") {
				objects = append(objects, document)
			}
		}
	}
	for _, name := range []string{"worker-7", "worker-8"} {
		objects = append(objects, fmt.Sprintf("{apiVersion: v1, kind: Node, metadata: {name: %s, labels: {zone: a}}, status: {capacity: {cpu: 8}, allocatable: {cpu: 8}}}", name))
	}
	objects = append(objects, "{apiVersion: v1, kind: Pod, metadata: {name: daemon, namespace: gpreempt}, "+
		"spec: {nodeName: worker-7, serviceAccountName: gpreempt, containers: [{name: node, image: example.invalid/gpreempt}]}}")
	for _, object := range objects {
		if err := api.create(t.Context(), object, ""); err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	credentials := filepath.Join(dir, "credentials")
	token := api.boundToken(t, "daemon")
	ca, err := os.ReadFile(api.certificate)
	if err == nil {
		err = os.Mkdir(credentials, 0o700)
	}
	if err != nil {
		t.Fatal(err)
	}
	daemon := `#!/bin/sh
case "$*" in
*status) echo '{"policy":"balanced","draining":false,"mechanisms":["dbgtrap"]}' ;;
*) echo '{"gpus":[{"lease_count":0,"breaker_open":false},{"lease_count":0,"breaker_open":false}]}' ;;
esac
`
	for name, text := range map[string]string{filepath.Join(credentials, "token"): token, filepath.Join(credentials, "ca.crt"): string(ca), filepath.Join(dir, "gpctl"): daemon} {
		if err := os.WriteFile(name, []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	program := filepath.Join(dir, "gpreempt-node")
	build := exec.Command("go", "build", "-buildvcs=false", "-o", program, "./node")
	build.Dir = "csi"
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var log bytes.Buffer
	agent := exec.Command(program, "-node", "worker-7", "-api", "https://"+api.address, "-credentials", credentials, "-offline-per-gpu", "4", "-every", "100ms")
	agent.Env, agent.Stderr = []string{"PATH=" + dir + ":" + os.Getenv("PATH")}, &log
	if err := agent.Start(); err != nil {
		t.Fatal(err)
	}
	ended := false
	end := func() {
		if !ended {
			ended = true
			_ = agent.Process.Signal(syscall.SIGTERM) // unless it has ended
			if err := agent.Wait(); err != nil {
				t.Errorf("gpreempt-node: %v\n%s", err, log.Bytes())
			}
		}
	}
	t.Cleanup(end)
	api.await(t, "worker-7", map[string]string{
		"gpreempt/mechanism": "dbgtrap", "gpreempt/policy": "balanced", "gpreempt/free-share": "100", "gpreempt/offline": "8",
	})

	for name, c := range map[string]struct{ path, change, want string }{
		"another node":        {"api/v1/nodes/worker-8", `{"metadata":{"labels":{"gpreempt/mechanism":"dbgtrap"}}}`, "only the node on which its pod runs"},
		"another label":       {"api/v1/nodes/worker-7", `{"metadata":{"labels":{"zone":"b"}}}`, "only labels that begin with gpreempt/"},
		"a label less":        {"api/v1/nodes/worker-7", `{"metadata":{"labels":{"zone":null}}}`, "only labels that begin with gpreempt/"},
		"a new label":         {"api/v1/nodes/worker-7", `{"metadata":{"labels":{"node-role.kubernetes.io/x":""}}}`, "only labels that begin with gpreempt/"},
		"a taint":             {"api/v1/nodes/worker-7", `{"spec":{"unschedulable":true}}`, "only labels and the resource gpreempt/offline"},
		"an annotation":       {"api/v1/nodes/worker-7", `{"metadata":{"annotations":{"a":"b"}}}`, "only labels and the resource gpreempt/offline"},
		"another capacity":    {"api/v1/nodes/worker-7/status", `{"status":{"capacity":{"cpu":"64"}}}`, "only the resource gpreempt/offline"},
		"another allocatable": {"api/v1/nodes/worker-7/status", `{"status":{"allocatable":{"cpu":"64"}}}`, "only the resource gpreempt/offline"},
		"a condition":         {"api/v1/nodes/worker-7/status", `{"status":{"conditions":[{"type":"Ready","status":"True"}]}}`, "only labels and the resource gpreempt/offline"},
	} {
		if status, answer := api.patch(t, token, c.path, c.change); status == http.StatusOK || !strings.Contains(answer, c.want) {
			t.Errorf("%s: status %d, want a refusal with %q: %s", name, status, c.want, answer)
		}
	}

	end()
	api.await(t, "worker-7", map[string]string{})
	if strings.Contains(log.String(), "refuses") {
		t.Errorf("gpreempt-node wrote:\n%s", log.Bytes())
	}
}

// boundToken returns a token as the kubelet requests it for a pod.
func (a *api) boundToken(t *testing.T, pod string) string {
	t.Helper()
	status, answer, err := a.call(t.Context(), http.MethodGet, "api/v1/namespaces/gpreempt/pods/"+pod, nil)
	var object corev1.Pod
	if err == nil {
		err = json.Unmarshal([]byte(answer), &object)
	}
	if err != nil || status != http.StatusOK {
		t.Fatal(status, answer, err)
	}
	request := fmt.Sprintf(`{"apiVersion":"authentication.k8s.io/v1","kind":"TokenRequest","spec":{"expirationSeconds":3600,"boundObjectRef":{"apiVersion":"v1","kind":"Pod","name":%q,"uid":%q}}}`, pod, object.UID)
	status, answer, err = a.call(t.Context(), http.MethodPost, "api/v1/namespaces/gpreempt/serviceaccounts/gpreempt/token", []byte(request))
	var token struct{ Status struct{ Token string } }
	if err == nil {
		err = json.Unmarshal([]byte(answer), &token)
	}
	if err != nil || status != http.StatusCreated {
		t.Fatal(status, answer, err)
	}
	return token.Status.Token
}
