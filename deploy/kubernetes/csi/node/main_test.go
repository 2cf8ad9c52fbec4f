package main

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestOfflinePodsAreTakenWhereTheyWouldBeSuspended(t *testing.T) {
	both := []gpu{{}, {LeaseCount: 2}}
	for name, c := range map[string]struct {
		state state
		want  facts
	}{
		"it can suspend on two GPUs": {
			state{Policy: "balanced", Mechanisms: []string{"dbgtrap", "freezer"}, GPUs: both},
			facts{Mechanism: "dbgtrap", Policy: "balanced", FreeShare: "50", Offline: 6},
		},
		"the breaker of a GPU is open": {
			state{Policy: "balanced", Mechanisms: []string{"dbgtrap"}, GPUs: []gpu{{BreakerOpen: true}, {}}},
			facts{Mechanism: "dbgtrap", Policy: "balanced", FreeShare: "100", Offline: 3},
		},
		"it only reports decisions": {
			state{Policy: "shadow", Mechanisms: []string{"dbgtrap"}, GPUs: both},
			facts{Mechanism: "dbgtrap", Policy: "shadow", FreeShare: "50"},
		},
		"no mechanism": {state{Policy: "balanced", GPUs: both}, facts{Policy: "balanced", FreeShare: "50"}},
		"it drains": {
			state{Policy: "balanced", Draining: true, Mechanisms: []string{"dbgtrap"}, GPUs: both},
			facts{Policy: "balanced", FreeShare: "50"},
		},
		"no GPU": {
			state{Policy: "balanced", Mechanisms: []string{"dbgtrap"}},
			facts{Mechanism: "dbgtrap", Policy: "balanced", FreeShare: "100"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, c.state.facts(3, c.state.free())); diff != "" {
				t.Errorf("facts (-want +got):\n%s", diff)
			}
		})
	}
}

func TestFreeShareIsTheAverageOfTheWindow(t *testing.T) {
	s := sampler{size: 3}
	var got []int
	for _, sample := range []int{100, 0, 50, 0, 100} {
		got = append(got, s.add(sample))
	}
	if diff := cmp.Diff([]int{100, 50, 50, 16, 50}, got); diff != "" {
		t.Errorf("averages (-want +got):\n%s", diff)
	}
}

// fakeAPI is an API server with one node, of which it keeps what was patched.
type fakeAPI struct {
	*httptest.Server
	node    map[string]any
	patches int
	refuse  bool
}

func newAPI(t *testing.T) (*fakeAPI, apiServer) {
	t.Helper()
	f := &fakeAPI{node: map[string]any{"metadata": map[string]any{"labels": map[string]any{"kubernetes.io/arch": "amd64"}}}}
	f.Server = httptest.NewTLSServer(f)
	t.Cleanup(f.Close)
	dir := t.TempDir()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: f.Certificate().Raw})
	for name, text := range map[string][]byte{"token": []byte("secret\n"), "ca.crt": ca} {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return f, apiServer{url: f.URL, dir: dir, node: "worker-7"}
}

func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.patches++
	var change map[string]any
	body, err := io.ReadAll(r.Body)
	if err == nil {
		err = json.Unmarshal(body, &change)
	}
	known := r.URL.Path == "/api/v1/nodes/worker-7" || r.URL.Path == "/api/v1/nodes/worker-7/status"
	switch {
	case f.refuse:
		w.WriteHeader(http.StatusForbidden)
		_, _ = io.WriteString(w, `{"message":"nodes is forbidden"}`)
	case err != nil || !known || r.Method != http.MethodPatch || r.Header.Get("Authorization") != "Bearer secret" || r.Header.Get("Content-Type") != "application/merge-patch+json":
		w.WriteHeader(http.StatusBadRequest)
	default:
		merge(f.node, change)
		_, _ = io.WriteString(w, "{}")
	}
}

// merge applies a JSON merge patch.
func merge(into, change map[string]any) {
	for key, value := range change {
		inner, nested := value.(map[string]any)
		switch {
		case value == nil:
			delete(into, key)
		case nested:
			deeper, ok := into[key].(map[string]any)
			if !ok {
				deeper = map[string]any{}
			}
			into[key] = deeper
			merge(deeper, inner)
		default:
			into[key] = value
		}
	}
}

func TestNodeHasWhatTheDaemonAnswersAndNothingWithoutIt(t *testing.T) {
	f, api := newAPI(t)
	answer, failure := state{Policy: "balanced", Mechanisms: []string{"dbgtrap"}, GPUs: []gpu{{}, {}}}, error(nil)
	a := agent{ask: func(context.Context) (state, error) { return answer, failure }, publish: api.publish, perGPU: 1}
	a.share.size = 1
	now := time.Now()
	step := func(after time.Duration) { now = now.Add(after); a.step(t.Context(), now) }
	empty := map[string]any{
		"metadata": map[string]any{"labels": map[string]any{"kubernetes.io/arch": "amd64"}},
		"status":   map[string]any{"capacity": map[string]any{}, "allocatable": map[string]any{}},
	}
	full := map[string]any{
		"metadata": map[string]any{"labels": map[string]any{
			"kubernetes.io/arch": "amd64", "gpreempt/mechanism": "dbgtrap", "gpreempt/policy": "balanced", "gpreempt/free-share": "100",
		}},
		"status": map[string]any{"capacity": map[string]any{"gpreempt/offline": "2"}, "allocatable": map[string]any{"gpreempt/offline": "2"}},
	}
	check := func(when string, want map[string]any, patches int) {
		t.Helper()
		if diff := cmp.Diff(want, f.node); diff != "" {
			t.Errorf("%s: the node (-want +got):\n%s", when, diff)
		}
		if f.patches != patches {
			t.Errorf("%s: %d patches, want %d", when, f.patches, patches)
		}
	}
	step(0)
	check("first answer", full, 2)
	step(time.Second)
	check("the same answer", full, 2)
	step(resync)
	check("resync", full, 4)
	failure = errors.New("it does not answer")
	step(time.Second)
	check("no answer", empty, 6)
	failure = nil
	f.refuse = true
	step(time.Second)
	check("refused", empty, 8)
	f.refuse = false
	step(time.Second)
	check("tried again", full, 10)

	ctx, stop := context.WithCancel(t.Context())
	stop()
	a.run(ctx, nil)
	check("the end", empty, f.patches)
}

func TestRefusalOfTheAPIServerIsReported(t *testing.T) {
	f, api := newAPI(t)
	f.refuse = true
	err := api.publish(t.Context(), facts{Mechanism: "dbgtrap"})
	want := "the API server refuses to change node worker-7: 403 Forbidden: nodes is forbidden\n" +
		"the API server refuses to change node worker-7/status: 403 Forbidden: nodes is forbidden"
	if err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
}

func TestDaemonIsAskedByGpctl(t *testing.T) {
	dir := t.TempDir()
	script := `#!/bin/sh
case "$*" in
"--timeout 5s -o json status") echo '{"policy":"balanced","draining":false,"mechanisms":["dbgtrap"],"gpu_count":1}' ;;
"--timeout 5s -o json gpu list") echo '{"gpus":[{"gpu_id":7,"lease_count":1,"breaker_open":true}]}' ;;
*) echo "unexpected: $*" >&2; exit 2 ;;
esac
`
	if err := os.WriteFile(filepath.Join(dir, "gpctl"), []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	got, err := askDaemon(t.Context())
	want := state{Policy: "balanced", Mechanisms: []string{"dbgtrap"}, GPUs: []gpu{{LeaseCount: 1, BreakerOpen: true}}}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("error %v; state (-want +got):\n%s", err, diff)
	}
}
