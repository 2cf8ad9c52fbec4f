"""The lease of an announcement."""

from __future__ import annotations

import time
from typing import Any, List, Optional, Protocol, Set

from . import _errors, _proto

# The share of its time to live after which a lease is renewed.
_RENEW_AFTER = 0.5


class Link(Protocol):
    """A connection. Its leases end with it."""

    leases: Set["Lease"]
    broken: Optional[_errors.Error]

    def post(self, path: str, message: bytes) -> None: ...


class Lease:
    """What an announcement returns. It asks for quiet GPUs until release."""

    __slots__ = ("_link", "_answer", "_expires", "_renew_at", "_renew", "_held", "_lost", "_ttl", "cause", "round_trip")

    def __init__(self, cause: Optional[_errors.Error] = None) -> None:
        # cause is why the daemon granted no lease, or None.
        self.cause = cause
        # round_trip is the duration of the announcement in seconds.
        self.round_trip = 0.0
        self._link: Optional[Link] = None
        self._answer: Any = None
        self._held = False
        self._lost = False
        self._ttl = 0.0
        self._expires = 0.0
        self._renew_at = 0.0
        self._renew = False

    @classmethod
    def _granted(cls, link: Link, answer: Any, begun: float, renew: bool) -> "Lease":
        """Return the lease of an answer to a request that was sent at begun."""
        lease = cls()
        lease._link, lease._answer, lease._renew = link, answer, renew
        ttl = lease._ttl = _proto.duration(answer.ttl)
        lease._expires = begun + ttl
        lease._renew_at = begun + _RENEW_AFTER * ttl if renew else lease._expires
        lease.round_trip = time.monotonic() - begun
        lease._held = True
        link.leases.add(lease)
        if link.broken is not None:
            lease._lose()
        return lease

    @property
    def id(self) -> str:
        """The daemon's ID of the lease, as gpctl shows it; "" when it is unprotected."""
        return str(self._answer.lease_id) if self._answer is not None else ""

    @property
    def protected(self) -> bool:
        """Whether the daemon granted the lease and is not known to have ended it. If not, the work may run beside offline work."""
        return self._answer is not None and not self._lost

    @property
    def quiet(self) -> bool:
        """Whether every offline target of lower priority on the GPUs was suspended when the announcement was answered."""
        return bool(self._answer is not None and self._answer.quiesced)

    @property
    def reason(self) -> str:
        """Why the GPUs were or were not quiet: a QuiesceReason such as "DONE" or "MAX_WAIT"; "UNSPECIFIED" when unprotected."""
        return _proto.QUIESCE_REASONS.get(self._answer.reason, "UNKNOWN") if self._answer is not None else "UNSPECIFIED"

    @property
    def owner_offline(self) -> bool:
        """Whether the daemon takes this process, or one that it started, for offline work: leases of others suspend it."""
        return bool(self._answer is not None and self._answer.owner_offline)

    @property
    def gpus(self) -> List[int]:
        """The gpu_id of each GPU that the lease covers."""
        return list(self._answer.gpu_ids) if self._answer is not None else []

    @property
    def suspended_targets(self) -> int:
        """The number of processes suspended for this lease."""
        return int(self._answer.suspended_targets) if self._answer is not None else 0

    @property
    def cannot_suspend_targets(self) -> int:
        """The number of offline processes that run on the GPUs because they cannot be suspended."""
        return int(self._answer.cannot_suspend_targets) if self._answer is not None else 0

    @property
    def ttl(self) -> float:
        """The granted time to live in seconds. Each renewal sets it again."""
        return self._ttl

    @property
    def lost(self) -> bool:
        """Whether the lease ended before release. The work continues unprotected until the next announcement."""
        return self._lost

    def release(self) -> None:
        """End the lease. It may be called again. It sends Complete and does not wait for the answer: if the
        daemon does not receive it, the lease ends with its connection or its time to live."""
        if self._held and self._link is not None:
            self._held = False
            self._link.leases.discard(self)
            self._link.post(_proto.COMPLETE, _complete(self._answer.lease_id))

    def _renewed(self, begun: float, ttl: float) -> None:
        self._expires = begun + ttl
        self._renew_at = begun + _RENEW_AFTER * ttl

    def _retry_renewal(self, now: float) -> None:
        """Schedule another attempt after a failed renewal, until the time to live has passed."""
        left = max(self._expires - now, 0.0)
        self._renew_at = now + min(left, max(left / 2, 0.01))

    def _lose(self) -> None:
        """End a lease that was not released."""
        if self._held:
            self._held = False
            self._lost = True
            if self._link is not None:
                self._link.leases.discard(self)

    def _forget(self) -> None:
        """End a lease in a child: it is the parent's."""
        self._held = False
        self._lost = True


def _complete(lease_id: str) -> bytes:
    """Return a CompleteRequest, whose only field is the ID, number 1."""
    text = lease_id.encode()
    if len(text) < 128:
        return b"\x0a" + bytes((len(text),)) + text
    return bytes(_proto.CompleteRequest(lease_id=lease_id).SerializeToString())


def renewal(lease: Lease) -> bytes:
    """Return the RenewRequest of a lease."""
    request = _proto.RenewRequest(lease_id=lease.id)
    _proto.set_duration(request.ttl, lease.ttl)
    return bytes(request.SerializeToString())
