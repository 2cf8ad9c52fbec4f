"""Case A: training of a convolutional network. Compare it with transformer.py, which is as large."""

import torch

import models
import runner

args = runner.parser(__doc__).parse_args()
device = runner.Device(args, small=1 / 4, queues=2)
model = models.cnn(device.scale).to(device.torch)
runner.say(f"cnn, {runner.parameters(model):,} parameters, 16 pictures of 64 x 64 each time")
pictures, classes = torch.randn(16, 3, 64, 64).to(device.torch), torch.randint(1000, (16,)).to(device.torch)
runner.train(args, device, models.trainer(model, pictures, classes))
