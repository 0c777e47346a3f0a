"""Events specific to inference: attention over a compressed cache, products with narrow weights,
and one-shot all-reduces."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeGuard

import numpy as np

from perfmodel.cost._events import (
    MOST_EVENTS,
    EventTimes,
    MonotoneGrid,
    PricesCollectives,
    event_times,
)
from perfmodel.cost._kernels import KernelModel
from perfmodel.cost._roofline import (
    COMPUTE_SHARE,
    FIXED_S,
    HALF_WIDTH,
    MEMORY_SHARE,
    power_join,
    roofline_seconds,
    under_load,
)
from perfmodel.ingest import SERVER_KERNELS
from perfmodel.ops import (
    LATENT_DECODE,
    Attention,
    Collective,
    Embedding,
    Gemm,
    KernelOp,
    MemoryBound,
    MoE,
    Op,
)
from perfmodel.session import Cache, current_session
from perfmodel.spec import Cluster, Device
from perfmodel.units import dtype_bytes

ONE_SHOT_S: Final = 3.7e-6
"""Time of a nearly empty one-shot all-reduce inside a CUDA graph: TensorRT-LLM's kernels on A100
and H100 (`training/inference.py` fits it)."""
ONE_SHOT_SHARE: Final = 0.38
"""Share of a device's link at which a one-shot all-reduce reads the buffers of all others, fitted
together with `ONE_SHOT_S`."""
ONE_SHOT_HALF_WIDTH: Final = 0.5
"""Half-width of the interval of one-shot all-reduces, in log time."""
LEAST_HALF_WIDTH: Final = 0.1
"""Half-width, in log time, of the interval of times that follow from the memory's nominal bandwidth
alone."""
LEAST_LINK_BYTES_PER_S: Final = 100e9
"""Least bandwidth of links over which devices read one another's memory directly; slower ones
(PCIe) do not, or not as fast as kernels assume."""
LATENT_MEMORY_SHARE: Final = 0.9
"""Share of H800's 3.35 TB/s that decoding over a compressed cache reaches: 3,000 GB/s where it is
memory-bound (deepseek-ai/FlashMLA, README of April 2025)."""
LATENT_COMPUTE_SHARE: Final = 0.67
"""Share of H800's 989 TFLOP/s that decoding over a compressed cache reaches: 660 TFLOP/s where it
is compute-bound (deepseek-ai/FlashMLA, README of April 2025)."""


@dataclass(frozen=True)
class _ServerKernels:
    """A kernel model that prefers measurements of inference servers to those of training."""

    model: KernelModel

    def times(self, device: Device, ops: Sequence[KernelOp]) -> EventTimes:
        return self.model.times(device, ops, software=SERVER_KERNELS)


def inference_times(
    ops: Sequence[Op],
    stored_bytes: Sequence[float],
    cluster: Cluster,
    kernels: KernelModel,
    collectives: PricesCollectives,
) -> EventTimes:
    """Times of events in an inference step, from servers' kernels where measured.

    The roofline is an upper bound for two kinds of kernels: element-wise ones, which tables also
    time one by one, and memory-bound dense products on devices without measurements (measured
    devices are within 15 % of it). Attention over a compressed cache was not measured
    (`latent_decode_s`). All-reduces run as one-shot kernels where these are faster (`one_shot_s`).
    Narrow weights are widened in registers (`_narrow_share`). No event is faster than reading its
    weights or cache from memory. Tables repeat a kernel on operands that may stay in the L2 cache;
    in a step, that cache holds data of other layers by then.

    With twice the tokens or sequences, a time is between one and two times as long
    (`MonotoneGrid`), even for few of them.

    Args:
        stored_bytes: bytes per element of the weights or cached keys and values that each event
            reads.
    """

    def predict(
        new: list[tuple[Op, float]],
    ) -> Iterator[tuple[tuple[Op, float], tuple[float, float, float, str]]]:
        # Events that read weights of one width at a time: only those may be compared with one
        # another. No number of samples is too few here, as steps of few tokens are the usual ones.
        for n_bytes in dict.fromkeys(n for _, n in new):
            grid = MonotoneGrid.of((op for op, n in new if n == n_bytes), {})
            times = grid.times(_by_themselves(grid.ops, n_bytes, cluster, kernels, collectives))
            for op, row in zip(grid.ops, times.rows(), strict=True):
                yield (op, n_bytes), row

    key = inference_times, cluster, kernels, collectives
    known = current_session().parts.get_or_compute(key, lambda: Cache(MOST_EVENTS))
    return EventTimes.of_rows(
        known.get_or_compute_each(list(zip(ops, stored_bytes, strict=True)), predict)
    )


def _by_themselves(
    ops: Sequence[Op],
    stored_bytes: float,
    cluster: Cluster,
    kernels: KernelModel,
    collectives: PricesCollectives,
) -> EventTimes:
    """Times of events in isolation, all of which read weights or a cache of the same width."""
    device = cluster.device
    times = event_times(ops, cluster, _ServerKernels(kernels), collectives)

    # 1. Kernels that follow the memory take no longer than their roofline: tables hold them issued
    # one by one.
    at_memory = [
        i
        for i, op in enumerate(ops)
        if not isinstance(op, Collective) and _follows_the_memory(op, device, times.provenance[i])
    ]
    memory_ops: list[KernelOp] = [ops[i] for i in at_memory]  # pyright: ignore[reportAssignmentType]
    times = times.at_most(
        at_memory, _around(roofline_seconds(device, memory_ops), HALF_WIDTH, "analytical")
    )

    # 2. Narrow weights and caches are read faster, and long kernels run at the clock that the power
    # limit allows.
    read_elements = np.array([_read_elements(op) for op in ops])
    shares = [
        _narrow_share(device, op, n, stored_bytes) for op, n in zip(ops, read_elements, strict=True)
    ]
    times = times.scaled(np.array(shares) * under_load(device, ops, times.time_s))

    # 3. Nothing is faster than its weights or cache come from memory: in a step the L2 cache holds
    # other layers'.
    least_s = read_elements * stored_bytes / device.memory_bandwidth_bytes_per_s
    at_readers = np.flatnonzero(least_s).tolist()
    times = times.at_least(at_readers, _around(least_s[at_readers], LEAST_HALF_WIDTH, "analytical"))

    # 4. Events that no table has: attention over a compressed cache, and all-reduces by direct
    # reads where shorter.
    latent_s = {
        i: latent_decode_s(device, op, least_s[i]) for i, op in enumerate(ops) if _is_latent(op)
    }
    times = times.replaced([*latent_s], _around(latent_s.values(), HALF_WIDTH, "analytical"))
    direct_s = {
        i: one_shot_s(device, op) for i, op in enumerate(ops) if _reads_directly(op, device)
    }
    return times.at_most([*direct_s], _around(direct_s.values(), ONE_SHOT_HALF_WIDTH, "learned"))


def _follows_the_memory(op: Op, device: Device, provenance: str) -> bool:
    """Whether an event moves bytes rather than computes: element-wise, or an unmeasured product of
    few tokens."""
    if isinstance(op, Gemm) and op.op == "linear" and provenance == "extrapolated":
        return (
            op.flops / device.peak.flops_per_s(op.dtype)
            < op.bytes / device.memory_bandwidth_bytes_per_s
        )
    return isinstance(op, (MemoryBound, Embedding))


def _read_elements(op: Op) -> float:
    """Elements of weights, or of cached keys and values, that an event reads; 0 where it has
    neither."""
    # a compressed cache is read once for all heads
    if _is_latent(op):
        return float(op.batch) * op.seq_kv * op.head_dim
    if isinstance(op, Attention):
        return float(op.work(np, op.shape()).moved_kv) if op.seq_q == 1 else 0.0
    if isinstance(op, MoE):
        return float(op.work(np, op.shape()).weights_bytes) / dtype_bytes(op.dtype)
    if isinstance(op, Gemm) and op.op != "bmm":
        work = op.work(np, op.shape())
        return float(work.products * work.b)
    return 0.0


def _narrow_share(device: Device, op: Op, elements: float, stored_bytes: float) -> float:
    """Time of a kernel relative to one whose stored operand is as wide as its other elements: the
    ratio of rooflines with fewer bytes read for the same FLOPs."""
    if isinstance(op, Collective):
        return 1.0
    compute_s = op.flops / (COMPUTE_SHARE * device.peak.flops_per_s(op.dtype))
    bytes_per_s = MEMORY_SHARE * device.memory_bandwidth_bytes_per_s
    narrow_bytes = op.bytes - elements * (dtype_bytes(op.dtype) - stored_bytes)
    wide_s = FIXED_S + power_join(np, compute_s, op.bytes / bytes_per_s, 3.0)
    narrow_s = FIXED_S + power_join(np, compute_s, narrow_bytes / bytes_per_s, 3.0)
    return float(narrow_s / wide_s)


def latent_decode_s(device: Device, op: Attention, read_s: float) -> float:
    """Seconds of attention of one token per sequence over a cache of compressed keys that contain
    the values, by the roofline of the stated rates. Reading the cache once for all heads takes
    `read_s` at the nominal bandwidth."""
    compute_s = op.flops / (LATENT_COMPUTE_SHARE * device.peak.flops_per_s(op.dtype))
    return FIXED_S + max(compute_s, read_s / LATENT_MEMORY_SHARE)


def one_shot_s(device: Device, op: Collective) -> float:
    """Seconds of an all-reduce in which every device reads the buffers of all others: latency + (n
    - 1) bytes / link (vLLM's and TensorRT-LLM's one-shot kernels)."""
    return ONE_SHOT_S + (op.num_ranks - 1) * op.bytes / (
        ONE_SHOT_SHARE * device.link_bandwidth_bytes_per_s
    )


def _is_latent(op: Op) -> TypeGuard[Attention]:
    return isinstance(op, Attention) and op.phase == LATENT_DECODE


def _reads_directly(op: Op, device: Device) -> TypeGuard[Collective]:
    """Whether an event is an all-reduce within a node whose devices read one another's memory
    directly."""
    if not isinstance(op, Collective) or op.collective != "all_reduce":
        return False
    in_one_node = 1 < op.num_ranks == op.ranks_per_node <= 8
    return in_one_node and device.link_bandwidth_bytes_per_s >= LEAST_LINK_BYTES_PER_S


def _around(seconds: Iterable[float], half_width: float, provenance: str) -> EventTimes:
    """Times with intervals of one half-width in log time."""
    time_s = np.array([*seconds])
    lo_s = time_s * np.exp(-half_width)
    hi_s = time_s * np.exp(half_width)
    return EventTimes(time_s, lo_s, hi_s, (provenance,) * len(time_s))
