"""A small transformer trained for real by a few processes: tensor, pipeline and data parallel over
gloo.

Every rank has a core of its own and one thread. Layers are those of `perfmodel.workload` without
anything fused: Megatron's column and row parallel products, embedding and loss divided by the
vocabulary, 1F1B, gradients reduced after the last backward, fused Adam.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn import functional as F  # pyright: ignore[reportMissingImports]
from torch.profiler import ProfilerActivity, profile, record_function, schedule  # pyright: ignore[reportMissingImports]

from perfmodel.spec import Layout, Transformer


@dataclass(frozen=True)
class RankCase:
    """One configuration."""

    layout: Layout
    global_batch: int

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a replica in a step."""
        return self.global_batch // (self.layout.dp * self.layout.micro_batch)

    @property
    def name(self) -> str:
        """The layout and the batch in words."""
        return f"{self.layout},batch={self.global_batch}"


class _Copied(torch.autograd.Function):
    """Identity forward, sum of gradients backward (Megatron-LM, arXiv 1909.08053, section 3: f)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """The tensor as it is."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""
        total = grad[0].contiguous()
        dist.all_reduce(total)
        return total


class _Summed(torch.autograd.Function):
    """Sum forward, identity backward (g)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""
        total = x.contiguous()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grad: torch.Tensor) -> torch.Tensor:
        """The gradient as it is."""
        return grad[0]


class _Layer(nn.Module):
    """One rank's part of a layer: some heads, and some of the feed-forward's width."""

    def __init__(self, model: Transformer, tp: int) -> None:
        super().__init__()
        h, self.heads, self.tp = model.hidden, model.heads // tp, tp
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h // tp), nn.Linear(h // tp, h)
        self.up, self.down = (
            nn.Linear(h, model.ffn_hidden // tp),
            nn.Linear(model.ffn_hidden // tp, h),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs of the layer, shape (batch, tokens, hidden), the same on all ranks."""
        into, out_of = (_Copied.apply, _Summed.apply) if self.tp > 1 else (lambda t: t, lambda t: t)
        b, s, _ = x.shape
        # shape of each (batch, heads, tokens, elements)
        q, k, v = self.qkv(into(self.norm1(x))).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(b, s, -1)
        )
        x = x + out_of(self.out(attended))
        return x + out_of(self.down(F.gelu(self.up(into(self.norm2(x))))))


class _Ends(nn.Module):
    """Embedding, or head and loss, of one rank's part of the vocabulary."""

    def __init__(self, model: Transformer, tp: int, rank: int) -> None:
        super().__init__()
        self.tp = tp
        self.size = model.vocab // tp
        self.first = self.size * rank
        self.table = nn.Parameter(torch.randn(self.size, model.hidden) * 0.02)

    def _rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of this rank's part of the table, and which ids lie outside it (they get row 0)."""
        outside = (ids < self.first) | (ids >= self.first + self.size)
        return (ids - self.first).masked_fill(outside, 0), outside

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of tokens: every rank adds those of its part."""
        if self.tp == 1:
            return F.embedding(ids, self.table)
        rows, outside = self._rows(ids)
        return _Summed.apply(F.embedding(rows, self.table).masked_fill(outside[..., None], 0.0))  # pyright: ignore

    def loss(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy, without gathering the logits of other ranks."""
        if self.tp == 1:
            return F.cross_entropy(F.linear(x, self.table).flatten(0, 1), ids.flatten())
        logits = F.linear(_Copied.apply(x), self.table)  # pyright: ignore

        # The largest logit of all ranks is taken off, so that exponentials stay finite.
        largest = logits.detach().amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        rows, outside = self._rows(ids)
        logits = logits - largest[..., None]

        # One rank has the target's logit; of the normaliser each has a part.
        target = logits.gather(-1, rows[..., None])[..., 0].masked_fill(outside, 0.0)
        target, total = _Summed.apply(target), _Summed.apply(logits.exp().sum(-1))  # pyright: ignore
        return (total.log() - target).mean()


