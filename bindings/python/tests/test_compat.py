from __future__ import annotations

import threading
from typing import Any

import pytest

import gpreempt
from gpreempt import _proto, compat
from conftest import Daemon


def test_tasks_of_the_scheduler_have_leases(daemon: Daemon, client: gpreempt.Client, capsys: pytest.CaptureFixture[str]) -> None:
    with compat.Scheduler([0], label="sched", max_wait=10, client=client) as scheduler:
        scheduler.register_online_queue(1, 11)
        scheduler.register_online_queue(2, 9)
        scheduler.register_offline_queue(3)
        task = scheduler.notify_online_task()
        assert scheduler.notify_online_task(task) == task
        assert [(x.label, x.priority) for x in daemon.leases()] == [("sched", 11)]
        scheduler.online_task_complete(task)
        scheduler.online_task_complete(task)
        daemon.eventually_free()
        scheduler.notify_online_task("left")
        counts = {k: v for k, v in scheduler.statistics().items() if not k.endswith("_ms")}
        assert counts == {
            "online_queues": 2, "offline_queues": 1, "online_tasks": 2, "running_tasks": 1, "unprotected_tasks": 0, "suspended_targets": 2,
        }  # fmt: skip
        assert scheduler.statistics()["announce_ms"]["count"] == 2
        scheduler.print_statistics()
        assert "[SCHED] online_tasks: 2\n" in capsys.readouterr().out
    daemon.eventually_free()


def test_online_task_announces_each_call(daemon: Daemon, client: gpreempt.Client) -> None:
    scheduler = compat.Scheduler([0], label="t", max_wait=10, client=client)
    task = compat.OnlineTask(scheduler, lambda x: (x, daemon.labels()))
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(task(1))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(x == 1 and "t" in labels for x, labels in results) and len(results) == len(task.latencies) == 8
    with pytest.raises(TypeError):
        task.run()
    daemon.eventually_free()
    assert scheduler.statistics()["online_tasks"] == 9


def test_offline_task_counts_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    task = compat.OfflineTask(steps.append)
    task.train_loop(3, 1)
    assert (steps, task.steps, task.longest > 0) == ([1, 1, 1], 3, True)
    monkeypatch.setenv("GPREEMPT_CLASS", "offline")
    assert task.declared


def test_unprotected_tasks_are_counted(directory: Any) -> None:
    with gpreempt.Client(str(directory / "none")) as client:
        scheduler = compat.Scheduler([0], client=client)
        assert compat.OnlineTask(scheduler, lambda: 1)() == 1
        assert scheduler.statistics()["unprotected_tasks"] == 1


def test_messages_are_made_by_old_and_new_protobuf(monkeypatch: pytest.MonkeyPatch) -> None:
    from google.protobuf import message_factory

    want = _proto.NotifyOnlineRequest(label="x").SerializeToString()
    made = []

    def make(descriptor: Any) -> Any:
        made.append(descriptor.full_name)
        return _proto.NotifyOnlineRequest

    monkeypatch.setattr(message_factory, "GetMessageClass", make, raising=False)  # 4.22 and later
    assert _proto.message("gpreempt.v1.NotifyOnlineRequest")(label="x").SerializeToString() == want
    assert made == ["gpreempt.v1.NotifyOnlineRequest"]
    if hasattr(message_factory, "MessageFactory"):
        monkeypatch.delattr(message_factory, "GetMessageClass")
        assert _proto.message("gpreempt.v1.NotifyOnlineRequest")(label="x").SerializeToString() == want
