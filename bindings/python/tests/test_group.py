"""Announcements on several hosts, by sockets and by TLS."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import pytest

import gpreempt
from conftest import Daemon, Silent, eventually


@pytest.fixture
def hosts(kfdemu: str, directory: Path) -> Iterator[List[Daemon]]:
    all = []
    for name in "ab":
        (directory / name).mkdir()
        all.append(Daemon(kfdemu, directory / name))
        all[-1].start()
    yield all
    for d in all:
        d.kill()


@pytest.fixture
def group(hosts: List[Daemon]) -> Iterator[gpreempt.Group]:
    with gpreempt.Group([gpreempt.Client(d.socket) for d in hosts]) as g:
        yield g


def labels(hosts: List[Daemon]) -> List[List[str]]:
    return [d.labels() for d in hosts]


def test_block_has_a_lease_on_every_host(hosts: List[Daemon], group: gpreempt.Group) -> None:
    with gpreempt.online(gpus=[0], label="tp", max_wait=10, client=group) as lease:
        assert labels(hosts) == [["tp"], ["tp"]]
        assert isinstance(lease, gpreempt.GroupLease)
        assert (lease.protected, lease.quiet, lease.reason, lease.cause, lease.causes, lease.lost) == (True, True, "DONE", None, {}, False)
        assert (lease.suspended_targets, len(lease.gpus), lease.ttl) == (2, 2, 30.0)
        assert lease.id == ",".join(d.leases()[0].lease_id for d in hosts)
    for d in hosts:
        d.eventually_free()
    assert not lease.lost


def test_coroutine_has_a_lease_on_every_host(hosts: List[Daemon], group: gpreempt.Group) -> None:
    @gpreempt.online(gpus=[0], label="tp", max_wait=10, client=group)
    async def work() -> Any:
        return labels(hosts)

    assert asyncio.run(work()) == [["tp"], ["tp"]]
    for d in hosts:
        d.eventually_free()


def test_hosts_use_their_own_gpus(hosts: List[Daemon]) -> None:
    ids = [[g.gpu_id for g in d._admin("ListGpus").gpus] for d in hosts]
    with gpreempt.Group([gpreempt.Client(d.socket) for d in hosts], gpus=[[0], [gpreempt.gpu_id(ids[1][1])]]) as group:
        with gpreempt.online(gpreempt.ALL, max_wait=10, client=group) as lease:
            assert [x.gpus for x in lease.leases] == [[ids[0][0]], [ids[1][1]]]  # type: ignore[attr-defined]


def test_work_runs_with_the_hosts_that_answer_and_the_others_are_named(hosts: List[Daemon], group: gpreempt.Group) -> None:
    hosts[1].kill()
    with gpreempt.online(gpus=[0], label="tp", max_wait=10, client=group) as lease:
        assert isinstance(lease, gpreempt.GroupLease)
        assert (lease.protected, lease.quiet, list(lease.causes)) == (False, False, [hosts[1].socket])
        assert [x.protected for x in lease.leases] == [True, False] and hosts[0].labels() == ["tp"]
    hosts[0].eventually_free()


def test_strict_keeps_all_leases_or_none(hosts: List[Daemon], group: gpreempt.Group) -> None:
    hosts[1].kill()
    with pytest.raises(gpreempt.Unavailable) as e:
        gpreempt.online(gpus=[0], max_wait=10, client=group, strict=True).acquire()
    assert e.value.message.startswith(f"host {hosts[1].socket}: ")
    hosts[0].eventually_free()


def test_loss_on_one_host_is_a_loss(hosts: List[Daemon], group: gpreempt.Group) -> None:
    with gpreempt.online(gpus=[0], max_wait=10, client=group) as lease:
        hosts[1].kill()
        eventually("the lease is lost", lambda: lease.lost)
        assert [x.lost for x in lease.leases] == [False, True]  # type: ignore[attr-defined]
    hosts[0].eventually_free()


def test_silent_hosts_are_waited_for_together(directory: Path) -> None:
    """Each of four hosts takes 0.5 s to be given up. One after the other they would take 2 s."""
    silent = [Silent(str(directory / str(i))) for i in range(4)]
    with gpreempt.Group([gpreempt.Client(str(directory / str(i)), on_unprotected=lambda _: None) for i in range(4)]) as group:
        reached = threading.Barrier(4)
        for client in group.clients:
            acquire = client.acquire

            def together(request: gpreempt.Request, *, strict: bool = False, acquire: Any = acquire) -> gpreempt.Lease:
                reached.wait(60)  # breaks unless all are asked at once
                return acquire(request, strict=strict)  # type: ignore[no-any-return]

            client.acquire = together  # type: ignore[method-assign]
        lease = gpreempt.online(gpus=[gpreempt.gpu_id(1)], max_wait=0.4, client=group).acquire()
        assert not lease.protected and len(lease.causes) == 4  # type: ignore[attr-defined]
    for s in silent:
        s.close()


def test_cancelled_coroutine_leaves_no_lease(hosts: List[Daemon], group: gpreempt.Group) -> None:
    hosts[1].pause()

    async def main() -> None:
        task = asyncio.ensure_future(gpreempt.online(gpus=[0], label="tp", ttl=30, max_wait=10, client=group).acquire_async())
        while hosts[0].labels() != ["tp"]:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        hosts[1].proceed()
        while hosts[0].leases() or hosts[1].leases():
            await asyncio.sleep(0.005)

    asyncio.run(main())


def test_group_refuses_what_has_no_meaning() -> None:
    with pytest.raises(ValueError, match="clients is empty"):
        gpreempt.Group([])
    with pytest.raises(ValueError, match="1 entries for 2 hosts"):
        gpreempt.Group([gpreempt.Client("/a"), gpreempt.Client("/b")], gpus=[[0]])


# Another host, by TLS.

Files = Dict[str, Tuple[str, str, str]]


@pytest.fixture
def files(directory: Path) -> Files:
    """The files of a daemon and of clients, by name: certificate, key, authority."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, which issues the certificates")

    def openssl(*args: str) -> None:
        subprocess.run(["openssl", *args], cwd=directory, check=True, capture_output=True)

    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    for authority in ("ca", "other"):
        openssl("req", "-x509", *curve, "-keyout", authority + ".key", "-out", authority + ".pem", "-days", "2", "-subj", "/CN=" + authority)
    issued = {}
    for name, authority in (("daemon", "ca"), ("server", "ca"), ("stranger", "ca"), ("foreign", "other")):
        openssl("req", *curve, "-keyout", name + ".key", "-out", name + ".csr", "-subj", "/CN=" + name)
        use = "serverAuth" if name == "daemon" else "clientAuth"
        (directory / "ext").write_text(f"subjectAltName=IP:127.0.0.1\nextendedKeyUsage={use}\n")
        openssl("x509", "-req", "-in", name + ".csr", "-CA", authority + ".pem", "-CAkey", authority + ".key", "-CAcreateserial",
                "-out", name + ".pem", "-days", "2", "-extfile", "ext")  # fmt: skip
        issued[name] = (str(directory / (name + ".pem")), str(directory / (name + ".key")), str(directory / (authority + ".pem")))
    return issued


