package container

import (
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// lookup compares what is known of a container now.
func (r *running) lookup(t *testing.T, g gpreempt.Cgroup, want gpreempt.Container, wantKnown bool) {
	t.Helper()
	c, known := r.Lookup(g)
	if diff := cmp.Diff(want, c); diff != "" || known != wantKnown {
		t.Errorf("known is %v, want %v; container (-want +got):\n%s", known, wantKnown, diff)
	}
}

func TestNameAppearsOverDockersAPI(t *testing.T) {
	path := filepath.Join(testutil.TempSocketDir(t), "docker.sock")
	serveHTTP(t, path, &docker{bodies: map[string]string{id("a"): inspect(id("a"), "train", map[string]string{"team": "nlp"})}})
	r := run(t, Config{Sockets: []string{path}})
	g := gpreempt.Cgroup{Runtime: "docker", ContainerID: id("a")}
	r.lookup(t, g, gpreempt.Container{}, false)
	wait(t, r.changed, "the name", id("a"))
	r.lookup(t, g, gpreempt.Container{Name: "train", Image: "registry.example/train:1", Labels: map[string]string{"team": "nlp"}}, true)
	if warnings := r.Warnings(); warnings != nil {
		t.Errorf("warnings %+v", warnings)
	}
}

func TestPodLabelsAreThoseOfTheSandbox(t *testing.T) {
	path := filepath.Join(testutil.TempSocketDir(t), "containerd.sock")
	serveCRI(t, path, serving())
	r := run(t, Config{Sockets: []string{path}})
	r.lookup(t, inPod, gpreempt.Container{}, false)
	wait(t, r.changed, "the pod", id("1"))
	r.lookup(t, inPod, served(), true)
}

func TestSocketThatHangsDoesNotDelayOthers(t *testing.T) {
	dir := testutil.TempSocketDir(t)
	hanging, well := filepath.Join(dir, "docker.sock"), filepath.Join(dir, "containerd.sock")
	l := listen(t, hanging)
	serveCRI(t, well, serving())
	r := run(t, Config{Sockets: []string{hanging, well}})
	r.Lookup(gpreempt.Cgroup{Runtime: "docker", ContainerID: id("a")})
	conn, err := l.Accept() // of a query, which gets no answer
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	r.Lookup(inPod)
	wait(t, r.changed, "the pod", id("1"))
	// The path of this one does not show the runtime: both are queried at once.
	r.Lookup(gpreempt.Cgroup{ContainerID: id("1") + "0"})
	wait(t, r.changed, "the other", id("1")+"0")
}

func TestRuntimeThatRestartsIsQueriedAgain(t *testing.T) {
	for name, serve := range map[string]func(*testing.T, string) func(){
		"docker.sock": func(t *testing.T, path string) func() {
			t.Helper()
			return serveHTTP(t, path, &docker{bodies: map[string]string{id("1"): inspect(id("1"), "train", nil)}})
		},
		"containerd.sock": func(t *testing.T, path string) func() {
			t.Helper()
			return serveCRI(t, path, serving())
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(testutil.TempSocketDir(t), name)
			serve(t, path)() // and ends
			r := run(t, Config{Sockets: []string{path}})
			g := gpreempt.Cgroup{ContainerID: id("1")}
			r.Lookup(g)
			wait(t, r.logged, "the warning", "container runtime does not answer")
			serve(t, path)
			r.advanceUntil(t, r.logged, "the good news", "container runtime answers again")
			wait(t, r.changed, "the name", id("1"))
			if _, known := r.Lookup(g); !known {
				t.Error("nothing is known")
			}
			if warnings := r.Warnings(); warnings != nil {
				t.Errorf("warnings %+v", warnings)
			}
		})
	}
}

