"""A transformer encoder that fills in masked words, under DistributedDataParallel (FSDP=1:
fully_shard)."""

import os
import sys

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.distributed.fsdp import fully_shard  # pyright: ignore[reportMissingImports]
from torch.nn.parallel import DistributedDataParallel  # pyright: ignore[reportMissingImports]

VOCABULARY, HIDDEN, LAYERS, LENGTH = 4096, 256, 4, 64
BATCH = int(os.environ.get("BATCH", "8"))


class Bert(nn.Module):
    """Embeddings of tokens and places, encoder layers, and a head over the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.places = nn.Parameter(torch.zeros(LENGTH, HIDDEN))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(HIDDEN, 8, 4 * HIDDEN, 0.0, batch_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of every word at every place."""
        x = self.embeddings(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main(steps: int) -> None:
    """Train for some steps on random tokens."""
    # One thread, as a rank has one core.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = Bert()
    if os.environ.get("FSDP"):
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(
            model, bucket_cap_mb=float(os.environ.get("BUCKET_MB", "4"))
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
