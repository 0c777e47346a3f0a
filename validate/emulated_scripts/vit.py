"""A vision transformer under DistributedDataParallel (FSDP=1: fully_shard), on random images."""

import os
import sys

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.distributed.fsdp import fully_shard  # pyright: ignore[reportMissingImports]
from torch.nn.parallel import DistributedDataParallel  # pyright: ignore[reportMissingImports]

HIDDEN, LAYERS, PATCH, SIDE, CLASSES, BATCH = 192, 3, 8, 64, 100, 4


class Vision(nn.Module):
    """Embeddings of patches and places, encoder layers, and a head over classes."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, HIDDEN, PATCH, PATCH)
        self.places = nn.Parameter(torch.zeros((SIDE // PATCH) ** 2, HIDDEN))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                HIDDEN, 6, 4 * HIDDEN, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores of classes."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def main(steps: int) -> None:
    """Train for some steps on random images."""
    # One thread, as a rank has one core.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = Vision()
    if os.environ.get("FSDP"):
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, bucket_cap_mb=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images, labels = torch.randn(BATCH, 3, SIDE, SIDE), torch.randint(0, CLASSES, (BATCH,))
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
