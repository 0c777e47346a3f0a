"""Prices that are the same for ever: kernels and collectives at constant rates, at a site without
fitted constants."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from perfmodel.cost import EventTimes
from perfmodel.ops import Collective, KernelOp
from perfmodel.prediction import Site
from perfmodel.prediction.sites import NEUTRAL
from perfmodel.prediction.sites.constants import MemorySpread
from perfmodel.spec import Cluster

SITE = Site(
    sustained=(("Hopper", 0.08), ("Ampere", 0.03)),
    skew=0.02,
    population=NEUTRAL,
    memory=MemorySpread(bias=0.02, deviation=0.05),
)


_SLOWER_BY_NAME = {"A100-SXM4-80GB": 1.6, "a100": 1.3}
"""Of devices and of kinds of nodes: which of two kinds an event is priced on must show."""


class Rates:
    """Kernels and collectives at constant rates, which are lower on every machine but the
    newest.

    Args:
        slower: how many times as long collectives take as usual.
    """

    def __init__(self, slower: float = 1.0) -> None:
        self.slower = slower

    def times(self, machine: Any, ops: Sequence[KernelOp | Collective]) -> EventTimes:
        time_s = _SLOWER_BY_NAME.get(machine.name, 1.0) * np.array(
            [_seconds(op, self.slower) for op in ops], float
        )
        return EventTimes(time_s, 0.9 * time_s, 1.2 * time_s, ("measured",) * len(ops))


_COLLECTIVE_FACTORS = {
    "all_reduce": 1.8,
    "all_gather": 1.0,
    "reduce_scatter": 1.1,
    "all_to_all": 1.3,
    "send_recv": 0.9,
    "broadcast": 0.8,
}
_DTYPE_FACTORS = {"bf16": 1.0, "fp16": 1.02, "fp32": 1.9, "fp8": 0.6}
_EXCHANGE_FACTORS = {"dispatch": 0.7, "combine": 0.75}


def _seconds(op: KernelOp | Collective, slower: float) -> float:
    if isinstance(op, Collective):
        rate = 1.5e11 if op.num_nodes == 1 else 2e10
        seconds = 1e-5 * op.num_ranks**0.5 + _moved_bytes(op) * (1 + 0.3 * op.level) / rate
        return slower * seconds
    return 4e-6 + _DTYPE_FACTORS.get(op.dtype, 1.2) * op.flops / 3e14 + op.bytes / 2e12


def _moved_bytes(op: Collective) -> float:
    """Bytes that a collective's time grows with; every field counts, so that a wrong one shows in
    every price."""
    moved = op.bytes * (1 - 1 / op.num_ranks) + 0.2 * op.relayed_bytes
    moved *= _COLLECTIVE_FACTORS[op.collective] * _DTYPE_FACTORS.get(op.dtype, 1.2) ** 0.1
    if op.exchange is not None:
        moved *= _EXCHANGE_FACTORS[op.exchange.way]
    return moved * (op.concurrent * op.interleaved) ** 0.5 / op.ranks_per_node**0.25


class Links:
    """Collectives that take the latency of a link and their bytes at its bandwidth."""

    def times(self, cluster: Cluster, ops: Sequence[Collective]) -> EventTimes:
        seconds = []
        for op in ops:
            level = cluster.levels[0 if op.num_nodes == 1 else max(1, op.level)]
            seconds.append(
                op.num_ranks**0.5 * level.latency_s + _moved_bytes(op) / level.bandwidth_bytes_per_s
            )
        time_s = np.array(seconds, float)
        return EventTimes(time_s, 0.9 * time_s, 1.2 * time_s, ("measured",) * len(ops))
