"""What a source's memory figure counts, and what its framework keeps: facts of the software, none tuned to its rows."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from perfmodel.prediction import Framework
from perfmodel.spec import Model, PerStage, Transformer

Counter = Literal["allocated", "reserved", "device"]
"""Bytes of live tensors; the segments that torch's caching allocator holds for them; these with CUDA's context and the
buffers of libraries, as nvidia-smi shows them."""


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """One source's."""

    counter: Counter | None = None
    """Where the table does not say."""
    first_rank: bool = False
    """The figure is that of global rank 0, on the first pipeline stage, instead of the fullest rank's."""
    keeps_outputs: bool = False
    """What a stage sends is kept until its backward (Megatron-LM frees it once it is sent)."""
    balanced_by_cost: bool = False
    """Stages are cut by the multiplications of layers and head (`partition_by_cost`)."""
    planned: bool = False
    """Tensors are placed before the run, so that nothing is lost between them (OneFlow)."""
    bucket_bytes: float = Framework.bucket_bytes
    ddp_buckets: bool = False
    cached_weight_gradients: bool = False
    """As in `Framework`."""


_BY_SOURCE: tuple[tuple[str, MemoryFacts], ...] = (
    # nanotron's `log_throughput` prints torch's counters on rank 0 after `log_memory` has reset that of allocated
    # bytes, so that only the reserved ones know of activations; its pipeline state holds every activation sent;
    # `build_model` cuts stages by cost; without ZeRO the model is wrapped in DistributedDataParallel, with it fp32
    # gradients are reduced where they lie
    ("ultrascale", MemoryFacts(counter="reserved", first_rank=True, keeps_outputs=True, balanced_by_cost=True,
                               bucket_bytes=0.0, ddp_buckets=True)),
    # Megatron-LM 0.14 with Transformer Engine 2: gradients reduced in their contiguous buffers
    ("SimuMax", MemoryFacts(bucket_bytes=0.0, cached_weight_gradients=True)),
    # Megatron-LM reports torch's maximum of allocated bytes
    ("Zero Bubble", MemoryFacts(counter="allocated")),
    ("OneFlow DLPerf GPT", MemoryFacts(counter="device", planned=True)),
    # DeepSpeed's defaults: `reduce_bucket_size` and `allgather_bucket_size` of 5e8 16-bit elements each
    ("BigScience", MemoryFacts(counter="device", bucket_bytes=2 * 5e8 * 2)),
)  # fmt: skip


def memory_facts(source: str) -> MemoryFacts:
    """The facts of a source by the start of its name; plain defaults for an unknown one."""
    return next((facts for start, facts in _BY_SOURCE if source.startswith(start)), MemoryFacts())


def partition_by_cost(model: Model, stages: int) -> PerStage:
    """Layers per stage where stages are balanced by multiplications as nanotron's `build_model` does it.

    A layer costs 4 h^2 (with grouped keys and values too) + 3 h f, the head h V; a stage is closed by the first block
    that carries the sum beyond its share. Where that leaves stages near the end without a layer (they hold the head or
    the loss alone), each takes one from the stage before it. None (even stages) where there are too few for that.
    """
    if stages == 1 or not isinstance(model, Transformer):
        return None
    layer = 4 * model.heads * model.head_dim * model.hidden + 3 * model.hidden * model.ffn_hidden
    sums = list(accumulate([layer] * model.layers + [model.hidden * model.vocab]))
    held, at = [0] * stages, 0
    for cost in sums[:-1]:
        held[at] += 1
        at += cost > sums[-1] * (at + 1) / stages
    for stage in range(stages - 2, 0, -1):
        before = next((i for i in range(stage - 1, -1, -1) if held[i] > 1), None)
        if held[stage] == 0 and before is not None:
            held[before], held[stage] = held[before] - 1, 1
    return tuple(held) if all(held[:-1]) else None
