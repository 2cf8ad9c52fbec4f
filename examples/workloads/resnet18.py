"""Inference of ResNet-18, one picture a request: online work.

A request is a line of input, until its end: gplab trial --request stdin. With --rate it makes
its own requests, and says of each how long it took.
"""

import sys
import time

import torch

import models
import runner

p = runner.parser(__doc__)
p.add_argument("--rate", type=float, default=0, help="requests per second; 0: a line of input is one")
args = p.parse_args()
device = runner.Device(args, small=1)
model = models.resnet18(device.scale).to(device.torch).eval()
picture = torch.randn(1, 3, 224, 224)


@torch.inference_mode()
def infer():
    with device.stream():
        answer = model(picture.to(device.torch)).argmax(1)
    device.done()
    return answer.item()


infer()  # the first one compiles and allocates
runner.say(f"resnet18, {runner.parameters(model):,} parameters")
runner.say("ready")
if args.rate:
    began = time.monotonic()
    for n in runner.ticks(args.seconds):
        due = began + (n - 1) / args.rate
        time.sleep(max(0, due - time.monotonic()))
        infer()
        runner.say(f"gpreempt-request total_ms={(time.monotonic() - due) * 1e3:.3f}")
else:
    end = time.monotonic() + args.seconds if args.seconds else float("inf")
    for _ in sys.stdin:
        runner.say(f"answer {infer()}")
        if runner.stopped or time.monotonic() >= end:
            break
device.close()
