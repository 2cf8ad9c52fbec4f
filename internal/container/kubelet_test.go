package container

import (
	"encoding/json"
	"encoding/pem"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// kubelet is a fake of the kubelet's API, which requires a token.
type kubelet struct {
	mu    sync.Mutex
	token string
	body  string
	asked chan struct{}
	// url, ca and tokenFile are its address and what a client needs.
	url, ca, tokenFile string
}

func (k *kubelet) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	k.mu.Lock()
	defer k.mu.Unlock()
	defer func() { k.asked <- struct{}{} }()
	switch {
	case r.URL.Path != "/pods":
		http.NotFound(w, r)
	case r.Header.Get("Authorization") != "Bearer "+k.token:
		http.Error(w, "Unauthorized", http.StatusUnauthorized)
	case k.body == "":
		http.Redirect(w, r, "/elsewhere", http.StatusFound)
	default:
		w.Write([]byte(k.body))
	}
}

// say replaces its token and its answer.
func (k *kubelet) say(token, body string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.token, k.body = token, body
}

func podsText(class string, labels map[string]string) string {
	b, err := json.Marshal(map[string]any{
		"kind": "PodList", "apiVersion": "v1", "metadata": map[string]any{},
		"items": []any{
			map[string]any{"metadata": map[string]any{"name": "other", "uid": "0"}, "spec": map[string]any{"priorityClassName": "low"}},
			map[string]any{
				"metadata": map[string]any{"name": "vllm-0", "namespace": "prod", "uid": podUID, "labels": labels},
				"spec":     map[string]any{"priorityClassName": class, "containers": []any{}}, "status": map[string]any{"phase": "Running"},
			},
		},
	})
	if err != nil {
		panic(err)
	}
	return string(b)
}

func startKubelet(t *testing.T) *kubelet {
	t.Helper()
	k := &kubelet{asked: make(chan struct{}, 1000), token: "secret"}
	server := httptest.NewTLSServer(k)
	t.Cleanup(server.Close)
	dir := t.TempDir()
	k.url, k.ca, k.tokenFile = server.URL, filepath.Join(dir, "ca.crt"), filepath.Join(dir, "token")
	write(t, k.ca, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})))
	write(t, k.tokenFile, "secret\n")
	return k
}

func write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestPriorityClassAndNewLabelsComeFromTheKubelet(t *testing.T) {
	k := startKubelet(t)
	k.say("secret", podsText("batch-low", map[string]string{"app": "vllm"}))
	path := filepath.Join(testutil.TempSocketDir(t), "containerd.sock")
	r := run(t, Config{Sockets: []string{path}, Kubelet: k.url, KubeletToken: k.tokenFile, KubeletCA: k.ca})
	r.Lookup(inPod)
	wait(t, r.changed, "the kubelet's part, as there is no runtime yet", id("1"))
	want := gpreempt.Container{Namespace: "prod", Pod: "vllm-0", PodLabels: map[string]string{"app": "vllm"}, PriorityClass: "batch-low"}
	r.lookup(t, inPod, want, true)

	serveCRI(t, path, serving())
	r.advanceUntil(t, r.changed, "the runtime's part", id("1"))
	want = served()
	want.PodLabels, want.PriorityClass = map[string]string{"app": "vllm"}, "batch-low"
	r.lookup(t, inPod, want, true)

	// The token was replaced, and the pod got a label.
	write(t, k.tokenFile, "another")
	k.say("another", podsText("batch-low", map[string]string{"app": "vllm", "tier": "offline"}))
	r.advanceUntil(t, r.changed, "the new label", id("1"))
	want.PodLabels["tier"] = "offline"
	r.lookup(t, inPod, want, true)
	if warnings := r.Warnings(); warnings != nil {
		t.Errorf("warnings %+v", warnings)
	}
}

func TestFailureOfTheKubeletKeepsItsLastAnswer(t *testing.T) {
	k := startKubelet(t)
	k.say("secret", podsText("batch-low", nil))
	r := run(t, Config{Sockets: []string{}, Kubelet: k.url, KubeletToken: k.tokenFile, KubeletCA: k.ca})
	r.Lookup(inPod)
	wait(t, r.changed, "the kubelet's part", id("1"))
	want := gpreempt.Container{Namespace: "prod", Pod: "vllm-0", PriorityClass: "batch-low"}
	k.say("not this one", podsText("other", nil))
	r.advanceUntil(t, r.logged, "the warning", "kubelet does not list its pods")
	r.lookup(t, inPod, want, true)
	wantWarnings := []gpreempt.Warning{gpreempt.WarnKubelet.Warn(
		"the kubelet at " + k.url + " does not list its pods: GET " + k.url + "/pods: HTTP status 401 Unauthorized",
	)}
	if diff := cmp.Diff(wantWarnings, r.Warnings()); diff != "" {
		t.Errorf("warnings (-want +got):\n%s", diff)
	}
	k.say("secret", podsText("other", nil))
	r.advanceUntil(t, r.changed, "the new class", id("1"))
	want.PriorityClass = "other"
	r.lookup(t, inPod, want, true)
	if warnings := r.Warnings(); warnings != nil {
		t.Errorf("warnings %+v", warnings)
	}
}

