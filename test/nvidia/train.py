"""Training in PyTorch: a transformer of 335 M parameters in bf16, AdamW, and a data loader with two workers.

train.py FILE [late] counts its steps in FILE, whose words are those of job.cu: 0 steps; 1 stop; 7 pause before the next
step, with an idle GPU; 8 it pauses. The workers are forked before CUDA is initialised; with late after it: then they
have the driver's descriptors of this process.
"""

import mmap
import os
import struct
import sys
import time

import torch
import torch.nn.functional as F

DEVICE, TYPE = "cuda", torch.bfloat16
WIDTH, HEADS, LAYERS, VOCABULARY = 1024, 16, 24, 32000
BATCH, LENGTH = 8, 1024


class Tokens(torch.utils.data.IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        generator = torch.Generator().manual_seed(info.id if info else 0)
        while True:
            yield torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        options = {"device": DEVICE, "dtype": TYPE}
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH, **options), torch.nn.LayerNorm(WIDTH, **options)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH, **options), torch.nn.Linear(WIDTH, WIDTH, **options)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH, **options), torch.nn.Linear(4 * WIDTH, WIDTH, **options)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, WIDTH, device=DEVICE, dtype=TYPE)
        self.positions = torch.nn.Embedding(LENGTH, WIDTH, device=DEVICE, dtype=TYPE)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = torch.nn.LayerNorm(WIDTH, device=DEVICE, dtype=TYPE)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class Trainer:
    def __init__(self, path, late=False):
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(file, 4096)
        self.words = mmap.mmap(file, 4096)
        loader = torch.utils.data.DataLoader(Tokens(), batch_size=BATCH, num_workers=2, prefetch_factor=4, persistent_workers=True)
        if late:
            torch.cuda.init()
            torch.zeros(1, device=DEVICE)
        self.batches = iter(loader)
        next(self.batches)  # the workers run

    def get(self, i):
        return struct.unpack_from("<Q", self.words, 8 * i)[0]

    def set(self, i, value):
        struct.pack_into("<Q", self.words, 8 * i, value)

    def run(self, stream=None):
        """Train on a stream until word 1 is set."""
        with torch.cuda.stream(stream or torch.cuda.current_stream()):
            torch.manual_seed(1)
            model = Model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
            last = None
            while not self.get(1):
                if self.get(7):
                    self.counted(last)
                    last = None
                    torch.cuda.current_stream().synchronize()
                    self.set(8, 1)
                    while self.get(7) and not self.get(1):
                        time.sleep(0.001)
                    self.set(8, 0)
                    continue
                batch = next(self.batches).to(DEVICE, non_blocking=True)
                optimizer.zero_grad(set_to_none=True)
                logits = model(batch[:, :-1])
                F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
                optimizer.step()
                event = torch.cuda.Event()
                event.record()
                self.counted(last)  # the GPU has the next step already
                last = event
            torch.cuda.current_stream().synchronize()

    def counted(self, event):
        if event is not None:
            event.synchronize()
            self.set(0, self.get(0) + 1)


if __name__ == "__main__":
    Trainer(sys.argv[1], late="late" in sys.argv[2:]).run()
