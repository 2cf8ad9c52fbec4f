package container

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestMain(m *testing.M) { os.Exit(testutil.VerifyMain(m)) }

// waitTime is how long a test waits for an event before it fails.
const waitTime = time.Minute

// id returns a container id that ends in n.
func id(n string) string { return strings.Repeat("0", 64-len(n)) + n }

// listen returns a listener on a unix socket. Its file stays when it is closed, as
// after a crash.
func listen(t *testing.T, path string) net.Listener {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) { //nolint:forbidigo // os.Remove wraps nothing
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	t.Cleanup(func() { l.Close() })
	return l
}

// docker is a fake of Docker's API: bodies by container id.
type docker struct {
	mu     sync.Mutex
	bodies map[string]string
}

func inspect(id, name string, labels map[string]string) string {
	b, err := json.Marshal(map[string]any{
		"Id": id, "Name": "/" + name, "Image": "sha256:0123", "State": map[string]any{"Pid": 42},
		"Config": map[string]any{"Image": "registry.example/" + name + ":1", "Labels": labels},
	})
	if err != nil {
		panic(err)
	}
	return string(b)
}

func (d *docker) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	id, found := strings.CutPrefix(r.URL.Path, "/containers/")
	id, found2 := strings.CutSuffix(id, "/json")
	d.mu.Lock()
	body := d.bodies[id]
	d.mu.Unlock()
	if r.Method != http.MethodGet || !found || !found2 || body == "" {
		http.Error(w, `{"message":"No such container: `+id+`"}`, http.StatusNotFound)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Write([]byte(body))
}

// serveHTTP serves until the test ends, or stop is called.
func serveHTTP(t *testing.T, path string, h http.Handler) (stop func()) {
	t.Helper()
	l := listen(t, path)
	server := &http.Server{Handler: h, ReadHeaderTimeout: waitTime}
	done := make(chan struct{})
	go func() {
		defer close(done)
		server.Serve(l)
	}()
	stop = func() {
		server.Close()
		<-done
	}
	t.Cleanup(stop)
	return stop
}

// criServer is a fake of a runtime's CRI service.
type criServer struct {
	cri.UnimplementedRuntimeServiceServer
	mu         sync.Mutex
	containers []*cri.Container
	statuses   map[string]*cri.ContainerStatusResponse
	sandboxes  map[string]*cri.PodSandboxStatus
	err        error
}

func (s *criServer) ListContainers(_ context.Context, r *cri.ListContainersRequest) (*cri.ListContainersResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return nil, s.err
	}
	m := &cri.ListContainersResponse{}
	for _, c := range s.containers {
		if strings.HasPrefix(c.GetId(), r.GetFilter().GetId()) {
			m.Containers = append(m.Containers, c)
		}
	}
	return m, nil
}

func (s *criServer) ContainerStatus(_ context.Context, r *cri.ContainerStatusRequest) (*cri.ContainerStatusResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.statuses[r.GetContainerId()]; c != nil {
		return c, nil
	}
	return nil, status.Error(codes.NotFound, "an error occurred when try to find container")
}

func (s *criServer) PodSandboxStatus(_ context.Context, r *cri.PodSandboxStatusRequest) (*cri.PodSandboxStatusResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.sandboxes[r.GetPodSandboxId()]; p != nil {
		return &cri.PodSandboxStatusResponse{Status: p}, nil
	}
	return nil, status.Error(codes.NotFound, "an error occurred when try to find sandbox")
}

func serveCRI(t *testing.T, path string, s cri.RuntimeServiceServer) (stop func()) {
	t.Helper()
	l := listen(t, path)
	server := grpc.NewServer(grpc.MaxSendMsgSize(64 << 20))
	if s != nil {
		cri.RegisterRuntimeServiceServer(server, s)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		server.Serve(l)
	}()
	stop = func() {
		server.Stop()
		<-done
	}
	t.Cleanup(stop)
	return stop
}

