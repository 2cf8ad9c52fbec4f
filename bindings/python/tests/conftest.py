"""A daemon on a simulated machine, and a fake that does not answer."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE.parent))

import gpreempt  # noqa: E402
from gpreempt import _lease, _proto, _sync  # noqa: E402

# No lease expires because the host is busy.
CONFIG = """
access: {online_groups: [%(gid)d], admin_groups: [%(gid)d]}
limits: {requests_per_user: 1000000, leases_per_user: 100000}
rules:
  - name: training
    match: {comm: "train*"}
    class: offline
    priority: 0
policy: {attach_after: 0s}
"""


def eventually(what: str, reached: Callable[[], Any]) -> None:
    """Wait for an event. The bound is only reached when it does not happen."""
    end = time.monotonic() + 60
    while not reached():
        if time.monotonic() > end:
            pytest.fail("never: " + what)
        time.sleep(0.005)


class Daemon:
    """gpreemptd on a simulated machine with two GPUs. It may be killed and started again."""

    def __init__(self, kfdemu: str, directory: Path) -> None:
        self._kfdemu = kfdemu
        self.socket = str(directory / "d.sock")
        self._config = directory / "c.yaml"
        self._config.write_text(CONFIG % {"gid": os.getegid(), "uid": os.geteuid()})
        self._log = directory / "log"
        self._process: Any = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [self._kfdemu, "serve-sim", "--config", str(self._config), "--socket", self.socket, "--gpus", "2", "--default-ttl", "30s", "--job", "train:4:25ms:2"],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._log.open("a"),
            env={"PATH": os.environ["PATH"], "TMPDIR": str(self._config.parent)},  # kill leaves its directory
        )  # fmt: skip

        def serves() -> bool:
            if self._process.poll() is not None:
                pytest.fail("the daemon ended: " + self._log.read_text())
            try:
                connection = _sync.Connection(self.socket)
            except gpreempt.Error:
                return False
            call = connection.call(_proto.HEALTH, b"", time.monotonic() + 60)
            connection.end("done")
            return call.message == b"\x08\x01"

        eventually("the daemon serves", serves)

    def kill(self) -> None:
        """End the daemon at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop the daemon: it accepts connections and does not answer."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)  # until then some of its threads run

    def proceed(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def _admin(self, method: str) -> Any:
        connection = _sync.Connection(self.socket)
        call = connection.call("/gpreempt.v1.AdminService/" + method, b"", time.monotonic() + 60)
        connection.end("done")
        assert call.status == 0, call.text
        return _proto.message("gpreempt.v1." + method + "Response").FromString(call.message)

    def leases(self) -> List[Any]:
        """Return the live leases."""
        return [lease for lease in self._admin("ListLeases").leases if lease.state != 4]

    def announcements(self) -> int:
        return int(self._admin("GetStatistics").statistics.announcements)

    def warnings(self) -> List[Any]:
        return list(self._admin("GetStatus").warnings)

    def labels(self) -> List[str]:
        return sorted(lease.label for lease in self.leases())

    def eventually_free(self) -> None:
        eventually("no lease is left", lambda: not self.leases())


@pytest.fixture(scope="session")
def kfdemu(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of kfdemu: of $GPREEMPT_BUILD, or built now."""
    given = os.environ.get("GPREEMPT_BUILD")
    if given:
        return os.path.join(given, "kfdemu")
    if shutil.which("go") is None:
        pytest.skip("the go command is missing, which builds kfdemu; or set GPREEMPT_BUILD")
    path = str(tmp_path_factory.mktemp("build") / "kfdemu")
    subprocess.run(["go", "build", "-buildvcs=false", "-o", path, "./emu/cmd/kfdemu"], cwd=ROOT, check=True)
    return path


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory whose path is short enough for a socket."""
    path = tempfile.mkdtemp(prefix="gpreempt")
    yield Path(path)
    shutil.rmtree(path)


@pytest.fixture
def daemon(kfdemu: str, directory: Path) -> Iterator[Daemon]:
    d = Daemon(kfdemu, directory)
    d.start()
    yield d
    d.kill()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[gpreempt.Client]:
    with gpreempt.Client(daemon.socket) as c:
        yield c


@pytest.fixture
def renewed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew leases after a fifth of their time to live: a lease of 10 s is not lost when the host stands still for less than 8 s."""
    monkeypatch.setattr(_lease, "_RENEW_AFTER", 0.2)


class Silent:
    """A socket that accepts connections, records what it receives, and never answers."""

    def __init__(self, path: str) -> None:
        self.received = bytearray()
        self.connections = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._open: List[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        try:
            while data := connection.recv(1 << 16):
                self.received += data
        except OSError:
            pass

    def close(self) -> None:
        for s in [self._listener, *self._open]:
            try:
                s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            s.close()
