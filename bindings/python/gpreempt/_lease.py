"""What the daemon granted, and the lease that a block has of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, List, Optional, Protocol, Set

from . import _errors, _proto

if TYPE_CHECKING:
    from ._shares import Shares

# The share of its time to live after which a lease is renewed.
_RENEW_AFTER = 0.5


class Link(Protocol):
    """A connection. Its grants end with it."""

    grants: Set["Grant"]
    broken: Optional[_errors.Error]

    def post(self, path: str, message: bytes) -> None: ...


class Grant:
    """A lease of the daemon. Blocks whose announcements are equal and overlap share one."""

    __slots__ = ("link", "answer", "renew", "ttl", "expires", "renew_at", "held", "lost", "users", "announcement")

    def __init__(self, link: Link, answer: Any, begun: float, renew: bool) -> None:
        """Hold the lease of an answer to a request that was sent at begun."""
        # link is None in a child: the lease is the parent's.
        self.link: Optional[Link] = link
        self.answer = answer
        self.renew = renew
        self.ttl = _proto.duration(answer.ttl)
        self.expires = begun + self.ttl
        self.renew_at = begun + _RENEW_AFTER * self.ttl if renew else self.expires
        self.held = True
        self.lost = False
        # users is how many have a Lease of it and have not released that.
        self.users = 1
        # announcement is what others share it by; empty if nobody does.
        self.announcement = b""
        link.grants.add(self)
        if link.broken is not None:
            self.lose()

    @property
    def live(self) -> bool:
        """Whether the daemon is not known to have ended it, and its time to live has not passed."""
        return self.held and time.monotonic() < self.expires

    def complete(self) -> None:
        """Send Complete, and do not wait for the answer: without it the lease ends with its connection or its time to live."""
        if self.held and self.link is not None:
            self.held = False
            self.link.grants.discard(self)
            self.link.post(_proto.COMPLETE, _complete(self.answer.lease_id))

    def renewed(self, begun: float, ttl: float) -> None:
        self.expires = begun + ttl
        self.renew_at = begun + _RENEW_AFTER * ttl

    def retry_renewal(self, now: float) -> None:
        """Schedule another attempt after a failed renewal, until the time to live has passed."""
        left = max(self.expires - now, 0.0)
        self.renew_at = now + min(left, max(left / 2, 0.01))

    def lose(self) -> None:
        """End a lease that was not completed."""
        if self.held:
            self.held = False
            self.lost = True
            if self.link is not None:
                self.link.grants.discard(self)

    def forget(self) -> None:
        """End a lease in a child: it is the parent's."""
        self.held = False
        self.lost = True
        self.link = None


class Lease:
    """What an announcement returns. It asks for quiet GPUs until release.

    Blocks of a process that run at the same time share one lease of the daemon if their announcements are equal: the
    first announces, and the last to release completes. quiet, reason, gpus and the counts are then of the first's answer.
    """

    __slots__ = ("_grant", "_shares", "_released", "_lost", "cause", "round_trip")

    def __init__(self, cause: Optional[_errors.Error] = None, *, grant: Optional[Grant] = None, shares: Optional["Shares"] = None) -> None:
        # cause is why the daemon granted no lease, or None.
        self.cause = cause
        # round_trip is how long the announcement took in seconds, or the wait for that of another block.
        self.round_trip = 0.0
        self._grant = grant
        self._shares = shares
        self._released = False
        self._lost = False  # at the release

    def __repr__(self) -> str:
        if self.protected:
            return f"<gpreempt.{type(self).__name__} {self.id} protected, {'quiet' if self.quiet else 'not quiet'}: {self.reason}>"
        return f"<gpreempt.{type(self).__name__} unprotected: {self.cause or ('lost ' + self.id)}>"

    def _waited(self, begun: float) -> "Lease":
        self.round_trip = time.monotonic() - begun
        return self

    @property
    def _answer(self) -> Any:
        return self._grant.answer if self._grant is not None else None

    @property
    def id(self) -> str:
        """The daemon's ID of the lease, as gpctl shows it; "" when it granted none."""
        return str(self._answer.lease_id) if self._answer is not None else ""

    @property
    def protected(self) -> bool:
        """Whether the daemon granted the lease and is not known to have ended it. If not, the work may run beside offline work."""
        return self._grant is not None and not self.lost

    @property
    def quiet(self) -> bool:
        """Whether every offline target of lower priority on the GPUs was suspended when the announcement was answered."""
        return bool(self._answer is not None and self._answer.quiesced)

    @property
    def reason(self) -> str:
        """Why the GPUs were or were not quiet: a QuiesceReason such as "DONE" or "MAX_WAIT"; without a lease the reason of
        cause, such as "DAEMON_UNAVAILABLE"."""
        if self._answer is not None:
            return _proto.QUIESCE_REASONS.get(self._answer.reason, "UNKNOWN")
        return self.cause.reason if self.cause is not None else ""

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
        return self._grant.ttl if self._grant is not None else 0.0

    @property
    def lost(self) -> bool:
        """Whether the lease ended before release. The work continues unprotected until the next announcement."""
        return self._lost if self._released or self._grant is None else self._grant.lost

    def release(self) -> None:
        """End the lease, or leave it to the blocks that share it. It may be called again, and does not wait for the daemon."""
        if self._shares is not None and not self._released:
            self._shares.leave(self)


def _complete(lease_id: str) -> bytes:
    """Return a CompleteRequest, whose only field is the ID, number 1."""
    text = lease_id.encode()
    if len(text) < 128:
        return b"\x0a" + bytes((len(text),)) + text
    return bytes(_proto.CompleteRequest(lease_id=lease_id).SerializeToString())


def renewal(grant: Grant) -> bytes:
    """Return the RenewRequest of a lease."""
    request = _proto.RenewRequest(lease_id=grant.answer.lease_id)
    _proto.set_duration(request.ttl, grant.ttl)
    return bytes(request.SerializeToString())
