"""What regressors are told of kernels of every family: work, waves and features, kept in
`known_physics.csv`.

Answers of the shipped weights hardly move with some of these figures, which a new fit would
nevertheless be made of. A change that is meant to move them is followed by

    PYTHONPATH=tests python tests/cost/known_physics.py
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from stored_figures import StoredCase, write_cases

from perfmodel.catalog import device
from perfmodel.cost.learn import kernel_physics
from perfmodel.cost.learn.rows import rows_from_ops
from perfmodel.cost.learn.stack import Figures
from perfmodel.ops import (
    Attention,
    Convolution,
    Embedding,
    Gemm,
    KernelOp,
    MemoryBound,
    MoE,
    OptimizerStep,
    Recurrence,
)
from perfmodel.ops.physics import cached_share, compute_seconds, memory_seconds

TABLE = Path(__file__).with_suffix(".csv")
DEVICES = ("A100-SXM4-80GB", "H100-SXM5-80GB")
FEW_UNITS = (2.0, 8.0)
"""Numbers of cores of made-up devices: those of a TPU, and the fewest that count as many."""
ON_FEW_UNITS = 3
"""Kernels of every family on these."""
DRAWN = 14
"""Kernels of every family, of sizes drawn evenly; there are as many of powers of two."""


class PowersOfTwo(random.Random):
    """Draws sizes as models have them, on which tiles end and limits of kernels lie."""

    def randint(self, a: int, b: int) -> int:
        largest = b.bit_length() - 1
        return 1 << self.choice(range(max(a.bit_length() - 1, largest - 4), largest + 1))


def _gemm(draw: random.Random) -> KernelOp:
    return Gemm(
        op=draw.choice(("linear", "bmm", "grouped_linear")),
        m=draw.randint(1, 5000),
        n=draw.randint(1, 5000),
        k=draw.randint(1, 5000),
        batch=draw.choice((1, 7, 96)),
        groups=draw.choice((1, 3, 16)),
        dtype=draw.choice(("bf16", "fp32", "int8")),
        accumulate=draw.random() < 0.5,
        pass_=draw.choice(("fwd", "bwd", "dgrad", "wgrad")),
    )


def _attention(draw: random.Random) -> KernelOp:
    kv_heads = draw.choice((1, 4, 8))
    seq_kv = draw.choice((1, 300, 4096, 10000))
    return Attention(
        batch=draw.randint(1, 40),
        heads=kv_heads * draw.choice((1, 4, 16)),
        kv_heads=kv_heads,
        seq_q=draw.choice((1, 77, seq_kv)),
        seq_kv=seq_kv,
        head_dim=draw.choice((64, 96, 128)),
        head_dim_v=draw.choice((0, 64)),
        causal=draw.random() < 0.5,
        window=draw.choice((0, 0, 128)),
        phase=draw.choice(("training", "prefill", "decode")),
        pass_=draw.choice(("fwd", "bwd")),
    )


def _memory(draw: random.Random) -> KernelOp:
    return MemoryBound(
        op=draw.choice(("gelu", "layer_norm", "rms_norm", "softmax", "add", "never_heard_of")),
        rows=draw.randint(1, 20000),
        hidden=draw.randint(1, 9000),
        n_inputs=draw.randint(1, 3),
        dtype=draw.choice(("bf16", "fp32")),
        pass_=draw.choice(("fwd", "bwd")),
    )


def _embedding(draw: random.Random) -> KernelOp:
    sizes: dict[str, Any] = {
        "tokens": draw.randint(1, 20000),
        "hidden": draw.randint(1, 9000),
        "vocab": draw.randint(1, 200000),
    }
    return Embedding(**sizes, pass_=draw.choice(("fwd", "bwd")))


def _optimizer(draw: random.Random) -> KernelOp:
    return OptimizerStep(
        n_params=draw.randint(1, 10**9),
        tensors=draw.randint(1, 500),
        bytes_per_param=draw.choice((16.0, 28.0, 42.0)),
    )


def _convolution(draw: random.Random) -> KernelOp:
    kernel = draw.choice((1, 3, 7))
    square: dict[str, Any] = {
        "k_h": kernel,
        "k_w": kernel,
        "pad_h": kernel // 2,
        "pad_w": draw.choice((0, kernel // 2)),
    }
    return Convolution(
        batch=draw.randint(1, 64),
        c_in=64 * draw.randint(1, 8),
        h_in=draw.randint(8, 224),
        w_in=draw.randint(8, 224),
        c_out=draw.choice((64, 96, 512)),
        stride_h=draw.choice((1, 2)),
        stride_w=draw.choice((1, 2)),
        groups=draw.choice((1, 1, 4)),
        pass_=draw.choice(("fwd", "bwd", "dgrad", "wgrad")),
        **square,
    )


def _experts(draw: random.Random) -> KernelOp:
    return MoE(
        op=draw.choice(("moe", "moe_ffn", "moe_nongated")),
        tokens=draw.randint(1, 20000),
        hidden=draw.randint(500, 8000),
        inter=draw.randint(500, 15000),
        topk=draw.choice((1, 2, 8)),
        experts=draw.choice((8, 64, 256)),
        moe_tp=draw.choice((1, 2)),
        moe_ep=draw.choice((1, 4, 8)),
        distribution=draw.choice(("balanced", "power_law_1.2")),
        pass_=draw.choice(("fwd", "bwd")),
    )


def _recurrence(draw: random.Random) -> KernelOp:
    return Recurrence(
        op=draw.choice(("state_space", "delta_rule")),
        tokens=draw.randint(1, 20000),
        products_per_token=draw.randint(1, 10**7),
        bytes_per_token=draw.randint(1, 10**6),
        pass_=draw.choice(("fwd", "bwd")),
    )


MAKERS: dict[str, Callable[[random.Random], KernelOp]] = {
    "products": _gemm,
    "attention": _attention,
    "memory": _memory,
    "embedding": _embedding,
    "optimizer": _optimizer,
    "convolution": _convolution,
    "experts": _experts,
    "recurrence": _recurrence,
}


def figures(figures_of_device: Figures, op: KernelOp) -> dict[str, float]:
    """Work, features and axes of a kernel by their place, and its seconds without any learned
    constant."""
    physics, machine = kernel_physics(figures_of_device, rows_from_ops([op]))
    figures: dict[str, float] = {}
    for name, value in physics._asdict().items():
        values = value if isinstance(value, list) else [value]
        figures |= {f"{name}{i}": _number(entry) for i, entry in enumerate(values)}
    figures["compute"] = _number(compute_seconds(np, physics, machine))
    figures["memory"] = _number(memory_seconds(np, physics, machine))
    figures["cached"] = _number(cached_share(physics.bytes, machine))
    figures |= {"op.flops": op.flops, "op.bytes": op.bytes}
    return {name: value for name, value in figures.items() if value}


def _number(value: Any) -> float:
    return float(np.asarray(value, float).sum())


def cases() -> Iterator[StoredCase]:
    """Figures of drawn kernels of every family on every device."""
    for name, make in MAKERS.items():
        for sizes, draw in (("", random.Random(name)), ("round ", PowersOfTwo(name))):
            for number in range(DRAWN):
                op = make(draw)
                base = f"{sizes}{name} {number}"
                for place, machine in enumerate(DEVICES):
                    yield StoredCase(
                        base, machine if place else base, figures(Figures.of(device(machine)), op)
                    )
                for units in FEW_UNITS if number < ON_FEW_UNITS else ():
                    few = replace(Figures.of(device(DEVICES[0])), units=units)
                    yield StoredCase(base, f"{units:g} units", figures(few, op))


if __name__ == "__main__":
    write_cases(TABLE, cases())
