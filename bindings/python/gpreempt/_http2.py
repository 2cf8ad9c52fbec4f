"""Unary gRPC calls over HTTP/2 (RFC 9113), as a state machine: bytes in, bytes out.

Nothing here does I/O, knows the time or takes a lock; _sync and _aio do. ADR 33 has the
reasons why this is not grpcio.
"""

from __future__ import annotations

import base64
import struct
from collections import deque
from typing import Deque, Dict, List, Optional, Set, Tuple
from urllib.parse import unquote_to_bytes

from . import _hpack

_DATA, _HEADERS, _PRIORITY, _RST_STREAM, _SETTINGS, _PUSH_PROMISE, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = range(10)
_END_STREAM = _ACK = 0x1
_END_HEADERS, _PADDED, _HAS_PRIORITY = 0x4, 0x8, 0x20
_CANCEL = 8
_MAX_CONCURRENT_STREAMS, _INITIAL_WINDOW_SIZE = 3, 4

# Status codes of gRPC.
OK, CANCELLED, UNKNOWN, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, INTERNAL, UNAVAILABLE = 0, 1, 2, 4, 8, 13, 14

MAX_FRAME = 1 << 14
# MAX_MESSAGE bounds an answer in bytes.
MAX_MESSAGE = 4 << 20
_WINDOW = 1 << 30
_FIRST_WINDOW = 65535
# Calls at once before the peer has sent its settings.
_FIRST_CALLS = 8


class ProtocolError(Exception):
    """The peer broke the protocol: the connection cannot be used any more."""


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">HBBBI", len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream) + payload


_PREFACE = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    # No dynamic table, no push, and a window that no answer fills.
    + _frame(_SETTINGS, 0, 0, struct.pack(">HIHIHI", 1, 0, 2, 0, 4, _WINDOW))
    + _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _WINDOW - _FIRST_WINDOW))
)


class Call:
    """One unary call. done is set when status is known."""

    __slots__ = ("stream", "message", "done", "status", "text", "details", "opened", "waiter")

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.message: bytes = b""
        self.done = False
        self.status = UNKNOWN
        self.text = ""
        self.details = b""  # a google.rpc.Status
        self.opened = False
        self.waiter: object = None

    def end(self, status: int, text: str) -> None:
        self.done = True
        self.status, self.text = status, text


