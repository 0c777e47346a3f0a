"""Events that only inference has: attention over a compressed cache, weights narrower than the products that read them,
and all-reduces of small messages by direct reads."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64

from perfmodel.cost._events import EventTimes, PricesCollectives, event_times
from perfmodel.cost._kernels import KernelModel
from perfmodel.cost._roofline import COMPUTE_SHARE, FIXED_S, HALF_WIDTH, MEMORY_SHARE, power_join, roofline_seconds
from perfmodel.ops import LATENT_DECODE, Attention, Collective, Embedding, Gemm, KernelOp, MemoryBound, MoE, Op
from perfmodel.spec import Cluster, Device
from perfmodel.units import dtype_bytes

SERVER_KERNELS: Final = "aiconfigurator"
"""Source of the tables whose kernels are those of inference servers (TensorRT-LLM, vLLM), timed in CUDA graphs."""
ONE_SHOT_S: Final = 4.3e-6
"""Time of a one-shot all-reduce that carries next to nothing inside a CUDA graph, and"""
ONE_SHOT_SHARE: Final = 0.6
"""the share of a device's link at which it reads the buffers of all others: TensorRT-LLM's kernels on A100 and H100
(`training/inference.py` fits both)."""
ONE_SHOT_HALF_WIDTH: Final = 0.5
LEAST_LINK_BYTES_PER_S: Final = 100e9
"""Below it devices do not read one another's memory directly, or not as fast as kernels assume (PCIe)."""
LATENT_MEMORY_SHARE: Final = 0.9
LATENT_COMPUTE_SHARE: Final = 0.67
"""Shares of H800's 3.35 TB/s and 989 TFLOP/s that decoding over a compressed cache reaches: 3,000 GB/s where it is
memory-bound, 660 TFLOP/s where it is compute-bound (deepseek-ai/FlashMLA, README of April 2025)."""


@dataclass(frozen=True)
class _ServerKernels:
    """Kernels of servers, in place of those that training takes by default."""

    model: KernelModel

    def times(self, device: Device, ops: Sequence[KernelOp]) -> EventTimes:
        return self.model.times(device, ops, software=SERVER_KERNELS)


def inference_times(
    ops: Sequence[Op], cluster: Cluster, kernels: KernelModel, collectives: PricesCollectives
) -> EventTimes:
    """Times of events of a step of inference: those of servers' kernels, as far as they were measured.

    Element-wise kernels take no more than their roofline, as tables hold them issued one by one besides; attention over
    a compressed cache (`latent_decode_s`) was not measured; and all-reduces run as one-shot kernels where these take
    less time (`one_shot_s`).
    """
    device = cluster.device
    found = event_times(ops, cluster, _ServerKernels(kernels), collectives)
    passing = {i: op for i, op in enumerate(ops) if isinstance(op, (MemoryBound, Embedding))}
    found = found.at_most([*passing], _around(roofline_seconds(device, [*passing.values()]), HALF_WIDTH, "analytical"))
    latent = {i: latent_decode_s(device, op) for i, op in enumerate(ops)
              if isinstance(op, Attention) and op.phase == LATENT_DECODE}  # fmt: skip
    direct = {i: one_shot_s(device, op) for i, op in enumerate(ops)
              if isinstance(op, Collective) and _reads_directly(op, device)}  # fmt: skip
    return found.replaced([*latent], _around(latent.values(), HALF_WIDTH, "analytical")).at_most(
        [*direct], _around(direct.values(), ONE_SHOT_HALF_WIDTH, "learned")
    )


def latent_decode_s(device: Device, op: Attention) -> float:
    """Seconds of attention of one token per sequence over a cache of compressed keys, part of which are the values.

    Roofline: rank + rope elements of every cached token are read once for all heads.
    """
    compute_s = op.flops / (LATENT_COMPUTE_SHARE * device.peak.flops_per_s(op.dtype))
    cache_bytes = float(op.batch) * op.seq_kv * op.head_dim * dtype_bytes(op.dtype)
    return FIXED_S + max(compute_s, cache_bytes / (LATENT_MEMORY_SHARE * device.memory_bandwidth_bytes_per_s))


def one_shot_s(device: Device, op: Collective) -> float:
    """Seconds of an all-reduce in which every device reads the buffers of all others: latency + (n - 1) bytes / link
    (vLLM's and TensorRT-LLM's one-shot kernels)."""
    return ONE_SHOT_S + (op.num_ranks - 1) * op.bytes / (ONE_SHOT_SHARE * device.link_bandwidth_bytes_per_s)


def narrow_shares(
    device: Device, ops: Sequence[Op], weight_bytes: float | None = None, cache_bytes: float | None = None
) -> Float64[np.ndarray, " ops"]:
    """Times of products and attention with narrower weights or cache, relative to elements as wide as the op's own.

    What is stored narrow is widened in registers, so that less memory is read for the same FLOPs: the ratio of the
    rooflines with and without. 1 for all other events.

    Args:
        weight_bytes, cache_bytes: of a weight of linear layers and experts, of an element of cached keys and values;
            None: as wide as the op's elements.
    """
    shares = np.ones(len(ops))
    for i, op in enumerate(ops):
        if isinstance(op, Attention) and cache_bytes is not None:
            elements, narrow_bytes = op.work(np, op.shape()).moved_kv, cache_bytes
        elif isinstance(op, MoE) and weight_bytes is not None:
            elements, narrow_bytes = op.work(np, op.shape()).weights_bytes / dtype_bytes(op.dtype), weight_bytes
        elif isinstance(op, Gemm) and op.op != "bmm" and weight_bytes is not None:
            work = op.work(np, op.shape())
            elements, narrow_bytes = work.products * work.b, weight_bytes
        else:
            continue
        compute_s = op.flops / (COMPUTE_SHARE * device.peak.flops_per_s(op.dtype))
        wide_s, narrow_s = (
            FIXED_S + power_join(np, compute_s, n / (MEMORY_SHARE * device.memory_bandwidth_bytes_per_s), 3.0)
            for n in (op.bytes, op.bytes - elements * (dtype_bytes(op.dtype) - narrow_bytes))
        )
        shares[i] = narrow_s / wide_s
    return shares


def _reads_directly(op: Collective, device: Device) -> bool:
    return (
        op.collective == "all_reduce" and 1 < op.num_ranks == op.ranks_per_node <= 8
        and device.link_bandwidth_bytes_per_s >= LEAST_LINK_BYTES_PER_S
    )  # fmt: skip


def _around(seconds: Iterable[float], half: float, provenance: str) -> EventTimes:
    time_s = np.array([*seconds])
    return EventTimes(time_s, time_s * np.exp(-half), time_s * np.exp(half), (provenance,) * len(time_s))
