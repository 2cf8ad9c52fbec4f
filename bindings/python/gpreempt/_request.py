"""What is announced."""

from __future__ import annotations

import difflib
import re
from typing import Any, Callable, List, Mapping, NoReturn, Optional, Tuple, Union

from . import _gpus, _proto

# How long the daemon itself may take in seconds, in addition to max_wait.
DAEMON_TIME = 0.1
# Assumed as max_wait when a request has none; the policy's default is 20 ms.
UNSTATED_MAX_WAIT = 0.2

# Duration is a time in seconds, or a string such as "20ms", "1.5s" or "1m30s".
Duration = Union[int, float, str]

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?)(ns|us|µs|ms|s|m|h)", re.ASCII)


def seconds(name: str, value: Duration) -> float:
    """Return a duration in seconds."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and value and not _PART.sub("", value):
        return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(value))
    kind = ValueError if isinstance(value, str) else TypeError
    raise kind(f'{name} of {value!r} is not a duration: use seconds, such as 0.02, or a string, such as "20ms"')


def check(name: str, value: Any, kind: type, use: str) -> None:
    """Raise a TypeError for an argument of another type. A truth value is not a number."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{name} is {value!r}: use {use}")


def refuse(unknown: Mapping[str, Any]) -> None:
    """Raise a TypeError for arguments that there are not."""
    for name in unknown:
        near = difflib.get_close_matches(name, ARGUMENTS, 1)
        raise TypeError(f"unknown argument {name}: use {near[0] if near else ', '.join(ARGUMENTS)}")


# ARGUMENTS are those of online.
ARGUMENTS = ("gpus", "label", "priority", "ttl", "renew", "max_wait", "eta", "complete_on_idle", "strict", "client")


class Request:
    """Work to announce. The arguments are those of online."""

    def __init__(
        self,
        gpus: Any = None,
        *,
        label: str = "",
        priority: Optional[int] = None,
        ttl: Optional[Duration] = None,
        renew: bool = True,
        max_wait: Optional[Duration] = None,
        eta: Optional[Duration] = None,
        complete_on_idle: bool = False,
        **unknown: NoReturn,
    ) -> None:
        refuse(unknown)
        check("label", label, str, 'a text, such as label="chat"')
        check("renew", renew, bool, "True or False")
        check("complete_on_idle", complete_on_idle, bool, "True or False")
        self.selected = _gpus.parse_all(gpus)
        self.renew = renew
        self.call_time = UNSTATED_MAX_WAIT + DAEMON_TIME
        # text is what is announced, for a person to read.
        self.text = f"gpus={list(self.selected) if isinstance(self.selected, tuple) else self.selected!r}"
        m = self._message = _proto.NotifyOnlineRequest(label=label, complete_on_idle=complete_on_idle)
        if len(label.encode()) > 128:
            raise ValueError("label has more than 128 bytes: use a short name of the kind of work")
        if label:
            self.text += f", label={label!r}"
        if priority is not None:
            check("priority", priority, int, "a number from 0 to 15")
            if not 0 <= priority <= 15:
                raise ValueError(f"priority {priority} is out of range: use 0 to 15")
            m.priority = priority
            self.text += f", priority={priority}"
        given: Tuple[Tuple[str, Optional[Duration], float, float], ...] = (
            ("ttl", ttl, 0.001, 600.0), ("max_wait", max_wait, 0.0, 10.0), ("eta", eta, 0.0, 60.0),
        )  # fmt: skip
        for name, value, least, most in given:
            if value is None:
                continue
            time = seconds(name, value)
            if not least <= time <= most:
                raise ValueError(f"{name} of {time:g} seconds is out of range: use {least:g} to {most:g}, or a string such as \"20ms\"")
            if name == "max_wait":
                self.call_time = time + DAEMON_TIME
            field = getattr(m, name)
            field.SetInParent()
            _proto.set_duration(field, time)
            self.text += f", {name}={value!r}"
        if not renew:
            self.text += ", renew=False"
        if complete_on_idle:
            self.text += ", complete_on_idle=True"
        self._bytes: Optional[bytes] = None
        # remote: the GPUs are those of another host, of which this process knows nothing.
        self.remote = False
        # alone: a time slice, or an end that depends on the moment of the announcement, is of one block only.
        self._alone = not renew or eta is not None or complete_on_idle
        self._identify()

    def _identify(self) -> None:
        # key is equal in equal announcements, which may share a lease; None for one that shares none.
        self.key = None if self._alone else bytes(self._message.SerializeToString()) + repr(self.selected).encode()

    @property
    def needs_list(self) -> bool:
        """Reports whether encode will ask for the GPUs of the daemon."""
        if self._bytes is not None or not isinstance(self.selected, tuple) or self.remote:
            return False
        if any(g.by == "name" for g in self.selected):
            return True
        return any(g.by in ("index", "uuid") for g in self.selected) and _gpus.topology() is None

    def encode(self, ask: Callable[[], List[_gpus.Node]]) -> bytes:
        """Return the message. ask lists the GPUs of the daemon. Errors: UnknownGpu, and those of ask."""
        if self._bytes is not None:
            return self._bytes
        message = _proto.NotifyOnlineRequest()
        message.CopyFrom(self._message)
        selectors: List[Tuple[str, Any]] = []  # without any the daemon chooses those on which this process has queues
        if isinstance(self.selected, tuple):
            selectors = list(_gpus.resolve_remote(self.selected) if self.remote else _gpus.resolve(self.selected, ask))
        elif self.selected is _gpus.ALL:
            selectors = [("all", True)]
        for by, value in selectors:
            setattr(message.gpus.add(), by, value)
        self._bytes = bytes(message.SerializeToString())
        return self._bytes

    def copy(self, gpus: Any = None) -> "Request":
        """Return the same announcement, with other GPUs if they are given."""
        other = Request.__new__(Request)
        other.__dict__.update(self.__dict__)
        other.selected = self.selected if gpus is None else _gpus.parse_all(gpus)
        other._bytes = None
        other._message = _proto.NotifyOnlineRequest()
        other._message.CopyFrom(self._message)
        other._identify()
        return other

    def at_once(self) -> "Request":
        """Return the same announcement without a wait for the GPUs."""
        other = self.copy()
        other.call_time = DAEMON_TIME
        other._message.max_wait.SetInParent()
        _proto.set_duration(other._message.max_wait, 0.0)
        other._identify()
        return other

    def forget(self) -> None:
        """Look the GPUs up again at the next announcement."""
        self._bytes = None
