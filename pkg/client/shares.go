package client

import (
	"context"
	"sync"
)

// shares has the announcements whose leases are shared while equal ones overlap: the first
// announces, and the last to be released completes.
type shares struct {
	mu  sync.Mutex // guards all below, users of each share, and left of each lease
	all map[string]*share
}

// share is an announcement and its outcome.
type share struct {
	key   string // "" when it is not shared
	users int    // leases that were not released, and calls that await the answer

	answered chan struct{} // closed when one of the others is set
	grant    *grant
	err      error
}

// share returns the share of key when it was answered. Where none lives it announces.
func (c *Client) share(ctx context.Context, key string, announce func() (*grant, error)) (*share, error) {
	s := &c.shares
	s.mu.Lock()
	sh := s.all[key]
	first := sh == nil || sh.grant != nil && !sh.grant.live()
	if first {
		sh = &share{key: key, answered: make(chan struct{})}
		if key != "" {
			s.all[key] = sh
		}
	}
	sh.users++
	s.mu.Unlock()
	if first {
		grant, err := announce()
		s.mu.Lock()
		sh.grant, sh.err = grant, err
		if err != nil && s.all[key] == sh {
			delete(s.all, key)
		}
		s.mu.Unlock()
		close(sh.answered)
	}
	select {
	case <-sh.answered:
		return sh, sh.err
	case <-ctx.Done():
		if s.leave(sh) && sh.grant != nil {
			c.spawn(func() { _ = sh.grant.complete(c.background) }) // else it ends with its TTL
		}
		return nil, ctx.Err()
	}
}

// leave reports whether nobody uses a share any more.
func (s *shares) leave(sh *share) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	sh.users--
	if sh.users == 0 && s.all[sh.key] == sh {
		delete(s.all, sh.key)
	}
	return sh.users == 0
}
