"""The client of one daemon."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
import weakref
from typing import Callable, Dict, List, Optional, Protocol, Set, TypeVar, Union

from . import _aio, _errors, _gpus, _http2, _keeper, _proto, _sync, _tls
from ._lease import Grant, Lease
from ._request import Request
from ._shares import Pending, Shares

DEFAULT_SOCKET = "/run/gpreempt/gpreemptd.sock"
# The longest wait for the answer to a call other than NotifyOnline.
_CALL_BOUND = 1.0
# How long no announcement may have been refused before protection counts as back: under
# overload some are refused and some are not.
_SETTLE = 1.0
# The most requests of which it is remembered that the daemon refused them.
_MAX_REFUSED = 64

log = logging.getLogger("gpreempt")
_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


class _Releasable(Protocol):
    def release(self) -> None: ...


L = TypeVar("L", bound=_Releasable)


async def run_in_thread(acquire: Callable[[], L]) -> L:
    """Return what acquire returns in a thread. If the caller is cancelled meanwhile, it is released."""
    future = asyncio.get_running_loop().run_in_executor(None, acquire)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:

        def undo(done: "asyncio.Future[L]") -> None:
            if not done.cancelled() and done.exception() is None:
                done.result().release()

        future.add_done_callback(undo)
        raise


def _log_protection(error: Optional[_errors.Error]) -> None:
    if error is not None:
        log.warning("inference runs unprotected: %s", error)
    else:
        log.info("inference is protected again")


class _Unprotected:
    """Work that runs unprotected: all, or that of one request."""

    def __init__(self) -> None:
        self.reasons: Set[str] = set()
        self.at = 0.0  # when it was last refused


class Client:
    """A client of the daemon of this host, or of another, for all threads and event loops of a process.

    It connects when an announcement first needs it, and again after an outage. A child that
    was forked connects itself; leases of its parent stay the parent's.

    socket is the daemon's socket; None means $GPREEMPT_SOCKET, or the default. A daemon on another host is
    "tcp://HOST:PORT", with certificate: the PEM files of the client's certificate and key, and of the authorities of the
    daemon's. Its GPUs are named
    by their PCI addresses, node, gpu_id or render, or are gpreempt.ALL. on_unprotected is
    called with the error when work begins to run unprotected, once for all that a daemon's absence concerns and
    once for each request that it refuses, and with None when all is protected again, instead of a line through
    logging. It must return soon and must not use the client.
    """

    def __init__(
        self,
        socket: "Union[str, os.PathLike[str], None]" = None,
        *,
        certificate: Optional[_tls.Files] = None,
        on_unprotected: Optional[Callable[[Optional[_errors.Error]], None]] = None,
    ) -> None:
        if socket is not None and not isinstance(socket, (str, os.PathLike)):
            raise TypeError(f'socket is {socket!r}: use the path of the daemon\'s socket, or "tcp://HOST:PORT"')
        path = os.fspath(socket or os.environ.get("GPREEMPT_SOCKET") or DEFAULT_SOCKET)
        if path.startswith("unix:"):
            path = "/" + path[len("unix:") :].lstrip("/")
        remote = path.startswith("tcp://")
        if not remote and (not path.startswith("/") or os.path.isdir(path)):
            raise ValueError(f"invalid address {path!r} of gpreemptd: use the absolute path of its socket, or tcp://HOST:PORT")
        if remote and certificate is None:
            raise ValueError(f"{path} needs a certificate: use Client({path!r}, certificate=(certificate, key, authorities)), three PEM files")
        if not remote and certificate is not None:
            raise ValueError(f"{path} is a socket of this host: use no certificate, or tcp://HOST:PORT")
        self.socket = path
        self._daemon: Union[str, _tls.Endpoint] = _tls.Endpoint(path, certificate) if certificate is not None else path
        self._report = on_unprotected or _log_protection
        self._reset()
        _clients.add(self)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards the connection of threads and the state of protection
        self._connection: Optional[_sync.Connection] = None
        self._loops: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _aio.Connection]" = weakref.WeakKeyDictionary()
        self._gpus: Optional[List[_gpus.Node]] = None
        self._closed = False
        # unavailable is why the daemon is known to be unavailable; announcements do not wait then.
        self.unavailable: Optional[_errors.Error] = None
        # What runs unprotected: "" is all, others are the texts of requests.
        self._unprotected: Dict[str, _Unprotected] = {}
        self._shares = Shares(threading.Event)
        self._loop_shares: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Shares]" = weakref.WeakKeyDictionary()
        self._keeper = _keeper.Keeper(self)

    def _after_fork(self) -> None:
        """Leave everything to the parent. It runs in a child, where only one thread exists."""
        connections: List[Union[_sync.Connection, _aio.Connection]] = list(self._loops.values())
        if self._connection is not None:
            connections.append(self._connection)
        for connection in connections:
            for grant in list(connection.grants):
                grant.forget()
            connection.grants.clear()
            connection.abandon()
        closed, sessions = self._closed, self._keeper.sessions
        self._reset()
        self._closed = closed
        for session in sessions:
            session._forget()

    def close(self) -> None:
        """End the connections, and with them every lease of the client."""
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
        self._keeper.stop()
        if connection is not None:
            connection.end("the client was closed")
        for other in list(self._loops.values()):
            other.end("the client was closed")

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"gpreempt.Client({self.socket!r})"

    def acquire(self, request: Request, *, strict: bool = False) -> Lease:
        """Announce work and return a lease when the GPUs are quiet or max_wait has passed.

        It waits for max_wait and a tenth of a second, and not at all while the daemon is known to be
        unavailable, or while an equal announcement of another thread holds a lease: that is shared. It does not
        raise an error of the daemon unless strict: the lease is unprotected then.
        """
        if self._pid != os.getpid():
            self._after_fork()
        try:
            return self._acquire(request)
        except Exception as e:
            return self._failed(e, request, strict)

    async def acquire_async(self, request: Request, *, strict: bool = False) -> Lease:
        """Do what acquire does, in the running event loop; for another host in a thread."""
        if not isinstance(self._daemon, str):
            return self.join(request) or await run_in_thread(lambda: self.acquire(request, strict=strict))
        if self._pid != os.getpid():
            self._after_fork()
        try:
            return await self._acquire_async(request)
        except Exception as e:
            return self._failed(e, request, strict)

    def join(self, request: Request) -> Optional[Lease]:
        """Return a lease without an announcement, if an equal one of another thread holds a lease, or None."""
        if self._pid != os.getpid():
            self._after_fork()
        return self._shares.join(request.key) if request.key else None

    def _acquire(self, request: Request) -> Lease:
        shares, begun = self._shares, time.monotonic()
        deadline = begun + request.call_time
        while True:
            lease = shares.join(request.key) if request.key else None
            if lease is not None:
                return lease._waited(begun)
            if self.unavailable is not None:
                raise self.unavailable.with_traceback(None)  # else each raise makes it longer
            if not request.key:
                return Lease(grant=self._announce(request, begun, deadline), shares=shares)._waited(begun)
            pending, leads = shares.enter(request.key)
            if leads:
                grant: Optional[Grant] = None
                error: Optional[Exception] = None
                try:
                    grant = self._announce(request, begun, deadline)
                    return Lease(grant=grant, shares=shares)._waited(begun)
                except Exception as e:
                    error = e
                    raise
                finally:
                    shares.end(request.key, pending, grant, error)
            try:
                pending.event.wait(max(0.0, deadline - time.monotonic()))
            except BaseException:
                shares.abandon(pending)
                raise
            lease = self._follow(shares, pending, request, deadline)
            if lease is not None:
                return lease._waited(begun)

    async def _acquire_async(self, request: Request) -> Lease:
        loop = asyncio.get_running_loop()
        shares = self._loop_shares.get(loop)
        if shares is None:
            shares = self._loop_shares[loop] = Shares(asyncio.Event)
        begun = time.monotonic()
        deadline = begun + request.call_time
        while True:
            lease = shares.join(request.key) if request.key else None
            if lease is not None:
                return lease._waited(begun)
            if self.unavailable is not None:
                raise self.unavailable.with_traceback(None)
            if not request.key:
                return Lease(grant=await self._announce_async(request, begun, deadline), shares=shares)._waited(begun)
            pending, leads = shares.enter(request.key)
            if leads:
                grant: Optional[Grant] = None
                error: Optional[Exception] = None
                try:
                    grant = await self._announce_async(request, begun, deadline)
                    return Lease(grant=grant, shares=shares)._waited(begun)
                except Exception as e:
                    error = e
                    raise
                finally:
                    shares.end(request.key, pending, grant, error)
            try:
                await pending.event.wait()  # for the announcement of another, which has a deadline that is earlier
            except BaseException:
                shares.abandon(pending)
                raise
            lease = self._follow(shares, pending, request, deadline)
            if lease is not None:
                return lease._waited(begun)

    def _follow(self, shares: Shares, pending: Pending, request: Request, deadline: float) -> Optional[Lease]:
        """Return the lease that the announcement of another has, or None if it was interrupted. Raise its error."""
        lease = shares.follow(pending)
        if lease is None and pending.error is not None:
            raise pending.error.with_traceback(None)
        if lease is None and time.monotonic() >= deadline:
            raise self._lost(_errors.no_answer("NotifyOnline", request.call_time))
        return lease

    def _announce(self, request: Request, begun: float, deadline: float) -> Grant:
        if not isinstance(self._daemon, str) and not request.remote:
            request.remote = True
            request.forget()
        for attempt in (1, 2):
            connection = self._connect(deadline)
            message = request.encode(lambda: self._list_gpus(request, deadline))
            call = connection.call(_proto.NOTIFY_ONLINE, message, deadline)
            # A broken connection may have been broken for long, unnoticed. A lease ends with it, so that a
            # second announcement is safe.
            if call.status != _http2.UNAVAILABLE or connection.usable or attempt == 2:
                break
        grant = Grant(connection, self._answer(call, request), begun, request.renew)
        self._keeper.keep(grant)
        return grant

    async def _announce_async(self, request: Request, begun: float, deadline: float) -> Grant:
        for attempt in (1, 2):
            connection = self._connect_loop()
            if request.needs_list and self._gpus is None:
                self._gpus_of(await connection.call(_proto.LIST_GPUS, b"", deadline), request)
            message = request.encode(lambda: self._gpus or [])
            call = await connection.call(_proto.NOTIFY_ONLINE, message, deadline)
            if call.status != _http2.UNAVAILABLE or connection.usable or attempt == 2:
                break
        grant = Grant(connection, self._answer(call, request), begun, request.renew)
        connection.keep(grant)
        return grant

    def _answer(self, call: _http2.Call, request: Request) -> object:
        if call.status == _http2.OK:
            if self._unprotected:
                self._granted(request)
            return _proto.NotifyOnlineResponse.FromString(call.message)
        if call.status in (_http2.DEADLINE_EXCEEDED, _http2.CANCELLED):
            raise self._lost(_errors.no_answer("NotifyOnline", request.call_time))
        error = _errors.of_call(call)
        if isinstance(error, _errors.UnknownGpu):
            request.forget()
            self._gpus = None
        raise self._lost(error)

    def _connect(self, deadline: float) -> _sync.Connection:
        """Return the connection of threads; it connects if necessary, until the deadline."""
        connection = self._connection
        if connection is not None and connection.usable:
            return connection
        if not self._lock.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            raise _errors.unavailable(f"{self.socket} did not accept a connection in time")
        try:
            if self._closed:
                raise _errors.Error("CLOSED", "the client was closed")
            connection = self._connection
            if connection is None or not connection.usable:
                try:
                    connection = self._connection = _sync.Connection(self._daemon, deadline - time.monotonic())
                except _errors.Error as e:
                    self._connection = None
                    error = e
                else:
                    return connection
            else:
                return connection
        finally:
            self._lock.release()
        raise self._lost(error)

    def _connect_loop(self) -> _aio.Connection:
        """Return the connection of the running loop; it connects if necessary."""
        loop = asyncio.get_running_loop()
        connection = self._loops.get(loop)
        if connection is None or not connection.usable:
            if self._closed:
                raise _errors.Error("CLOSED", "the client was closed")
            try:
                connection = self._loops[loop] = _aio.Connection(self.socket)
            except _errors.Error as e:
                raise self._lost(e) from None
            self._keeper.start()
        return connection

    def _list_gpus(self, request: Request, deadline: float) -> List[_gpus.Node]:
        """Return the daemon's GPUs, in the order of their nodes."""
        gpus = self._gpus
        if gpus is None:
            gpus = self._gpus_of(self._connect(deadline).call(_proto.LIST_GPUS, b"", deadline), request)
        return gpus

    def _gpus_of(self, call: _http2.Call, request: Request) -> List[_gpus.Node]:
        if call.status == _http2.DEADLINE_EXCEEDED:
            raise self._lost(_errors.no_answer("ListGpus", request.call_time))
        if call.status != _http2.OK:
            raise self._lost(_errors.of_call(call))
        gpus = _proto.ListGpusResponse.FromString(call.message).gpus
        self._gpus = sorted((_gpus.Node(g.node, g.gpu_id, 0, g.name) for g in gpus), key=lambda n: n.node)
        return self._gpus

    def _failed(self, error: Exception, request: Request, strict: bool) -> Lease:
        """Return the lease of work that runs without the daemon, or raise the error."""
        if strict:
            raise error
        if not isinstance(error, _errors.Error):
            error = _errors.Error("INTERNAL", f"the client failed: {error!r}", "report it", _http2.INTERNAL)
        # What is wrong with a request concerns that one only.
        of = request.text if isinstance(error, (_errors.UnknownGpu, _errors.InvalidRequest)) else ""
        with self._lock:
            known = self._unprotected.get(of)
            if known is None:
                while len(self._unprotected) >= _MAX_REFUSED:
                    del self._unprotected[next(iter(self._unprotected))]
                known = self._unprotected[of] = _Unprotected()
            # A refusal that will be repeated is reported once for each reason, any other once until protection is back.
            report = not known.reasons or (not error.temporary and error.reason not in known.reasons)
            known.reasons.add(error.reason)
            known.at = time.monotonic()
            if report:
                self._call_report(error)
        return Lease(error)

    def _lost(self, error: _errors.Error) -> _errors.Error:
        """Note the failure of a call, and return its error."""
        unreachable = isinstance(error, _errors.Unavailable) or (isinstance(error, _errors.PermissionDenied) and not error.temporary)
        if unreachable:
            with self._lock:
                if self.unavailable is None and not self._closed:
                    self.unavailable = error
                    self._keeper.probe()
        return error

    def _granted(self, request: Request) -> None:
        with self._lock:
            for of in (request.text, ""):
                known = self._unprotected.get(of)
                if known is not None and self.unavailable is None and time.monotonic() - known.at >= _SETTLE:
                    self._back(of)

    def _found(self) -> None:
        """The daemon answers again."""
        with self._lock:
            self.unavailable = None
            self._back("")

    def _back(self, of: str) -> None:
        if self._unprotected.pop(of, None) is not None and not self._unprotected:
            self._call_report(None)

    def _call_report(self, error: Optional[_errors.Error]) -> None:
        try:
            self._report(error)
        except Exception:
            log.exception("on_unprotected failed")

    def _probe(self) -> bool:
        """Report whether the daemon serves this client."""
        with contextlib.suppress(_errors.Error):
            connection = self._connection
            if connection is None or not connection.usable:
                connection = _sync.Connection(self._daemon)
            call = connection.call(_proto.HEALTH, b"", time.monotonic() + _CALL_BOUND)
            # The answer is a HealthCheckResponse; its status 2 is NOT_SERVING. A daemon that has no health
            # check counts as serving, one that refuses this process does not.
            refused = call.status in (_http2.UNAVAILABLE, _http2.DEADLINE_EXCEEDED, 7, 16)
            if not refused and call.message != b"\x08\x02":
                with self._lock:
                    if self._connection is None or not self._connection.usable:
                        self._connection = connection
                return True
            if connection is not self._connection:
                connection.end("the daemon does not serve")
        return False


def check_client(client: object, *others: type) -> None:
    """Raise a TypeError for what is no client; an error of the default client is raised here, and not when work is announced."""
    if client is None:
        default_client()
    elif not isinstance(client, (Client, *others)):
        use = f"gpreempt.Client({client!r})" if isinstance(client, str) else "gpreempt.Client()"
        raise TypeError(f"client is {client!r}: use {use}")


_defaults: Dict[str, Client] = {}
_defaults_lock = threading.Lock()


def default_client() -> Client:
    """Return the client of $GPREEMPT_SOCKET, or of the default socket."""
    key = os.environ.get("GPREEMPT_SOCKET", "")
    client = _defaults.get(key)
    if client is None:
        with _defaults_lock:
            client = _defaults.get(key) or _defaults.setdefault(key, Client())
    return client


def _after_fork_in_child() -> None:
    global _defaults_lock
    _defaults_lock = threading.Lock()
    for client in list(_clients):
        client._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
