package container

import (
	"bufio"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// says serves bytes to each client after its first bytes.
func says(t *testing.T, path, text string) {
	t.Helper()
	l := listen(t, path)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			bufio.NewReader(conn).ReadString('\n')
			conn.Write([]byte(text))
			conn.Close()
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
	})
}

// asked queries one socket for the container 1.
func asked(t *testing.T, path string) (answer, *socket) {
	t.Helper()
	s := newSocket(path, zap.NewNop())
	return s.query(t.Context(), id("1"), time.Now), s
}

func okay(body string) string {
	return "HTTP/1.1 200 OK\r\nContent-Length: " + strconv.Itoa(len(body)) + "\r\n\r\n" + body
}

func TestAnswersOfDockersAPI(t *testing.T) {
	tests := map[string]struct {
		text string
		want answer
		// rests: the socket is not queried for a while.
		rests bool
	}{
		"a container": {okay(inspect(id("1"), "a", nil)), answer{state: isFound, reported: reported{pid: 42, container: gpreempt.Container{Name: "a", Image: "registry.example/a:1"}}}, false},
		"chunked": {
			"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + strconv.FormatInt(int64(len(inspect(id("1"), "a", nil))), 16) + "\r\n" +
				inspect(id("1"), "a", nil) + "\r\n0\r\n\r\n",
			answer{state: isFound, reported: reported{pid: 42, container: gpreempt.Container{Name: "a", Image: "registry.example/a:1"}}},
			false,
		},
		"the kubelet's, over cri-dockerd": {
			okay(inspect(id("1"), "k8s_server_vllm-0_prod_x_0", map[string]string{labelContainer: "server", labelPod: "vllm-0", labelPodNamespace: "prod"})),
			answer{state: isFound, reported: reported{pid: 42, container: gpreempt.Container{
				Name: "server", Image: "registry.example/k8s_server_vllm-0_prod_x_0:1", Namespace: "prod", Pod: "vllm-0",
				Labels: map[string]string{labelContainer: "server", labelPod: "vllm-0", labelPodNamespace: "prod"},
			}}},
			false,
		},
		"an image with an id only":  {okay(`{"Id":"` + id("1") + `","Name":"/a","Image":"sha256:0"}`), answer{state: isFound, reported: reported{pid: unsaid, container: gpreempt.Container{Name: "a", Image: "sha256:0"}}}, false},
		"another, whose name it is": {okay(inspect(id("2"), id("1"), nil)), answer{state: isUnknown}, false},
		"no such container":         {"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}", answer{state: isUnknown}, false},
		"an error":                  {"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n", answer{state: refused, err: &answerError{"HTTP status 500 Oops"}}, false},
		"not JSON":                  {okay("<html>"), answer{state: refused, err: &answerError{"the answer is not that of Docker's API: invalid character '<' looking for beginning of value"}}, false},
		"labels in a list": {
			okay(`{"Id":"x","Config":{"Labels":["a=b"]}}`),
			answer{state: refused, err: &answerError{"the answer is not that of Docker's API: json: cannot unmarshal array into Go struct field .Config.Labels of type map[string]string"}},
			false,
		},
		"a giant":          {okay(inspect(id("1"), strings.Repeat("x", 4<<20), nil)), answer{state: refused, err: &answerError{"the answer is larger than 1024 KiB"}}, false},
		"a giant header":   {"HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 4<<20), answer{state: refused, err: &answerError{"the answer is larger than 1024 KiB"}}, false},
		"half an answer":   {okay(inspect(id("1"), "a", nil))[:100], answer{state: unreachable}, true},
		"no HTTP":          {"SSH-2.0-OpenSSH\r\n", answer{state: unreachable}, true},
		"nothing whatever": {"", answer{state: unreachable}, true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(testutil.TempSocketDir(t), "docker.sock")
			says(t, path, test.text)
			got, s := asked(t, path)
			if refusal, ok := test.want.err.(*answerError); ok { //nolint:errorlint // the test made it
				test.want.err = &answerError{path + ": " + refusal.problem}
			}
			compare(t, got, test.want, s, test.rests)
		})
	}
}

// compare compares an answer, the text of its error if that is wanted, and whether
// the socket rests.
func compare(t *testing.T, got, want answer, s *socket, rests bool) {
	t.Helper()
	if got.state == unreachable && got.err != nil {
		got.err = nil // a text of the library
	}
	text := func(err error) string {
		if err == nil {
			return ""
		}
		return err.Error()
	}
	if diff := cmp.Diff(want.reported, got.reported, cmp.AllowUnexported(reported{})); diff != "" || got.state != want.state || text(got.err) != text(want.err) {
		t.Errorf("state %d, want %d; error %v, want %v; reported (-want +got):\n%s", got.state, want.state, got.err, want.err, diff)
	}
	if err := s.resting(time.Now()); (err != nil) != rests {
		t.Errorf("rests: %v, want %v", err, rests)
	}
}

