"""What a kernel has to do on a machine, by op family: features, base-time terms and table axes."""

from collections.abc import Callable
from typing import Any, Final

from perfmodel.learn._attention import attention
from perfmodel.learn._machine import Machine
from perfmodel.learn._products import conv, gemm, moe
from perfmodel.learn._streams import embedding, memory, optimizer
from perfmodel.learn._work import Columns, Physics, log2, vector_rate

AXES: Final[dict[str, tuple[tuple[str, float, float, int], ...]]] = {
    "gemm": (("m", 0, 17, 4), ("n", 3, 18, 4), ("k", 3, 18, 4), ("products", 0, 14, 1),
             ("weights_in_l2", -10, 6, 8), ("waves", -8, 12, 3)),
    "attention": (("seq_q", 0, 17, 2), ("seq_kv", 0, 18, 2), ("heads", 0, 8, 4), ("batch", 0, 12, 1),
                  ("heads_per_kv", 0, 7, 1), ("head_dim", 5, 10, 4), ("waves", -8, 14, 2)),
    "memory": (("rows", 0, 23, 2), ("hidden", 0, 20, 2), ("in_l2", -14, 12, 4)),
    "embedding": (("tokens", 0, 18, 2), ("hidden", 6, 15, 2), ("vocab", 8, 19, 2)),
    "optimizer": (("n_params", 10, 36, 1), ("tensors", 0, 12, 1)),
    "conv": (("batch", 0, 11, 2), ("c_in", 0, 13, 2), ("c_out", 0, 13, 2), ("size", 0, 11, 3),
             ("kernel", 0, 5, 4), ("waves", -8, 12, 2)),
    "moe": (("tokens", 0, 16, 2), ("hidden", 9, 15, 4), ("inter", 3, 16, 2), ("experts", -3, 11, 2),
            ("rows_per_expert", -10, 16, 2), ("topk", 0, 6, 2)),
}  # fmt: skip
"""Axes of the per-stack tables: name, lowest and highest log2 value, nodes per doubling."""

PHYSICS: Final[dict[str, Callable[[Any, Columns, Machine], Physics]]] = {
    "gemm": gemm, "attention": attention, "memory": memory, "embedding": embedding,
    "optimizer": optimizer, "conv": conv, "moe": moe,
}  # fmt: skip


def common_features(xp: Any, physics: Physics, machine: Machine) -> list[Any]:
    """Inputs that every family has: work, its time at the nominal rates, and their balance."""
    compute_s = physics.flops / machine.peak + physics.vector_ops / vector_rate(xp, machine)
    memory_s = physics.bytes / machine.bandwidth
    return [
        log2(xp, physics.flops), log2(xp, physics.bytes), log2(xp, compute_s * 1e6),
        log2(xp, memory_s * 1e6), log2(xp, compute_s / memory_s),
        log2(xp, physics.quantised_flops / physics.flops), log2(xp, physics.bytes / machine.l2),
    ]  # fmt: skip
