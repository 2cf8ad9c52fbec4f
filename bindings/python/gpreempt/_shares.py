"""Equal announcements that overlap share a lease of the daemon: the first announces, the last completes."""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, Optional, Tuple

from ._lease import Grant, Lease


class Pending:
    """An announcement that the daemon has not answered yet."""

    __slots__ = ("followers", "event", "done", "grant", "error")

    def __init__(self) -> None:
        self.followers = 0
        # event is set when done is; the first follower makes it.
        self.event: Any = None
        self.done = False
        self.grant: Optional[Grant] = None
        # error is why there is no grant; None if the one who announced was interrupted.
        self.error: Optional[Exception] = None


class Shares:
    """The leases of all threads of a client, or of one event loop, by their encoded announcements."""

    def __init__(self, event: Callable[[], Any]) -> None:
        """event makes a threading.Event or an asyncio.Event."""
        self._event = event
        self._lock = threading.Lock()  # guards all below, users of the grants, and the release of leases
        self._grants: Dict[bytes, Grant] = {}
        self._pending: Dict[bytes, Pending] = {}

    def join(self, announcement: bytes) -> Optional[Lease]:
        """Return a lease of a grant that lives, or None."""
        if announcement not in self._grants:
            return None
        with self._lock:
            grant = self._grants.get(announcement)
            if grant is None or not grant.live:
                return None
            grant.users += 1
        return Lease(grant=grant, shares=self)

    def enter(self, announcement: bytes) -> Tuple[Pending, bool]:
        """Return the pending announcement, and whether the caller is the one who has to announce, and then calls end.
        Others wait for event, and call follow."""
        with self._lock:
            pending = self._pending.get(announcement)
            if pending is None:
                pending = self._pending[announcement] = Pending()
                return pending, True
            pending.followers += 1
            if pending.event is None:
                pending.event = self._event()
            return pending, False

    def end(self, announcement: bytes, pending: Pending, grant: Optional[Grant], error: Optional[Exception] = None) -> None:
        """Note the outcome, and wake the followers."""
        with self._lock:
            del self._pending[announcement]
            pending.done, pending.grant, pending.error = True, grant, error
            if grant is not None:
                grant.users, grant.announcement = 1 + pending.followers, announcement
                self._grants[announcement] = grant
        if pending.event is not None:
            pending.event.set()

    def follow(self, pending: Pending) -> Optional[Lease]:
        """Return the lease of a follower: None if there is no grant, or the announcement has not been answered."""
        with self._lock:
            if not pending.done:
                pending.followers -= 1
                return None
        return None if pending.grant is None else Lease(grant=pending.grant, shares=self)

    def abandon(self, pending: Pending) -> None:
        """Do without the outcome, in a follower that was interrupted."""
        lease = self.follow(pending)
        if lease is not None:
            lease.release()

    def leave(self, lease: Lease) -> None:
        """Release a lease."""
        grant = lease._grant
        if grant is None or grant.link is None:  # the parent's; the lock was its as well
            lease._lost = lease._released = True
            return
        with self._lock:
            if lease._released:
                return
            lease._lost, lease._released = grant.lost, True
            grant.users -= 1
            if grant.users > 0:
                return
            if self._grants.get(grant.announcement) is grant:
                del self._grants[grant.announcement]
        grant.complete()
