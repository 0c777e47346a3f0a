"""Every collective of gloo in a world of six of which this rank alone is real, and what is then in
the buffers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("nccl" if dist.is_nccl_available() else "gloo")
rank = dist.get_rank()
size = dist.get_world_size()
library = type(dist.group.WORLD._get_backend(torch.device("cpu")))
assert "ProcessGroupGloo" in [known.__name__ for known in library.__mro__]  # the library's own

mine = torch.full((3,), float(rank + 1))
parts = [torch.empty(3) for _ in range(size)]
dist.all_gather(parts, mine)
assert all(part.tolist() == mine.tolist() for part in parts)  # others' are copies of its own
objects = [None] * size
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": rank}] * size
sent = torch.arange(float(size))
received = torch.empty(size)
dist.all_to_all_single(received, sent)
assert received.tolist() == sent.tolist()
# of 256 KiB, which a slow link takes a while to carry
long = torch.arange(1 << 16, dtype=torch.float32)
parts = [torch.empty_like(long) for _ in range(size)]
dist.all_gather(parts, long)
assert all(torch.equal(part, long) for part in parts)
sent = torch.arange(float(size << 15))
received = torch.empty_like(sent)
dist.all_to_all_single(received, sent)
assert torch.equal(received, sent)
dist.all_gather_object(objects, {"rank": rank, "more": [*range(50_000)]})
assert [found["more"][-1] for found in objects] == [49_999] * size
for nbytes in (4, 1 << 22):
    whole = torch.ones(nbytes // 4)
    dist.all_reduce(whole)
    assert whole.isfinite().all()
    assert whole.min() >= 0
    assert whole.max() <= size
share = torch.empty(2)
dist.reduce_scatter_tensor(share, torch.ones(2 * size))
dist.broadcast(mine, rank)
assert mine.tolist() == [rank + 1.0] * 3
dist.broadcast(mine, (rank + 1) % size)  # emulated ranks have no data
assert mine.tolist() == [0.0] * 3
dist.reduce(share, rank)
dist.gather(share, [torch.empty(2) for _ in range(size)], rank)
dist.scatter(share, [torch.full((2,), float(r)) for r in range(size)], rank)
assert share.tolist() == [float(rank)] * 2
works = [
    dist.isend(torch.ones(1 << 20), (rank + 1) % size),
    dist.irecv(torch.empty(1 << 20), (rank - 1) % size),
]
works += [dist.all_reduce(torch.ones(1 << 18), async_op=True) for _ in range(3)]  # side by side
for work in works:
    work.wait()
pair = dist.new_group([rank, 5])
dist.barrier(group=pair)

model = DistributedDataParallel(nn.Linear(8, 8), bucket_cap_mb=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
assert all(p.isfinite().all() for p in model.parameters())
dist.destroy_process_group()