// serving returns a fake runtime with one container of one pod.
func serving() *criServer {
	return &criServer{
		containers: []*cri.Container{
			{Id: id("1") + "0", Metadata: &cri.ContainerMetadata{Name: "longer"}},
			{
				Id: id("1"), PodSandboxId: id("2"), Metadata: &cri.ContainerMetadata{Name: "server", Attempt: 3},
				Image:  &cri.ImageSpec{Image: "sha256:0123", UserSpecifiedImage: "registry.example/vllm:1"},
				Labels: map[string]string{labelContainer: "server", labelPod: "vllm-0", labelPodNamespace: "prod", labelPodUID: podUID},
			},
			{Id: id("1") + "1", Metadata: &cri.ContainerMetadata{Name: "longer"}},
		},
		statuses: map[string]*cri.ContainerStatusResponse{
			id("1") + "0": {Status: &cri.ContainerStatus{Image: &cri.ImageSpec{Image: "registry.example/longer:1"}}},
			id("1"):       {Info: map[string]string{"sandboxID": id("2"), "info": `{"sandboxID":"` + id("2") + `","pid":42,"runtimeSpec":{"linux":{}}}`}},
		},
		sandboxes: map[string]*cri.PodSandboxStatus{id("2"): {
			Id: id("2"), Metadata: &cri.PodSandboxMetadata{Name: "vllm-0", Namespace: "prod", Uid: podUID},
			Labels: map[string]string{labelPod: "vllm-0", labelPodNamespace: "prod", labelPodUID: podUID, "app": "vllm", "tier": "online"},
		}},
	}
}

const podUID = "1858680e-b044-4fd5-9dd4-f137e30e2180"

// inPod is the cgroup of a process in the container of serving.
var inPod = gpreempt.Cgroup{Runtime: "containerd", ContainerID: id("1"), PodUID: podUID}

// served is the container of serving.
func served() gpreempt.Container {
	return gpreempt.Container{
		Name: "server", Image: "registry.example/vllm:1", Namespace: "prod", Pod: "vllm-0",
		Labels:    map[string]string{labelContainer: "server", labelPod: "vllm-0", labelPodNamespace: "prod", labelPodUID: podUID},
		PodLabels: map[string]string{"app": "vllm", "tier": "online"},
	}
}

// clock is a time that stands still until the test moves it.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// running is a Resolver that runs until the test ends.
type running struct {
	*Resolver
	clock   *clock
	changed chan string
	// logged receives the message of each line of the log.
	logged chan string
}

func run(t *testing.T, cfg Config) *running {
	t.Helper()
	r := &running{clock: &clock{now: time.Unix(1_700_000_000, 0)}, changed: make(chan string, 1000), logged: make(chan string, 1000)}
	cfg.Now = r.clock.Now
	cfg.Changed = func(id string) { r.changed <- id }
	core := zapcore.NewCore(zapcore.NewJSONEncoder(zap.NewProductionEncoderConfig()), zapcore.AddSync(discard{}), zap.InfoLevel)
	cfg.Log = zap.New(core, zap.Hooks(func(e zapcore.Entry) error {
		r.logged <- e.Message
		return nil
	}))
	r.Resolver = New(cfg)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		wait(t, done, "Run to return")
	})
	return r
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// advance moves the clock and wakes the resolver.
func (r *running) advance(d time.Duration) {
	r.clock.mu.Lock()
	r.clock.now = r.clock.now.Add(d)
	r.clock.mu.Unlock()
	notify(r.wake)
}

// advanceUntil moves the clock until c has a value.
func (r *running) advanceUntil(t *testing.T, c <-chan string, what, want string) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for range int(waitTime / (10 * time.Millisecond)) {
		r.advance(retryLast)
		select {
		case got := <-c:
			if got != want {
				t.Fatalf("waiting for %s: got %v, want %v", what, got, want)
			}
			return
		case <-tick.C:
		}
	}
	t.Fatalf("waited %v for %s", waitTime, what)
}

// wait waits for a value, which must be one of want if there are any.
func wait[T comparable](t *testing.T, c <-chan T, what string, want ...T) {
	t.Helper()
	timer := time.NewTimer(waitTime)
	defer timer.Stop()
	select {
	case got := <-c:
		for _, w := range want {
			if got != w {
				t.Fatalf("waiting for %s: got %v, want %v", what, got, w)
			}
		}
	case <-timer.C:
		t.Fatalf("waited %v for %s", waitTime, what)
	}
}