@pytest.fixture
def remote(kfdemu: str, directory: Path, files: Files) -> Iterator[Tuple[Daemon, str]]:
    """A daemon and its address on TCP."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the daemon may listen on the port, and nobody else gets it
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
        d = Daemon(kfdemu, directory)
        cert, key, ca = files["daemon"]
        d._config.write_text(d._config.read_text() + f'tcp: {{address: "{address}", certificate: {cert}, key: {key}, client_ca: {ca}, online: ["cn:server"]}}\n')
        d.start()
        yield d, "tcp://" + address
        d.kill()


@pytest.mark.usefixtures("renewed_early")
def test_daemon_of_another_host_takes_announcements(remote: Tuple[Daemon, str], files: Files) -> None:
    d, address = remote
    with gpreempt.Client(address, certificate=files["server"]) as client:
        for _ in range(3):
            with gpreempt.online(gpreempt.ALL, label="tp", max_wait=10, client=client) as lease:
                assert d.labels() == ["tp"]
                assert (lease.protected, sorted(lease.gpus)) == (True, sorted(g.gpu_id for g in d._admin("ListGpus").gpus))
            d.eventually_free()
        with gpreempt.online(gpreempt.ALL, ttl=10, max_wait=10, client=client) as lease:
            first = lease._grant.expires
            eventually("the lease is renewed", lambda: lease._grant.expires > first)
            assert not lease.lost
        d.eventually_free()

        @gpreempt.online(gpreempt.ALL, label="async", max_wait=10, client=client)
        async def work() -> Any:
            return d.labels()

        assert asyncio.run(work()) == ["async"]
        d.eventually_free()


def test_long_answers_arrive_over_tls(remote: Tuple[Daemon, str], files: Files) -> None:
    """Many answers at once are more than a record of TLS, and than a read of the client."""
    d, address = remote
    with gpreempt.Client(address, certificate=files["server"]) as client:
        announce = gpreempt.online(gpreempt.ALL, max_wait=10, client=client)
        done: List[bool] = []

        def work() -> None:
            for _ in range(25):
                with announce as lease:
                    done.append(lease.protected)

        threads = [threading.Thread(target=work) for _ in range(16)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert done == [True] * 400
    d.eventually_free()


def test_gpu_of_another_host_is_named_by_what_its_daemon_knows(remote: Tuple[Daemon, str], files: Files) -> None:
    d, address = remote
    gpu = d._admin("ListGpus").gpus[1]
    with gpreempt.Client(address, certificate=files["server"]) as client:
        for name in (gpreempt.gpu_id(gpu.gpu_id), gpreempt.node(gpu.node), gpu.bdf, gpreempt.render(gpu.render_minor)):
            with gpreempt.online(gpus=[name], max_wait=10, client=client, strict=True) as lease:
                assert lease.gpus == [gpu.gpu_id]
        for name in (0, "GPU-1234567890abcdef"):
            with pytest.raises(gpreempt.UnknownGpu, match="cannot be named by its"):
                gpreempt.online(gpus=[name], max_wait=10, client=client, strict=True).acquire()


@pytest.mark.parametrize("name", ["stranger", "foreign"])
def test_work_runs_unprotected_with_a_certificate_that_has_no_right(remote: Tuple[Daemon, str], files: Files, name: str) -> None:
    with gpreempt.Client(remote[1], certificate=files[name][:2] + (files["server"][2],), on_unprotected=lambda _: None) as client:
        with gpreempt.online(gpus=[gpreempt.gpu_id(1)], max_wait=10, client=client) as lease:
            assert not lease.protected and lease.cause is not None


def test_daemon_with_a_certificate_of_another_authority_is_not_trusted(remote: Tuple[Daemon, str], files: Files) -> None:
    with gpreempt.Client(remote[1], certificate=files["server"][:2] + (files["foreign"][2],), on_unprotected=lambda _: None) as client:
        lease = gpreempt.online(gpreempt.ALL, max_wait=10, client=client).acquire()
        assert isinstance(lease.cause, gpreempt.Unavailable) and "certificate verify failed" in lease.cause.message


def test_host_that_does_not_finish_the_handshake_is_given_up_in_time(files: Files) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        with gpreempt.Client(f"tcp://127.0.0.1:{s.getsockname()[1]}", certificate=files["server"], on_unprotected=lambda _: None) as client:
            lease = gpreempt.online(gpus=[gpreempt.gpu_id(1)], max_wait=0.2, client=client).acquire()
            assert isinstance(lease.cause, gpreempt.Unavailable)
            begun = time.monotonic()
            again = gpreempt.online(gpus=[gpreempt.gpu_id(1)], max_wait=10, client=client).acquire()
            assert not again.protected and time.monotonic() - begun < 5  # known to be unavailable: it does not wait at all


def test_wrong_addresses_and_files_are_refused(files: Files) -> None:
    for address, certificate, text in (
        ("tcp://gpu-host", files["server"], "HOST:PORT"),
        ("tcp://gpu-host:7443", None, "needs a certificate"),
        ("/run/gpreempt/gpreemptd.sock", files["server"], "use no certificate"),
        ("gpu-host:7443", files["server"], "absolute path"),
    ):
        with pytest.raises(ValueError, match=text):
            gpreempt.Client(address, certificate=certificate)
    with pytest.raises(ValueError, match="certificate /none.pem, /none.key: "):
        gpreempt.Client("tcp://gpu-host:7443", certificate=("/none.pem", "/none.key", files["server"][2]))
