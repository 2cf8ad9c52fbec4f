"""Forks and threads, at once and many: make python-soak runs 10 000 forks."""

from __future__ import annotations

import os
import threading
import time
from typing import List

import gpreempt
from conftest import Daemon

FORKS = int(os.environ.get("GPREEMPT_FORKS", "100"))
THREADS = 4


def test_forks_and_threads_leave_no_lease(daemon: Daemon, client: gpreempt.Client) -> None:
    announce = gpreempt.online(gpus=[0], max_wait=10, ttl=60, client=client)
    left = iter(range(FORKS))
    take = threading.Lock()
    failed: List[str] = []
    done = [0, 0]  # forks, threads

    def child(n: int) -> int:
        """Some children announce, some end within their block, some do nothing, and some exit as programs do."""
        if n % 4 == 0:
            return 0
        lease = announce.acquire()
        if not lease.protected:
            return 1
        if n % 4 == 1:
            lease.release()
        return 0

    def fork() -> None:
        while True:
            with take:
                n = next(left, None)
            if n is None:
                return
            with announce as lease:
                pid = os.fork()
                if pid == 0:
                    code = 2
                    try:
                        code = child(n)
                    finally:
                        os._exit(code)
                _, status = os.waitpid(pid, 0)
                if status:
                    failed.append(f"child {n} of thread {threading.get_ident()}: wait status {status}")
                if not lease.protected:
                    failed.append(f"the parent's lease of fork {n}: {lease.cause or 'lost'}")
                done[0] += 1

    def short() -> None:  # a thread for each announcement
        with announce as lease:
            if not lease.protected:
                failed.append(f"a thread's lease: {lease.cause or 'lost'}")
            done[1] += 1

    begun = time.monotonic()
    forkers = [threading.Thread(target=fork) for _ in range(THREADS)]
    for t in forkers:
        t.start()
    threads: List[threading.Thread] = []
    while any(t.is_alive() for t in forkers) or done[1] < FORKS:
        threads = [threading.Thread(target=short) for _ in range(THREADS)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    for t in forkers:
        t.join()
    assert failed == []
    daemon.eventually_free()
    print(f"{done[0]} forks and {done[1]} threads in {time.monotonic() - begun:.0f} s: no lease is left")
