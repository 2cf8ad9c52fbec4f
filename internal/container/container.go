// Package container hides how the name, the image, the labels and the pod of a
// container are learned from the sockets of its runtime and from the kubelet.
//
// The peers are not trusted to be well: every answer is bounded in size and time,
// a peer that fails is left in peace for a while, and none of them is waited for
// where the others are asked. What is asked about is bounded too: a user can make
// up as many containers as there can be cgroups.
package container

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// DefaultSockets are where the runtimes listen if nobody moved them: containerd,
// CRI-O, cri-dockerd, the containerd of k3s and RKE2, of k0s and of MicroK8s;
// Docker and Podman.
var DefaultSockets = []string{
	"/run/containerd/containerd.sock",
	"/run/crio/crio.sock",
	"/run/cri-dockerd.sock",
	"/run/k3s/containerd/containerd.sock",
	"/run/k0s/containerd.sock",
	"/var/snap/microk8s/common/run/containerd.sock",
	"/run/docker.sock",
	"/run/podman/podman.sock",
}

const (
	// maxEntries is how many containers are remembered at most. Those with a process
	// on a GPU are far fewer; the rest is room for their predecessors.
	maxEntries = 512
	// maxAsking is how many containers are asked about at once.
	maxAsking = 16
	// refreshEvery is how old what is known of a container may get. Docker's rename
	// and new labels of a pod are all that changes.
	refreshEvery = 2 * time.Minute
	// idleAfter is how long a container is asked about that nobody looks up.
	idleAfter = 10 * time.Minute
	// retryFirst doubles up to retryLast, or to unknownLast where the answer was that
	// there is no such container.
	retryFirst  = time.Second
	retryLast   = 30 * time.Second
	unknownLast = 5 * time.Minute
)

// Config says where to ask.
type Config struct {
	// Sockets are the paths of unix sockets; none: no runtime is asked. Those whose
	// file name begins with docker or podman speak Docker's API, all others the
	// CRI. One below /run/user/UID is asked about that user's rootless containers,
	// and it alone is.
	Sockets []string
	// Kubelet is the address of the kubelet's API, such as https://127.0.0.1:10250,
	// or "": only it knows a pod's priority class and labels that were changed.
	// KubeletToken is a file with the token to show it, KubeletCA a file with the
	// certificates that vouch for it ("": the host's). Both are read again each time.
	Kubelet, KubeletToken, KubeletCA string
	// Changed is called, from several goroutines, when Lookup has something new to
	// say of a container. It must be set, and must not block.
	Changed func(containerID string)
	// Log gets a line when a socket or the kubelet fails and when it is well again;
	// nil means nobody reads it.
	Log *zap.Logger
	// Now is the clock; nil means time.Now. It is read from several goroutines.
	Now func() time.Time
}

// Resolver answers what is known of containers. Its methods may be called from
// several goroutines.
type Resolver struct {
	cfg     Config
	sockets []*socket
	// wake and wakeKubelet tell Run that there is something to look at.
	wake, wakeKubelet chan struct{}

	mu      sync.Mutex // guards all below
	entries map[key]*entry
	asking  int
	pods    podList
}

// New returns a Resolver that knows nothing: Run makes it ask.
func New(cfg Config) *Resolver {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	r := &Resolver{
		cfg: cfg, wake: make(chan struct{}, 1), wakeKubelet: make(chan struct{}, 1), entries: map[key]*entry{},
	}
	for _, path := range cfg.Sockets {
		r.sockets = append(r.sockets, newSocket(path, cfg.Log))
	}
	return r
}

// Lookup returns what is known of the container a process is in. It never blocks: at
// first nothing is known, and Changed is called once there is more. The maps are
// shared: they must not be changed.
//
// It is to be called again every few minutes while the process lives. What is not
// looked up for ten minutes is not asked about until then, and forgotten if nothing
// was known.
func (r *Resolver) Lookup(g gpreempt.Cgroup) (c gpreempt.Container, known bool) {
	if g.ContainerID == "" || len(r.sockets) == 0 && r.cfg.Kubelet == "" {
		return gpreempt.Container{}, false
	}
	now := r.cfg.Now()
	k := key{g.ContainerID, userOf(g.Path)}
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.entries[k]
	if e == nil {
		r.makeRoom()
		e = &entry{key: k, runtime: g.Runtime, since: now, due: now}
		if k.user == 0 { // a user can claim any pod too
			e.pod = g.PodUID
		}
		e.show(r.pods.facts)
		r.entries[k] = e
	}
	e.used = now
	if !e.busy && !e.due.After(now) {
		poke(r.wake)
		if e.pod != "" {
			poke(r.wakeKubelet)
		}
	}
	return e.shown, e.known()
}

// Run asks the sockets and the kubelet about the containers that are looked up,
// until ctx ends. It returns when no goroutine of its own is left.
func (r *Resolver) Run(ctx context.Context) {
	var work sync.WaitGroup
	defer work.Wait()
	if r.cfg.Kubelet != "" {
		work.Go(func() { r.runKubelet(ctx) })
	}
	if len(r.sockets) == 0 {
		return
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.wake:
		case <-timer.C:
		}
		due, next := r.takeDue()
		for _, e := range due {
			work.Go(func() {
				r.resolve(ctx, e)
				poke(r.wake)
			})
		}
		timer.Reset(next)
	}
}

// resolve asks about one container and keeps what it learns.
func (r *Resolver) resolve(ctx context.Context, e *entry) {
	answer := r.ask(ctx, e)
	now := r.cfg.Now()
	r.mu.Lock()
	r.asking--
	e.take(answer, now)
	changed := e.show(r.pods.facts) && r.entries[e.key] == e
	r.mu.Unlock()
	if changed && ctx.Err() == nil {
		r.cfg.Changed(e.key.id)
	}
}

// poke wakes who waits for c, now or later.
func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