// A program that listens at a socket can say anything of the containers of others.
func TestSocketOfAUserIsNotQueried(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can listen as another user")
	}
	dir := testutil.TempSocketDir(t)
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	users, system := filepath.Join(dir, "podman.sock"), filepath.Join(dir, "docker.sock")
	serve := func(path, name string) {
		serveHTTP(t, path, &docker{bodies: map[string]string{id("a"): inspect(id("a"), name, nil)}})
	}
	asUser(t, 65534, func() { serve(users, "the-users") })
	serve(system, "the-hosts")
	r := run(t, Config{Sockets: []string{users, system}})
	g := gpreempt.Cgroup{ContainerID: id("a")}
	r.Lookup(g)
	wait(t, r.changed, "the host's", id("a"))
	r.lookup(t, g, gpreempt.Container{Name: "the-hosts", Image: "registry.example/the-hosts:1"}, true)
	// The host's answer may end the query of the other one: this one is known to that only.
	r.Lookup(gpreempt.Cgroup{ContainerID: id("b")})
	wait(t, r.logged, "the warning", "container runtime does not answer")
	want := []gpreempt.Warning{gpreempt.WarnContainerRuntime.Warn("the container runtime at " + users + " is not queried: it is of user 65534, who can say anything of a container: " +
		"remove it, and match that user's containers by uid and user_unit")}
	if diff := cmp.Diff(want, r.Warnings()); diff != "" {
		t.Errorf("warnings (-want +got):\n%s", diff)
	}
}

// asUser calls f on a thread of a user, which the kernel then forgets.
func asUser(t *testing.T, uid int, f func()) {
	t.Helper()
	done := make(chan syscall.Errno)
	go func() {
		runtime.LockOSThread()                                                                         // and never unlocked: the thread ends with the goroutine
		_, _, err := syscall.RawSyscall(syscall.SYS_SETRESUID, ^uintptr(0), uintptr(uid), ^uintptr(0)) //nolint:forbidigo // of this thread alone, which is locked
		if err == 0 {
			f()
		}
		done <- err
	}()
	if err := <-done; err != 0 {
		t.Fatal(err)
	}
}

