"""Training of an encoder with the shape of BERT-base: offline work."""

import torch

import models
import runner

args = runner.parser(__doc__).parse_args()
device = runner.Device(args, small=1 / 6, queues=2)
model = models.bert(device.scale).to(device.torch)
words = model.words.num_embeddings
runner.say(f"bert, {runner.parameters(model):,} parameters, 8 texts of 128 tokens each time")
tokens = torch.randint(words, (8, 128)).to(device.torch)
runner.train(args, device, models.trainer(model, tokens, tokens.roll(1, 1)))
