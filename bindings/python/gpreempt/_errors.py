"""Errors, by the reasons of docs/api.md."""

from __future__ import annotations

import grp
import os
from typing import Optional, Type

from . import _http2, _proto


def _printable(text: str) -> str:
    """Return text of the daemon as one line without commands for a terminal or changes of direction: it is logged."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Error(Exception):
    """An error with what happened and what to do.

    reason is the stable name of docs/api.md, code the gRPC status code.
    """

    def __init__(self, reason: str, message: str, next: str = "", code: int = 0) -> None:
        reason, message, next = _printable(reason), _printable(message), _printable(next)
        super().__init__(f"{message}: {next}" if next else message)
        self.reason = reason
        self.message = message
        self.next = next
        self.code = code

    @property
    def temporary(self) -> bool:
        """Reports whether the same request may succeed later."""
        return isinstance(self, (Unavailable, Overloaded)) or self.code in (_http2.UNKNOWN, 10, _http2.INTERNAL)


class Unavailable(Error):
    """The daemon is absent, does not answer, or shuts down."""


class PermissionDenied(Error):
    """This process may not announce work."""


class UnknownGpu(Error):
    """A selector matches no GPU of this host."""


class InvalidRequest(Error):
    """A value is outside its range."""


class UnknownLease(Error):
    """The lease has ended, or belongs to another process."""


class Overloaded(Error):
    """A limit is reached."""


_CLASSES = {"UNKNOWN_GPU": UnknownGpu, "UNKNOWN_LEASE": UnknownLease, "FOREIGN_LEASE": UnknownLease}
_CODES = {3: InvalidRequest, 6: InvalidRequest, 7: PermissionDenied, 8: Overloaded, 14: Unavailable, 16: PermissionDenied}


def of_status(code: int, reason: str, message: str, next: str = "") -> Error:
    """Return the error of a refused call."""
    kind: Type[Error] = _CLASSES.get(reason) or _CODES.get(code) or Error
    return kind(reason, message, next, code)


def of_call(call: _http2.Call) -> Error:
    """Return the error of a call that has ended with one."""
    if call.details:
        try:
            status = _proto.Status.FromString(call.details)
            for detail in status.details:
                if detail.type_url.endswith("/google.rpc.ErrorInfo"):
                    info = _proto.ErrorInfo.FromString(detail.value)
                    if info.domain == "gpreempt":
                        next = {entry.key: entry.value for entry in info.metadata}.get("next", "")
                        # The status has the next step in its text, for clients that know no ErrorInfo.
                        return of_status(call.status, info.reason, call.text.removesuffix(": " + next), next)
        except Exception:  # protobuf has no common class for invalid input before 3.21
            pass
    if call.status == _http2.UNAVAILABLE:
        return unavailable(call.text or "gpreemptd ended the connection")
    if call.status == _http2.RESOURCE_EXHAUSTED:
        return Overloaded("MESSAGE_TOO_LARGE", call.text, "send less", call.status)
    return of_status(call.status, "", call.text or f"gpreemptd answered with status {call.status}")


def unavailable(message: str) -> Unavailable:
    return Unavailable("DAEMON_UNAVAILABLE", message, "check the daemon: systemctl status gpreemptd", _http2.UNAVAILABLE)


def no_answer(call: str, seconds: float) -> Unavailable:
    return unavailable(f"gpreemptd did not answer {call} within {seconds * 1000:.0f} ms")


def of_connect(path: str, error: OSError) -> Error:
    """Return the error of a failed connect to the socket."""
    if not isinstance(error, PermissionError):
        return unavailable(f"no gpreemptd at {path}: {error.strerror or error}")
    group = socket_group(path) or "gpreempt"
    return PermissionDenied(
        "ONLINE_RIGHT_MISSING",
        f"this process (user {os.geteuid()}) may not connect to {path}",
        f"join the group {group}: usermod -aG {group} USER, then start this program from a new login",
        7,
    )


def socket_group(path: str) -> Optional[str]:
    """Return the name of the group of the socket, or None when it cannot be read."""
    try:
        gid = os.stat(path).st_gid
        return grp.getgrgid(gid).gr_name
    except (OSError, KeyError):
        return None