func TestContainerIsComparedWithTheRuntimesAnswer(t *testing.T) {
	const path, pod = "/kubepods/pod" + podUID + "/x", podUID
	claimed := gpreempt.Cgroup{Path: path, ContainerID: id("1"), ContainerPath: path, PodUID: pod}
	elsewhere := claimed
	elsewhere.Path, elsewhere.ContainerPath = "/docker/x", "/docker/x"
	other := claimed
	other.ContainerID = id("2")
	found := gpreempt.Container{Name: "server"}
	conflict := func(text string) gpreempt.Container {
		return gpreempt.Container{Conflict: "container 000000000000, and by its runtime that of " + text}
	}
	for name, test := range map[string]struct {
		answer reported
		at     gpreempt.Cgroup
		err    error
		want   answer
	}{
		"the same":                    {reported{container: found, pid: 42, pod: pod}, claimed, nil, answer{state: isFound, reported: reported{container: found, pid: 42, pod: pod}}},
		"a runtime without pods":      {reported{container: found, pid: 42}, claimed, nil, answer{state: isFound, reported: reported{container: found, pid: 42}}},
		"a runtime without processes": {reported{container: found, pid: unsaid, pod: pod}, elsewhere, nil, answer{state: isFound, reported: reported{container: found, pid: unsaid, pod: pod}}},
		"another cgroup":              {reported{container: found, pid: 42, pod: pod}, elsewhere, nil, answer{state: isFound, reported: reported{container: conflict("process 42 in /docker/x")}}},
		"another container":           {reported{container: found, pid: 42, pod: pod}, other, nil, answer{state: isFound, reported: reported{container: conflict("process 42 in " + path)}}},
		"no container":                {reported{container: found, pid: 42}, gpreempt.Cgroup{Path: "/"}, nil, answer{state: isFound, reported: reported{container: conflict("process 42 in /")}}},
		"another pod":                 {reported{container: found, pid: 42, pod: "x"}, claimed, nil, answer{state: isFound, reported: reported{container: conflict("pod x, not " + pod)}}},
		"the process has exited":      {reported{container: found, pid: 42}, claimed, fs.ErrNotExist, answer{state: isUnknown}},
		"it has no process":           {reported{container: found, pid: 0}, claimed, nil, answer{state: isUnknown}},
	} {
		e := &entry{key: key{claimed.ContainerID, claimed.ContainerPath}, pod: claimed.PodUID}
		got := e.check(answer{state: isFound, reported: test.answer}, func(pid int32) (gpreempt.Cgroup, error) {
			if pid != test.answer.pid {
				t.Errorf("%s: looked at process %d", name, pid)
			}
			return test.at, test.err
		})
		if (got.err == nil) != (test.want.container.Conflict == "") {
			t.Errorf("%s: error %v", name, got.err)
		}
		got.err = nil
		if diff := cmp.Diff(test.want, got, cmp.AllowUnexported(answer{}, reported{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// A process that claims the id of a container elsewhere has none of its facts, and does not
// take them from the container.
func TestFalseContainerIsRefusedAndSaid(t *testing.T) {
	path := filepath.Join(testutil.TempSocketDir(t), "docker.sock")
	serveHTTP(t, path, &docker{bodies: map[string]string{id("a"): inspect(id("a"), "server", nil)}})
	at := gpreempt.Cgroup{Path: "/docker/" + id("a"), ContainerID: id("a"), ContainerPath: "/docker/" + id("a")}
	r := run(t, Config{Sockets: []string{path}, Cgroup: func(int32) (gpreempt.Cgroup, error) { return at, nil }})
	claim := gpreempt.Cgroup{Path: "/batch/docker/" + id("a"), ContainerID: id("a"), ContainerPath: "/batch/docker/" + id("a")}
	r.Lookup(at)
	wait(t, r.changed, "the name", id("a"))
	r.Lookup(claim)
	wait(t, r.changed, "the conflict", id("a"))
	const text = "container 000000000000, and by its runtime that of process 42 in /docker/"
	r.lookup(t, at, gpreempt.Container{Name: "server", Image: "registry.example/server:1"}, true)
	r.lookup(t, claim, gpreempt.Container{Conflict: text + id("a")}, true)
	want := []gpreempt.Warning{gpreempt.WarnContainerAnswer.Warn("the answer of a runtime for container 000000000000 is refused: " + text + id("a"))}
	if diff := cmp.Diff(want, r.Warnings()); diff != "" {
		t.Errorf("warnings (-want +got):\n%s", diff)
	}
}

func TestRunEndsWhileEverythingHangs(t *testing.T) {
	dir := testutil.TempSocketDir(t)
	var sockets []string
	var hanging []net.Listener
	for _, name := range []string{"docker.sock", "containerd.sock", "crio.sock"} {
		sockets = append(sockets, filepath.Join(dir, name))
		hanging = append(hanging, listen(t, sockets[len(sockets)-1]))
	}
	r := run(t, Config{Sockets: sockets})
	r.Lookup(gpreempt.Cgroup{ContainerID: id("a")})
	for _, l := range hanging {
		conn, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	// The end of the test ends Run, and waits for it.
}

func TestHostWithoutContainersHasNoWarnings(t *testing.T) {
	dir := testutil.TempSocketDir(t)
	listen(t, filepath.Join(dir, "docker.sock")).Close() // without a listener
	r := run(t, Config{Sockets: []string{filepath.Join(dir, "docker.sock"), filepath.Join(dir, "none.sock")}})
	r.lookup(t, gpreempt.Cgroup{Path: "/system.slice/train.service", Unit: "train.service"}, gpreempt.Container{}, false)
	if warnings := r.Warnings(); warnings != nil {
		t.Errorf("warnings %+v", warnings)
	}
}
