"""A connection for the coroutines of one event loop."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any, Callable, Optional, Set

from . import _errors, _http2, _proto, _sync
from ._lease import Grant, renewal

_RENEW_BOUND = 1.0


class Connection:
    """A connection that the coroutines of one loop use, in its thread only. The daemon ends its leases with it."""

    def __init__(self, path: str) -> None:
        self._socket = _sync.connect(path)
        self._http2 = _http2.Connection()
        self._unsent = b""
        self._room: Set[asyncio.Future[None]] = set()
        self._timer: Optional[asyncio.TimerHandle] = None  # the next look at the leases, at _look_at
        self._look_at = 0.0
        self._renewing: Optional[asyncio.Task[None]] = None
        self.grants: Set[Grant] = set()
        self.broken: Optional[_errors.Error] = None
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._readable)

    def __del__(self) -> None:
        if hasattr(self, "_socket"):  # it connected
            self._socket.close()

    @property
    def usable(self) -> bool:
        """Reports whether a call may be tried."""
        return self.broken is None and not self._http2.full

    async def call(self, path: str, message: bytes, deadline: float) -> _http2.Call:
        """Return the ended call. A call without an answer by the deadline, of time.monotonic, ends with DEADLINE_EXCEEDED."""
        loop = asyncio.get_running_loop()
        while self.usable and not self._http2.has_room(len(message)) and time.monotonic() < deadline:
            await self._until(loop, deadline, self._room.add, self._room.discard)
        left = deadline - time.monotonic()
        if not self.usable or left <= 0:
            call = _http2.Call(0)
            if not self.usable:
                call.end(_http2.UNAVAILABLE, self.broken.message if self.broken else "gpreemptd closes the connection")
            else:
                call.end(_http2.DEADLINE_EXCEEDED, "")
            return call
        call = self._http2.open(path, message, max(1, int(left * 1000)))

        def wait(future: Optional[asyncio.Future[None]]) -> None:
            call.waiter = future

        try:
            self._flush(loop)
            if not call.done:
                await self._until(loop, deadline, wait, lambda _: wait(None))
        finally:
            if not call.done:
                self._http2.cancel(call)
                self._flush(loop)
                call.end(_http2.DEADLINE_EXCEEDED, "")
        return call

    async def _until(
        self, loop: asyncio.AbstractEventLoop, deadline: float, begin: Callable[[Any], None], end: Callable[[Any], None]
    ) -> None:
        """Wait for a future that begin publishes, or the deadline."""
        future: asyncio.Future[None] = loop.create_future()
        begin(future)
        timer = loop.call_later(max(0.0, deadline - time.monotonic()), _resolve, future)
        try:
            await future
        finally:
            timer.cancel()
            end(future)

    def post(self, path: str, message: bytes) -> None:
        """Send a call and do not wait for its answer."""
        if self.usable:
            self._http2.post(path, message, 1000)
            self._flush(None)

    def keep(self, grant: Grant) -> None:
        """Renew a lease in time."""
        if self._timer is not None and grant.renew_at < self._look_at:
            self._timer.cancel()
            self._timer = None
        if self._timer is None and (self._renewing is None or self._renewing.done()):
            self._schedule(grant.renew_at)

    def abandon(self) -> None:
        """Close the descriptor that a child has of its parent's connection. The connection stays open."""
        self._socket.close()
        self.broken = _errors.unavailable("the connection belongs to the parent process")

    def end(self, why: str) -> None:
        """Close the connection; the daemon ends its leases."""
        self._break(why)

    def _schedule(self, at: float) -> None:
        def begin() -> None:
            self._timer = None
            if self.broken is None and self.grants:
                self._renewing = asyncio.get_running_loop().create_task(self._renew())

        self._look_at = at
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at - time.monotonic()), begin)

    async def _renew(self) -> None:
        for grant in list(self.grants):
            now = time.monotonic()
            if not grant.held or grant.renew_at > now:
                continue
            if grant.expires <= now or not grant.renew:
                grant.lose()
                continue
            call = await self.call(_proto.RENEW, renewal(grant), min(grant.expires, now + _RENEW_BOUND))
            settle_renewal(grant, call, now)
        if self.grants and self.broken is None:
            self._schedule(min(grant.renew_at for grant in self.grants))

    def _readable(self) -> None:
        try:
            data = self._socket.recv(1 << 16)
            if not data:
                self._break("gpreemptd closed the connection")
                return
            for call in self._http2.feed(data):
                if call.waiter is not None:
                    _resolve(call.waiter)
        except BlockingIOError:
            return
        except (OSError, _http2.ProtocolError) as e:
            self._break(f"the connection to gpreemptd failed: {e}")
            return
        for future in self._room:
            _resolve(future)
        self._flush(None)

    def _flush(self, loop: Optional[asyncio.AbstractEventLoop]) -> None:
        if self.broken is not None:
            return
        data = self._unsent + self._http2.take()
        if not data:
            return
        try:
            sent = self._socket.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError as e:
            self._break(f"the connection to gpreemptd failed: {e}")
            return
        waiting = bool(self._unsent)
        self._unsent = data[sent:]
        if waiting != bool(self._unsent):
            loop = loop or asyncio.get_running_loop()
            if self._unsent:
                loop.add_writer(self._socket.fileno(), self._flush, None)
            else:
                loop.remove_writer(self._socket.fileno())

    def _break(self, why: str) -> None:
        if self.broken is not None:
            return
        self.broken = _errors.unavailable(why)
        try:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._socket.fileno())
            loop.remove_writer(self._socket.fileno())
        except RuntimeError:
            pass  # the loop has ended, and its registrations with it
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()
        for call in list(self._http2.calls.values()):
            call.end(_http2.UNAVAILABLE, why)
            if call.waiter is not None:
                _resolve(call.waiter)
        self._http2.calls.clear()
        for future in self._room:
            _resolve(future)
        for grant in list(self.grants):
            grant.lose()


def _resolve(future: Any) -> None:
    if not future.done():
        future.set_result(None)


def settle_renewal(grant: Grant, call: _http2.Call, begun: float) -> None:
    """Apply the answer to a Renew that was sent at begun."""
    if call.status == _http2.OK:
        grant.renewed(begun, _proto.duration(_proto.RenewResponse.FromString(call.message).ttl))
    elif isinstance(_errors.of_call(call), _errors.UnknownLease):
        grant.lose()
    else:
        grant.retry_renewal(time.monotonic())
