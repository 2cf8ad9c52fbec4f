"""The announcement of one piece of work, as a context manager and as a decorator."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Callable, List, NoReturn, Optional, TypeVar, Union, cast

from . import _client, _group
from ._lease import Lease
from ._request import Duration, Request, check

F = TypeVar("F", bound=Callable[..., Any])


class online:
    """Announce work: offline work on the GPUs is suspended while the block or the function runs.

        with gpreempt.online(gpus=[0]):
            model(batch)

    It is a context manager, with and async with, and a decorator of functions and coroutine functions. One
    object may be used many times and by many threads at once, which saves the cost of making it.

    gpus: HIP indices, products, PCI addresses, UUIDs, torch devices or gpreempt.gpu_id(N); gpreempt.ALL; or gpreempt.OWN for
        those on which this process has queues when it announces. It must be set.
    label: a name of the kind of work for a person to read, of at most 128 bytes.
    priority: 0 to 15; offline work of lower priority is suspended. None: 11.
    ttl: the time to live of the lease, which is renewed in time unless renew is False. None: the policy's.
    max_wait: the longest time to wait for quiet GPUs, 0 to 10. None: the policy's.
    eta: the time until the work begins, 0 to 60: offline work runs until shortly before. None: it begins at once.
    complete_on_idle: end the lease when the queues of this process had work and then none.
    strict: raise the errors of the daemon; otherwise the work runs unprotected.
    client: the client, or a Group for several hosts; None means the default client.

    Times are in seconds, or strings such as "20ms". Invalid arguments are a ValueError or a TypeError here, and never
    when work is announced.

    Blocks that run at the same time in threads of the process, or in one event loop, share one lease of the daemon if their
    announcements are equal, also of two objects. With renew=False, eta or complete_on_idle each has its own.
    """

    def __init__(
        self,
        gpus: Any = None,
        *more: NoReturn,
        label: str = "",
        priority: Optional[int] = None,
        ttl: Optional[Duration] = None,
        renew: bool = True,
        max_wait: Optional[Duration] = None,
        eta: Optional[Duration] = None,
        complete_on_idle: bool = False,
        strict: bool = False,
        client: Union["_client.Client", "_group.Group", None] = None,
        **unknown: NoReturn,
    ) -> None:
        if more:
            raise TypeError(f"{more[0]!r} has no name: use one, such as label={more[0]!r}; only gpus needs none")
        self._request = Request(
            gpus, label=label, priority=priority, ttl=ttl, renew=renew, max_wait=max_wait, eta=eta,
            complete_on_idle=complete_on_idle, **unknown,
        )  # fmt: skip
        check("strict", strict, bool, "True or False")
        _client.check_client(client, _group.Group)
        self._strict = strict
        self._client = client
        # The leases of the blocks that run now. All are of the same request, so a block may release
        # the lease of another: as many stay as blocks run. Those of loops are apart.
        self._held: List[Lease] = []
        self._held_async: List[Lease] = []

    def __repr__(self) -> str:
        return f"gpreempt.online({self._request.text})"

    if not TYPE_CHECKING:  # or every attribute would be valid

        def __getattr__(self, name: str) -> Any:
            hint = f": use that of the lease: with ... as lease: lease.{name}" if hasattr(Lease, name) else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def acquire(self) -> Lease:
        """Return a lease, to be released. with does both."""
        return (self._client or _client.default_client()).acquire(self._request, strict=self._strict)

    async def acquire_async(self) -> Lease:
        """Return a lease, to be released in the same event loop. async with does both."""
        return await (self._client or _client.default_client()).acquire_async(self._request, strict=self._strict)

    def __enter__(self) -> Lease:
        lease = self.acquire()
        self._held.append(lease)
        return lease

    def __exit__(self, *_: object) -> None:
        if self._held:  # it is empty in a child that was forked inside the block and released it before
            self._held.pop().release()

    async def __aenter__(self) -> Lease:
        lease = await self.acquire_async()
        self._held_async.append(lease)
        return lease

    async def __aexit__(self, *_: object) -> None:
        if self._held_async:
            self._held_async.pop().release()

    def __call__(self, function: F) -> F:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_async(*args: Any, **kwargs: Any) -> Any:
                lease = await self.acquire_async()
                try:
                    return await function(*args, **kwargs)
                finally:
                    lease.release()

            return cast(F, run_async)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            lease = self.acquire()
            try:
                return function(*args, **kwargs)
            finally:
                lease.release()

        return cast(F, run)
