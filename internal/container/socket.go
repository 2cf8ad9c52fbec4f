package container

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/logkey"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const (
	// askTimeout bounds what asking one socket about one container takes.
	askTimeout = 2 * time.Second
	// maxAnswer bounds an answer, in bytes. Real ones have some kilobytes.
	maxAnswer = 1 << 20
	// maxHeader bounds what comes before an answer, in bytes.
	maxHeader = 64 << 10
	// maxConns is how many connections to a socket there are at once.
	maxConns = 4
)

// errUnknown: the runtime has no such container.
var errUnknown = errors.New("no such container")

// answerError is an answer that cannot be used. It says nothing about the next
// one: a container can have more labels than there is room for.
type answerError struct{ problem string }

func (e *answerError) Error() string { return e.problem }

// socket is where one runtime listens.
type socket struct {
	path string
	// runtime is the runtime, as Cgroup has it, "" when the path does not tell; cri
	// tells that it speaks the CRI; user whose containers it has, 0 for the host's.
	runtime string
	cri     bool
	user    uint32
	log     *zap.Logger
	// dial connects, talk asks over a connection: of criTalk and dockerTalk one.
	dial func(context.Context) (net.Conn, error)
	talk func(ctx context.Context, conn net.Conn, id string) (gpreempt.Container, error)
	// conns holds one token for each connection.
	conns chan struct{}

	mu       sync.Mutex // guards all below
	failures int
	rest     time.Time // do not ask before
	err      error     // why it failed last, nil when it is well
}

func newSocket(path string, log *zap.Logger) *socket {
	s := &socket{path: path, log: log, cri: true, talk: criTalk, conns: make(chan struct{}, maxConns)}
	s.dial = func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}
	name := filepath.Base(path)
	if strings.HasPrefix(name, "docker") || strings.HasPrefix(name, "podman") {
		s.cri, s.talk = false, dockerTalk
	}
	for _, known := range [][2]string{{"docker", "docker"}, {"podman", "podman"}, {"crio", "cri-o"}, {"containerd", "containerd"}} {
		if s.runtime == "" && strings.Contains(name, known[0]) {
			s.runtime = known[1]
		}
	}
	if _, rest, found := strings.Cut(filepath.Clean(path), "/run/user/"); found {
		uid, _, _ := strings.Cut(rest, "/")
		if n, err := strconv.ParseUint(uid, 10, 32); err == nil {
			s.user = uint32(n)
		}
	}
	return s
}

// rank describes how late to ask the socket about a container, 0 first: its own
// runtime before the others, and about a pod's the CRI first, which knows the pod.
// ok is false for containers it must not be asked about.
func (s *socket) rank(e *entry) (rank int, ok bool) {
	if s.runtime != "" && e.runtime != "" && s.runtime != e.runtime {
		rank += 2
	}
	if e.pod != "" && !s.cri {
		rank++
	}
	return rank, s.user == e.key.user
}

// maxRank is the highest rank.
const maxRank = 3

// ask asks the sockets about a container, one rank after the other.
func (r *Resolver) ask(ctx context.Context, e *entry) answer {
	worst := answer{state: noSocket}
	for rank := range maxRank + 1 {
		var peers []*socket
		for _, s := range r.sockets {
			if n, ok := s.rank(e); ok && n == rank {
				peers = append(peers, s)
			}
		}
		a := askAll(ctx, peers, e.key.id, r.cfg.Now)
		if a.state == isFound && e.ever && worst.state > isUnknown {
			// Who knows less does not speak for a runtime that is away for a moment.
			return worst
		}
		if a.state == isFound {
			return a
		}
		if a.state > worst.state {
			worst = a
		}
	}
	return worst
}

// askAll asks all of some sockets at once: it returns the first that knows the
// container, or the worst there is to say.
func askAll(ctx context.Context, peers []*socket, id string, now func() time.Time) answer {
	ctx, cancel := context.WithCancel(ctx)
	var asked sync.WaitGroup
	defer asked.Wait()
	defer cancel()
	answers := make(chan answer, len(peers))
	for _, s := range peers {
		asked.Go(func() { answers <- s.ask(ctx, id, now) })
	}
	worst := answer{state: noSocket}
	for range peers {
		a := <-answers
		if a.state == isFound {
			return a
		}
		if a.state > worst.state {
			worst = a
		}
	}
	return worst
}

// ask asks one socket about one container, unless it failed a moment ago.
func (s *socket) ask(ctx context.Context, id string, now func() time.Time) answer {
	select {
	case s.conns <- struct{}{}:
		defer func() { <-s.conns }()
	case <-ctx.Done():
		return answer{state: unreachable, err: ctx.Err()}
	}
	if err := s.resting(now()); err != nil {
		return answer{state: unreachable, err: err}
	}
	limited, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	c, err := s.converse(limited, id)
	if ctx.Err() != nil {
		// Another has answered, or the daemon stops: this one is not to blame.
		return answer{state: unreachable, err: ctx.Err()}
	}
	if err != nil && limited.Err() != nil {
		err = fmt.Errorf("no answer within %v", askTimeout)
	}
	refusal, isRefusal := errors.AsType[*answerError](err)
	switch {
	case err == nil:
		s.note(now(), nil)
		return answer{state: isFound, container: c}
	case errors.Is(err, errUnknown):
		s.note(now(), nil)
		return answer{state: isUnknown}
	case errors.Is(err, fs.ErrNotExist):
		s.note(now(), nil)
		return answer{state: noSocket}
	case isRefusal:
		s.note(now(), nil)
		return answer{state: refused, err: fmt.Errorf("%s: %w", s.path, refusal)}
	}
	s.note(now(), err)
	return answer{state: unreachable, err: err}
}

// converse connects and asks. Whatever happens, it ends soon after ctx.
func (s *socket) converse(ctx context.Context, id string) (gpreempt.Container, error) {
	conn, err := s.dial(ctx)
	if err != nil {
		return gpreempt.Container{}, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	return s.talk(ctx, conn, id)
}

// resting returns why the socket is not to be asked now, nil when it is.
func (s *socket) resting(now time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now.Before(s.rest) {
		return s.err
	}
	return nil
}

// note keeps how asking went, and logs when that is new.
func (s *socket) note(now time.Time, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err != nil && s.err == nil:
		s.log.Warn("container runtime does not answer", logkey.Socket(s.path), logkey.Err(err))
	case err == nil && s.err != nil:
		s.log.Info("container runtime answers again", logkey.Socket(s.path))
	}
	if s.err = err; err == nil {
		s.failures, s.rest = 0, time.Time{}
		return
	}
	s.rest = now.Add(backOff(s.failures, retryLast))
	s.failures++
}
