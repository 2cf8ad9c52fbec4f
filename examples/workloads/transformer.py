"""Case B: training of a transformer encoder. Compare it with cnn.py, which is as large."""

import torch

import models
import runner

args = runner.parser(__doc__).parse_args()
device = runner.Device(args, small=1 / 4, queues=1)
model = models.transformer(device.scale).to(device.torch)
runner.say(f"transformer, {runner.parameters(model):,} parameters, 16 texts of 128 tokens each time")
tokens = torch.randint(1000, (16, 128)).to(device.torch)
runner.train(args, device, models.trainer(model, tokens, tokens.roll(1, 1)))
