"""The names of gpreempt's design documents, over the present API.

There, a scheduler in the inference program suspended queues whose IDs were registered with it. Here, gpreemptd finds
the queues, and its config file decides what is offline; so registering a queue has no effect but its priority.
"""

from __future__ import annotations

import os
import statistics as _statistics
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Union

from . import _client
from ._lease import Lease
from ._request import Request

ONLINE_PRIORITY, OFFLINE_PRIORITY = 15, 2


class Scheduler:
    """Announces online tasks, and counts them. It may be used by several threads.

    The arguments are those of online, except priority: that is the highest of the registered queues.
    """

    def __init__(self, gpus: Any = None, *, client: Optional["_client.Client"] = None, strict: bool = False, **request: Any) -> None:
        self._gpus, self._client, self._strict, self._arguments = gpus, client, strict, request
        self._lock = threading.Lock()  # guards all below
        self._priority = ONLINE_PRIORITY
        self._request = Request(gpus, priority=self._priority, **request)
        self._online: Dict[int, int] = {}
        self._offline: Dict[int, int] = {}
        self._tasks: Dict[str, Lease] = {}
        self._next = 0
        self._begun: Dict[str, float] = {}
        self._unprotected = self._suspended = 0
        self._announce: List[float] = []
        self._held: List[float] = []

    def register_online_queue(self, queue_id: int, priority: int = ONLINE_PRIORITY) -> None:
        """Set the priority of a queue of this process; the highest of all is announced."""
        with self._lock:
            self._online[queue_id] = priority
            highest = max(self._online.values())
            if highest != self._priority:
                self._request = Request(self._gpus, priority=highest, **self._arguments)
                self._priority = highest

    def register_offline_queue(self, queue_id: int, priority: int = OFFLINE_PRIORITY) -> None:
        """Record a queue for statistics. What is suspended is decided by the rules of gpreemptd."""
        with self._lock:
            self._offline[queue_id] = priority

    def notify_online_task(self, task_id: Union[str, int, None] = None) -> str:
        """Announce a task, and return its ID when the GPUs are quiet or max_wait has passed. An ID that runs already is
        announced once."""
        with self._lock:
            if task_id is None:
                self._next += 1
                task_id = f"task-{self._next}"
            task_id = str(task_id)
            if task_id in self._tasks:
                return task_id
            request = self._request
        lease = (self._client or _client.default_client()).acquire(request, strict=self._strict)
        with self._lock:
            if task_id in self._tasks:  # another thread was first
                lease.release()
                return task_id
            self._tasks[task_id] = lease
            self._begun[task_id] = time.monotonic()
            self._announce.append(lease.round_trip)
            self._unprotected += not lease.protected
            self._suspended += lease.suspended_targets
        return task_id

    def online_task_complete(self, task_id: Union[str, int]) -> None:
        """End a task. It may be called again."""
        with self._lock:
            lease = self._tasks.pop(str(task_id), None)
            begun = self._begun.pop(str(task_id), 0.0)
            if lease is not None:
                self._held.append(time.monotonic() - begun)
        if lease is not None:
            lease.release()

    def statistics(self) -> Dict[str, Any]:
        """Return the counts, and the latencies in milliseconds."""
        with self._lock:
            return {
                "online_queues": len(self._online),
                "offline_queues": len(self._offline),
                "online_tasks": len(self._announce),
                "running_tasks": len(self._tasks),
                "unprotected_tasks": self._unprotected,
                "suspended_targets": self._suspended,
                "announce_ms": _summary(self._announce),
                "task_ms": _summary(self._held),
            }

    def print_statistics(self) -> None:
        """Print the statistics, a line each."""
        for name, value in self.statistics().items():
            if isinstance(value, dict):
                value = ", ".join(f"{key} {v:.3f}" if isinstance(v, float) else f"{key} {v}" for key, v in value.items())
            print(f"[SCHED] {name}: {value}")

    def cleanup(self) -> None:
        """End all tasks."""
        with self._lock:
            tasks = list(self._tasks)
        for task in tasks:
            self.online_task_complete(task)

    def __enter__(self) -> "Scheduler":
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()


def _summary(seconds: List[float]) -> Dict[str, Any]:
    if not seconds:
        return {"count": 0}
    return {"count": len(seconds), "mean": 1000 * _statistics.fmean(seconds), "max": 1000 * max(seconds)}


class OnlineTask:
    """Announces each call of an inference function."""

    def __init__(self, scheduler: Scheduler, function: Callable[..., Any], name: str = "inference") -> None:
        self._scheduler, self._function, self.name = scheduler, function, name
        self._lock = threading.Lock()
        self._calls = 0
        # latencies are of the calls, the announcement included, in seconds.
        self.latencies: List[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self._calls += 1
            task = f"{self.name}-{self._calls}"
        begun = time.monotonic()
        self._scheduler.notify_online_task(task)
        try:
            return self._function(*args, **kwargs)
        finally:
            self._scheduler.online_task_complete(task)
            self.latencies.append(time.monotonic() - begun)

    run = __call__


class OfflineTask:
    """Counts and times the steps of training. It needs no announcement: the daemon suspends the process from outside.

    That it is offline is decided by the daemon: by a rule, or by `gpctl run --class offline`. declared reports whether
    this process was started by the latter.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step
        self.steps = 0
        # longest is the duration of the longest step in seconds: it contains the suspensions.
        self.longest = 0.0

    @property
    def declared(self) -> bool:
        return os.environ.get("GPREEMPT_CLASS", "").lower() == "offline"

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step."""
        begun = time.monotonic()
        try:
            return self._step(*args, **kwargs)
        finally:
            self.steps += 1
            self.longest = max(self.longest, time.monotonic() - begun)

    def train_loop(self, steps: int, *args: Any, **kwargs: Any) -> None:
        """Run steps steps."""
        for _ in range(steps):
            self.train_step(*args, **kwargs)
