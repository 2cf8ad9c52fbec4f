package container

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// sockets are the usual sockets of the runtimes: containerd, CRI-O,
// cri-dockerd, the containerd of k3s and RKE2, of k0s and of MicroK8s; Docker and Podman.
var sockets = []string{
	"/run/containerd/containerd.sock",
	"/run/crio/crio.sock",
	"/run/cri-dockerd.sock",
	"/run/k3s/containerd/containerd.sock",
	"/run/k0s/containerd.sock",
	"/var/snap/microk8s/common/run/containerd.sock",
	"/run/docker.sock",
	"/run/podman/podman.sock",
}

// peer is a fake runtime in memory.
type peer struct {
	mu         sync.Mutex
	containers map[string]gpreempt.Container
	err        error // of connecting
	hangs      bool
	// connected counts the connections; open is how many are open, most their maximum.
	connected, open, most int
}

func (p *peer) dial(context.Context) (net.Conn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.connected++
	if p.err != nil {
		return nil, p.err
	}
	mine, theirs := net.Pipe()
	theirs.Close()
	return mine, nil
}

func (p *peer) talk(ctx context.Context, _ net.Conn, id string) (reported, error) {
	p.mu.Lock()
	p.open++
	p.most = max(p.most, p.open)
	c, found := p.containers[id]
	hangs := p.hangs
	p.mu.Unlock()
	if hangs {
		<-ctx.Done()
	} else {
		time.Sleep(time.Millisecond) // simulated: the time of a query
	}
	p.mu.Lock()
	p.open--
	p.mu.Unlock()
	switch {
	case ctx.Err() != nil:
		return reported{}, net.ErrClosed
	case !found:
		return reported{}, errUnknown
	}
	return reported{container: c, pid: unsaid}, nil
}

func (p *peer) set(change func(*peer)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change(p)
}

func (p *peer) connections() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.connected
}

// simulated runs a Resolver over fake runtimes, by path, in a bubble where time is
// simulated. The Resolver's second result lists the ids of Changed so far.
func simulated(t *testing.T, peers map[string]*peer, test func(r *Resolver, changed func() string)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var ids []string
		r := New(Config{Sockets: []string{}, Changed: func(id string) {
			mu.Lock()
			defer mu.Unlock()
			ids = append(ids, strings.TrimLeft(id, "0"))
		}})
		for _, path := range sockets {
			if p := peers[path]; p != nil {
				s := newSocket(path, r.cfg.Log)
				s.dial, s.talk = p.dial, p.talk
				r.sockets = append(r.sockets, s)
			}
		}
		if len(r.sockets) != len(peers) {
			t.Fatal("a peer has a path that is not among the default ones")
		}
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { r.Run(ctx) })
		defer running.Wait()
		defer cancel()
		test(r, func() string {
			mu.Lock()
			defer mu.Unlock()
			text := strings.Join(ids, " ")
			ids = nil
			return text
		})
	})
}

const (
	containerd = "/run/containerd/containerd.sock"
	dockerd    = "/run/docker.sock"
)

var inDocker = gpreempt.Cgroup{Path: "/docker/" + id("a"), Runtime: "docker", ContainerID: id("a")}

// pass advances simulated time, with a Lookup every minute if a cgroup is given.
func pass(r *Resolver, d time.Duration, g ...gpreempt.Cgroup) {
	for ; d > 0; d -= time.Minute {
		for _, g := range g {
			r.Lookup(g)
		}
		time.Sleep(min(d, time.Minute))
	}
	synctest.Wait()
}

func texts(warnings []gpreempt.Warning) string {
	text := ""
	for _, w := range warnings {
		text += w.Code + ": " + w.Text + "\n"
	}
	return text
}

