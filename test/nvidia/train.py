"""Training in PyTorch: forward, backward, AdamW. It counts steps in FILE until word 1 is set."""

import mmap
import sys

import torch

torch.manual_seed(1)
D = 4096
file = open(sys.argv[1], "w+b")
file.truncate(4096)
words = mmap.mmap(file.fileno(), 4096)
net = torch.nn.TransformerEncoder(
    torch.nn.TransformerEncoderLayer(D, 32, 4 * D, batch_first=True, device="cuda", dtype=torch.bfloat16), 4
)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
x = torch.randn(16, 512, D, device="cuda", dtype=torch.bfloat16)
steps = 0
while words[8] == 0:
    optimizer.zero_grad()
    loss = (net(x).float() ** 2).mean()
    loss.backward()
    optimizer.step()
    torch.cuda.synchronize()
    steps += 1
    words[0:8] = steps.to_bytes(8, "little")
