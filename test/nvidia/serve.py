"""LLM-like serving in PyTorch: prefill of 1,024 tokens, then 48 decode steps, launched from the CPU.

serve.py REQUESTS announce|plain prints a JSON object with the milliseconds of each request.
"""

import json
import random
import sys
import time

import torch

torch.manual_seed(0)
random.seed(0)
D, H, L, V = 2048, 16, 24, 32000
DEVICE, TYPE = "cuda", torch.float16


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = torch.nn.LayerNorm(D), torch.nn.LayerNorm(D)
        self.qkv = torch.nn.Linear(D, 3 * D, bias=False)
        self.out = torch.nn.Linear(D, D, bias=False)
        self.up, self.down = torch.nn.Linear(D, 4 * D), torch.nn.Linear(4 * D, D)

    def forward(self, x, keys, values, at):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, H, D // H).unbind(2)
        keys[:, :, at : at + t] = k.transpose(1, 2)
        values[:, :, at : at + t] = v.transpose(1, 2)
        a = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), keys[:, :, : at + t], values[:, :, : at + t], is_causal=t > 1
        )
        x = x + self.out(a.transpose(1, 2).reshape(b, t, D))
        return x + self.down(torch.nn.functional.gelu(self.up(self.n2(x))))


blocks = torch.nn.ModuleList([Block() for _ in range(L)]).to(DEVICE, TYPE).eval()
embedding = torch.nn.Embedding(V, D).to(DEVICE, TYPE)
head = torch.nn.Linear(D, V, bias=False).to(DEVICE, TYPE)
online = None
if sys.argv[2] == "announce":
    import gpreempt

    online = gpreempt.online(gpus=gpreempt.ALL, label="serve")


@torch.inference_mode()
def request(prompt, tokens):
    keys = [torch.empty(1, H, prompt + tokens, D // H, device=DEVICE, dtype=TYPE) for _ in blocks]
    values = [torch.empty_like(k) for k in keys]
    ids = torch.randint(V, (1, prompt), device=DEVICE)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    quiet = True
    if online is not None:
        lease = online.__enter__()
        quiet = bool(lease.quiet)
    announced = time.perf_counter()
    try:
        x = embedding(ids)
        for block, k, v in zip(blocks, keys, values):
            x = block(x, k, v, 0)
        token = head(x[:, -1:]).argmax(-1)
        torch.cuda.synchronize()
        first, steps = time.perf_counter(), []
        for at in range(prompt, prompt + tokens - 1):
            step = time.perf_counter()
            x = embedding(token)
            for block, k, v in zip(blocks, keys, values):
                x = block(x, k, v, at)
            token = head(x[:, -1:]).argmax(-1)
            torch.cuda.synchronize()
            steps.append((time.perf_counter() - step) * 1e3)
    finally:
        if online is not None:
            online.__exit__(None, None, None)
    return {"ttft": (first - begin) * 1e3, "announce": (announced - begin) * 1e3, "quiet": quiet, "tpot": steps}


for _ in range(3):
    request(512, 8)
print("ready", flush=True)
sys.stdin.readline()
answers = []
for _ in range(int(sys.argv[1])):
    time.sleep(random.uniform(0.1, 0.3))
    answers.append(request(1024, 48))
print(json.dumps(answers), flush=True)
