from __future__ import annotations

import asyncio
import threading
import time
from typing import Any, List

import pytest

import gpreempt
from gpreempt import _request
from conftest import Daemon, eventually


def test_block_has_a_lease_and_releases_it(daemon: Daemon, client: gpreempt.Client) -> None:
    with gpreempt.online(gpus=[0], label="chat", max_wait=10, client=client) as lease:
        assert daemon.labels() == ["chat"]
        assert (lease.protected, lease.quiet, lease.reason, lease.cause, lease.lost) == (True, True, "DONE", None, False)
        assert lease.suspended_targets == 1
        assert lease.gpus == [daemon.leases()[0].gpu_ids[0]] and lease.id == daemon.leases()[0].lease_id
        assert lease.ttl == 30.0
    daemon.eventually_free()
    assert not lease.lost


def test_lease_is_released_when_the_block_raises(daemon: Daemon, client: gpreempt.Client) -> None:
    with pytest.raises(KeyError):
        with gpreempt.online(gpus=[0], max_wait=10, client=client):
            raise KeyError
    daemon.eventually_free()


def test_request_reaches_the_daemon_whole(daemon: Daemon, client: gpreempt.Client) -> None:
    with gpreempt.online(gpreempt.ALL, label="ü", priority=3, ttl=20, max_wait=10, client=client) as lease:
        live = daemon.leases()[0]
        assert (live.label, live.priority, len(live.gpu_ids), lease.ttl) == ("ü", 3, 2, 20.0)


def test_function_is_announced(daemon: Daemon, client: gpreempt.Client) -> None:
    @gpreempt.online(gpus=[1], label="f", max_wait=10, client=client)
    def f(a: int, *, b: int) -> Any:
        """Text."""
        return a, b, daemon.labels()

    assert f(1, b=2) == (1, 2, ["f"])
    assert (f.__name__, f.__doc__) == ("f", "Text.")
    daemon.eventually_free()


def test_coroutines_are_announced(daemon: Daemon, client: gpreempt.Client) -> None:
    announce = gpreempt.online(gpus=[0], label="c", max_wait=10, client=client)

    @announce
    async def f(n: int) -> Any:
        return n, daemon.labels()

    async def main() -> Any:
        async with announce as lease:
            assert (lease.protected, daemon.labels()) == (True, ["c"])
        with pytest.raises(KeyError):
            async with announce:
                raise KeyError
        daemon.eventually_free()
        return await f(1)

    for _ in range(2):  # each in a loop of its own
        assert asyncio.run(main()) == (1, ["c"])
        daemon.eventually_free()


def test_lease_of_a_cancelled_coroutine_ends(daemon: Daemon, client: gpreempt.Client) -> None:
    announce = gpreempt.online(gpus=[0], ttl=1, max_wait=10, client=client)  # one that is granted too late ends with that

    async def main() -> None:
        async def work() -> None:
            async with announce:
                await asyncio.sleep(3600)

        for turns in range(30):
            task = asyncio.ensure_future(work())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        while daemon.leases():
            await asyncio.sleep(0.01)

    asyncio.run(main())


@pytest.mark.usefixtures("renewed_early")
def test_long_work_keeps_its_lease(daemon: Daemon, client: gpreempt.Client) -> None:
    announce = gpreempt.online(gpus=[0], ttl=10, max_wait=10, client=client)

    async def main(of_thread: gpreempt.Lease) -> None:
        async with announce as lease:
            end = lease._grant.expires + 1
            while time.monotonic() < end and not lease.lost:
                await asyncio.sleep(0.01)
            assert lease.protected and of_thread.protected and len(daemon.leases()) == 2

    with announce as lease:
        asyncio.run(main(lease))
    daemon.eventually_free()


@pytest.mark.usefixtures("renewed_early")
def test_short_lease_is_renewed_beside_a_long_one(daemon: Daemon, client: gpreempt.Client) -> None:
    async def main() -> None:
        async with gpreempt.online(gpus=[0], ttl=60, max_wait=10, client=client):
            async with gpreempt.online(gpus=[0], ttl=10, max_wait=10, client=client) as lease:
                first = lease._grant.expires
                while lease._grant.expires == first and len(daemon.leases()) == 2:
                    await asyncio.sleep(0.01)
                assert lease._grant.expires > first

    with gpreempt.online(gpus=[0], ttl=60, max_wait=10, client=client):
        with gpreempt.online(gpus=[0], ttl=10, max_wait=10, client=client) as lease:
            first = lease._grant.expires
            eventually("the lease is renewed", lambda: lease._grant.expires > first or lease.lost)
            assert lease.protected
    asyncio.run(main())


