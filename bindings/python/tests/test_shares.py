"""Requests that run at the same time share a lease of the daemon if they announce the same."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Set

import pytest

import gpreempt
from gpreempt import _http2, _proto, _request
from conftest import Daemon, Silent, eventually


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> List[str]:
    """The calls to the daemon, by their paths."""
    made: List[str] = []
    for name in ("open", "post"):
        original = getattr(_http2.Connection, name)

        def record(self: Any, path: str, message: bytes, *rest: Any, _original: Any = original) -> Any:
            made.append(path)
            return _original(self, path, message, *rest)

        monkeypatch.setattr(_http2.Connection, name, record)
    return made


@pytest.fixture
def small_stacks() -> Iterator[None]:
    before = threading.stack_size(256 << 10)
    yield
    threading.stack_size(before)


def in_threads(count: int, work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


ROUNDS = 3


def by_threads(client: gpreempt.Client, count: int) -> List[gpreempt.Lease]:
    announce = gpreempt.online(gpus=[0], label="chat", max_wait=10, client=client)
    all_run = threading.Barrier(count)
    leases: List[gpreempt.Lease] = []

    def serve() -> None:
        for turn in range(ROUNDS):
            with announce as lease:
                if turn == 0:
                    all_run.wait()
                leases.append(lease)

    in_threads(count, serve)
    return leases


def by_coroutines(client: gpreempt.Client, count: int) -> List[gpreempt.Lease]:
    announce = gpreempt.online(gpus=[0], label="chat", max_wait=10, client=client)
    leases: List[gpreempt.Lease] = []

    async def main() -> None:
        all_run = asyncio.Event()

        async def serve() -> None:
            for _ in range(ROUNDS):
                async with announce as lease:
                    leases.append(lease)
                    if len(leases) == count:
                        all_run.set()
                    await all_run.wait()
                    await asyncio.sleep(0)

        await asyncio.gather(*(serve() for _ in range(count)))

    asyncio.run(main())
    return leases


@pytest.mark.usefixtures("small_stacks")
@pytest.mark.parametrize("count", [200, 1000])
@pytest.mark.parametrize("run", [by_threads, by_coroutines])
def test_all_requests_in_flight_are_protected_and_say_so(
    run: Callable[[gpreempt.Client, int], List[gpreempt.Lease]], count: int, daemon: Daemon, calls: List[str], caplog: pytest.LogCaptureFixture
) -> None:
    with gpreempt.Client(daemon.socket) as client:
        leases = run(client, count)
        made = len(calls)
        daemon.eventually_free()
    assert len(leases) == ROUNDS * count
    assert [lease for lease in leases if not (lease.protected and lease.quiet and lease.reason == "DONE" and lease.cause is None)] == []
    assert caplog.records == []
    print(f"{made} calls for {len(leases)} requests, {count} at once")
    assert made <= 0.05 * len(leases)


def test_lease_lasts_until_the_last_of_its_requests_ends(daemon: Daemon, client: gpreempt.Client, calls: List[str]) -> None:
    first, second = (gpreempt.online(gpus=[0], label="chat", max_wait=10, client=client).acquire() for _ in range(2))
    assert first.id == second.id == daemon.leases()[0].lease_id
    first.release()
    first.release()
    assert (second.protected, daemon.labels(), calls.count(_proto.COMPLETE)) == (True, ["chat"], 0)
    second.release()
    assert calls.count(_proto.COMPLETE) == 1
    daemon.eventually_free()
    third = gpreempt.online(gpus=[0], label="chat", max_wait=10, client=client).acquire()
    assert third.protected and third.id != first.id
    assert (first.lost, second.lost) == (False, False)


BASE: Dict[str, Any] = {"gpus": [0], "label": "chat", "priority": 9, "max_wait": 10, "ttl": 20}


@pytest.mark.parametrize("other", [
    {"gpus": [1]}, {"gpus": [0, 1]}, {"label": "embed"}, {"priority": 10}, {"max_wait": 9}, {"ttl": 19}, {"renew": False}, {"eta": 0}, {"complete_on_idle": True},
])  # fmt: skip
def test_requests_that_announce_something_else_have_leases_of_their_own(other: Dict[str, Any], daemon: Daemon, client: gpreempt.Client) -> None:
    with gpreempt.online(**BASE, client=client) as one, gpreempt.online(**{**BASE, **other}, client=client) as another:
        assert one.protected and another.protected
        assert sorted(lease.lease_id for lease in daemon.leases()) == sorted([one.id, another.id])
    daemon.eventually_free()


@pytest.mark.parametrize("alone", [{"renew": False}, {"eta": 0}, {"complete_on_idle": True}])
def test_leases_that_depend_on_their_moment_are_never_shared(alone: Dict[str, Any], daemon: Daemon, client: gpreempt.Client) -> None:
    with gpreempt.online(**{**BASE, **alone}, client=client) as one, gpreempt.online(**{**BASE, **alone}, client=client) as another:
        assert one.id != another.id and len(daemon.leases()) == 2


def test_objects_that_announce_the_same_are_equal() -> None:
    assert _request.Request([0], max_wait="20ms").key == _request.Request("cuda:0", max_wait=0.02).key


def test_requests_of_one_another_keep_a_lease_beyond_its_time_to_live(daemon: Daemon, client: gpreempt.Client, renewed_early: None) -> None:
    announce = gpreempt.online(gpus=[0], ttl=10, max_wait=10, client=client)
    first = lease = announce.acquire()
    end = first._grant.expires + 1  # type: ignore[union-attr]
    while time.monotonic() < end:
        following = announce.acquire()
        lease.release()
        lease = following
        assert lease.protected and lease.id == first.id
        time.sleep(0.01)
    assert [x.lease_id for x in daemon.leases()] == [first.id]
    lease.release()
    daemon.eventually_free()


def test_lost_lease_is_lost_for_all_and_the_next_request_announces_again(daemon: Daemon, client: gpreempt.Client) -> None:
    announce = gpreempt.online(gpus=[0], max_wait=10, client=client)
    with announce as one, announce as another:
        daemon.kill()
        eventually("the lease is lost", lambda: one.lost)
        assert (another.lost, another.protected) == (True, False)
        with announce as late:  # the lease of the others says nothing about it
            assert (late.protected, late.reason) == (False, "DAEMON_UNAVAILABLE")
        daemon.start()

        def protected() -> bool:
            with announce as late:
                return late.protected and late.id != one.id

        eventually("the next is protected", protected)
    daemon.eventually_free()


def test_lease_whose_time_to_live_has_passed_is_not_joined(daemon: Daemon, client: gpreempt.Client) -> None:
    announce = gpreempt.online(gpus=[0], max_wait=10, client=client)
    with announce as one:
        one._grant.expires = time.monotonic()  # type: ignore[union-attr]  # as after a stop of this process
        with announce as another:
            assert another.protected and another.id != one.id


def test_refusal_is_the_answer_to_all_who_wait_for_it(daemon: Daemon, client: gpreempt.Client, calls: List[str]) -> None:
    announce = gpreempt.online(gpus=[gpreempt.gpu_id(1)], max_wait=10, client=client)

    async def main() -> List[gpreempt.Lease]:
        return list(await asyncio.gather(*(announce.acquire_async() for _ in range(100))))

    assert [(lease.protected, lease.reason) for lease in asyncio.run(main())] == [(False, "UNKNOWN_GPU")] * 100
    assert len(calls) == 1


def test_requests_that_wait_for_a_silent_daemon_return_in_time(directory: Path) -> None:
    silent = Silent(str(directory / "d.sock"))
    reports: List[Any] = []
    with gpreempt.Client(str(directory / "d.sock"), on_unprotected=reports.append) as client:
        announce = gpreempt.online(gpus=[gpreempt.gpu_id(1)], label="work", max_wait=1, client=client)
        reasons: List[str] = []
        in_threads(20, lambda: reasons.append(announce.acquire().reason))
        eventually("the announcement arrives", lambda: b"work" in silent.received)
    silent.close()
    assert reasons == ["DAEMON_UNAVAILABLE"] * 20
    assert len(reports) == 1 and silent.received.count(b"work") == 1


@pytest.mark.parametrize("cancelled", [{0}, {1}, {0, 2}])
def test_end_of_some_requests_before_the_answer_leaves_the_others(cancelled: Set[int], daemon: Daemon, client: gpreempt.Client) -> None:
    """Request 0 announces."""

    async def main() -> None:
        async with gpreempt.online(gpus=[0], label="other", max_wait=10, client=client) as other:  # the loop is connected
            announce = gpreempt.online(gpus=[1], max_wait=10, client=client)
            daemon.pause()
            tasks: "List[asyncio.Task[gpreempt.Lease]]" = [asyncio.ensure_future(announce.acquire_async()) for _ in range(3)]
            await asyncio.sleep(0)
            for i in cancelled:
                tasks[i].cancel()
            await asyncio.wait([tasks[i] for i in cancelled])
            daemon.proceed()
            leases = [await tasks[i] for i in {0, 1, 2} - cancelled]
            assert other.protected and all(lease.protected for lease in leases) and all(tasks[i].cancelled() for i in cancelled)
            for lease in leases:
                lease.release()
            # On a thread: an answer that came after its request was cancelled is given back by the loop.
            await asyncio.get_running_loop().run_in_executor(None, eventually, "the lease ends", lambda: daemon.labels() == ["other"])

    asyncio.run(main())
    daemon.eventually_free()


def test_child_does_not_share_the_lease_of_its_parent(daemon: Daemon, client: gpreempt.Client) -> None:
    from test_fork import in_child

    announce = gpreempt.online(gpus=[0], max_wait=10, client=client)
    with announce as lease:

        def child() -> bool:
            with announce as own:
                return own.protected and own.id != lease.id

        assert in_child(child)
        assert lease.protected
    daemon.eventually_free()


def test_groups_share_the_leases_of_their_hosts(daemon: Daemon, calls: List[str]) -> None:
    with gpreempt.Group([gpreempt.Client(daemon.socket)]) as group:
        announce = gpreempt.online(gpreempt.ALL, max_wait=10, client=group)

        async def main() -> List[gpreempt.Lease]:
            first = await announce.acquire_async()
            return [first, *await asyncio.gather(*(announce.acquire_async() for _ in range(200)))]

        leases = asyncio.run(main())
        assert all(lease.protected for lease in leases) and {lease.id for lease in leases} == {leases[0].id}
        assert len(calls) == 1
        for lease in leases:
            lease.release()
        daemon.eventually_free()
