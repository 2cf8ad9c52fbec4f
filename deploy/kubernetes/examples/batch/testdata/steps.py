# A rank that does one collective after the other, and says so.
import datetime
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(sys.argv[1])))
for step in range(int(sys.argv[2])):
    dist.all_reduce(torch.ones(1))
    print(f"step {step}", flush=True)
    time.sleep(0.5)
dist.destroy_process_group()
