"""A reduction of tensors on a GPU that is a fake: kernels before it in the stream take a while."""

import time
from types import SimpleNamespace

import torch
import torch.distributed as dist

from perfmodel.emulate.rank import _group

KERNELS_S = 0.5
done = []


class Event:
    def record(self) -> None:
        self.end_s = time.perf_counter() + KERNELS_S

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.end_s - time.perf_counter()))


dist.init_process_group("nccl")
stream = SimpleNamespace(synchronize=lambda: done.append(True))
_group.device_module = lambda dtype: SimpleNamespace(Event=Event, current_stream=lambda: stream)
x = torch.ones(4)
start_s = time.perf_counter()
work = dist.all_reduce(x, async_op=True)
assert time.perf_counter() - start_s < KERNELS_S  # the host goes on
work.wait()
assert time.perf_counter() - start_s >= KERNELS_S
assert done == [True]
dist.barrier()
assert len(done) == 2
dist.destroy_process_group()
