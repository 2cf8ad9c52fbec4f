"""The thread of a client: it renews leases, looks for a daemon that was away, and keeps sessions."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Optional, Set

from . import _aio, _http2, _proto, _sync
from ._lease import Grant, renewal

if TYPE_CHECKING:
    from ._client import Client
    from ._session import Session

_RENEW_BOUND = 1.0
# The pause between two probes of a daemon that does not answer: it doubles from the first to the second.
_PROBE_MIN, _PROBE_MAX = 0.1, 2.0
# How often an idle connection is read, and one that a session needs.
_IDLE, _SESSION = 5.0, 0.25


class Keeper:
    """The thread starts with the first lease, and ends with the client or the process."""

    def __init__(self, client: "Client") -> None:
        self._client = weakref.ref(client)
        self._changed = threading.Condition(threading.Lock())  # guards all below
        self._thread: Optional[threading.Thread] = None
        self._until = 0.0  # when the thread looks next
        self._stopped = False
        self._probe_at: Optional[float] = None
        self._pause = _PROBE_MIN
        self.sessions: Set["Session"] = set()

    def start(self) -> None:
        """Start the thread unless it runs."""
        if self._thread is not None:
            return
        with self._changed:
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._run, name="gpreempt", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:
                    self._thread = None  # the interpreter ends, or has no threads: leases end with their ttl

    def keep(self, grant: Grant) -> None:
        """Renew a lease in time."""
        self._wake(grant.renew_at)

    def probe(self) -> None:
        """Look for the daemon until it answers."""
        with self._changed:
            self._pause = _PROBE_MIN
            self._probe_at = time.monotonic() + self._pause
        self._wake(self._probe_at)

    def add(self, session: "Session") -> None:
        with self._changed:
            self.sessions.add(session)
        self._wake(time.monotonic())

    def remove(self, session: "Session") -> None:
        with self._changed:
            self.sessions.discard(session)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _wake(self, at: float) -> None:
        self.start()
        if at < self._until:  # an earlier reading of it only wakes the thread without need
            with self._changed:
                self._until = min(self._until, at)  # also for a thread that does not wait now
                self._changed.notify_all()

    def _run(self) -> None:
        at = time.monotonic()
        while True:
            with self._changed:
                if self._stopped:
                    return
                self._until = min(self._until, at)
                while not self._stopped and (left := self._until - time.monotonic()) > 0:
                    self._changed.wait(left)
                # Whatever is announced from here on is in the next look, or sets when the one after it is.
                self._until = float("inf")
                if self._stopped:
                    return
            client = self._client()
            if client is None:
                return
            at = self._work(client)
            del client

    def _work(self, client: "Client") -> float:
        """Do what is due and return when to look again."""
        now = time.monotonic()
        with self._changed:
            probe_at, sessions = self._probe_at, list(self.sessions)
        if probe_at is not None and probe_at <= now:
            found = client._probe()
            self._pause = min(2 * self._pause, _PROBE_MAX)
            probe_at = None if found else max(now + self._pause, time.monotonic())
            with self._changed:
                self._probe_at = probe_at
            if found:
                client._found()  # last: from here on the next failure asks for another probe
        connection = client._connection
        if connection is not None and connection.broken is None:
            connection.service()
            self._renew(connection)
        for session in sessions:
            session._restore()
        connection = client._connection  # a session may have connected
        now = time.monotonic()
        at = now + (_SESSION if sessions else _IDLE)
        if connection is not None:
            at = min([at, *(grant.renew_at for grant in list(connection.grants))])
        return at if probe_at is None else min(at, probe_at)

    def _renew(self, connection: _sync.Connection) -> None:
        for grant in list(connection.grants):
            now = time.monotonic()
            if not grant.held or grant.renew_at > now:
                continue
            if grant.expires <= now or not grant.renew:
                grant.lose()
                continue
            call = connection.call(_proto.RENEW, renewal(grant), min(grant.expires, now + _RENEW_BOUND))
            _aio.settle_renewal(grant, call, now)
            if call.status == _http2.DEADLINE_EXCEEDED:
                return  # the others would wait as long: the next look tries them