func TestAnswersOfTheCRI(t *testing.T) {
	found := func(change func(*gpreempt.Container)) answer {
		c := served()
		change(&c)
		return answer{state: isFound, reported: reported{container: c, pid: 42, pod: podUID}}
	}
	tests := map[string]struct {
		change func(*criServer)
		want   answer
	}{
		"a container": {func(*criServer) {}, found(func(*gpreempt.Container) {})},
		"an image of an older kubelet": {
			func(s *criServer) {
				s.containers[1].Image = &cri.ImageSpec{Image: "sha256:0123"}
				s.statuses[id("1")].Status = &cri.ContainerStatus{Image: &cri.ImageSpec{Image: "registry.example/old:1"}}
			},
			found(func(c *gpreempt.Container) { c.Image = "registry.example/old:1" }),
		},
		"a sandbox that is gone": {
			func(s *criServer) { s.sandboxes = nil },
			found(func(c *gpreempt.Container) { c.PodLabels = nil }),
		},
		"without labels of the kubelet's": {
			func(s *criServer) { s.containers[1].Labels = nil },
			found(func(c *gpreempt.Container) { c.Labels = nil }),
		},
		"without its first process, as from cri-dockerd": {
			func(s *criServer) { s.statuses[id("1")].Info = nil },
			answer{state: isFound, reported: reported{container: served(), pid: unsaid, pod: podUID}},
		},
		"without a process": {
			func(s *criServer) { s.statuses[id("1")].Info["info"] = `{"pid":0}` },
			answer{state: isFound, reported: reported{container: served(), pid: 0, pod: podUID}},
		},
		"a status that is not JSON": {
			func(s *criServer) { s.statuses[id("1")].Info["info"] = "42" },
			answer{state: isFound, reported: reported{container: served(), pid: unsaid, pod: podUID}},
		},
		"no such container":        {func(s *criServer) { s.containers = s.containers[:1] }, answer{state: isUnknown}},
		"removed during the query": {func(s *criServer) { s.statuses = nil }, answer{state: isUnknown}},
		"the CRI is turned off":    {func(s *criServer) { s.err = status.Error(codes.Unimplemented, "unknown service") }, answer{state: isUnknown}},
		"it is not allowed":        {func(s *criServer) { s.err = status.Error(codes.PermissionDenied, "no") }, answer{state: refused, err: &answerError{"PermissionDenied: no"}}},
		"a giant":                  {func(s *criServer) { s.containers[1].Labels["a"] = strings.Repeat("x", 4<<20) }, answer{state: refused}},
		"the runtime shuts down":   {func(s *criServer) { s.err = status.Error(codes.Unavailable, "not ready") }, answer{state: unreachable}},
		"it times out on its own":  {func(s *criServer) { s.err = status.Error(codes.DeadlineExceeded, "slow") }, answer{state: unreachable}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(testutil.TempSocketDir(t), "crio.sock")
			s := serving()
			test.change(s)
			serveCRI(t, path, s)
			got, socket := asked(t, path)
			switch {
			case name == "a giant":
				if got.err == nil || !strings.Contains(got.err.Error(), "ResourceExhausted") {
					t.Errorf("error %v", got.err)
				}
				got.err = nil
			case test.want.err != nil:
				test.want.err = &answerError{path + ": " + test.want.err.Error()}
			}
			compare(t, got, test.want, socket, test.want.state == unreachable)
		})
	}
}

func TestSocketWithAnotherProtocol(t *testing.T) {
	path := filepath.Join(testutil.TempSocketDir(t), "containerd.sock")
	says(t, path, "HTTP/1.1 400 Bad Request\r\n\r\n")
	got, s := asked(t, path)
	compare(t, got, answer{state: unreachable}, s, true)

	path = filepath.Join(testutil.TempSocketDir(t), "containerd.sock")
	serveCRI(t, path, nil) // gRPC, but no CRI
	got, s = asked(t, path)
	compare(t, got, answer{state: isUnknown}, s, false)

	path = filepath.Join(testutil.TempSocketDir(t), "docker.sock")
	got, s = asked(t, path) // without a listener
	compare(t, got, answer{state: noSocket}, s, false)
}

// A connection that stays open would keep a runtime from stopping.
func TestConnectionsAreClosedAfterEachQuery(t *testing.T) {
	path := filepath.Join(testutil.TempSocketDir(t), "docker.sock")
	l := listen(t, path)
	closed := make(chan struct{})
	server := &http.Server{
		Handler: &docker{bodies: map[string]string{id("1"): inspect(id("1"), "a", nil)}}, ReadHeaderTimeout: waitTime,
		ConnState: func(_ net.Conn, s http.ConnState) {
			if s == http.StateClosed {
				close(closed)
			}
		},
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		server.Serve(l)
	}()
	t.Cleanup(func() {
		server.Close()
		<-done
	})
	if got, _ := asked(t, path); got.state != isFound {
		t.Fatalf("%+v", got)
	}
	wait(t, closed, "the connection to be closed")
}