class Connection:
    """The client's side of one connection."""

    def __init__(self, authority: str = "localhost") -> None:
        self._authority = authority
        self._paths: Dict[str, bytes] = {}
        self._timeouts: Dict[int, bytes] = {}
        self._blocks: Dict[bytes, List[Tuple[str, str]]] = {}
        self._next = 1
        self._in = bytearray()
        self._block: Optional[Tuple[int, int, bytearray]] = None  # stream, flags, what arrived of its header block
        self._received = 0
        self._send_window = self._stream_window = _FIRST_WINDOW
        self._out = bytearray(_PREFACE)
        self._max_calls = _FIRST_CALLS
        self._settled = False  # the peer has sent its settings
        self._posted: Set[int] = set()
        self._later: Deque[Tuple[str, bytes, int]] = deque()
        self.calls: Dict[int, Call] = {}
        # draining is set when the peer accepts no further calls.
        self.draining = False

    @property
    def full(self) -> bool:
        """Reports whether no further call can be opened."""
        return self.draining or self._next >= 1 << 31

    def has_room(self, size: int) -> bool:
        """Reports whether the peer accepts a call with a message of size bytes now."""
        return size + 5 <= min(self._send_window, self._stream_window, MAX_FRAME) and len(self.calls) + len(self._posted) < self._max_calls

    def open(self, path: str, message: bytes, timeout_ms: int) -> Call:
        """Open a call, which take then contains; has_room must be true."""
        call = Call(self._next)
        self._next += 2
        self.calls[call.stream] = call
        self._append(call.stream, path, message, timeout_ms)
        return call

    def post(self, path: str, message: bytes, timeout_ms: int) -> None:
        """Open a call whose answer nobody needs, now or as soon as the peer accepts it."""
        if not self.has_room(len(message)):
            self._later.append((path, message, timeout_ms))
            return
        self._posted.add(self._next)
        self._append(self._next, path, message, timeout_ms)
        self._next += 2

    def _append(self, stream: int, path: str, message: bytes, timeout_ms: int) -> None:
        block = self._paths.get(path)
        if block is None:
            block = self._paths[path] = b"\x83\x86" + _hpack.encode(
                [(":path", path), (":authority", self._authority), ("content-type", "application/grpc"), ("te", "trailers")]
            )
        timeout = self._timeouts.get(timeout_ms)
        if timeout is None:
            if len(self._timeouts) >= 64:
                self._timeouts.clear()
            timeout = self._timeouts[timeout_ms] = _hpack.encode([("grpc-timeout", f"{min(timeout_ms, 99_999_999)}m")])
        size = len(message) + 5
        self._send_window -= size
        n = len(block) + len(timeout)
        self._out += b"".join(
            (
                struct.pack(">HBBBI", n >> 8, n & 0xFF, _HEADERS, _END_HEADERS, stream),
                block,
                timeout,
                struct.pack(">HBBBIBI", size >> 8, size & 0xFF, _DATA, _END_STREAM, stream, 0, len(message)),
                message,
            )
        )

    def cancel(self, call: Call) -> None:
        """End a call whose answer is not awaited any more."""
        if self.calls.pop(call.stream, None) is not None and not call.done:
            self._out += _frame(_RST_STREAM, 0, call.stream, struct.pack(">I", _CANCEL))
            call.end(CANCELLED, "cancelled")

    @property
    def waiting(self) -> bool:
        """Reports whether a posted call is to be sent yet: received bytes will permit it."""
        return bool(self._later)

    def take(self) -> bytes:
        """Return the bytes to send."""
        out = bytes(self._out)
        self._out.clear()
        return out

    def feed(self, data: bytes) -> List[Call]:
        """Accept received bytes and return the calls that they ended."""
        ended: List[Call] = []
        self._in += data
        at = 0
        buffer = self._in
        while len(buffer) - at >= 9:
            high, low, kind, flags, stream = struct.unpack_from(">HBBBI", buffer, at)
            length = high << 8 | low
            if length > MAX_FRAME:
                raise ProtocolError("a frame is too long")
            if len(buffer) - at - 9 < length:
                break
            payload = bytes(buffer[at + 9 : at + 9 + length])
            at += 9 + length
            self._frame(kind, flags, stream & 0x7FFFFFFF, payload, ended)
        if at:
            del buffer[:at]
        while self._later and not self.full and self.has_room(len(self._later[0][1])):
            self.post(*self._later.popleft())
        return ended

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes, ended: List[Call]) -> None:
        if self._block is not None:
            owner, first, block = self._block
            if kind != _CONTINUATION or stream != owner:
                raise ProtocolError("a header block is interrupted")
            block += payload
            if len(block) > 4 * MAX_FRAME:
                raise ProtocolError("a header block is too long")
            if flags & _END_HEADERS:
                self._block = None
                self._headers(stream, first, bytes(block), ended)
        elif kind == _DATA:
            self._data(stream, flags, payload, ended)
        elif kind == _HEADERS:
            if flags & _PADDED:
                payload = _unpadded(payload)
            if flags & _HAS_PRIORITY:
                payload = payload[5:]
            if flags & _END_HEADERS:
                self._headers(stream, flags, payload, ended)
            else:
                self._block = stream, flags, bytearray(payload)
        elif kind == _RST_STREAM:
            self._posted.discard(stream)
            call = self.calls.pop(stream, None)
            if call is not None:
                call.end(UNAVAILABLE, "the daemon reset the call")
                ended.append(call)
        elif kind == _SETTINGS:
            if not flags & _ACK:
                if not self._settled:
                    self._settled, self._max_calls = True, 1 << 31
                for at in range(0, len(payload) - 5, 6):
                    setting, value = struct.unpack_from(">HI", payload, at)
                    if setting == _MAX_CONCURRENT_STREAMS:
                        self._max_calls = value
                    elif setting == _INITIAL_WINDOW_SIZE:
                        # A message fits in one frame, so a call needs no other window.
                        self._stream_window = value
                self._out += _frame(_SETTINGS, _ACK, 0, b"")
        elif kind == _PING:
            if len(payload) != 8:
                raise ProtocolError("a ping of the wrong size")
            if not flags & _ACK:
                self._out += _frame(_PING, _ACK, 0, payload)
        elif kind == _GOAWAY:
            if len(payload) < 8:
                raise ProtocolError("a goaway of the wrong size")
            self.draining = True
            self._later.clear()  # what it would end ends with the connection
            last = struct.unpack_from(">I", payload)[0] & 0x7FFFFFFF
            text = payload[8:].decode("utf-8", "replace") or "the daemon closes the connection"
            for number in [n for n in self.calls if n > last]:
                call = self.calls.pop(number)
                call.end(UNAVAILABLE, text)
                ended.append(call)
        elif kind == _WINDOW_UPDATE:
            if len(payload) != 4:
                raise ProtocolError("a window update of the wrong size")
            if stream == 0:
                self._send_window += struct.unpack(">I", payload)[0] & 0x7FFFFFFF
        elif kind in (_PUSH_PROMISE, _CONTINUATION):
            raise ProtocolError("an unexpected frame")

    def _data(self, stream: int, flags: int, payload: bytes, ended: List[Call]) -> None:
        self._received += len(payload)
        if self._received > _WINDOW // 2:
            self._out += _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", self._received))
            self._received = 0
        if flags & _PADDED:
            payload = _unpadded(payload)
        call = self.calls.get(stream)
        if call is None:
            return
        call.message += payload
        if len(call.message) > MAX_MESSAGE + 5:
            self.cancel(call)
            call.end(RESOURCE_EXHAUSTED, "the answer is too large")
            ended.append(call)
        elif flags & _END_STREAM:
            del self.calls[stream]
            call.end(INTERNAL, "the answer has no status")
            ended.append(call)

    def _headers(self, stream: int, flags: int, block: bytes, ended: List[Call]) -> None:
        call = self.calls.get(stream)
        if call is None:  # there is no table that the block could change
            if flags & _END_STREAM:
                self._posted.discard(stream)
            return
        fields = self._blocks.get(block)
        if fields is None:
            try:
                fields = _hpack.decode(block)
            except _hpack.HeaderError as e:
                raise ProtocolError(str(e)) from e
            if len(self._blocks) < 64 and len(block) < 256:
                self._blocks[block] = fields
        if not call.opened:
            call.opened = True
            if (":status", "200") not in fields:
                status = next((value for name, value in fields if name == ":status"), "none")
                self.cancel(call)
                call.end(UNAVAILABLE if status in ("429", "502", "503", "504") else UNKNOWN, f"HTTP status {status}")
                ended.append(call)
                return
        if not flags & _END_STREAM:
            return
        del self.calls[stream]
        ended.append(call)
        status, text = str(INTERNAL), "the answer has no status"
        for name, value in fields:
            if name == "grpc-status":
                status, text = value, ""
        for name, value in fields:
            if name == "grpc-message":
                text = unquote_to_bytes(value).decode("utf-8", "replace")
            elif name == "grpc-status-details-bin":
                try:
                    call.details = base64.b64decode(value + "=" * (-len(value) % 4))
                except ValueError:
                    call.details = b""
        call.end(int(status) if status.isascii() and status.isdigit() and len(status) < 4 else UNKNOWN, text)
        if call.status == OK:
            message = call.message
            if len(message) < 5 or message[0] != 0 or struct.unpack_from(">I", message, 1)[0] != len(message) - 5:
                call.end(INTERNAL, "the answer is not one message")
            else:
                call.message = message[5:]


def _unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise ProtocolError("invalid padding of a frame")
    return payload[1 : len(payload) - payload[0]]