def test_lease_without_renewal_ends(daemon: Daemon, client: gpreempt.Client) -> None:
    with gpreempt.online(gpus=[0], ttl=0.05, renew=False, max_wait=10, client=client) as lease:
        eventually("the lease is lost", lambda: lease.lost)
        assert not lease.protected
        daemon.eventually_free()


def test_one_object_serves_many_threads_and_coroutines(daemon: Daemon, client: gpreempt.Client) -> None:
    announce = gpreempt.online(gpus=[0], max_wait=10, client=client)
    unprotected: List[Any] = []

    def work() -> None:
        for _ in range(20):
            with announce as lease:
                if not lease.protected:
                    unprotected.append(lease.cause)

    async def many() -> None:
        async def one() -> None:
            for _ in range(5):
                async with announce as lease:
                    if not lease.protected:
                        unprotected.append(lease.cause)
                    await asyncio.sleep(0)

        await asyncio.gather(*(one() for _ in range(100)))

    threads = [threading.Thread(target=work) for _ in range(50)]
    threads.append(threading.Thread(target=lambda: asyncio.run(many())))
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert unprotected == []
    daemon.eventually_free()


def test_closing_the_client_ends_its_leases(daemon: Daemon) -> None:
    client = gpreempt.Client(daemon.socket)
    lease = gpreempt.online(gpus=[0], max_wait=10, client=client).acquire()
    client.close()
    daemon.eventually_free()
    assert lease.lost
    assert gpreempt.online(gpus=[0], max_wait=10, client=client).acquire().cause.reason == "CLOSED"  # type: ignore[union-attr]


@pytest.mark.parametrize("text, seconds", [
    ("20ms", 0.02), ("1.5s", 1.5), ("1m30s", 90.0), ("250us", 0.00025), ("250µs", 0.00025), ("0s", 0.0), ("1h", 3600.0), (3, 3.0), (0.5, 0.5),
])  # fmt: skip
def test_durations_are_seconds_or_strings(text: Any, seconds: float) -> None:
    assert _request.seconds("ttl", text) == pytest.approx(seconds)


def test_objects_show_what_they_are(daemon: Daemon, client: gpreempt.Client, directory: Any) -> None:
    announce = gpreempt.online(gpus=[0], label="chat", priority=9, ttl=20, renew=False, max_wait="5s", eta=0, complete_on_idle=True, client=client)
    assert repr(announce) == (
        "gpreempt.online(gpus=[0], label='chat', priority=9, ttl=20, max_wait='5s', eta=0, renew=False, complete_on_idle=True)"
    )
    assert repr(client) == f"gpreempt.Client({daemon.socket!r})"
    assert repr(gpreempt.Group([client])) == f"gpreempt.Group([{client!r}])"
    with gpreempt.online(gpus=[0], max_wait=10, client=client) as lease:
        assert repr(lease) == f"<gpreempt.Lease {lease.id} protected, quiet: DONE>"
        lease._grant.lose()
        assert repr(lease) == f"<gpreempt.Lease unprotected: lost {lease.id}>"
    session = gpreempt.Session(gpus=[0], max_wait=10, client=client)
    assert repr(session) == "<gpreempt.Session gpus=[0], max_wait=10 closed>"
    with session:
        assert repr(session) == "<gpreempt.Session gpus=[0], max_wait=10 protected>"
    with gpreempt.Client(str(directory / "none"), on_unprotected=lambda _: None) as absent:
        lease = gpreempt.online(gpus=[0], client=absent).acquire()
    assert repr(lease).startswith(f"<gpreempt.Lease unprotected: no gpreemptd at {directory / 'none'}: ")


@pytest.mark.parametrize(
    "arguments, error",
    [
        ({"gpus": []}, ValueError), ({"gpus": ["x"]}, ValueError), ({"gpus": [True]}, TypeError), ({"gpus": [-1]}, ValueError),
        ({"priority": 16}, ValueError), ({"ttl": 0}, ValueError), ({"max_wait": 11}, ValueError), ({"label": "x" * 129}, ValueError),
        ({"eta": -1}, ValueError), ({"max_wait": "20"}, ValueError), ({"max_wait": "ms"}, ValueError), ({"max_wait": ""}, ValueError),
        ({"max_wait": "11s"}, ValueError), ({"ttl": True}, TypeError), ({"ttl": []}, TypeError), ({"eta": "-1s"}, ValueError),
    ],
)  # fmt: skip
def test_invalid_arguments_are_errors_at_once(arguments: Any, error: Any) -> None:
    with pytest.raises(error):
        gpreempt.online(**{"gpus": [0], **arguments})