func TestKubeletThatHangsDoesNotDelayNames(t *testing.T) {
	release := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-release }))
	defer server.Close()
	defer close(release)
	path := filepath.Join(testutil.TempSocketDir(t), "containerd.sock")
	serveCRI(t, path, serving())
	r := run(t, Config{Sockets: []string{path}, Kubelet: server.URL})
	r.Lookup(inPod)
	wait(t, r.changed, "the name", id("1"))
	r.lookup(t, inPod, served(), true)
}

func TestKubeletIsQueriedForContainersOfPodsOnly(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	r := New(Config{Kubelet: "https://localhost:10250", Changed: func(string) {}, Now: func() time.Time { return now }})
	r.Lookup(inDocker)
	if pause := r.kubeletDue(); pause != idleAfter {
		t.Errorf("queried in %v", pause)
	}
	r.Lookup(inPod)
	if pause := r.kubeletDue(); pause > 0 {
		t.Errorf("for a pod it is queried in %v", pause)
	}
	// What the kubelet says of a pod is not for a process whose container the runtime refused.
	e := r.entries[key{inPod.ContainerID, inPod.ContainerPath}]
	e.update(answer{state: isFound, reported: reported{container: gpreempt.Container{Conflict: "of another pod"}}}, now)
	r.updatePods(map[string]podFacts{podUID: {name: "vllm-0"}}, nil)
	if c, known := r.Lookup(inPod); !known || !c.Equal(gpreempt.Container{Conflict: "of another pod"}) {
		t.Errorf("known %v, %+v", known, c)
	}
}

func TestErrorsOfTheKubeletAreWarnings(t *testing.T) {
	k := startKubelet(t)
	tests := map[string]struct {
		change func(*Config)
		want   string
	}{
		"certificate of an unknown authority": {func(c *Config) { c.KubeletCA = "" }, "x509"},
		"no certificates":                     {func(c *Config) { c.KubeletCA = k.tokenFile }, k.tokenFile + " has no certificate"},
		"no file of certificates":             {func(c *Config) { c.KubeletCA = "/nonexistent" }, "open /nonexistent"},
		"no token":                            {func(c *Config) { c.KubeletToken = "/nonexistent" }, "open /nonexistent"},
		"a token in the clear":                {func(c *Config) { c.Kubelet = "http" + strings.TrimPrefix(k.url, "https") }, "https://"},
		"a redirection":                       {func(*Config) { k.say("secret", "") }, "HTTP status 302"},
		"another path":                        {func(c *Config) { c.Kubelet += "/metrics" }, "HTTP status 404"},
		"no address":                          {func(c *Config) { c.Kubelet = "https://%" }, "invalid URL"},
		"too many pods":                       {func(*Config) { k.say("secret", `{"items":[`+manyPods(maxPods+1)+`]}`) }, "more than 2048"},
		"not JSON":                            {func(*Config) { k.say("secret", `[]`) }, "the list of pods"},
		"half a list":                         {func(*Config) { k.say("secret", podsText("a", nil)[:200]) }, "the list of pods"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			k.say("secret", podsText("a", nil))
			cfg := Config{Kubelet: k.url, KubeletToken: k.tokenFile, KubeletCA: k.ca}
			test.change(&cfg)
			facts, err := New(cfg).kubeletPods(t.Context())
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want one with %q; %d pods", err, test.want, len(facts))
			}
		})
	}
}

func TestNodeWithoutPodsHasNoWarning(t *testing.T) {
	for _, text := range []string{`{"kind":"PodList","items":null}`, `{"items":[]}`, `{}`} {
		if facts, err := parsePods(strings.NewReader(text)); err != nil || len(facts) != 0 {
			t.Errorf("%s: %v, %v", text, facts, err)
		}
	}
}

func TestTooLargeListOfPodsIsRefused(t *testing.T) {
	facts, err := parsePods(io.MultiReader(strings.NewReader(podsText("a", nil)[:200]), spaces{}))
	if want := "the list of pods is larger than 16 MiB"; err == nil || err.Error() != want || facts != nil {
		t.Errorf("error %v, want %s; %d pods", err, want, len(facts))
	}
}

// spaces is an endless text.
type spaces struct{}

func (spaces) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}

func manyPods(n int) string {
	var text strings.Builder
	for i := range n {
		text.WriteString(`{"metadata":{"uid":"` + strconv.Itoa(i) + `"}},`)
	}
	return strings.TrimSuffix(text.String(), ",")
}

func FuzzParsePods(f *testing.F) {
	f.Add(podsText("batch-low", map[string]string{"app": "vllm"}))
	f.Add(`{"items":null}`)
	f.Add(`{0`)
	f.Add(`{"items":[}`)
	f.Add(`{"items":[{"metadata":{"uid":"\ud800","labels":{"a":null}}}],"items":[]}`)
	f.Add(`{"items":[{}],"kind":{"a":[1,2]}}`)
	f.Fuzz(func(t *testing.T, text string) {
		facts, err := parsePods(strings.NewReader(text))
		if err != nil && !strings.HasPrefix(err.Error(), "the list of pods") {
			t.Errorf("error %v", err)
		}
		if err == nil && !strings.HasPrefix(strings.TrimLeft(text, " \t\r\n"), "{") {
			t.Errorf("%q was taken for a list", text)
		}
		if len(facts) > maxPods {
			t.Errorf("%d pods", len(facts))
		}
		for uid, p := range facts {
			for _, s := range []string{uid, p.name, p.namespace, p.priorityClass} {
				if len(s) > maxText || !utf8.ValidString(s) {
					t.Errorf("%q of %q", s, text)
				}
			}
		}
	})
}
