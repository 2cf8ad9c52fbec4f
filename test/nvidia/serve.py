"""Serving of a language model with random weights, in PyTorch, as a server does it.

serve.py SIZE makes a model of 7b or 1.2b parameters in bf16, prints a line, and takes commands, each answered by a line
of JSON:

    cost                 what a prompt of 1,024 tokens and a step of decoding take
    run plain FILE       serve the arrivals of FILE ([[seconds, prompt tokens, generated tokens], ...]), one at a time
    run announce FILE    the same, announced to gpreemptd: before the prefill, until the last token. The announcement
                         stays if the next request waits already

The prefill is launched from the CPU. The decode step is a CUDA graph, whose position is a device tensor: attention is
over the whole static cache, with a mask. The token of each step is fetched, as for streaming.
"""

import contextlib
import hashlib
import json
import sys
import time

import torch
import torch.nn.functional as F

DEVICE, TYPE = "cuda", torch.bfloat16
VOCABULARY = 32000
LONGEST = 2048 + 128  # tokens in the cache
SIZES = {  # width, heads, layers, width of the gated feed-forward part
    "7b": (4096, 32, 32, 11008),
    "1.2b": (2048, 16, 24, 5504),
    "tiny": (128, 2, 2, 256),
}
now = time.perf_counter


def random(*shape):
    return torch.empty(shape, device=DEVICE, dtype=TYPE).normal_(0, 0.02)


