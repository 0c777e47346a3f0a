"""What must not hang: `wrong.py CASE`."""

import atexit
import os
import sys
import time

case = sys.argv[1]
if case == "aborts after its end":
    atexit.register(os.abort)  # handlers run in reverse: after what the rank notes has been written
if case == "no group":
    sys.exit(0)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

dist.init_process_group("gloo")
rank = dist.get_rank()
if case == "size":
    dist.all_reduce(torch.ones(2 + rank))
elif case == "order":
    dist.barrier() if rank else dist.all_reduce(torch.ones(2))
elif case == "deadlock":
    dist.all_reduce(torch.ones(2))
    time.sleep(600) if rank else dist.all_reduce(torch.ones(2))
elif case == "left":
    None if rank else dist.all_reduce(torch.ones(2))
elif case == "silent":
    time.sleep(600)
elif case == "sparse":
    dist.all_reduce(torch.eye(3).to_sparse())
elif case == "objects":
    dist.broadcast_object_list([None], 1)
elif case == "calls":
    for _ in range(5):
        dist.all_reduce(torch.ones(2))
elif case == "raises":
    dist.barrier()
    raise ValueError("no data")
elif case == "aborts":
    dist.barrier()
    os.abort()
