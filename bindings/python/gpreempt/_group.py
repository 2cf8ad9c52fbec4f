"""Announcements on several hosts at once."""

from __future__ import annotations

import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, List, NoReturn, Optional, Sequence, Union

from . import _errors
from ._client import Client, check_client, run_in_thread
from ._lease import Lease
from ._request import Request


class GroupLease(Lease):
    """The leases of an announcement on all hosts of a group. cause is that of the first host without one."""

    __slots__ = ("leases", "_clients")

    def __init__(self, clients: Sequence[Client], leases: List[Lease]) -> None:
        super().__init__(next((lease.cause for lease in leases if lease.cause is not None), None))
        self._clients = clients
        # leases are those of the hosts, in the order of the group.
        self.leases = leases
        self.round_trip = max(lease.round_trip for lease in leases)

    @property
    def id(self) -> str:
        """The IDs of the leases, separated by commas; those of hosts without a lease are empty."""
        return ",".join(lease.id for lease in self.leases)

    @property
    def protected(self) -> bool:
        """Whether the work is protected on every host."""
        return all(lease.protected for lease in self.leases)

    @property
    def quiet(self) -> bool:
        """Whether the GPUs of every host were quiet when it answered."""
        return all(lease.quiet for lease in self.leases)

    @property
    def reason(self) -> str:
        """The reason of the first host that was not quiet, or of the first host."""
        return next((lease.reason for lease in self.leases if not lease.quiet), self.leases[0].reason)

    @property
    def gpus(self) -> List[int]:
        """The gpu_id of each GPU that the leases cover, host after host."""
        return [gpu for lease in self.leases for gpu in lease.gpus]

    @property
    def suspended_targets(self) -> int:
        """The number of processes suspended on all hosts."""
        return sum(lease.suspended_targets for lease in self.leases)

    @property
    def ttl(self) -> float:
        """The shortest granted time to live in seconds, 0 if a host granted none."""
        return min(lease.ttl for lease in self.leases)

    @property
    def lost(self) -> bool:
        """Whether the lease of a host ended before release. Those of the others continue."""
        return any(lease.lost for lease in self.leases)

    @property
    def causes(self) -> Dict[str, _errors.Error]:
        """Why the daemons of some hosts granted no lease, by the address of the host."""
        return {c.socket: lease.cause for c, lease in zip(self._clients, self.leases) if lease.cause is not None}

    def release(self) -> None:
        """End all leases, as Lease.release does."""
        for lease in self.leases:
            lease.release()


class Group:
    """Several hosts that one piece of work uses, such as a model whose tensors or layers are divided among hosts.

        group = gpreempt.Group([gpreempt.Client(address, certificate=files) for address in addresses])
        with gpreempt.online(gpus=[0, 1], client=group) as lease:
            model(batch)

    It is used in place of a client. All hosts are asked at once, and each within the time that one host has. With a
    host that does not answer, or refuses, the work runs, and the lease says so: protected is False, and causes names
    the host. With strict, the error of the first such host is raised, and no host keeps a lease. A lease
    excludes no other, so that groups of the same hosts do not wait for each other.

    gpus: what the work uses on each host, in their order; None for what the announcement names, on all hosts.
    """

    def __init__(self, clients: Sequence[Client], *more: NoReturn, gpus: Optional[Sequence[Any]] = None) -> None:
        if more or isinstance(clients, Client):
            raise TypeError(f"clients is {clients!r}: use a list: gpreempt.Group([...])")
        if not clients:
            raise ValueError("clients is empty: use one for each host: gpreempt.Group([gpreempt.Client(), ...])")
        for client in clients:
            check_client(client)
        if gpus is not None and len(gpus) != len(clients):
            raise ValueError(f"gpus has {len(gpus)} entries for {len(clients)} hosts: use one for each, in their order")
        self.clients = list(clients)
        self._gpus = gpus
        self._pool: Optional[ThreadPoolExecutor] = None
        self._pid = 0
        # The GPUs of each host have other names, so each has a request of its own.
        self._requests: "weakref.WeakKeyDictionary[Request, List[Request]]" = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"gpreempt.Group({self.clients!r})"

    def acquire(self, request: Request, *, strict: bool = False) -> GroupLease:
        """Do what Client.acquire does, on all hosts."""
        joined = self._join(request)
        if joined is not None:
            return joined
        if self._pid != os.getpid():  # threads do not survive a fork
            self._pool, self._pid = ThreadPoolExecutor(max_workers=max(len(self.clients) - 1, 1) * 8), os.getpid()
        pool = self._pool
        assert pool is not None
        requests = self._of_hosts(request)

        def one(client: Client, own: Request) -> Union[Lease, _errors.Error]:
            try:
                return client.acquire(own, strict=strict)
            except _errors.Error as e:
                return type(e)(e.reason, f"host {client.socket}: {e.message}", e.next, e.code)

        pending = [pool.submit(one, client, own) for client, own in zip(self.clients[1:], requests[1:])]
        results = [one(self.clients[0], requests[0]), *(future.result() for future in pending)]
        leases = [result for result in results if isinstance(result, Lease)]
        for result in results:
            if isinstance(result, _errors.Error):
                for lease in leases:
                    lease.release()
                raise result
        return GroupLease(self.clients, leases)

    def _of_hosts(self, request: Request) -> List[Request]:
        requests = self._requests.get(request)
        if requests is None:
            requests = [request.copy() if self._gpus is None else request.copy(self._gpus[i]) for i in range(len(self.clients))]
            self._requests[request] = requests
        return requests

    def _join(self, request: Request) -> Optional[GroupLease]:
        """Return the leases of equal announcements that every host has from other threads, or None."""
        found = [client.join(own) for client, own in zip(self.clients, self._of_hosts(request))]
        leases = [lease for lease in found if lease is not None]
        if len(leases) == len(found):
            return GroupLease(self.clients, leases)
        for lease in leases:
            lease.release()
        return None

    async def acquire_async(self, request: Request, *, strict: bool = False) -> GroupLease:
        """Do what acquire does, in a thread."""
        return self._join(request) or await run_in_thread(lambda: self.acquire(request, strict=strict))

    def close(self) -> None:
        """Close the clients of all hosts."""
        for client in self.clients:
            client.close()
        if self._pool is not None and self._pid == os.getpid():
            self._pool.shutdown()

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
