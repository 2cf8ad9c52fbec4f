"""Inference continues whatever the daemon does."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest

import gpreempt
from gpreempt import _client, _errors, asgi, compat
from conftest import HERE, Daemon, Silent, eventually

Acquire = Callable[..., gpreempt.Lease]


def by_thread(client: gpreempt.Client, **request: Any) -> gpreempt.Lease:
    with gpreempt.online(**{"gpus": [0], "max_wait": 10, **request}, client=client) as lease:
        return lease


def by_coroutine(client: gpreempt.Client, **request: Any) -> gpreempt.Lease:
    async def main() -> gpreempt.Lease:
        async with gpreempt.online(**{"gpus": [0], "max_wait": 10, **request}, client=client) as lease:
            return lease

    return asyncio.run(main())


both = pytest.mark.parametrize("acquire", [by_thread, by_coroutine])


@pytest.fixture
def silent(directory: Path) -> Iterator[Silent]:
    s = Silent(str(directory / "d.sock"))
    yield s
    s.close()


@both
def test_work_runs_without_a_daemon_and_one_line_is_logged(acquire: Acquire, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with gpreempt.Client(str(directory / "none")) as client:
        leases = [acquire(client) for _ in range(3)]
    assert [(lease.protected, lease.quiet, lease.id, lease.gpus, lease.reason) for lease in leases] == [(False, False, "", [], "DAEMON_UNAVAILABLE")] * 3
    assert isinstance(leases[0].cause, gpreempt.Unavailable)
    assert [(r.name, r.levelno) for r in caplog.records] == [("gpreempt", logging.WARNING)]
    assert "no gpreemptd at" in caplog.text


@both
def test_strict_raises_instead(acquire: Acquire, directory: Path) -> None:
    with gpreempt.Client(str(directory / "none")) as client, pytest.raises(gpreempt.Unavailable) as e:
        acquire(client, strict=True)
    assert (e.value.reason, e.value.code) == ("DAEMON_UNAVAILABLE", 14)


@both
def test_nothing_waits_for_a_daemon_that_is_known_not_to_answer(acquire: Acquire, silent: Silent, directory: Path) -> None:
    with gpreempt.Client(str(directory / "d.sock")) as client:
        request = {"gpus": [gpreempt.gpu_id(1)], "max_wait": 1, "label": "work"}
        first = acquire(client, **request)
        assert first.cause is not None and first.cause.reason == "DAEMON_UNAVAILABLE"
        assert "did not answer NotifyOnline within 1100 ms" in str(first.cause)
        for _ in range(100):
            assert acquire(client, **request).cause is not None
        eventually("the announcement arrives", lambda: b"work" in silent.received)
        assert silent.received.count(b"work") == 1


def test_end_of_work_does_not_wait_for_a_daemon_that_stopped_answering(daemon: Daemon, client: gpreempt.Client) -> None:
    announce = gpreempt.online(gpus=[0], max_wait=10, client=client)
    lease = announce.acquire()
    daemon.pause()
    lease.release()  # would not return
    daemon.proceed()
    daemon.eventually_free()


@both
def test_refused_work_runs_and_each_reason_is_logged_once(
    acquire: Acquire, client: gpreempt.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_client, "_SETTLE", 3600.0)  # protection is not back yet, also on a busy host
    caplog.set_level(logging.INFO)
    for _ in range(3):
        lease = acquire(client, gpus=[gpreempt.gpu_id(1)])
        assert isinstance(lease.cause, gpreempt.UnknownGpu)
    assert acquire(client).protected
    assert [r.getMessage() for r in caplog.records] == [
        "inference runs unprotected: GPU 1 is not on this host: gpctl gpu list shows those that are"
    ]
    with pytest.raises(gpreempt.UnknownGpu) as e:
        acquire(client, gpus=[gpreempt.gpu_id(1)], strict=True)
    assert (e.value.reason, e.value.code, e.value.message, e.value.next) == (
        "UNKNOWN_GPU", 3, "GPU 1 is not on this host", "gpctl gpu list shows those that are",
    )  # fmt: skip


@both
def test_each_request_that_is_refused_is_logged_once_also_beside_others(
    acquire: Acquire, client: gpreempt.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_client, "_SETTLE", 0.0)
    caplog.set_level(logging.INFO)
    for _ in range(3):
        assert not acquire(client, gpus=[gpreempt.gpu_id(1)]).protected
        assert acquire(client).protected
        assert not acquire(client, gpus=["0000:ff:00.0"]).protected
    assert [r.getMessage() for r in caplog.records] == [
        "inference runs unprotected: GPU 1 is not on this host: gpctl gpu list shows those that are",
        'inference runs unprotected: GPU "0000:ff:00.0" is not on this host: gpctl gpu list shows those that are',
    ]


def test_errors_do_not_grow_while_there_is_no_daemon(directory: Path) -> None:
    with gpreempt.Client(str(directory / "none"), on_unprotected=lambda _: None) as client:
        for _ in range(100):
            cause = by_thread(client).cause
    frames, trace = 0, cause.__traceback__  # type: ignore[union-attr]
    while trace is not None:
        frames, trace = frames + 1, trace.tb_next
    assert frames < 10


def test_text_of_the_daemon_is_logged_as_one_line_without_commands_for_a_terminal() -> None:
    error = _errors.of_status(8, "LIMIT\n", "a\x1b]0;PWN\x07\nb\u202e\x9b\ufeff é", "wait\x1b[31m")
    assert str(error) == "a\\x1b]0;PWN\\x07\\nb\\u202e\\x9b\\ufeff é: wait\\x1b[31m"
    assert (error.reason, error.message, error.next) == ("LIMIT\\n", "a\\x1b]0;PWN\\x07\\nb\\u202e\\x9b\\ufeff é", "wait\\x1b[31m")


@both
def test_value_that_only_the_daemon_can_refuse(acquire: Acquire, client: gpreempt.Client) -> None:
    with pytest.raises(gpreempt.InvalidRequest) as e:
        acquire(client, ttl=599, strict=True)
    assert e.value.reason == "TTL_OUT_OF_RANGE"


@both
def test_protection_returns_after_an_outage(acquire: Acquire, daemon: Daemon) -> None:
    reports: List[Any] = []
    with gpreempt.Client(daemon.socket, on_unprotected=reports.append) as client:
        assert acquire(client).protected
        for _ in range(2):
            daemon.kill()
            assert not acquire(client).protected
            daemon.start()
            eventually("protection is back", lambda: acquire(client).protected)
    assert [r if r is None else r.reason for r in reports] == ["DAEMON_UNAVAILABLE", None] * 2


def test_restart_between_two_announcements_is_not_noticed(daemon: Daemon, client: gpreempt.Client) -> None:
    assert by_thread(client, strict=True).protected
    daemon.kill()
    daemon.start()
    assert by_thread(client, strict=True).protected


def test_protection_returns_after_the_daemon_hung(daemon: Daemon, client: gpreempt.Client) -> None:
    assert by_thread(client).protected
    daemon.pause()
    assert not by_thread(client, max_wait=0).protected
    daemon.proceed()
    eventually("protection is back", lambda: by_thread(client).protected)
    daemon.eventually_free()


def test_lease_is_lost_with_its_daemon(daemon: Daemon, client: gpreempt.Client) -> None:
    async def main() -> None:
        async with gpreempt.online(gpus=[0], max_wait=10, client=client) as lease:
            daemon.kill()
            while not lease.lost:
                await asyncio.sleep(0.01)

    with gpreempt.online(gpus=[0], max_wait=10, client=client) as lease:
        daemon.kill()
        eventually("the lease is lost", lambda: lease.lost)
        assert not lease.protected
    daemon.start()
    eventually("protection is back", lambda: by_thread(client).protected)
    asyncio.run(main())


def test_session_announces_again_after_an_outage(daemon: Daemon, client: gpreempt.Client) -> None:
    with gpreempt.Session(gpus=[0], label="s", max_wait=10, client=client) as session:
        assert (session.protected, daemon.labels()) == (True, ["s"])
        first = session.lease.id
        daemon.kill()
        eventually("the session is unprotected", lambda: not session.protected)
        daemon.start()
        eventually("the session is protected", lambda: session.protected)
        assert session.lease.id != first
        eventually("one lease is left", lambda: daemon.labels() == ["s"])  # an answer that came too late has left another
    daemon.eventually_free()
    assert not session.protected

    async def main() -> None:
        async with gpreempt.Session(gpus=[0], label="a", max_wait=10, client=client) as session:
            assert (session.protected, daemon.labels()) == (True, ["a"])

    asyncio.run(main())
    daemon.eventually_free()


@pytest.mark.usefixtures("renewed_early")
def test_session_keeps_its_lease_beyond_the_time_to_live(daemon: Daemon, client: gpreempt.Client) -> None:
    with gpreempt.Session(gpus=[0], ttl=10, max_wait=10, client=client) as session:
        lease, end = session.lease, session.lease._grant.expires + 1
        eventually("the time to live has passed", lambda: time.monotonic() > end or lease.lost)
        assert lease.protected and session.lease is lease and len(daemon.leases()) == 1


@pytest.mark.parametrize("make", [gpreempt.online, gpreempt.Session, compat.Scheduler, lambda: asgi.Middleware(by_thread, gpus=None)])  # type: ignore[arg-type, list-item]
def test_gpus_that_are_left_out_are_an_error_when_the_object_is_made(make: Callable[[], Any]) -> None:
    """Whether a daemon runs does not matter, and no queue has to be known."""
    with pytest.raises(ValueError, match="gpus is not set: name the GPUs, such as gpus=.0., or use gpreempt.ALL .* or gpreempt.OWN"):
        make()


@both
def test_own_gpus_of_a_process_without_queues_are_all_of_the_host(acquire: Acquire, daemon: Daemon, client: gpreempt.Client) -> None:
    lease = acquire(client, gpus=gpreempt.OWN)
    assert lease.protected and len(lease.gpus) == 2
    assert "ALL_GPUS_TAKEN" in [w.code for w in daemon.warnings()]


def test_denied_socket_is_a_permission_error_that_names_the_group(daemon: Daemon) -> None:
    os.chmod(daemon.socket, 0)
    script = (
        "import os, gpreempt\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        f"client = gpreempt.Client({daemon.socket!r})\n"
        "try: gpreempt.online([0], strict=True, client=client).acquire()\n"
        "except gpreempt.PermissionDenied as e: print(e.reason, e.code, e.next)\n"
        "print(gpreempt.online([0], client=client).acquire().protected)\n"
    )
    os.chmod(os.path.dirname(daemon.socket), 0o755)
    answer = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": str(HERE.parent)}, capture_output=True, text=True, check=True
    )
    import grp

    group = grp.getgrgid(os.stat(daemon.socket).st_gid).gr_name
    assert answer.stdout.splitlines() == [
        f"ONLINE_RIGHT_MISSING 7 join the group {group}: usermod -aG {group} USER, then start this program from a new login",
        "False",
    ]
    assert "may not connect to" in answer.stderr


def test_report_that_fails_does_not_stop_the_work(directory: Path) -> None:
    def report(_: Any) -> None:
        raise KeyError

    with gpreempt.Client(str(directory / "none"), on_unprotected=report) as client:
        assert not by_thread(client).protected