func TestContainerIsUnknownThenKnown(t *testing.T) {
	p := &peer{}
	simulated(t, map[string]*peer{dockerd: p}, func(r *Resolver, changed func() string) {
		r.Lookup(inDocker)
		synctest.Wait()
		time.Sleep(2 * time.Second)
		if got := texts(r.Warnings()); got != "" {
			t.Errorf("warned of at once: %s", got)
		}
		pass(r, 5*time.Second)
		want := "CONTAINER_UNKNOWN: no container runtime knows container 000000000000\n"
		if got := texts(r.Warnings()); got != want {
			t.Errorf("warnings %q, want %q", got, want)
		}
		// Unknown containers are queried less and less.
		pass(r, 2*time.Hour, inDocker)
		if n := p.connections(); n < 24 || n > 40 {
			t.Errorf("queried %d times within 2 hours", n)
		}
		p.set(func(p *peer) { p.containers = map[string]gpreempt.Container{id("a"): {Name: "train"}} })
		pass(r, unknownLast, inDocker)
		if got := changed(); got != "a" {
			t.Errorf("changed: %q", got)
		}
		if c, known := r.Lookup(inDocker); !known || c.Name != "train" {
			t.Errorf("%+v, %v", c, known)
		}
		if got := texts(r.Warnings()); got != "" {
			t.Errorf("warnings %s", got)
		}
	})
}

func TestRemovedContainerKeepsItsName(t *testing.T) {
	p := &peer{containers: map[string]gpreempt.Container{id("a"): {Name: "train"}}}
	simulated(t, map[string]*peer{dockerd: p}, func(r *Resolver, changed func() string) {
		pass(r, time.Minute, inDocker)
		p.set(func(p *peer) { p.containers = nil })
		pass(r, time.Hour, inDocker)
		if c, known := r.Lookup(inDocker); !known || c.Name != "train" {
			t.Errorf("%+v, %v", c, known)
		}
		if got := changed(); got != "a" {
			t.Errorf("changed: %q", got)
		}
		if got := texts(r.Warnings()); got != "" {
			t.Errorf("warnings %s", got)
		}
	})
}

func TestChangedIsCalledForDifferencesOnly(t *testing.T) {
	p := &peer{containers: map[string]gpreempt.Container{id("a"): {Name: "train", Labels: map[string]string{"tier": "a"}}}}
	simulated(t, map[string]*peer{dockerd: p}, func(r *Resolver, changed func() string) {
		pass(r, 20*time.Minute, inDocker)
		if got, n := changed(), p.connections(); got != "a" || n < 9 || n > 11 {
			t.Errorf("changed: %q, queried %d times", got, n)
		}
		p.set(func(p *peer) {
			p.containers = map[string]gpreempt.Container{id("a"): {Name: "train", Labels: map[string]string{"tier": "b"}}}
		})
		pass(r, refreshEvery, inDocker)
		if got := changed(); got != "a" {
			t.Errorf("changed: %q", got)
		}
		want := gpreempt.Container{Name: "train", Labels: map[string]string{"tier": "b"}}
		c, _ := r.Lookup(inDocker)
		if diff := cmp.Diff(want, c); diff != "" {
			t.Errorf("container (-want +got):\n%s", diff)
		}
	})
}

func TestNumberOfContainersIsBounded(t *testing.T) {
	p := &peer{containers: map[string]gpreempt.Container{id("a"): {Name: "train"}}}
	simulated(t, map[string]*peer{dockerd: p}, func(r *Resolver, _ func() string) {
		pass(r, time.Second, inDocker)
		for i := range 10_000 {
			n := strconv.Itoa(i)
			p.set(func(p *peer) { p.containers[id(n)] = gpreempt.Container{Name: n} })
			r.Lookup(gpreempt.Cgroup{ContainerID: id(n), Runtime: "docker"})
			if i%100 == 0 {
				if _, known := r.Lookup(inDocker); !known {
					t.Fatalf("what is looked up all the time was forgotten after %d others", i)
				}
				time.Sleep(10 * time.Millisecond)
			}
		}
		pass(r, time.Minute, inDocker)
		r.mu.Lock()
		n := len(r.entries)
		r.mu.Unlock()
		if n > maxEntries {
			t.Errorf("%d containers are remembered", n)
		}
		if p.most > maxConns {
			t.Errorf("%d connections at once", p.most)
		}
		if c, known := r.Lookup(gpreempt.Cgroup{ContainerID: id("9999"), Runtime: "docker"}); !known || c.Name != "9999" {
			t.Errorf("the last: %+v, %v", c, known)
		}
	})
}

