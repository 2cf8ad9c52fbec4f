"""What the workloads share: options, the device, and lines that `gplab trial` understands."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext

import torch

PACKETS, MICROSECONDS = 8, 500  # of each emulated queue for a step or a request
PRIORITIES = {-1: "high", 0: "normal", 1: "low"}  # of HIP's streams

stopped = False


def _stop(*_):
    global stopped
    stopped = True


def parser(about):
    p = argparse.ArgumentParser(description=about)
    p.add_argument("--seconds", type=float, default=0, help="end after so long; 0: at SIGTERM")
    p.add_argument("--seed", type=int, default=1, help="of weights and data")
    p.add_argument("--device", choices=["auto", "cuda", "cpu", "emulated"], default="auto",
                   help="cuda is any GPU of PyTorch, also AMD's; emulated: the CPU, and queues of kfdemu; "
                        "auto: a GPU, else emulated within kfdemu run, else the CPU")  # fmt: skip
    p.add_argument("--scale", type=float, default=0, help="size of the model; 1 is the real one (default: 1 on a GPU, less elsewhere)")
    return p


class Device:
    """Where the work runs. `with device.stream():` selects the stream, done() waits for its work."""

    def __init__(self, args, small, queues=1, priority=None):
        """small is the default scale without a GPU; queues are the emulated ones."""
        signal.signal(signal.SIGTERM, _stop)
        signal.signal(signal.SIGINT, _stop)
        torch.manual_seed(args.seed)
        kind = args.device
        if kind == "auto":
            kind = "cuda" if torch.cuda.is_available() else "emulated" if os.environ.get("KFDEMU_SOCKET") else "cpu"
        if kind == "cuda" and not torch.cuda.is_available():
            sys.exit("this PyTorch has no GPU: use --device cpu, or --device emulated within kfdemu run")
        if priority is None:
            priority = int(os.environ.get("GPREEMPT_STREAM_PRIORITY", "0"))
        self.scale = args.scale or (1 if kind == "cuda" else small)
        self.torch = torch.device("cuda" if kind == "cuda" else "cpu")
        self.side = torch.cuda.Stream(priority=priority) if kind == "cuda" else None
        self.emulated, self.begun = None, False
        where = f"PyTorch {torch.__version__} on the CPU"
        if kind == "cuda":
            runtime = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
            where = f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {runtime}, stream priority {priority}"
        elif kind == "cpu":
            where += ": without GPU queues, so that gpreempt can suspend nothing"
        else:
            self.emulated = Emulated(queues, PRIORITIES[priority])
            where += (f"; its progress also waits for {PACKETS} packets on each of {queues} EMULATED queues of process "
                      f"{self.emulated.process.pid}, whose time says nothing about the model")  # fmt: skip
        say(f"device {kind}: {where}; scale {self.scale:g}")

    def stream(self):
        if self.side and not self.begun:
            torch.cuda.synchronize()  # weights and data were made in another stream
            self.begun = True
        return torch.cuda.stream(self.side) if self.side else nullcontext()

    def done(self):
        if self.side:
            self.side.synchronize()
        if self.emulated:
            self.emulated.work()

    def close(self):
        if self.emulated:
            self.emulated.close()


class Emulated:
    """A process with queues on the machine of `kfdemu run`, which works on request."""

    def __init__(self, queues, priority):
        command = ["kfdemu", "answer", "--runtime", "--queues", str(queues), "--packets", str(PACKETS),
                   "--duration", str(MICROSECONDS), "--priority", priority]  # fmt: skip
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        except FileNotFoundError:
            sys.exit("kfdemu is not on PATH: run this within kfdemu run, with PATH=$PWD/build:$PATH")
        self.proof = None
        if self._await("ready") is None:
            sys.exit("kfdemu answer has no emulated GPU: run this within kfdemu run")

    def _await(self, event):
        for line in self.process.stdout:
            message = json.loads(line)
            if message["event"] == "done":
                self.proof = line.strip()  # that each packet ran exactly once and in order
            if message["event"] == event:
                return message
        return None

    def work(self):
        try:
            self.process.stdin.write("\n")
        except BrokenPipeError:
            pass
        if self._await("answer") is None and not stopped:
            raise RuntimeError(f"kfdemu answer ended with status {self.process.wait()}")

    def close(self):
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        self._await("")
        self.process.wait()
        if self.proof:
            say(self.proof)


def say(line):
    print(line, flush=True)


def ticks(seconds):
    """Counts from 1 until the time is over or a signal came."""
    end = time.monotonic() + seconds if seconds else float("inf")
    n = 0
    while not stopped and (n == 0 or time.monotonic() < end):
        n += 1
        yield n


def train(args, device, step):
    """Calls step, which returns a loss or nothing, and says how far it is, at most 10 times a second."""
    said = 0.0
    n = 0
    for n in ticks(args.seconds):
        with device.stream():
            loss = step()
        device.done()
        if time.monotonic() - said >= 0.1:
            said = time.monotonic()
            say(f"step {n}" if loss is None else f"step {n} loss {loss.item():.4f}")
    say(f"ended after step {n}")
    device.close()


def parameters(model):
    return sum(p.numel() for p in model.parameters())
