"""A lease for as long as a block runs."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Optional

from . import _client, _errors
from ._lease import Lease
from ._request import Request, check


class Session:
    """Keeps GPUs quiet for as long as it is open: its lease is renewed in the background, and announced again
    after it was lost, as when the daemon was restarted. For work of seconds or more; use online for requests.

    The arguments are those of online. In a child that was forked the session is closed.
    """

    def __init__(self, gpus: Any = None, *, client: Optional["_client.Client"] = None, strict: bool = False, **request: Any) -> None:
        self._request = Request(gpus, **request)
        check("strict", strict, bool, "True or False")
        _client.check_client(client)
        self._again = self._request.at_once()
        self._chosen = client
        self._strict = strict
        self._lock = threading.Lock()  # guards both below, of which the client's thread sets the lease
        self._client: Optional["_client.Client"] = None
        self._lease: Optional[Lease] = None

    def __repr__(self) -> str:
        state = "closed" if self._client is None else "protected" if self.protected else "unprotected"
        return f"<gpreempt.Session {self._request.text} {state}>"

    @property
    def lease(self) -> Lease:
        """The present lease; an unprotected one before start and after close."""
        return self._lease or Lease(_errors.Error("CLOSED", "the session is not open"))

    @property
    def protected(self) -> bool:
        """Whether the session has a live lease."""
        return self.lease.protected

    def start(self) -> "Session":
        """Announce the work. Errors are raised only if the session is strict."""
        if self._client is None:
            client = self._chosen or _client.default_client()
            lease = client.acquire(self._request, strict=self._strict)
            with self._lock:
                self._client, self._lease = client, lease
            client._keeper.add(self)
        return self

    def close(self) -> None:
        """End the lease. It may be called again."""
        with self._lock:
            client, self._client = self._client, None
            lease, self._lease = self._lease, None
        if client is not None:
            client._keeper.remove(self)
        if lease is not None:
            lease.release()

    def _restore(self) -> None:
        """Announce again when the lease was lost. It runs in the client's thread."""
        client, lease = self._client, self._lease
        if client is None or lease is None or lease.protected or client.unavailable is not None:
            return
        again = client.acquire(self._again)
        with self._lock:
            unchanged = self._lease is lease
            if unchanged:
                self._lease = again
        if not unchanged:  # closed meanwhile
            again.release()

    def _forget(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._client = self._lease = None

    def __enter__(self) -> "Session":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> "Session":
        await asyncio.get_running_loop().run_in_executor(None, self.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
