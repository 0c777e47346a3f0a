"""Rank 1 comes to every other collective late by the seconds that are given."""

import sys
import time

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
tensor = torch.ones(1 << 10)
for _ in range(2):
    dist.all_reduce(tensor)
    if dist.get_rank() == 1:
        time.sleep(float(sys.argv[1]))
    dist.broadcast(tensor, 0)
    dist.all_reduce(tensor)
