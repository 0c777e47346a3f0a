"""A recommendation model: embeddings of categories and numbers through a deep network, predicting
clicks."""

import os
import sys

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.distributed.fsdp import fully_shard  # pyright: ignore[reportMissingImports]
from torch.nn.parallel import DistributedDataParallel  # pyright: ignore[reportMissingImports]

TABLES, ROWS, WIDTH, NUMBERS, BATCH = 8, 2000, 32, 13, 256


class Recommender(nn.Module):
    """Tables of categories and a network of numbers, joined by a deep network."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for _ in range(TABLES))
        self.bottom = nn.Sequential(
            nn.Linear(NUMBERS, 256), nn.ReLU(), nn.Linear(256, WIDTH), nn.ReLU()
        )
        self.top = nn.Sequential(
            nn.Linear(WIDTH * (TABLES + 1), 1024),
            nn.ReLU(),
            nn.Linear(1024, 1024),
            nn.ReLU(),
            nn.Linear(1024, 1),
        )

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        """Score of a click of every sample; `categories` has a column per table."""
        embedded = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        return self.top(torch.cat([self.bottom(numbers), *embedded], 1)).squeeze(1)


def main(steps: int) -> None:
    """Train for some steps on random samples."""
    # One thread, as a rank has one core.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = Recommender()
    # Tables of embeddings are sharded with the whole model: they are next to no computation.
    if os.environ.get("FSDP"):
        for part in (model.bottom, model.top):
            fully_shard(part)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
    numbers, clicks = torch.randn(BATCH, NUMBERS), torch.rand(BATCH).round()
    categories = torch.randint(0, ROWS, (BATCH, TABLES, 4))
    for _ in range(steps):
        loss = nn.functional.binary_cross_entropy_with_logits(model(numbers, categories), clicks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
