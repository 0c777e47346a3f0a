"""A residual network for images under DistributedDataParallel (FSDP=1: fully_shard), on random
data."""

import os
import sys

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.distributed.fsdp import fully_shard  # pyright: ignore[reportMissingImports]
from torch.nn.parallel import DistributedDataParallel  # pyright: ignore[reportMissingImports]


class Block(nn.Module):
    """Two convolutions beside a short cut."""

    def __init__(self, wide: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(wide, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.skip = (
            nn.Conv2d(wide, out, 1, stride, bias=False)
            if stride > 1 or wide != out
            else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the convolutions' result to the shortcut's."""
        return torch.relu(self.body(x) + self.skip(x))


def main(steps: int) -> None:
    """Train for some steps on random images."""
    # One thread, as a rank has one core.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    widths = (64, 128, 256, 512)
    # Blocks that widen halve the image, as in the original network.
    blocks = [Block(i, o, 1 + (i != o)) for i, o in zip((64, *widths[:-1]), widths, strict=True)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 100))
    model = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1), *blocks, head)
    if os.environ.get("FSDP"):
        for block in (*blocks, head):
            fully_shard(block)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(0, 100, (8,))
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
