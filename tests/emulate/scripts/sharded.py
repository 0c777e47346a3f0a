"""FSDP2 over tensor parallelism on a mesh, and DistributedDataParallel, a few iterations of
each."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size() // 4, 4), mesh_dim_names=("dp", "tp"))


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


sharded = nn.Sequential(block(), block())
for part in sharded:
    parallelize_module(part, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(part, mesh=mesh["dp"])
fully_shard(sharded, mesh=mesh["dp"])
for model in (sharded, DistributedDataParallel(block())):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
