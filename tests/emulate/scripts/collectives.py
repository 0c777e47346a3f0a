"""Every collective in a world of six, with what must be in the buffers; ranks that are real say so
in REAL."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
size = dist.get_world_size()
real = [int(r) for r in os.environ["REAL"].split(",")]
assert (size, dist.get_backend()) == (6, "gloo")

x = torch.full((3,), float(rank + 1))
dist.all_reduce(x)
assert x.tolist() == [float(sum(r + 1 for r in real))] * 3  # emulated ranks add nothing
work = dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)
assert work.wait()
assert work.is_completed()

mine = torch.full((2,), float(rank))
parts = [torch.empty(2) for _ in range(size)]
dist.all_gather(parts, mine)
assert [p[0].item() for p in parts] == [float(r if r in real else rank) for r in range(size)]
whole = torch.empty(2 * size)
dist.all_gather_into_tensor(whole, mine)
assert whole.tolist() == torch.cat(parts).tolist()

share = torch.empty(2)
dist.reduce_scatter_tensor(share, torch.arange(12.0))
assert share.tolist() == [len(real) * (2 * rank + i) for i in range(2)]
dist.reduce_scatter(share, list(torch.arange(12.0).chunk(size)))
assert share.tolist() == [len(real) * (2 * rank + i) for i in range(2)]

group = dist.group.WORLD
for name in ("all_gather_single", "_allgather_base"):  # of torch 2.13, and before
    assert getattr(group, name)(whole.zero_(), mine).wait()
    assert whole.tolist() == torch.cat(parts).tolist()
for name in ("reduce_scatter_single", "_reduce_scatter_base"):
    assert getattr(group, name)(share.zero_(), torch.arange(12.0)).wait()
    assert share.tolist() == [len(real) * (2 * rank + i) for i in range(2)]
for name in ("all_to_all_single", "alltoall_base"):
    received = torch.empty(size)
    assert getattr(group, name)(received, torch.arange(float(size)) + rank, [], []).wait()
    assert received.tolist() == [float(rank + r) for r in range(size)]

sent = torch.arange(float(size)) + 10 * rank
received = torch.empty(size)
dist.all_to_all_single(received, sent)
assert received.tolist() == [10.0 * r + rank if r in real else sent[r].item() for r in range(size)]
dist.all_to_all_single(
    torch.empty(size - 1), torch.empty(1), [0] + [1] * (size - 1), [1] + [0] * (size - 1)
)

root = torch.full((2,), float(rank))
dist.broadcast(root, 5)  # an emulated root: what the lowest real rank has
assert root.tolist() == [float(real[0])] * 2
dist.reduce(root, real[0])
gathered = [torch.empty(2) for _ in range(size)] if rank == real[0] else None
dist.gather(mine, gathered, real[0])
dist.scatter(
    share, [torch.full((2,), float(r)) for r in range(size)] if rank == real[0] else None, real[0]
)
assert share.tolist() == [float(rank)] * 2

message = torch.full((2,), float(rank))
requests = dist.batch_isend_irecv(
    [
        dist.P2POp(dist.isend, torch.full((2,), 7.0), (rank + 1) % size),
        dist.P2POp(dist.irecv, message, (rank - 1) % size),
    ]
)
for request in requests:
    request.wait()
assert message.tolist() == ([7.0] * 2 if (rank - 1) % size in real else [0.0] * 2)

with dist.distributed_c10d._coalescing_manager():
    for tensor in (torch.ones(2), torch.ones(3)):
        dist.all_reduce(tensor)
objects = [None] * size
dist.all_gather_object(objects, {"rank": rank})
assert objects[rank] == {"rank": rank}

pair = dist.new_group([0, 5])
if rank in (0, 5):
    one = torch.ones(1)
    dist.all_reduce(one, group=pair)
dist.barrier()
dist.destroy_process_group()
