"""Ranks 0 and 1 call different collectives of a group of their own, the broadcast from the rank
that is given."""

import sys

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
group = dist.new_group([0, 1])
tensor = torch.ones(1 << 16)
dist.all_reduce(tensor, group=group)
if dist.get_rank() == 0:
    dist.all_reduce(tensor, group=group)
else:
    dist.broadcast(tensor, int(sys.argv[1]), group=group)
dist.all_reduce(tensor, group=group)
