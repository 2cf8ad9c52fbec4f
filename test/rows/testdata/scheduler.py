"""The scheduler, the online and the offline task of the design documents, in their names."""

import time

from gpreempt import compat

with compat.Scheduler([0], label="resnet", max_wait=10) as scheduler:
    scheduler.register_online_queue(1, 15)
    scheduler.register_offline_queue(2, 2)
    task = scheduler.notify_online_task()
    time.sleep(0.01)
    scheduler.online_task_complete(task)

    infer = compat.OnlineTask(scheduler, lambda x: 2 * x)
    print("answers", [infer(x) for x in range(5)])
    train = compat.OfflineTask(lambda: None)
    train.train_loop(100)
    print("steps", train.steps)
    scheduler.print_statistics()
