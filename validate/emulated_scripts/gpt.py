"""A causal transformer under DistributedDataParallel (FSDP=1: fully_shard): the model of
`gpt.toml`."""

import os
import sys

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.distributed.fsdp import fully_shard  # pyright: ignore[reportMissingImports]
from torch.nn.parallel import DistributedDataParallel  # pyright: ignore[reportMissingImports]

SMALL = bool(os.environ.get("SMALL"))
"""A model that takes next to no memory, to find what the libraries take for themselves."""
VOCABULARY, HIDDEN, LAYERS, HEADS, LENGTH = (64, 32, 1, 8, 128) if SMALL else (8192, 512, 6, 8, 128)
BATCH = int(os.environ.get("BATCH", "4"))


class Layer(nn.Module):
    """Causal attention and a feed-forward network, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs of the layer, shape (batch, tokens, hidden)."""
        # (3, batch, heads, tokens, elements): queries, keys and values by head
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Embeddings that the head shares, learned places, and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.places = nn.Parameter(torch.zeros(LENGTH, HIDDEN))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of every word at every place."""
        x = self.embeddings(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embeddings.weight.T


def main(steps: int) -> None:
    """Train for some steps on random tokens."""
    # One thread, as a rank has one core.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = Gpt()
    if os.environ.get("FSDP"):
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
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
