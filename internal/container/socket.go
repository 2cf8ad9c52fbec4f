package container

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/log"
)

const (
	// queryTimeout bounds a query of one socket for one container.
	queryTimeout = 2 * time.Second
	// maxAnswer bounds an answer, in bytes. Real ones have some kilobytes.
	maxAnswer = 1 << 20
	// maxHeader bounds the header of an answer, in bytes.
	maxHeader = 64 << 10
	// maxConns is the largest number of connections to a socket at a time.
	maxConns = 4
)

// errUnknown reports that the runtime does not know the container.
var errUnknown = errors.New("no such container")

// answerError is an unusable answer. The next one may be usable: one container may have
// too many labels, for example.
type answerError struct{ problem string }

func (e *answerError) Error() string { return e.problem }

// socket is where one runtime listens.
type socket struct {
	path string
	// runtime is the name of the runtime as in gpreempt.Cgroup, "" when the path does not
	// show it. cri: it uses the CRI.
	runtime string
	cri     bool
	log     *zap.Logger
	// dial connects, and talk makes a query over the connection: criTalk or dockerTalk.
	dial func(context.Context) (net.Conn, error)
	talk func(ctx context.Context, conn net.Conn, id string) (reported, error)
	// conns holds one token for each connection.
	conns chan struct{}

	mu       sync.Mutex // guards all below
	failures int
	rest     time.Time // no query before
	err      error     // of the last query, nil while it works
}

func newSocket(path string, log *zap.Logger) *socket {
	s := &socket{path: path, log: log, cri: true, talk: criTalk, conns: make(chan struct{}, maxConns)}
	s.dial = func(ctx context.Context) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
		if err != nil {
			return nil, err
		}
		if err := ofSystem(conn); err != nil {
			conn.Close()
			return nil, err
		}
		return conn, nil
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
	return s
}

// foreignError reports that another user listens at the socket: what that user says of a
// container is not evidence.
type foreignError struct{ uid uint32 }

func (e *foreignError) Error() string {
	return fmt.Sprintf("it is of user %d, who can say anything of a container: remove it, and match that user's containers by uid and user_unit", e.uid)
}

// ofSystem returns an error unless root, or the user of the daemon, listens at the other end.
func ofSystem(conn net.Conn) error {
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return err
	}
	var peer *syscall.Ucred
	var failed error
	if err := raw.Control(func(fd uintptr) {
		peer, failed = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	}); err != nil {
		return err
	}
	if failed == nil && peer.Uid != 0 && peer.Uid != uint32(os.Geteuid()) {
		failed = &foreignError{peer.Uid}
	}
	return failed
}

// rank returns the order of the queries for a container, 0 first: its own runtime before
// the others, and for a container of a pod the CRI first, which knows the pod.
func (s *socket) rank(e *entry) (rank int) {
	if s.runtime != "" && e.runtime != "" && s.runtime != e.runtime {
		rank += 2
	}
	if e.pod != "" && !s.cri {
		rank++
	}
	return rank
}

// maxRank is the highest rank.
const maxRank = 3

// query queries the sockets for a container, one rank after the other.
func (r *Resolver) query(ctx context.Context, e *entry) answer {
	worst := answer{state: noSocket}
	for rank := range maxRank + 1 {
		var peers []*socket
		for _, s := range r.sockets {
			if s.rank(e) == rank {
				peers = append(peers, s)
			}
		}
		a := queryAll(ctx, peers, e.key.id, r.cfg.Now)
		if a.state == isFound && e.ever && worst.state > isUnknown {
			// A better runtime does not answer at present: keep what it said.
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

// queryAll queries some sockets concurrently: it returns the first answer with the
// container, or the worst one.
func queryAll(ctx context.Context, peers []*socket, id string, now func() time.Time) answer {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	answers := make(chan answer, len(peers))
	for _, s := range peers {
		running.Go(func() { answers <- s.query(ctx, id, now) })
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

// query queries one socket for one container, unless it failed recently.
func (s *socket) query(ctx context.Context, id string, now func() time.Time) answer {
	select {
	case s.conns <- struct{}{}:
		defer func() { <-s.conns }()
	case <-ctx.Done():
		return answer{state: unreachable, err: ctx.Err()}
	}
	if err := s.resting(now()); err != nil {
		return failed(err)
	}
	limited, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	c, err := s.converse(limited, id)
	if ctx.Err() != nil {
		// Another socket has answered, or the daemon stops: this is not a failure.
		return answer{state: unreachable, err: ctx.Err()}
	}
	if err != nil && limited.Err() != nil {
		err = fmt.Errorf("no answer within %v", queryTimeout)
	}
	refusal, isRefusal := errors.AsType[*answerError](err)
	switch {
	case err == nil:
		s.note(now(), nil)
		return answer{state: isFound, reported: c}
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
	return failed(err)
}

// failed returns the answer for a socket that could not be queried.
func failed(err error) answer {
	if _, foreign := errors.AsType[*foreignError](err); foreign {
		return answer{state: noSocket} // for nothing waits for it
	}
	return answer{state: unreachable, err: err}
}

// converse connects and makes the query. It always returns soon after ctx ends.
func (s *socket) converse(ctx context.Context, id string) (reported, error) {
	conn, err := s.dial(ctx)
	if err != nil {
		return reported{}, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	return s.talk(ctx, conn, id)
}

// resting returns the last error while there must be no query, otherwise nil.
func (s *socket) resting(now time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now.Before(s.rest) {
		return s.err
	}
	return nil
}

// note stores the result of a query, and logs a change.
func (s *socket) note(now time.Time, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err != nil && s.err == nil:
		s.log.Warn("container runtime does not answer", log.Socket(s.path), log.Err(err))
	case err == nil && s.err != nil:
		s.log.Info("container runtime answers again", log.Socket(s.path))
	}
	if s.err = err; err == nil {
		s.failures, s.rest = 0, time.Time{}
		return
	}
	s.rest = now.Add(backOff(s.failures, retryLast))
	s.failures++
}
