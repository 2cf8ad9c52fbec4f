"""TLS to the daemon of another host."""

from __future__ import annotations

import os
import socket
import ssl
from typing import List, Tuple

from . import _errors

# The files of a client, PEM: its certificate, its key, and the certificates of the daemon's authorities.
Files = Tuple[str, str, str]


class Endpoint:
    """The address of a daemon, with the files for it, which each connection reads again."""

    def __init__(self, address: str, files: Files) -> None:
        host, _, port = address[len("tcp://") :].rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"invalid address {address!r} of gpreemptd: use the form tcp://HOST:PORT")
        if isinstance(files, str) or len(files) != 3:
            raise TypeError(f"certificate is {files!r}: use three PEM files: (certificate, key, authorities)")
        self.name, self._host, self._port, self._files = address, host.strip("[]"), int(port), files
        try:
            self._context()
        except OSError as e:  # of the program; ssl does not name the file
            wrong = [file for file in files if not os.access(file, os.R_OK)]
            raise ValueError(f"certificate {', '.join(wrong) or files}: {e}: use PEM files that this process may read: (certificate, key, authorities)") from None

    def _context(self) -> ssl.SSLContext:
        cert, key, ca = self._files
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols(["h2"])
        context.load_cert_chain(cert, key)
        return context

    def connect(self, within: float) -> "Stream":
        """Return a connection. within bounds each of its steps in seconds, except the resolution of the name."""
        try:
            raw = socket.create_connection((self._host, self._port), timeout=max(within, 0.001))
            try:
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                secure = self._context().wrap_socket(raw, server_hostname=self._host)
            except BaseException:
                raw.close()
                raise
            secure.setblocking(False)
            return Stream(secure)
        except OSError as e:
            raise _errors.unavailable(f"no gpreemptd at {self.name}: {e}") from e


class Stream:
    """A TLS connection that behaves like a socket that does not block."""

    def __init__(self, secure: ssl.SSLSocket) -> None:
        self._secure = secure

    def fileno(self) -> int:
        return self._secure.fileno()

    def recv(self, size: int) -> bytes:
        """Return all that has arrived, and at most size bytes and a record: what stayed would not wake a poll."""
        parts: List[bytes] = []
        try:
            while size > 0:
                data = self._secure.recv(size)
                if not data:
                    break
                parts.append(data)
                size -= len(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not parts:
                raise BlockingIOError from None
        return b"".join(parts)

    def send(self, data: bytes, flags: int = 0) -> int:
        """Send like socket.send; the flags, which TLS does not have, are ignored: Python ignores SIGPIPE."""
        try:
            return self._secure.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def shutdown(self, how: int) -> None:
        self._secure.shutdown(how)

    def close(self) -> None:
        self._secure.close()