func TestSocketsByTheirNames(t *testing.T) {
	type facts struct {
		Runtime string
		CRI     bool
	}
	for path, want := range map[string]facts{
		"/run/containerd/containerd.sock":              {"containerd", true},
		"/run/k3s/containerd/containerd.sock":          {"containerd", true},
		"/run/k0s/containerd.sock":                     {"containerd", true},
		"/run/crio/crio.sock":                          {"cri-o", true},
		"/run/cri-dockerd.sock":                        {"docker", true},
		"/run/docker.sock":                             {"docker", false},
		"/run/podman/podman.sock":                      {"podman", false},
		"/run/user/1000/../../containerd/runtime.sock": {"", true},
	} {
		s := newSocket(path, zap.NewNop())
		if diff := cmp.Diff(want, facts{s.runtime, s.cri}); diff != "" {
			t.Errorf("%s (-want +got):\n%s", path, diff)
		}
	}
}

func TestItsOwnRuntimeIsQueriedFirst(t *testing.T) {
	order := func(e *entry) string {
		text := ""
		for rank := range maxRank + 1 {
			for _, path := range sockets {
				if newSocket(path, nil).rank(e) == rank {
					text += strings.TrimSuffix(filepath.Base(path), ".sock") + " "
				}
			}
			text += "/ "
		}
		return text
	}
	for want, e := range map[string]*entry{
		"cri-dockerd docker / / containerd crio containerd containerd containerd podman / / ": {runtime: "docker"},
		"podman / / containerd crio cri-dockerd containerd containerd containerd docker / / ": {runtime: "podman"},
		"crio / / containerd cri-dockerd containerd containerd containerd / docker podman / ": {runtime: "cri-o", pod: podUID},
		"cri-dockerd / docker / containerd crio containerd containerd containerd / podman / ": {runtime: "docker", pod: podUID},
		"containerd crio cri-dockerd containerd containerd containerd / docker podman / / / ": {pod: podUID},
	} {
		if got := order(e); got != want {
			t.Errorf("%+v:\n%s, want\n%s", e, got, want)
		}
	}
}

func TestTextsAreBoundedAndValid(t *testing.T) {
	for _, test := range []struct {
		text string
		n    int
		want string
	}{
		{"abc", 3, "abc"}, {"abcd", 3, "abc"}, {"\xffab", 9, "\uFFFDab"}, {"ab\u00e9", 3, "ab"}, {"ab\xff", 3, "ab"}, {"", 3, ""},
	} {
		if got := cut(test.text, test.n); got != test.want {
			t.Errorf("cut(%q, %d) = %q, want %q", test.text, test.n, got, test.want)
		}
	}
	labels := map[string]string{}
	for i := range 1000 {
		labels["label"+strconv.Itoa(1000+i)] = strings.Repeat("\u00e9", maxText)
	}
	got := cleanLabels(labels, "label1001")
	if _, found := got["label1001"]; found || len(got) != maxLabels || len(got["label1000"]) != maxText || !utf8.ValidString(got["label1000"]) {
		t.Errorf("%d labels, %q", len(got), got["label1000"])
	}
	if _, found := got["label1064"]; !found {
		t.Error("the first by name are not the ones that are kept")
	}
	if got := cleanLabels(map[string]string{"a": "b"}, "a"); got != nil {
		t.Errorf("no labels are %v", got)
	}
}

func FuzzParseInspect(f *testing.F) {
	f.Add([]byte(inspect(id("1"), "train", map[string]string{"team": "nlp"})))
	f.Add([]byte(`{"Id":"` + id("1") + `","Config":{"Labels":{"a":null}}}`))
	f.Add([]byte(`{"Id":"` + id("1") + `","Name":"\ud800","Config":null}`))
	f.Add([]byte(`[[[`))
	f.Fuzz(func(t *testing.T, b []byte) {
		found, err := parseInspect(b, id("1"))
		if err != nil {
			if diff := cmp.Diff(reported{}, found, cmp.AllowUnexported(reported{})); diff != "" {
				t.Errorf("with error %v:\n%s", err, diff)
			}
			return
		}
		c := found.container
		for _, s := range []string{c.Name, c.Image, c.Namespace, c.Pod} {
			if len(s) > maxText || !utf8.ValidString(s) {
				t.Errorf("%q of %q", s, b)
			}
		}
		if len(c.Labels) > maxLabels {
			t.Errorf("%+v of %q", c, b)
		}
	})
}
