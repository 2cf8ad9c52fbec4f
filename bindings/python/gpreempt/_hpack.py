"""Decoding of header blocks (RFC 7541), without a dynamic table.

The client sets SETTINGS_HEADER_TABLE_SIZE to 0, so a header block has the same meaning
wherever it is received. Nothing here does I/O.
"""

from __future__ import annotations

from typing import Dict, List, Tuple

# Names of the static table (RFC 7541, appendix A) from index 1; ":status" is at 8 to 14.
_NAMES = (
    ":authority :method :method :path :path :scheme :scheme :status :status :status :status :status :status :status "
    "accept-charset accept-encoding accept-language accept-ranges accept access-control-allow-origin age allow "
    "authorization cache-control content-disposition content-encoding content-language content-length content-location "
    "content-range content-type cookie date etag expect expires from host if-match if-modified-since if-none-match "
    "if-range if-unmodified-since last-modified link location max-forwards proxy-authenticate proxy-authorization range "
    "referer refresh retry-after server set-cookie strict-transport-security transfer-encoding user-agent vary via "
    "www-authenticate"
).split()
_VALUES = {
    2: "GET", 3: "POST", 4: "/", 5: "/index.html", 6: "http", 7: "https",
    8: "200", 9: "204", 10: "206", 11: "304", 12: "400", 13: "404", 14: "500", 16: "gzip, deflate",
}  # fmt: skip

# Lengths of the Huffman codes (appendix B) of the bytes 0 to 255 and of the end of a
# string. The code is canonical: the lengths determine it.
_LENGTHS = bytes(
    int(n)
    for n in (
        "13 23 28 28 28 28 28 28 28 24 30 28 28 30 28 28 28 28 28 28 28 28 30 28 28 28 28 28 28 28 28 28 "
        "6 10 10 12 13 6 8 11 10 10 8 11 8 6 6 6 5 5 5 6 6 6 6 6 6 6 7 8 15 6 12 10 "
        "13 6 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 8 7 8 13 19 13 14 6 "
        "15 5 6 5 6 5 6 6 6 5 7 7 6 6 6 5 6 7 6 5 5 6 7 7 7 7 7 15 11 14 13 28 "
        "20 22 20 20 22 22 22 23 22 23 23 23 23 23 24 23 24 24 22 23 24 23 23 23 23 21 22 23 22 23 23 24 "
        "22 21 20 22 22 23 23 21 23 22 22 24 21 22 23 23 21 21 22 21 23 22 23 23 20 22 22 22 23 22 22 23 "
        "26 26 20 19 22 23 22 25 26 26 26 27 27 26 24 25 19 21 26 27 27 26 27 24 21 21 26 26 28 27 27 27 "
        "20 24 20 21 22 21 21 23 22 22 25 25 24 24 26 23 26 27 26 26 27 27 27 27 27 28 27 27 27 27 27 26 30"
    ).split()
)


class HeaderError(Exception):
    """A header block that cannot be decoded."""


def _huffman_codes() -> Dict[Tuple[int, int], int]:
    codes = {}
    code = length = 0
    for n, symbol in sorted((n, symbol) for symbol, n in enumerate(_LENGTHS)):
        code <<= n - length
        length = n
        codes[n, code] = symbol
        code += 1
    return codes


_CODES = _huffman_codes()


def huffman_decode(data: bytes) -> bytes:
    """Return the text of a Huffman-coded string."""
    text = bytearray()
    code = length = 0
    for byte in data:
        for bit in range(7, -1, -1):
            code = code << 1 | byte >> bit & 1
            length += 1
            symbol = _CODES.get((length, code))
            if symbol is not None:
                if symbol == 256:
                    raise HeaderError("a string contains its end")
                text.append(symbol)
                code = length = 0
            elif length >= 30:
                raise HeaderError("an unknown code in a string")
    if length > 7 or code != (1 << length) - 1:
        raise HeaderError("invalid padding of a string")
    return bytes(text)


def _integer(block: bytes, at: int, prefix: int) -> Tuple[int, int]:
    """Return the integer at a position, whose first byte has prefix bits of it, and the position after it."""
    if at >= len(block):
        raise HeaderError("a header block ends early")
    limit = (1 << prefix) - 1
    value = block[at] & limit
    at += 1
    if value < limit:
        return value, at
    for shift in range(0, 35, 7):
        if at >= len(block):
            raise HeaderError("a header block ends early")
        value += (block[at] & 0x7F) << shift
        at += 1
        if not block[at - 1] & 0x80:
            return value, at
    raise HeaderError("an integer of a header block is too large")


def _string(block: bytes, at: int) -> Tuple[str, int]:
    length, start = _integer(block, at, 7)
    if start + length > len(block):
        raise HeaderError("a header block ends early")
    raw = block[start : start + length]
    if block[at] & 0x80:
        raw = huffman_decode(raw)
    return raw.decode("latin-1"), start + length


def _name(index: int) -> str:
    if not 1 <= index <= len(_NAMES):
        raise HeaderError("a header block refers to an entry that does not exist")
    return _NAMES[index - 1]


def decode(block: bytes) -> List[Tuple[str, str]]:
    """Return the fields of a header block."""
    fields = []
    at = 0
    while at < len(block):
        first = block[at]
        if first & 0x80:  # an indexed field
            index, at = _integer(block, at, 7)
            fields.append((_name(index), _VALUES.get(index, "")))
            continue
        if first & 0xE0 == 0x20:  # a size of the dynamic table, which has no entries
            _, at = _integer(block, at, 5)
            continue
        index, at = _integer(block, at, 6 if first & 0x40 else 4)
        if index:
            name = _name(index)
        else:
            name, at = _string(block, at)
        value, at = _string(block, at)
        fields.append((name, value))
    return fields


def encode(fields: List[Tuple[str, str]]) -> bytes:
    """Return a header block of literals, which enter no table."""
    block = bytearray()
    for name, value in fields:
        block.append(0)
        for text in (name.encode(), value.encode()):
            if len(text) < 127:
                block.append(len(text))
            else:
                block.append(127)
                rest = len(text) - 127
                while rest >= 128:
                    block.append(rest & 0x7F | 0x80)
                    rest >>= 7
                block.append(rest)
            block += text
    return bytes(block)
