"""`sized.py bert|resnet152|deeplight STEPS`: models as large as NeuronaBox's (table 2), with little
data each step."""

import sys

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn.parallel import DistributedDataParallel  # pyright: ignore[reportMissingImports]


class Bert(nn.Module):
    """BERT-large, 1.3 GB of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30522, 1024)
        layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 24, enable_nested_tensor=False)
        self.span = nn.Linear(1024, 2)

    def forward(self, _: int) -> torch.Tensor:
        """Scores of spans of one sequence of 32 random tokens."""
        return self.span(self.layers(self.words(torch.randint(30522, (1, 32)))))


class Bottleneck(nn.Module):
    """Three convolutions beside a short cut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        same = inputs == 4 * width and stride == 1
        self.side = nn.Identity() if same else nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both ways added up."""
        return torch.relu(self.body(x) + self.side(x))


class ResNet152(nn.Module):
    """60 million parameters, 240 MB."""

    def __init__(self) -> None:
        super().__init__()
        blocks, inputs = [nn.Conv2d(3, 64, 7, 4, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()], 64
        for stage, depth in enumerate((3, 8, 36, 3)):
            for block in range(depth):
                blocks.append(Bottleneck(inputs, 64 << stage, 2 if stage and not block else 1))
                inputs = 4 * (64 << stage)
        self.body = nn.Sequential(
            *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)
        )

    def forward(self, _: int) -> torch.Tensor:
        """Scores of classes of two small random images."""
        return self.body(torch.randn(2, 3, 64, 64))


class DeepLight(nn.Module):
    """Embeddings of 39 features and a perceptron, 2.3 GB; gradients of embeddings are dense."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(35_000_000, 16)
        self.deep = nn.Sequential(
            nn.Linear(39 * 16, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 1)
        )

    def forward(self, _: int) -> torch.Tensor:
        """Scores of 256 random samples."""
        return self.deep(self.words(torch.randint(35_000_000, (256, 39))).flatten(1))


torch.set_num_threads(1)
dist.init_process_group("gloo")
models = {"bert": Bert, "resnet152": ResNet152, "deeplight": DeepLight}
model = models[sys.argv[1]]()
# Gradients as views of buckets save a copy of them all, of models of gigabytes.
model = DistributedDataParallel(model, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
# Gradients stay allocated between steps, as they are views of buckets.
for step in range(int(sys.argv[2])):
    optimizer.zero_grad(set_to_none=False)
    model(step).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
