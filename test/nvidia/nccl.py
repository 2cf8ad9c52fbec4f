"""A rank of a job that adds over GPUs with NCCL, and checks the sums.

nccl.py FILE RANK RANKS PORT. Words of FILE, as job.cu's: 0 all-reduces; 1 stop; 3 failed; 9 wrong sums. The ranks agree
on the stop by an all-reduce of its own, so that none waits for another for ever.
"""

import datetime
import mmap
import os
import struct
import sys

# Multicast over NVLink is not used: whether it bears that a GPU stops in the midst was never tried.
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
os.environ["NVSHMEM_DISABLE_NVLS"] = "1"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

path, rank, ranks, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
words = mmap.mmap(file, 4096)


def get(i):
    return struct.unpack_from("<Q", words, 8 * i)[0]


def put(i, value):
    struct.pack_into("<Q", words, 8 * i, value)


def main():
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks,
                            timeout=datetime.timedelta(seconds=60))  # fmt: skip
    # 256 MiB. Sums of these whole numbers are exact in fp32.
    base = (torch.arange(64 << 20, device=device) % 4093).float()
    mine, total = base * (rank + 1), base * (ranks * (ranks + 1) // 2)
    buffer, stop = torch.empty_like(base), torch.zeros(1, device=device)
    number = 0
    while True:
        # Another factor each time, so that an old sum is a wrong one.
        factor = number % 7 + 1
        torch.mul(mine, factor, out=buffer)
        dist.all_reduce(buffer)
        wrong = (buffer != total * factor).any()
        stop.fill_(get(1))
        dist.all_reduce(stop)
        if bool(wrong):  # waits for both
            put(9, get(9) + 1)
        number += 1
        put(0, number)
        if float(stop) > 0:
            break
    dist.destroy_process_group()


try:
    main()
except BaseException:
    put(3, 1)
    raise
