"""Online and offline work in one process: what do stream priorities change?

A thread trains in a stream of priority 0, and requests are made beside it, for a third of
--seconds each: without training, in a stream of priority 0, and in one of priority -1, which is
high. A stream's priority orders waiting kernels. It does not interrupt one that runs.
"""

import threading
import time

import torch

import models
import runner

p = runner.parser(__doc__)
p.add_argument("--rate", type=float, default=20, help="requests per second")
args = p.parse_args()
offline = runner.Device(args, small=1 / 6, priority=0)
equal = runner.Device(args, small=1, priority=0)
high = runner.Device(args, small=1, priority=-1)
words = 1000
trainee = models.bert(offline.scale).to(offline.torch)
tokens = torch.randint(words, (8, 128)).to(offline.torch)
step = models.trainer(trainee, tokens, tokens.roll(1, 1))
model = models.resnet18(equal.scale).to(equal.torch).eval()
picture = torch.randn(1, 3, 224, 224)
working, over = threading.Event(), threading.Event()
steps = 0


def train():
    global steps
    while not over.is_set():
        if not working.wait(0.05):
            continue
        with offline.stream():
            step()
        offline.done()
        steps += 1
        runner.say(f"step {steps}")


@torch.inference_mode()
def infer(device):
    with device.stream():
        model(picture.to(device.torch)).argmax(1)
    device.done()


for device in equal, high:
    infer(device)
trainer = threading.Thread(target=train)
trainer.start()
results = []
for name, device, beside in ("alone", equal, False), ("equal priority", equal, True), ("high priority", high, True):
    (working.set if beside else working.clear)()
    took, began, before = [], time.monotonic(), steps
    for n in runner.ticks((args.seconds or 30) / 3):
        due = began + (n - 1) / args.rate
        time.sleep(max(0, due - time.monotonic()))
        infer(device)
        took.append((time.monotonic() - due) * 1e3)
        runner.say(f"gpreempt-request total_ms={took[-1]:.3f}")
    if not took:
        break  # it was ended
    took.sort()
    rate = (steps - before) / (time.monotonic() - began)
    results.append(f"{name}: {len(took)} requests, p50 {took[len(took) // 2]:.2f} ms, "
                   f"p99 {took[max(0, -(-len(took) * 99 // 100) - 1)]:.2f} ms; training {rate:.2f} steps/s")  # fmt: skip
over.set()
working.set()
trainer.join()
for line in results:
    runner.say(line)
if offline.torch.type == "cpu":
    runner.say("This ran on the CPU, which has no streams: the figures say nothing about priorities.")
for device in offline, equal, high:
    device.close()