class _Step:
    """One rank's part of a configuration, ready to run steps."""

    def __init__(self, model: Transformer, case: RankCase, rank: int) -> None:
        layout = case.layout
        self.case, self.layout, self.model = case, layout, model
        self.stage = rank if layout.pp > 1 else 0
        self.first = self.stage == 0
        self.last = self.stage == layout.pp - 1
        tensor_rank = rank if layout.tp > 1 else 0
        torch.manual_seed(1 + tensor_rank)
        self.layers = nn.ModuleList(
            _Layer(model, layout.tp) for _ in range(model.layers // layout.pp)
        )

        # The first stage has the embedding, the last one the head.
        self.embedding = _Ends(model, layout.tp, tensor_rank) if self.first else None
        self.head = _Ends(model, layout.tp, tensor_rank) if self.last else None
        self.positions = (
            nn.Parameter(torch.randn(model.seq_len, model.hidden) * 0.02) if self.first else None
        )
        self.norm = nn.LayerNorm(model.hidden) if self.last else None
        self.parameters: list[nn.Parameter] = []
        for module in (self.layers, self.embedding, self.head, self.norm):
            if module is not None:
                self.parameters += module.parameters()
        if self.positions is not None:
            self.parameters.append(self.positions)

        # Gradients lie in one buffer, which is reduced as a whole.
        self.gradients = torch.zeros(sum(p.numel() for p in self.parameters))
        offset = 0
        for p in self.parameters:
            p.grad = self.gradients[offset : offset + p.numel()].view_as(p)
            offset += p.numel()
        self.optimizer = torch.optim.Adam(self.parameters, lr=1e-5, fused=True)
        self.ids = torch.randint(model.vocab, (layout.micro_batch, model.seq_len))
        self.sends: list[Any] = []

    def run(self) -> None:
        """Run a step under 1F1B: passes, reduction of gradients, optimizer."""
        self.gradients.zero_()
        n = self.case.micro_batches

        # A stage runs as many forwards ahead as stages follow it, then one backward per forward.
        ahead = min(self.layout.pp - 1 - self.stage, n)
        under_way: list[tuple[int, Any, torch.Tensor]] = [self._forward(i) for i in range(ahead)]
        for i in range(ahead, n):
            under_way.append(self._forward(i))
            self._backward(*under_way.pop(0))
        for forward in under_way:
            self._backward(*forward)

        # Sends are waited for at the end, as nothing rests on their arrival here.
        for request, _ in self.sends:
            request.wait()
        self.sends.clear()
        if self.layout.dp > 1:
            with record_function("grad_reduce"):
                dist.all_reduce(self.gradients)
        with record_function("optimizer"):
            self.optimizer.step()

    def _forward(self, i: int) -> tuple[int, Any, torch.Tensor]:
        """Run the forward of a micro-batch; returns its number, its input and its output."""
        received: Any = None
        if not self.first:
            received = torch.empty(self.layout.micro_batch, self.model.seq_len, self.model.hidden)
            dist.recv(received, self.stage - 1)
            received.requires_grad_()
        # The names are those by which the profile tells passes from each other.
        with record_function(f"forward stage={self.stage} micro_batch={i}"):
            x: Any = received
            if self.embedding is not None and self.positions is not None:
                x = self.embedding.embed(self.ids) + self.positions
            for layer in self.layers:
                x = layer(x)
            if self.head is not None and self.norm is not None:
                x = self.head.loss(self.norm(x), self.ids)
        if not self.last:
            self._send(x.detach(), self.stage + 1)
        return i, received, x

    def _backward(self, i: int, received: torch.Tensor | None, x: torch.Tensor) -> None:
        """Run the backward of a micro-batch, and send its gradient to the stage before."""
        grad = None
        if not self.last:
            grad = torch.empty_like(x)
            dist.recv(grad, self.stage + 1)
        with record_function(f"backward stage={self.stage} micro_batch={i}"):
            x.backward(grad)
        if received is not None and received.grad is not None:
            self._send(received.grad, self.stage - 1)

    def _send(self, x: torch.Tensor, receiver: int) -> None:
        """Start sending a tensor, which is kept until it is sent."""
        self.sends.append((dist.isend(x, receiver), x))


def serve(
    rank: int,
    ranks: int,
    port: int,
    model: Transformer,
    cases: list[RankCase],
    rounds: int,
    steps: int,
    traced: tuple[int, Path] | None,
    out: Any,
) -> None:
    """Run every configuration in turns, and put (configuration, round, seconds from start to end of
    each step) of this rank into `out`. The configuration `traced` is profiled as well, in as many
    rounds."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    # of one device each rank runs a copy, so that cores share caches and memory in every
    # configuration
    ready = [
        _Step(model, case, rank) if rank < case.layout.devices or case.layout.devices == 1 else None
        for case in cases
    ]
    for turn in range(-1, rounds):  # the first warms up
        for number, step in enumerate(ready):
            stamps = _stamps(step, steps)
            if turn >= 0:
                out.put((number, turn, rank, stamps))
        if traced is not None and turn >= 0 and (step := ready[traced[0]]) is not None:
            path = traced[1] / f"turn{turn}"
            path.mkdir(parents=True, exist_ok=True)
            stamps = _traced(step, steps, path / f"rank{rank}.json")
            out.put((-1, turn, rank, stamps))
        dist.barrier()
    dist.destroy_process_group()


def _stamps(
    step: _Step | None, steps: int, after: Callable[[], None] = lambda: None
) -> list[tuple[float, float]]:
    """Start and end of some steps on this rank, also on ranks that take no part in them."""
    stamps = []
    for _ in range(steps):
        # All ranks begin together, so that no step waits for the end of another's last one.
        dist.barrier()
        start_s = time.monotonic()
        if step is not None:
            step.run()
        stamps.append((start_s, time.monotonic()))
        after()
    return stamps


def _traced(step: _Step, steps: int, path: Path) -> list[tuple[float, float]]:
    """Start and end of some steps, whose trace is written to a file."""
    # The schedule ends while it is still active: a trace that is complete would be dropped.
    plan = schedule(wait=0, warmup=1, active=steps)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=plan) as profiler:
        stamps = _stamps(step, steps, profiler.step)
    profiler.export_chrome_trace(str(path))
    return stamps
