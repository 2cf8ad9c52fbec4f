package container

import (
	"net"
	"path/filepath"
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

// A user can choose the name of a cgroup and the answers of a socket: neither affects
// the containers of others.
func TestRootlessContainersComeFromTheirUsersSocketOnly(t *testing.T) {
	dir := testutil.TempSocketDir(t)
	system, users := filepath.Join(dir, "docker.sock"), filepath.Join(dir, "run/user/1000/docker.sock")
	serveHTTP(t, system, &docker{bodies: map[string]string{id("a"): inspect(id("a"), "the-hosts", nil)}})
	serveHTTP(t, users, &docker{bodies: map[string]string{
		id("a"): inspect(id("a"), "the-users", nil), id("b"): inspect(id("b"), "not-the-users", nil),
	}})
	r := run(t, Config{Sockets: []string{users, system}})
	unknown := gpreempt.Cgroup{ContainerID: id("b")}
	hosts, user := gpreempt.Cgroup{Path: "/docker/" + id("a"), Runtime: "docker", ContainerID: id("a")}, gpreempt.Cgroup{
		Path: "/user.slice/user-1000.slice/user@1000.service/user.slice/docker-" + id("a") + ".scope", Runtime: "docker", ContainerID: id("a"), PodUID: podUID,
	}
	r.Lookup(unknown)
	r.Lookup(hosts)
	wait(t, r.changed, "the host's", id("a"))
	r.Lookup(user)
	wait(t, r.changed, "the user's", id("a"))
	r.lookup(t, hosts, gpreempt.Container{Name: "the-hosts", Image: "registry.example/the-hosts:1"}, true)
	r.lookup(t, user, gpreempt.Container{Name: "the-users", Image: "registry.example/the-users:1"}, true)
	r.lookup(t, unknown, gpreempt.Container{}, false)
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