func TestContainersAreNotQueriedLongAfterTheLastLookup(t *testing.T) {
	p := &peer{containers: map[string]gpreempt.Container{id("a"): {Name: "train"}}}
	simulated(t, map[string]*peer{dockerd: p}, func(r *Resolver, changed func() string) {
		unknown := gpreempt.Cgroup{Runtime: "docker", ContainerID: id("b")}
		pass(r, time.Minute, inDocker, unknown)
		pass(r, idleAfter)
		n := p.connections()
		pass(r, 24*time.Hour)
		if more := p.connections() - n; more > 1 {
			t.Errorf("queried %d times more within a day", more)
		}
		r.mu.Lock()
		remembered := len(r.entries)
		r.mu.Unlock()
		if remembered != 1 {
			t.Errorf("%d are remembered", remembered)
		}
		if c, known := r.Lookup(inDocker); !known || c.Name != "train" {
			t.Errorf("what was known: %+v, %v", c, known)
		}
		changed()
		p.set(func(p *peer) { p.containers[id("a")] = gpreempt.Container{Name: "renamed"} })
		r.Lookup(inDocker)
		pass(r, time.Second)
		if got := changed(); got != "a" && got != "" {
			t.Errorf("changed: %q", got)
		}
		pass(r, refreshEvery)
		if c, _ := r.Lookup(inDocker); c.Name != "renamed" {
			t.Errorf("looked up again, it is %+v", c)
		}
	})
}

func TestSocketThatFailsIsQueriedLessOften(t *testing.T) {
	p := &peer{err: errors.New("connect: connection refused")}
	simulated(t, map[string]*peer{dockerd: p}, func(r *Resolver, _ func() string) {
		var many []gpreempt.Cgroup
		for i := range 100 {
			many = append(many, gpreempt.Cgroup{Runtime: "docker", ContainerID: id(strconv.Itoa(i))})
		}
		pass(r, time.Hour, many...)
		if n := p.connections(); n < 60 || n > 200 {
			t.Errorf("%d connections within an hour", n)
		}
		want := "CONTAINER_RUNTIME_UNREACHABLE: the container runtime at /run/docker.sock does not answer: connect: connection refused\n"
		if got := texts(r.Warnings()); got != want {
			t.Errorf("warnings %q, want %q", got, want)
		}
	})
}

