from __future__ import annotations

import os
import random
import struct
from typing import Callable

import pytest

from gpreempt import _hpack, _http2


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">HBBBI", len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream) + payload


def answer(stream: int, message: bytes) -> bytes:
    data = b"\0" + struct.pack(">I", len(message)) + message
    return (
        frame(1, 4, stream, b"\x88" + _hpack.encode([("content-type", "application/grpc")]))
        + frame(0, 0, stream, data)
        + frame(1, 5, stream, _hpack.encode([("grpc-status", "0")]))
    )


def ended(call: _http2.Call) -> tuple[bool, int, str, bytes]:
    return call.done, call.status, call.text, call.message


# RFC 7541, C.4 and C.6.
@pytest.mark.parametrize(
    "coded, text",
    [
        ("f1e3c2e5f23a6ba0ab90f4ff", b"www.example.com"),
        ("a8eb10649cbf", b"no-cache"),
        ("25a849e95ba97d7f", b"custom-key"),
        ("25a849e95bb8e8b4bf", b"custom-value"),
        ("d07abe941054d444a8200595040b8166e082a62d1bff", b"Mon, 21 Oct 2013 20:13:21 GMT"),
        ("9d29ad171863c78f0b97c8e9ae82ae43d3", b"https://www.example.com"),
    ],
)
def test_huffman_codes_are_those_of_the_standard(coded: str, text: bytes) -> None:
    assert _hpack.huffman_decode(bytes.fromhex(coded)) == text


def test_header_block_of_the_standard_is_decoded() -> None:
    block = bytes.fromhex("828684418cf1e3c2e5f23a6ba0ab90f4ff")  # C.4.1
    assert _hpack.decode(block) == [(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "www.example.com")]


def test_long_values_are_encoded_and_decoded() -> None:
    fields = [("name", "x" * n) for n in (0, 126, 127, 128, 300, 20000)]
    assert _hpack.decode(_hpack.encode(fields)) == fields


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_answer_in_pieces_is_the_same_answer(size: int) -> None:
    http2 = _http2.Connection()
    call = http2.open("/a.B/C", b"question", 100)
    data = frame(4, 0, 0, b"") + frame(6, 0, 0, b"12345678") + answer(1, b"yes")
    calls = []
    for at in range(0, len(data), size):
        calls += http2.feed(data[at : at + size])
    assert calls == [call]
    assert ended(call) == (True, 0, "", b"yes")
    assert http2.calls == {}


def test_answers_in_any_order_reach_their_calls() -> None:
    http2 = _http2.Connection()
    first, second = http2.open("/a.B/C", b"", 100), http2.open("/a.B/C", b"", 100)
    assert http2.feed(answer(3, b"2") + answer(1, b"1")) == [second, first]
    assert (first.message, second.message) == (b"1", b"2")


def test_status_and_message_of_a_refusal_are_returned() -> None:
    http2 = _http2.Connection()
    call = http2.open("/a.B/C", b"", 100)
    http2.feed(frame(1, 5, 1, b"\x88" + _hpack.encode([("grpc-status", "8"), ("grpc-message", "50%25 %C3%BC")])))
    assert ended(call) == (True, 8, "50% ü", b"")


def test_answer_that_is_no_answer_of_grpc_ends_the_call_at_once() -> None:
    http2 = _http2.Connection()
    call = http2.open("/a.B/C", b"", 100)
    http2.take()
    assert http2.feed(frame(1, 4, 1, _hpack.encode([(":status", "503")]))) == [call]
    assert (ended(call), http2.take()) == ((True, _http2.UNAVAILABLE, "HTTP status 503", b""), frame(3, 0, 1, struct.pack(">I", 8)))
    call = http2.open("/a.B/C", b"", 100)
    assert http2.feed(frame(1, 5, 3, b"\x88" + _hpack.encode([("grpc-status", "\u00b2")]))) == [call]
    assert ended(call) == (True, _http2.UNKNOWN, "", b"")


def test_header_block_in_several_frames_is_one_block() -> None:
    http2 = _http2.Connection()
    call = http2.open("/a.B/C", b"", 100)
    block = b"\x88" + _hpack.encode([("grpc-status", "5"), ("grpc-message", "none")])
    http2.feed(frame(1, 1, 1, block[:4]) + frame(9, 0, 1, block[4:9]) + frame(9, 4, 1, block[9:]))
    assert ended(call) == (True, 5, "none", b"")


