"""`reduce.py BYTES STEPS`: steps of one reduction each."""

import sys

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]

torch.set_num_threads(1)
dist.init_process_group("gloo")
# A step of next to no work marks the iteration; the reduction is what it takes.
weight = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([weight], lr=0.1)
gradients = torch.ones(int(sys.argv[1]) // 4)
for _ in range(int(sys.argv[2])):
    dist.all_reduce(gradients, dist.ReduceOp.MAX)
    optimizer.step()
dist.destroy_process_group()
