"""Three stages of a pipeline, two ranks each, with messages of the script's own; the middle one has
two layers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
size = dist.get_world_size()
stage = rank // 2
replicas = [dist.new_group([2 * s, 2 * s + 1]) for s in range(size // 2)]
before = rank - 2 if stage else None
after = rank + 2 if rank + 2 < size else None
layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(2 if stage == 1 else 1)))
model = DistributedDataParallel(layers, process_group=replicas[stage])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    x = torch.ones(8, 32, requires_grad=before is not None)
    if before is not None:
        dist.recv(x.data, before)
    y = model(x)
    gradient = torch.ones_like(y)
    if after is not None:
        dist.send(y.detach(), after)
        dist.recv(gradient, after)
    y.backward(gradient)
    if before is not None:
        dist.send(x.grad, before)
    optimizer.step()
dist.destroy_process_group()