def test_pings_and_settings_are_acknowledged() -> None:
    http2 = _http2.Connection()
    http2.take()
    http2.feed(frame(4, 0, 0, b"") + frame(6, 0, 0, b"12345678") + frame(6, 1, 0, b"87654321"))
    assert http2.take() == frame(4, 1, 0, b"") + frame(6, 1, 0, b"12345678")


def test_no_call_is_opened_beyond_the_limits_of_the_peer() -> None:
    http2 = _http2.Connection()
    http2.feed(frame(4, 0, 0, struct.pack(">HI", 3, 2)))
    http2.open("/a.B/C", b"", 100)
    assert http2.has_room(1)
    http2.post("/a.B/C", b"", 100)
    assert not http2.has_room(1)
    http2.feed(answer(3, b""))  # of the posted call
    assert http2.has_room(1)
    assert not http2.has_room(1 << 14)

    http2 = _http2.Connection()
    http2.feed(frame(4, 0, 0, b""))
    for _ in range(65535 // 1005):
        http2.post("/a.B/C", b"x" * 1000, 100)
    assert not http2.has_room(1000)
    http2.feed(frame(8, 0, 0, struct.pack(">I", 10_000)))
    assert http2.has_room(1000)


def test_settings_of_the_peer_are_kept() -> None:
    http2 = _http2.Connection()
    http2.feed(frame(4, 0, 0, struct.pack(">HIHI", 3, 8, 4, 1000)))
    assert http2.has_room(995) and not http2.has_room(996)
    http2.feed(frame(4, 0, 0, struct.pack(">HI", 4, 2000)))  # says nothing of calls
    assert http2.has_room(1995) and not http2.has_room(1996)
    for _ in range(8):
        http2.open("/a.B/C", b"", 100)
    assert not http2.has_room(0)


def test_reset_call_ends_and_others_continue() -> None:
    http2 = _http2.Connection()
    first, second = http2.open("/a.B/C", b"", 100), http2.open("/a.B/C", b"", 100)
    assert http2.feed(frame(3, 0, 1, struct.pack(">I", 7))) == [first]
    assert ended(first) == (True, _http2.UNAVAILABLE, "the daemon reset the call", b"")
    assert http2.feed(answer(3, b"2")) == [second]


def test_large_answer_is_bounded_and_the_window_of_the_connection_grows_again() -> None:
    http2 = _http2.Connection()
    call = http2.open("/a.B/C", b"", 100)
    http2.take()
    http2._received = _http2._WINDOW // 2  # of former answers
    part = frame(0, 0, 1, bytes(_http2.MAX_FRAME))
    assert http2.feed(frame(1, 4, 1, b"\x88") + part * (_http2.MAX_MESSAGE // _http2.MAX_FRAME + 1)) == [call]
    assert ended(call)[:3] == (True, _http2.RESOURCE_EXHAUSTED, "the answer is too large")
    granted = frame(8, 0, 0, struct.pack(">I", _http2._WINDOW // 2 + _http2.MAX_FRAME))
    assert http2.take() == granted + frame(3, 0, 1, struct.pack(">I", 8))


@pytest.mark.parametrize(
    "data",
    [
        frame(1, 0, 1, b"\x88") + frame(6, 0, 0, bytes(8)),  # between the frames of a header block
        frame(1, 0, 1, b"\x88") + frame(9, 4, 3, b""),
        frame(1, 0, 1, b"\x88") + frame(9, 0, 1, bytes(_http2.MAX_FRAME)) * 5,
        frame(9, 4, 1, b""),
        frame(5, 4, 1, bytes(4)),
        frame(6, 0, 0, bytes(7)),
        frame(7, 0, 0, bytes(7)),
        frame(8, 0, 0, bytes(3)),
        frame(0, 8, 1, b"\x05abc"),
        frame(1, 4, 1, b"\xff"),
        b"\xff\xff\xff" + bytes(6),
    ],
)
def test_broken_protocol_is_an_error(data: bytes) -> None:
    http2 = _http2.Connection()
    http2.open("/a.B/C", b"", 100)
    with pytest.raises(_http2.ProtocolError):
        http2.feed(data)


def test_posted_call_is_sent_as_soon_as_the_peer_accepts_it() -> None:
    http2 = _http2.Connection()
    http2.feed(frame(4, 0, 0, struct.pack(">HI", 3, 1)))
    http2.open("/a.B/C", b"", 100)
    http2.take()
    http2.post("/a.B/C", b"later", 100)
    assert (http2.waiting, http2.take()) == (True, b"")
    http2.feed(answer(1, b""))
    assert not http2.waiting
    assert b"later" in http2.take()


def test_calls_after_the_last_of_a_goaway_end() -> None:
    http2 = _http2.Connection()
    first, second = http2.open("/a.B/C", b"", 100), http2.open("/a.B/C", b"", 100)
    assert http2.feed(frame(7, 0, 0, struct.pack(">II", 1, 0) + b"closing")) == [second]
    assert ended(second) == (True, _http2.UNAVAILABLE, "closing", b"")
    assert http2.full and not first.done
    assert http2.feed(answer(1, b"1")) == [first]


def test_answer_to_a_cancelled_call_is_ignored() -> None:
    http2 = _http2.Connection()
    call = http2.open("/a.B/C", b"", 100)
    http2.take()
    http2.cancel(call)
    assert http2.take() == frame(3, 0, 1, struct.pack(">I", 8))
    assert http2.feed(answer(1, b"late")) == []


def fuzz_http2(rng: random.Random) -> None:
    """Feed random frames, valid ones that were damaged, and bytes, in random pieces."""
    http2 = _http2.Connection()
    calls = [http2.open("/a.B/C", b"question", 100) for _ in range(rng.randrange(1, 4))]
    http2.post("/a.B/C", b"", 100)
    data = bytearray(frame(4, 0, 0, struct.pack(">HI", 3, rng.randrange(10))))
    for _ in range(rng.randrange(8)):
        stream = rng.choice([0, 1, 3, 5, 7, 9])
        data += rng.choice(
            [
                lambda: answer(stream, rng.randbytes(rng.randrange(50))),
                lambda: frame(rng.randrange(12), rng.randrange(256), stream, rng.randbytes(rng.randrange(40))),
                lambda: frame(1, 0, stream, b"\x88") + frame(9, 4, stream, _hpack.encode([("grpc-status", str(rng.randrange(20)))])),
                lambda: rng.randbytes(rng.randrange(30)),
            ]
        )()
    for _ in range(rng.randrange(4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    try:
        while data:
            n = rng.randrange(1, len(data) + 1)
            for call in http2.feed(bytes(data[:n])):
                assert call.done and call.stream not in http2.calls
            del data[:n]
    except _http2.ProtocolError:
        return
    # A call has either ended or is still awaited, and the answer to it is bounded.
    assert all(call.done == (call.stream not in http2.calls) for call in calls)


def fuzz_hpack(rng: random.Random) -> None:
    """Decode random bytes, and a valid block that was damaged."""
    block = bytearray(_hpack.encode([(rng.choice(["grpc-status", "x"]), "v" * rng.randrange(300)) for _ in range(rng.randrange(1, 4))]))
    for _ in range(rng.randrange(4)):
        block[rng.randrange(len(block))] = rng.randrange(256)
    for data in (bytes(block), rng.randbytes(rng.randrange(60))):
        try:
            fields = _hpack.decode(data)
        except _hpack.HeaderError:
            continue
        assert all(isinstance(name, str) and isinstance(value, str) for name, value in fields)
        # Fields of ASCII are the same after they were encoded and decoded again.
        assert not all((name + value).isascii() for name, value in fields) or _hpack.decode(_hpack.encode(fields)) == fields


@pytest.mark.parametrize("fuzz", [fuzz_http2, fuzz_hpack])
def test_random_bytes_raise_nothing_but_protocol_errors(fuzz: Callable[[random.Random], None]) -> None:
    """GPREEMPT_FUZZ=1000000 tries longer."""
    for seed in range(int(os.environ.get("GPREEMPT_FUZZ", "10000"))):
        try:
            fuzz(random.Random(seed))
        except Exception as e:
            raise AssertionError(f"seed {seed}") from e
