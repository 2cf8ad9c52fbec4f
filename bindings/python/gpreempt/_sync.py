"""A connection for threads."""

from __future__ import annotations

import select
import socket
import threading
import time
from typing import TYPE_CHECKING, Callable, Optional, Set, Union

from . import _errors, _http2, _tls

if TYPE_CHECKING:
    from ._lease import Grant

# The longest wait of the reading thread, after which it sends what others could not send.
_TURN = 0.1
_CHUNK = 1 << 16


def connect(path: str) -> socket.socket:
    """Return a connected socket that does not block. On a unix socket a connect succeeds or fails at once."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.connect(path)
    except OSError as e:
        sock.close()
        raise _errors.of_connect(path, e) from e
    return sock


class Connection:
    """A connection that any number of threads use. The daemon ends its leases with it.

    No thread of its own reads: of the threads that wait for an answer, one reads for all.
    """

    def __init__(self, daemon: Union[str, _tls.Endpoint], within: float = 1.0) -> None:
        """Connect to a socket, or within some seconds to another host."""
        self._socket: Union[socket.socket, _tls.Stream] = connect(daemon) if isinstance(daemon, str) else daemon.connect(within)
        self._poll = select.poll()
        self._changed = threading.Condition()  # its lock guards all below, and is never held while waiting
        self._http2 = _http2.Connection()
        self._unsent = b""
        self._reading = False
        self.grants: Set[Grant] = set()
        # broken is why the connection has ended.
        self.broken: Optional[_errors.Error] = None

    @property
    def usable(self) -> bool:
        """Reports whether a call may be tried."""
        return self.broken is None and not self._http2.full

    def call(self, path: str, message: bytes, deadline: float) -> _http2.Call:
        """Return the ended call. A call without an answer by the deadline, of time.monotonic, ends with DEADLINE_EXCEEDED."""
        with self._changed:
            if not self._http2.has_room(len(message)):
                self._wait(lambda: self._http2.has_room(len(message)), deadline)
            left = deadline - time.monotonic()
            if self.broken is not None or self._http2.full or left <= 0 or not self._http2.has_room(len(message)):
                call = _http2.Call(0)
                if self.broken is not None or self._http2.full:
                    call.end(_http2.UNAVAILABLE, self.broken.message if self.broken else "gpreemptd closes the connection")
                else:
                    call.end(_http2.DEADLINE_EXCEEDED, "")
                return call
            call = self._http2.open(path, message, max(1, int(left * 1000)))
            try:
                self._flush()
                self._wait(lambda: call.done, deadline)
            finally:
                if not call.done:
                    self._http2.cancel(call)
                    self._flush()
                    call.end(_http2.DEADLINE_EXCEEDED, "")
            return call

    def post(self, path: str, message: bytes) -> None:
        """Send a call and do not wait for its answer."""
        with self._changed:
            if self.broken is None and not self._http2.full:
                self._http2.post(path, message, 1000)
                if self._http2.waiting and not self._reading:
                    self._read()  # answers that nobody has read make room
                self._flush()

    def service(self) -> None:
        """Answer the daemon's pings, and notice the end of the connection, while no call does."""
        with self._changed:
            if self.broken is None and not self._reading:
                self._read()
                self._flush()
                self._changed.notify_all()

    def end(self, why: str) -> None:
        """Close the connection; the daemon ends its leases."""
        with self._changed:
            self._break(why)

    def abandon(self) -> None:
        """Close the descriptor that a child has of its parent's connection. The connection stays open."""
        self._socket.close()
        self.broken = _errors.unavailable("the connection belongs to the parent process")

    def _wait(self, done: Callable[[], bool], deadline: float) -> None:
        """Wait until done, the deadline, or the end of the connection. The lock is held before and after."""
        while not done() and self.broken is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            if self._reading:
                self._changed.wait(left)
                continue
            self._reading = True
            events = select.POLLIN | (select.POLLOUT if self._unsent else 0)
            self._changed.release()
            try:
                self._poll.register(self._socket, events)
                # poll rounds up to a millisecond, so that this is not a busy loop.
                self._poll.poll(min(left, _TURN) * 1000)
            except (OSError, ValueError):
                pass  # the socket was closed meanwhile: _read notices it
            finally:
                self._changed.acquire()
                self._reading = False
            posted = self._http2.waiting
            self._read()
            if posted or self._unsent:  # acknowledgements wait for the next call, or for service: a system call less
                self._flush()
            self._changed.notify_all()

    def _read(self) -> None:
        try:
            while self.broken is None:
                data = self._socket.recv(_CHUNK)
                if not data:
                    self._break("gpreemptd closed the connection")
                    return
                self._http2.feed(data)
                if len(data) < _CHUNK:
                    return
        except BlockingIOError:
            pass
        except (OSError, _http2.ProtocolError) as e:
            self._break(f"the connection to gpreemptd failed: {e}")

    def _flush(self) -> None:
        if self.broken is not None:
            return
        data = self._http2.take()
        if self._unsent:
            data = self._unsent + data
        if not data:
            return
        try:
            sent = self._socket.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError as e:
            self._break(f"the connection to gpreemptd failed: {e}")
            return
        self._unsent = data[sent:]

    def _break(self, why: str) -> None:
        if self.broken is not None:
            return
        self.broken = _errors.unavailable(why)
        for call in list(self._http2.calls.values()):
            call.end(_http2.UNAVAILABLE, why)
        self._http2.calls.clear()
        try:
            # A child may have a copy of the descriptor.
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()
        grants, self.grants = self.grants, set()
        for grant in grants:
            grant.lose()
        self._changed.notify_all()
