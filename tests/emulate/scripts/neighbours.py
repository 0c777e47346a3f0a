"""Objects of four ranks of which the first two are real: emulated ranks pass on those of the
second."""

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
size = dist.get_world_size()
for more in (0, 50_000):  # in one message, and in many
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "more": [*range(more)]})
    assert [found["rank"] for found in objects] == [0, 1, 1, 1]
    assert all(len(found["more"]) == more for found in objects)
dist.destroy_process_group()
