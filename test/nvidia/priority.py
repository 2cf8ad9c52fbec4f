"""The bound that a server can reach without gpreempt: serving and training in one process, on streams of high and of low priority.

priority.py FILE SIZE trains as train.py FILE does, in a thread, and takes the commands of serve.py SIZE. Both threads
need Python's lock, so that each delays the other on the CPU, too.
"""

import os
import sys
import threading

import torch

import serve
import train


def main():
    trainer = train.Trainer(sys.argv[1])  # forks its workers, before CUDA is initialised
    low, high = torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-3)
    server = serve.Server(sys.argv[2], stream=high)  # its graph is captured before anything else runs
    torch.cuda.synchronize()
    thread = threading.Thread(target=trainer.run, args=(low,), daemon=True)
    thread.start()
    serve.commands(server)
    trainer.set(1, 1)
    thread.join(20)
    sys.stdout.flush()
    os._exit(0)  # the data loader's workers are waited for otherwise


if __name__ == "__main__":
    main()
