"""The models, with random weights. A smaller scale makes them narrower, and encoders shallower."""

import torch
from torch import nn
from torch.nn import functional as F


def cnn(scale):
    """Case A: a plain convolutional network for pictures of 64 x 64."""
    layers, before = [], 3
    for width, depth in ((64, 2), (128, 2), (256, 2), (512, 4)):
        width = max(8, round(width * scale))
        for i in range(depth):
            layers += [nn.Conv2d(before, width, 3, stride=2 if i == 0 and before > 3 else 1, padding=1), nn.ReLU()]
            before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))


class Encoder(nn.Module):
    """A transformer encoder with token and position embeddings and a head over the vocabulary."""

    def __init__(self, layers, heads, words, positions, per_head=64):
        super().__init__()
        width = heads * per_head
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(positions, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, words)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, tokens):
        x = self.norm(self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def transformer(scale):
    """Case B: an encoder with about the parameters and operations of cnn."""
    return Encoder(layers=max(1, round(5 * scale)), heads=max(1, round(6 * scale)), words=1000, positions=128)


def bert(scale):
    """The shape of BERT-base at scale 1: 12 layers, 12 heads, width 768, 30522 words."""
    n = max(1, round(12 * scale))
    return Encoder(layers=n, heads=n, words=max(1000, round(30522 * scale)), positions=512)


class Block(nn.Module):
    def __init__(self, before, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.short = nn.Identity()
        if stride > 1 or before != width:
            self.short = nn.Sequential(nn.Conv2d(before, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.short(x))


def resnet18(scale):
    """ResNet-18 for pictures of 224 x 224."""
    before = max(8, round(64 * scale))
    layers = [nn.Conv2d(3, before, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(before), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    for stage in range(4):
        width = max(8, round(64 * scale)) * 2**stage
        layers += [Block(before, width, 1 if stage == 0 else 2), Block(width, width, 1)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))


def trainer(model, inputs, answers):
    """Returns a step of training on one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, -2), answers.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