func TestQueryOfASocketThatHangsTimesOut(t *testing.T) {
	hanging, well := &peer{hangs: true}, &peer{containers: map[string]gpreempt.Container{id("a"): {Name: "train"}}}
	simulated(t, map[string]*peer{dockerd: hanging, containerd: well}, func(r *Resolver, _ func() string) {
		start := time.Now()
		for i := range 200 {
			r.Lookup(gpreempt.Cgroup{Runtime: "docker", ContainerID: id(strconv.Itoa(i))})
		}
		time.Sleep(time.Millisecond)
		other := gpreempt.Cgroup{Runtime: "containerd", ContainerID: id("a")}
		for {
			if c, known := r.Lookup(other); known {
				if c.Name != "train" {
					t.Errorf("%+v", c)
				}
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		// 200 containers of a runtime that hangs come before this one.
		if took := time.Since(start); took > 2*queryTimeout {
			t.Errorf("the other runtime's container had no name for %v", took)
		}
		pass(r, time.Minute)
		want := "CONTAINER_RUNTIME_UNREACHABLE: the container runtime at /run/docker.sock does not answer: no answer within 2s\n"
		if got := texts(r.Warnings()); got != want {
			t.Errorf("warnings %q, want %q", got, want)
		}
		if hanging.most > maxConns {
			t.Errorf("%d connections at once", hanging.most)
		}
	})
}

func TestOneQueryAtATimeForAContainer(t *testing.T) {
	p := &peer{containers: map[string]gpreempt.Container{id("a"): {Name: "train"}}}
	simulated(t, map[string]*peer{dockerd: p}, func(r *Resolver, changed func() string) {
		var all sync.WaitGroup
		for range 100 {
			all.Go(func() { r.Lookup(inDocker) })
		}
		all.Wait()
		pass(r, time.Second)
		if got, n := changed(), p.connections(); got != "a" || n != 1 {
			t.Errorf("changed: %q, queried %d times", got, n)
		}
	})
}

// Docker's API knows the name of a pod's container, but not the pod's labels.
func TestAnswerOfABetterRuntimeStaysWhileItDoesNotAnswer(t *testing.T) {
	whole, part := gpreempt.Container{Name: "server", PodLabels: map[string]string{"tier": "online"}}, gpreempt.Container{Name: "server"}
	knows := &peer{containers: map[string]gpreempt.Container{id("1"): whole}}
	less := &peer{containers: map[string]gpreempt.Container{id("1"): part}}
	simulated(t, map[string]*peer{containerd: knows, dockerd: less}, func(r *Resolver, _ func() string) {
		pass(r, time.Minute, inPod)
		knows.set(func(p *peer) { p.err = errors.New("connect: connection refused") })
		pass(r, time.Hour, inPod)
		c, _ := r.Lookup(inPod)
		if diff := cmp.Diff(whole, c); diff != "" {
			t.Errorf("container (-want +got):\n%s", diff)
		}
	})
	// At first, a partial answer is used.
	knows = &peer{err: errors.New("connect: connection refused")}
	simulated(t, map[string]*peer{containerd: knows, dockerd: less}, func(r *Resolver, _ func() string) {
		pass(r, time.Minute, inPod)
		c, _ := r.Lookup(inPod)
		if diff := cmp.Diff(part, c); diff != "" {
			t.Errorf("container (-want +got):\n%s", diff)
		}
		knows.set(func(p *peer) { p.err, p.containers = nil, map[string]gpreempt.Container{id("1"): whole} })
		pass(r, 2*refreshEvery, inPod)
		c, _ = r.Lookup(inPod)
		if diff := cmp.Diff(whole, c); diff != "" {
			t.Errorf("container, once the runtime is back (-want +got):\n%s", diff)
		}
	})
}

func TestWarningsNameTheRemedy(t *testing.T) {
	absent := &fs.PathError{Op: "dial", Path: "x", Err: fs.ErrNotExist}
	tests := map[string]struct {
		peers map[string]*peer
		g     gpreempt.Cgroup
		want  string
	}{
		"no socket at all": {map[string]*peer{dockerd: {err: absent}}, inDocker, "make a symbolic link to its runtime"},
		"one of ctr's":     {map[string]*peer{containerd: {}}, gpreempt.Cgroup{Runtime: "containerd", ContainerID: "redis"}, "nerdctl and ctr"},
		"another's":        {map[string]*peer{dockerd: {}}, inDocker, "or match it by container id"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			simulated(t, test.peers, func(r *Resolver, _ func() string) {
				pass(r, time.Minute, test.g)
				warnings := r.Warnings()
				if len(warnings) != 1 || warnings[0].Code != gpreempt.WarnContainerUnknown.Code || !strings.Contains(warnings[0].Remedy, test.want) {
					t.Errorf("warnings %+v, want one with %q", warnings, test.want)
				}
			})
		})
	}
}

func TestResultOfLookupDoesNotChangeLater(t *testing.T) {
	p := &peer{containers: map[string]gpreempt.Container{id("a"): {Name: "train", Labels: map[string]string{"tier": "a"}}}}
	simulated(t, map[string]*peer{dockerd: p}, func(r *Resolver, _ func() string) {
		pass(r, time.Minute, inDocker)
		c, _ := r.Lookup(inDocker)
		labels := maps.Clone(c.Labels)
		p.set(func(p *peer) { p.containers[id("a")] = gpreempt.Container{Labels: map[string]string{"tier": "b"}} })
		pass(r, 2*refreshEvery, inDocker)
		if !maps.Equal(labels, c.Labels) {
			t.Errorf("%v became %v", labels, c.Labels)
		}
	})
}
