"""Kernel times: a batch of new ops against one call per op, and against looking known ops up
again."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from timing import seconds_of

from perfmodel.catalog import device
from perfmodel.cost import KernelModel
from perfmodel.ops import Attention, Embedding, Gemm, KernelOp, MemoryBound, OptimizerStep

COUNT = 3000


def fresh_ops(seed: int, count: int = COUNT) -> list[KernelOp]:
    """Random ops over the families of a training step."""
    sizes = np.random.default_rng(seed).integers(64, 8192, (count // 5, 3)).tolist()
    ops: list[KernelOp] = [Gemm(m=m, n=n, k=k) for m, n, k in sizes]
    ops += [
        Attention(
            batch=1 + m % 8,
            heads=32,
            kv_heads=8,
            seq_q=n,
            seq_kv=n,
            head_dim=128,
            pass_=("fwd", "bwd")[k % 2],
        )
        for m, n, k in sizes
    ]
    ops += [MemoryBound(op="gelu", rows=m, hidden=n) for m, n, _ in sizes]
    ops += [Embedding(tokens=m, hidden=n, vocab=10 * k) for m, n, k in sizes]
    ops += [OptimizerStep(n_params=m * n, tensors=1 + k % 100) for m, n, k in sizes]
    return ops


def seconds(model: KernelModel, batches: Sequence[Sequence[KernelOp]]) -> float:
    """Shortest time of one batch."""
    # New ops each time: a batch that was priced before is looked up.
    return min(
        seconds_of(lambda ops=ops: model.times(device("A100-SXM4-80GB"), ops)) for ops in batches
    )


def run() -> dict[str, dict[str, Any]]:
    """Ratios within this run."""
    model = KernelModel.load()
    # The first call compiles.
    model.times(device("A100-SXM4-80GB"), fresh_ops(0, 50))
    batch = seconds(model, [fresh_ops(seed) for seed in range(1, 6)])
    # Asked before, in the line above.
    known = seconds(model, [fresh_ops(1)] * 5)
    single = seconds(model, [[op] for op in fresh_ops(9, 50)])
    text = f"{COUNT:,} new ops in {1e3 * batch:.0f} ms"
    return {
        "kernels: batch of new ops, per op": {
            "ratio": COUNT * single / batch,
            "baseline": f"one call per op; {text}",
            "unit": "x faster",
        },
        "kernels: known ops again": {"ratio": batch / known, "baseline": text, "unit": "x faster"},
    }
