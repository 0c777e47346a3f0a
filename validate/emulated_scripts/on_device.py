"""Data-parallel steps of a small network on a GPU, or on the CPU where there is none."""

import sys

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn.parallel import DistributedDataParallel  # pyright: ignore[reportMissingImports]

device = sys.argv[1]
# NCCL takes tensors on the GPU, gloo those of the CPU, which tries the script.
dist.init_process_group("nccl" if device == "cuda" else "gloo")
torch.manual_seed(0)
layers = [nn.Linear(512, 512) for _ in range(4)]
model = DistributedDataParallel(nn.Sequential(*layers).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(64, 512, device=device)
for _ in range(12):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
