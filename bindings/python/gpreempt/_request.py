"""What is announced."""

from __future__ import annotations

from typing import Any, Callable, List, Optional

from . import _errors, _gpus, _proto

# How long the daemon itself may take in seconds, in addition to max_wait.
DAEMON_TIME = 0.1
# Assumed as max_wait when a request has none; the policy's default is 20 ms.
UNSTATED_MAX_WAIT = 0.2


class Request:
    """Work to announce. The arguments are those of online."""

    def __init__(
        self,
        gpus: Any = None,
        *,
        label: str = "",
        priority: Optional[int] = None,
        ttl: Optional[float] = None,
        renew: bool = True,
        max_wait: Optional[float] = None,
        eta: Optional[float] = None,
        complete_on_idle: bool = False,
    ) -> None:
        self.selected = _gpus.parse_all(gpus)
        self.renew = renew
        self.call_time = (UNSTATED_MAX_WAIT if max_wait is None else max_wait) + DAEMON_TIME
        m = self._message = _proto.NotifyOnlineRequest(label=label, complete_on_idle=complete_on_idle)
        if priority is not None:
            if not 0 <= priority <= 15:
                raise ValueError(f"priority {priority} is out of range: use 0 to 15")
            m.priority = priority
        if len(label.encode()) > 128:
            raise ValueError("label has more than 128 bytes")
        for name, value, least, most in (
            ("ttl", ttl, 0.001, 600.0),
            ("max_wait", max_wait, 0.0, 10.0),
            ("eta", eta, 0.0, 60.0),
        ):
            if value is not None:
                if not least <= value <= most:
                    raise ValueError(f"{name} of {value} seconds is out of range: use {least:g} to {most:g}")
                field = getattr(m, name)
                field.SetInParent()
                _proto.set_duration(field, value)
        self._bytes: Optional[bytes] = None
        # remote: the GPUs are those of another host, of which this process knows nothing.
        self.remote = False

    @property
    def needs_list(self) -> bool:
        """Reports whether encode will ask for the GPUs of the daemon."""
        if self._bytes is not None or self.selected is None or self.remote:
            return False
        return self.selected is _gpus.ALL or (
            any(g.by in ("index", "uuid") for g in self.selected) and _gpus.topology() is None  # type: ignore[union-attr]
        )

    def encode(self, ask: Callable[[], List[_gpus.Node]]) -> bytes:
        """Return the message. ask lists the GPUs of the daemon. Errors: NoQueues, UnknownGpu, and those of ask."""
        if self._bytes is not None and (self.selected is not None or _gpus.may_have_queues()):
            return self._bytes
        if self.selected is None and not _gpus.may_have_queues():
            raise _errors.NoQueues(
                "NO_QUEUES",
                "gpus is not set, and this process has no GPU queues by which its GPUs are known",
                "name the GPUs, such as gpus=[0], or use gpus=gpreempt.ALL for all GPUs of the host",
            )
        message = _proto.NotifyOnlineRequest()
        message.CopyFrom(self._message)
        if isinstance(self.selected, tuple):
            selectors = _gpus.resolve_remote(self.selected) if self.remote else _gpus.resolve(self.selected, ask)
        elif self.selected is _gpus.ALL and not self.remote:
            # Named one by one: without names the daemon would choose those on which this process has queues.
            selectors = [("gpu_id", n.gpu_id) for n in ask()]
        else:
            selectors = []
        for by, value in selectors:
            setattr(message.gpus.add(), by, value)
        self._bytes = bytes(message.SerializeToString())
        return self._bytes

    def copy(self, gpus: Any = None) -> "Request":
        """Return the same announcement, with other GPUs if they are given."""
        other = Request.__new__(Request)
        other.selected = self.selected if gpus is None else _gpus.parse_all(gpus)
        other.renew, other.call_time, other.remote, other._bytes = self.renew, self.call_time, self.remote, None
        other._message = _proto.NotifyOnlineRequest()
        other._message.CopyFrom(self._message)
        return other

    def at_once(self) -> "Request":
        """Return the same announcement without a wait for the GPUs."""
        other = self.copy()
        other.call_time = DAEMON_TIME
        other._message.max_wait.SetInParent()
        _proto.set_duration(other._message.max_wait, 0.0)
        return other

    def forget(self) -> None:
        """Look the GPUs up again at the next announcement."""
        self._bytes = None
