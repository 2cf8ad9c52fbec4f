"""A child is another process: it connects itself and leaves the parent's leases alone."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Callable

import gpreempt
from conftest import Daemon, eventually


def in_child(work: Callable[[], bool]) -> bool:
    """Fork, and report whether work returned true in the child."""
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def test_child_leaves_the_lease_to_its_parent(daemon: Daemon, client: gpreempt.Client) -> None:
    announce = gpreempt.online(gpus=[0], label="parent", max_wait=10, client=client)
    with announce as lease:

        def child() -> bool:
            inherited = not lease.protected
            lease.release()
            announce.__exit__()
            client.close()
            return inherited

        assert in_child(child)
        assert lease.protected and not lease.lost and daemon.labels() == ["parent"]
        with announce as other:  # the connection works
            assert other.protected
    daemon.eventually_free()


def test_child_announces_by_its_own_connection(daemon: Daemon, client: gpreempt.Client) -> None:
    with gpreempt.online(gpus=[0], label="parent", max_wait=10, client=client):

        def child() -> bool:
            with gpreempt.online(gpus=[1], label="child", max_wait=10, client=client) as lease:
                pids = {x.client_pid: x.label for x in daemon.leases()}
                return lease.protected and pids == {os.getppid(): "parent", os.getpid(): "child"}

        assert in_child(child)
        eventually("the child's lease ends", lambda: daemon.labels() == ["parent"])
    daemon.eventually_free()


def test_child_that_ends_with_a_lease_leaves_none(daemon: Daemon, client: gpreempt.Client) -> None:
    assert in_child(lambda: gpreempt.online(gpus=[0], max_wait=10, client=client).acquire().protected)
    daemon.eventually_free()


def test_child_of_a_child_works(daemon: Daemon, client: gpreempt.Client) -> None:
    def protected() -> bool:
        with gpreempt.online(gpus=[0], max_wait=10, client=client) as lease:
            return lease.protected

    assert in_child(lambda: protected() and in_child(protected) and protected())
    daemon.eventually_free()


def test_child_of_an_event_loop_works(daemon: Daemon, client: gpreempt.Client) -> None:
    announce = gpreempt.online(gpus=[0], label="parent", max_wait=10, client=client)

    async def again() -> bool:
        async with announce as lease:
            return lease.protected

    async def main() -> None:
        async with announce as lease:
            # The loop itself is the parent's: a child makes a new one, in a thread as this one runs a loop.
            def child() -> bool:
                answer = []
                t = threading.Thread(target=lambda: answer.append(asyncio.run(again())))
                t.start()
                t.join()
                return answer == [True] and not lease.protected

            assert in_child(child)
            assert lease.protected and "parent" in daemon.labels()
            assert await again()

    asyncio.run(main())
    daemon.eventually_free()


def test_session_is_closed_in_a_child(daemon: Daemon, client: gpreempt.Client) -> None:
    with gpreempt.Session(gpus=[0], label="s", max_wait=10, client=client) as session:

        def child() -> bool:
            session.close()
            return not session.protected

        assert in_child(child)
        assert session.protected and daemon.labels() == ["s"]
    daemon.eventually_free()


def test_children_of_a_busy_process_work(daemon: Daemon, client: gpreempt.Client) -> None:
    announce = gpreempt.online(gpus=[0], max_wait=10, client=client)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with announce:
                pass

    def child() -> bool:
        with announce as lease:
            return lease.protected

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    answers = [in_child(child) for _ in range(50)]
    stop.set()
    for t in threads:
        t.join()
    assert answers == [True] * 50
    daemon.eventually_free()