class Layer:
    def __init__(self, width, heads, inner):
        self.norms = torch.ones(2, width, device=DEVICE, dtype=TYPE)
        self.qkv, self.out = random(3 * width, width), random(width, width)
        self.gates, self.down = random(2 * inner, width), random(width, inner)
        self.cache = torch.zeros(2, heads, LONGEST, width // heads, device=DEVICE, dtype=TYPE)  # keys, values


class Server:
    @torch.no_grad()
    def __init__(self, size, stream=None):
        width, self.heads, layers, inner = SIZES[size]
        self.stream = stream
        torch.manual_seed(0)
        self.width, self.scale = width, (width // self.heads) ** -0.5
        self.layers = [Layer(width, self.heads, inner) for _ in range(layers)]
        self.norm = torch.ones(width, device=DEVICE, dtype=TYPE)
        # Learned positions: fewer small kernels than rotary ones, and with random weights as good.
        self.tokens, self.positions, self.head = random(VOCABULARY, width), random(LONGEST, width), random(VOCABULARY, width)
        self.places = torch.arange(LONGEST, device=DEVICE)
        # What the graph reads and writes.
        self.token = torch.zeros(1, device=DEVICE, dtype=torch.long)
        self.at = torch.zeros(1, device=DEVICE, dtype=torch.long)
        torch.cuda.synchronize()  # the stream may be another one
        with self.streamed():
            for length in range(256, 2049, 256):  # libraries choose and load their kernels at the first use
                self.prefill(torch.zeros(length, device=DEVICE, dtype=torch.long))
            for _ in range(3):
                self.step()
            torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # With a stream of high priority the kernels of the graph have it, too.
        with torch.cuda.graph(self.graph, stream=stream):
            self.step()
        self.generate(torch.zeros(256, dtype=torch.long), 8)

    def streamed(self):
        return torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext()

    def normed(self, x, weight):
        return F.rms_norm(x, (self.width,), weight)

    def rest(self, layer, x, attended):
        x = x + F.linear(attended, layer.out)
        gate, up = F.linear(self.normed(x, layer.norms[1]), layer.gates).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, layer.down)

    def choose(self, x):
        self.token.copy_(F.linear(self.normed(x, self.norm), self.head).argmax(-1))

    @torch.no_grad()
    def prefill(self, ids):
        n = len(ids)
        x = F.embedding(ids, self.tokens) + self.positions[:n]
        for layer in self.layers:
            qkv = F.linear(self.normed(x, layer.norms[0]), layer.qkv).view(n, 3, self.heads, -1).permute(1, 2, 0, 3)
            layer.cache[:, :, :n] = qkv[1:]
            q, k, v = qkv.unsqueeze(1)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0]
            x = self.rest(layer, x, attended.transpose(0, 1).reshape(n, self.width))
        self.choose(x[-1:])
        self.at.fill_(n)

    @torch.no_grad()
    def step(self):
        x = F.embedding(self.token, self.tokens) + F.embedding(self.at, self.positions)
        mask = torch.zeros(LONGEST, device=DEVICE, dtype=TYPE).masked_fill(self.places > self.at, float("-inf"))
        mask = mask.expand(self.heads, 1, LONGEST)
        for layer in self.layers:
            qkv = F.linear(self.normed(x, layer.norms[0]), layer.qkv).view(3, self.heads, 1, -1)
            layer.cache.index_copy_(2, self.at, qkv[1:])
            keys, values = layer.cache
            weights = torch.baddbmm(mask, qkv[0], keys.transpose(1, 2), alpha=self.scale).softmax(-1)
            x = self.rest(layer, x, torch.bmm(weights, values).view(1, self.width))
        self.choose(x)
        self.at.add_(1)

    def generate(self, ids, count):
        """The tokens, and when each was there."""
        tokens, times = [], []
        with self.streamed():
            self.prefill(ids.to(DEVICE, non_blocking=True))
            for i in range(count):
                if i:
                    self.graph.replay()
                tokens.append(int(self.token))  # waits for this stream alone
                times.append(now())
        return tokens, times

    def cost(self):
        prompt = torch.zeros(1024, dtype=torch.long)
        prefills, steps = [], []
        for _ in range(5):
            begin = now()
            _, times = self.generate(prompt, 33)
            prefills.append((times[0] - begin) * 1e3)
            steps.append((times[-1] - times[0]) / 32 * 1e3)
        return {"prefill_1024_ms": sorted(prefills)[2], "tpot_ms": sorted(steps)[2]}

    def run(self, arrivals, online=None):
        generator = torch.Generator().manual_seed(1)
        prompts = [torch.randint(VOCABULARY, (prompt,), generator=generator) for _, prompt, _ in arrivals]
        answers, busy, leased, lease, since = [], 0.0, 0.0, None, 0.0
        begin = now() + 0.2
        try:
            for i, (at, prompt, generated) in enumerate(arrivals):
                arrived = begin + at
                time.sleep(max(0.0, arrived - now()))
                start = now()
                announced = lease is None and online is not None
                if announced:
                    lease, since = online.acquire(), start
                ready, quiet = now(), bool(lease.quiet) if announced else None
                tokens, times = self.generate(prompts[i], generated)
                end = now()
                busy += end - start
                if lease is not None and (i + 1 == len(arrivals) or begin + arrivals[i + 1][0] > end):
                    lease.release()
                    lease, leased = None, leased + now() - since
                answers.append({
                    "at_s": at, "prompt": prompt, "generated": generated,
                    "queue_ms": round((start - arrived) * 1e3, 3),
                    "announced": announced, "announce_ms": round((ready - start) * 1e3, 3),
                    "quiet": quiet,
                    "ttft_ms": round((times[0] - arrived) * 1e3, 3),
                    "total_ms": round((end - arrived) * 1e3, 3),
                    "tpot_ms": [round((b - a) * 1e3, 3) for a, b in zip(times, times[1:])],
                    # The same in all arms, unless a library chooses other kernels.
                    "digest": hashlib.sha256(repr(tokens).encode()).hexdigest()[:16],
                })  # fmt: skip
        finally:
            if lease is not None:
                lease.release()
        return {"span_s": now() - begin, "busy_s": busy, "leased_s": leased, "requests": answers}


def commands(server):
    print(json.dumps({"ready": True}), flush=True)
    online = None
    for line in sys.stdin:
        try:
            command = line.split()
            if command[0] == "cost":
                answer = server.cost()
            else:
                with open(command[2]) as file:
                    arrivals = json.load(file)
                if command[1] == "announce" and online is None:
                    import gpreempt

                    online = gpreempt.online(gpus=gpreempt.ALL, label="serve")
                answer = server.run(arrivals, online if command[1] == "announce" else None)
        except Exception as e:  # the next command may work
            answer = {"failed": repr(e)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    commands(Server(sys.argv[1]))
