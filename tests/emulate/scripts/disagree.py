"""Two ranks of four call different collectives."""

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
tensor = torch.ones(1 << 16)
dist.all_reduce(tensor)
if dist.get_rank() == 0:
    dist.all_reduce(tensor)
else:
    dist.broadcast(tensor, 1)
