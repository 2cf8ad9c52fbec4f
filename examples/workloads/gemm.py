"""Matrix products, as of S2's capture: a step is ten of them."""

import torch

import runner

args = runner.parser(__doc__).parse_args()
device = runner.Device(args, small=1 / 16)
size = max(64, round(8192 * device.scale))
kind = torch.float16 if device.torch.type == "cuda" else torch.float32
a, b = (torch.randn(size, size, device=device.torch, dtype=kind) / size**0.5 for _ in range(2))
runner.say(f"gemm {size} x {size}, {kind}")


def step():
    c = a
    for _ in range(10):
        c = c @ b


runner.train(args, device, step)
