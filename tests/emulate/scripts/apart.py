"""A rank that is late; nobody's data comes to anybody."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank:
    time.sleep(0.2)
mine = torch.full((4,), float(rank))
dist.all_reduce(mine)
assert (mine == rank).all()
if rank:
    dist.send(mine, 0)
else:
    dist.recv(mine, 1)
dist.barrier()
