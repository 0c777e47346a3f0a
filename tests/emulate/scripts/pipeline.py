"""1F1B by torch.distributed.pipelining, a stage per rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank = dist.get_rank()
size = dist.get_world_size()
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
stage = PipelineStage(model, rank, size, torch.device("cpu"))
schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, target: (y - target).square().mean())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(32, 16)
for _ in range(3):
    optimizer.zero_grad()
    first = (x,) if rank == 0 else ()
    last = {"target": x} if rank == size - 1 else {}
    schedule.step(*first, **last)
    optimizer.step()
dist.destroy_process_group()
