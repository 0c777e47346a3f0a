"""Small collectives one after another: how many per second a rank can be answered."""

import sys
import time

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]

torch.set_num_threads(1)
dist.init_process_group("gloo")
x = torch.ones(1024)
# Warm up. Maxima keep the ones as they are, whatever the others send.
for _ in range(100):
    dist.all_reduce(x, dist.ReduceOp.MAX)
start_s = time.perf_counter()
for _ in range(int(sys.argv[1])):
    dist.all_reduce(x, dist.ReduceOp.MAX)
with open(sys.argv[2], "w") as out:
    out.write(str(int(sys.argv[1]) / (time.perf_counter() - start_s)))
dist.destroy_process_group()
