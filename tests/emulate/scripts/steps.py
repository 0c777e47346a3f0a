"""`steps.py N`: N steps of one product each, with one reduction waited for at once and one after
backward."""

import sys

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Linear(32, 32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(8, 32)).square().mean().backward()
    dist.all_reduce(model.weight.grad)
    work = dist.all_reduce(model.bias.grad, async_op=True)
    work.wait()
    optimizer.step()
    print("step done", flush=True)
dist.destroy_process_group()
