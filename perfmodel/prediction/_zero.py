"""Model states on data-parallel ranks: their bytes, and how ZeRO shards, reduces, gathers and
updates them.

ZeRO (Rajbhandari et al. 2019, section 5): stage 1 shards optimizer states, 2 gradients too, 3
weights too. Hybrid sharding (torch's HYBRID_SHARD, MiCS, arXiv 2205.00119) does so inside groups of
neighbouring ranks; gradients are then reduced over the ranks of all groups that hold the same
shard.
"""

from dataclasses import dataclass
from math import gcd, inf
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from perfmodel.ops import Collective, Op
from perfmodel.prediction.blocks import ShardBlocks
from perfmodel.prediction.placement import Group, Placement
from perfmodel.spec import (
    BASE_WEIGHT_BYTES,
    OPTIMIZERS,
    Cluster,
    Device,
    Framework,
    Job,
    Layout,
    Model,
    StateOffload,
)
from perfmodel.units import dtype_bytes
from perfmodel.workload import optimizer_op, parameter_count

Exchange = Literal[
    "all_reduce", "reduce_scatter", "all_reduce_copies", "all_gather", "all_gather_backward"
]
"""Exchanges of model states: gradients all-reduced; gradients reduced to the rank that stores or
applies each; those sums all-reduced over the copies of a shard; weights gathered for forward passes
or after an update; weights gathered for backward passes under ZeRO 3."""
STATES: Final[tuple[Group, ...]] = ("dp", "expert_dp")
"""Process groups over which parameters outside and inside routed experts are replicated."""


class StateLayout(NamedTuple):
    """Placement of a layout's model states."""

    zero: int
    """Stage of ZeRO, as in `Layout.zero`."""
    replicate: int
    """Number of groups that are replicas of each other, as in `Layout.replicate`."""
    offload_states: StateOffload
    """Whether states are kept on the host, as in `Layout.offload_states`."""
    reuse_params: float
    """A weight stays gathered from its use in recompute to its use in backward if at most this many
    parameters are used in between."""

    @classmethod
    def of(cls, layout: Layout, framework: Framework) -> "StateLayout":
        """Select the fields of a layout that place its states."""
        return cls(
            layout.zero, layout.replicate, layout.offload_states, reuse_params(layout, framework)
        )

    @property
    def on_host(self) -> bool:
        """Whether the optimizer's states are in host memory and updated there."""
        return self.offload_states != "none"


@dataclass(frozen=True)
class StatePlace:
    """Placement of the ranks that hold the same parameters."""

    replicas: Placement
    """Placement of all replicas."""
    shards: Placement
    """The nearest replicas, over which states are sharded."""
    copies: Placement
    """Ranks that hold the same shard, one in every sharding group."""

    @classmethod
    def of(cls, group: Group, ranks: Layout, replicate: int, replicas: int) -> "StatePlace":
        """Place the ranks of a data-parallel group.

        Args:
            ranks: layout by which ranks are numbered.
            replicate: sharding groups that the ranks form.
            replicas: pipeline ranks that hold the same stage, which join the group.
        """
        everywhere = Placement.of(group, ranks).times(replicas, ranks)
        return cls(everywhere, *everywhere.split(everywhere.size // replicate))

    def backward_shards(self, job: Job) -> Placement:
        """Ranks that gather weights from each other for a backward pass: those of one secondary
        copy, if there is one (`GradientReduction.secondary_shards`) and it divides the primary
        shards."""
        if job.gradients.secondary_shards <= 1:
            return self.shards
        return self.shards.split(gcd(job.gradients.secondary_shards, self.shards.size))[0]


def reuse_params(layout: Layout, framework: Framework) -> float:
    """Under ZeRO 3 a weight that was gathered for recompute stays gathered for its backward if at
    most this many parameters are used between the two; infinite if it always stays.

    DeepSpeed releases what no module of the next `stage3_max_reuse_distance` parameters reads, in
    recompute as in any forward (runtime/zero/partitioned_param_coordinator.py,
    `__params_to_release`; its trace has the modules of recompute and of backward alike). torch
    gathers a layer before its backward and keeps it through recompute
    (distributed/fsdp/_fully_shard/_fsdp_param_group.py, `pre_forward` and `post_forward` return at
    once in `TrainingState.PRE_BACKWARD`; FSDP 1's `_runtime_utils.py` has the checkpoint inside the
    wrapped layer), as FairScale does, whose checkpoints are inside as well.
    """
    regathers = layout.zero == 3 and layout.recompute == "full" and framework.memory.live_params > 0
    return framework.memory.live_params if regathers else inf


def stored_dtype_bytes(job: Job) -> int:
    """Bytes per stored weight: fp8 runs keep 16-bit weights and cast on the fly."""
    return max(dtype_bytes(job.dtype), 2)


_FP4_WEIGHT_BYTES: Final = 2 * (1 / 2 + 1 / 16)
"""Bytes of a weight of NVFP4 products in both orientations: 4 bits, and an 8-bit scale for 16 of
them (Transformer Engine 2.8 pytorch/tensor/nvfp4_tensor.py, NVFP4Quantizer: row-wise and
column-wise data with scales of their own)."""


def held_dtype_bytes(job: Job) -> float:
    """Bytes per weight in device memory."""
    # Frozen weights of 4-bit products have no wider copy either: with one, NVIDIA's LoRA of 70B in
    # NVFP4 would not fit into the devices that it ran on (MLPerf Training v5.1; read with these
    # runs in view).
    if job.fine_tuning.frozen and job.dtype == "fp4":
        return _FP4_WEIGHT_BYTES
    # Frozen weights of fp8 products need no other copy (`fp8_params` of NeMo's LoRA): the
    # transposed one that input gradients read before Blackwell is made anew in every backward
    # (`disable_parameter_transpose_cache`, which NVIDIA's LoRA sets:
    # mlcommons/training_results_v4.0, the files in
    # NVIDIA/benchmarks/llama2_70b_lora/implementations/nemo/conf, and NeMo 2
    # scripts/performance/llm/finetune_*.py).
    return 1 if job.fine_tuning.frozen and job.dtype == "fp8" else stored_dtype_bytes(job)


def resident_dtype_bytes(job: Job, framework: Framework) -> float:
    """Bytes per weight that a rank keeps or gathers: as `held_dtype_bytes`, but 4 under autocast.

    Autocast casts a weight where an operator reads it (PyTorch aten/src/ATen/autocast_mode.cpp,
    `cached_cast`). The weights that are sharded or frozen stay as they were loaded, in fp32; only
    trained leaves that are not views have their casts cached, and FSDP's gathered weights are
    views.
    """
    is_cast = dtype_bytes(job.dtype) < 4 and not job.fine_tuning.base_weights
    return 4.0 if framework.memory.autocast and is_cast else held_dtype_bytes(job)


def layer_weight_share(job: Job) -> float:
    """Bytes of a layer's weight relative to one stored in the products' type
    (`Job.base_weights`)."""
    if not job.fine_tuning.base_weights:
        return 1.0
    # Norms and adapters, which are next to none of a layer's parameters, count as narrow too.
    return BASE_WEIGHT_BYTES[job.fine_tuning.base_weights] / stored_dtype_bytes(job)


TRANSPOSED_FP8_WEIGHTS: Final = ("Ada", "Hopper")
"""Architectures whose 8-bit products accept operands in one orientation only, so that the backward
pass needs a second, transposed copy of each weight (Transformer Engine 2.3
pytorch/csrc/quantizer.cpp, Float8Quantizer:
`create_transpose = columnwise_usage && !nvte_is_non_tn_fp8_gemm_supported()`)."""
_ONE_SCALE: Final = ("delayed", "current", "tensorwise")
"""Recipes with one scale for a whole tensor, which is also valid for the transposed tensor. With
scales of rows or blocks, the tensor is quantised a second time for the backward pass."""


def fp8_weight_bytes(job: Job, device: Device) -> float:
    """Bytes of a trained weight stored only in 8 bits (`Job.fp8_params`): one for each layout that
    products read."""
    if device.architecture not in TRANSPOSED_FP8_WEIGHTS and job.narrow.fp8_recipe in _ONE_SCALE:
        return 1.0
    # MXFP8 has an 8-bit scale for 32 elements (OCP Microscaling Formats 1.0, section 5.2).
    return 2 * (1 + 1 / 32) if job.narrow.fp8_recipe == "mxfp8" else 2.0


def gradient_dtype_bytes(job: Job) -> int:
    """Bytes per gradient while it is added up and reduced, including the 16-bit copy if both it and
    the main gradient are stored."""
    return dtype_bytes(job.gradients.grad_dtype) + (2 if job.adds_half_gradients else 0)


def has_master_alone(job: Job, framework: Framework) -> bool:
    """Whether ranks keep sharded weights only as the optimizer's master copy
    (`MemoryCosts.casts_when_gathered`)."""
    is_cast = dtype_bytes(job.dtype) < 4 and not job.narrow.fp8_params
    return (
        framework.memory.casts_when_gathered
        and is_cast
        and is_trained(job)
        and OPTIMIZERS[job.optimizer].master
    )


def kept_gradient_bytes(job: Job) -> int:
    """Bytes per gradient that the optimizer reads."""
    # Where weights have no wider master copy, gradients end in the weights' type, as torch's
    # `Tensor.grad` does, also after a reduction in another type (PyTorch
    # torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_reduce`: the result is
    # converted to `orig_dtype`).
    if OPTIMIZERS[job.optimizer].master:
        return gradient_dtype_bytes(job)
    return min(gradient_dtype_bytes(job), stored_dtype_bytes(job))


def optimizer_bytes_per_param(job: Job) -> float:
    """Bytes of the optimizer's states per parameter of a layer."""
    # Adam has two fp32 moments. Narrower weights have an fp32 master copy (ZeRO, section 3.1). An
    # average of the weights is kept in fp32.
    kind = OPTIMIZERS[job.optimizer]
    master_bytes = 4.0 if kind.master and dtype_bytes(job.dtype) < 4 else 0.0
    return kind.state_bytes + master_bytes + (4.0 if job.weight_average else 0.0)


def is_trained(job: Job) -> bool:
    """Whether weights have gradients and are updated."""
    return job.mode == "train" and not job.fine_tuning.frozen


def checkpoint_bytes(model: Model, job: Job) -> float:
    """Size of a checkpoint: weights and optimizer states of the whole model.

    0 where nothing is trained but adapters.
    """
    if not is_trained(job):
        return 0.0
    per_param = stored_dtype_bytes(job) + optimizer_bytes_per_param(job)
    return parameter_count(model) * per_param


def shards_gradients(
    zero: Any, pipelined: Any, replicas: Any, job: Job, accumulates: Any = True
) -> Any:
    """Whether accumulated gradients are sharded, so that each backward pass reduces its own.

    Args:
        zero: ZeRO stage of a layout, or an array of those of several layouts, as all arguments but
            `job`.
        pipelined: whether the pipeline has several stages.
        replicas: pipeline ranks that hold the same stage.
        accumulates: whether a step has several backward passes. What a single one reduces is
            reduced once a step either way.
    """
    # Not where a pipeline's ranks hold replicas of its stages, which would wait for each other
    # after every backward: they add up whole gradients and reduce them once (as torch's pipelines
    # do, `backward_maybe_with_nosync`).
    added_up_whole = (pipelined & job.gradients.whole_gradients_in_pipelines) | (
        np.asarray(accumulates) & job.gradients.whole_gradients_in_accumulation
    )
    return (zero >= 2) & np.logical_not(added_up_whole) & (np.asarray(replicas) <= 1)


def reduces_every_micro_batch(zero: Any, pipelined: Any, replicas: Any, job: Job) -> Any:
    """Whether each backward pass reduces its own gradients: if they are sharded, or the job says so
    (`Job.reduce_every_micro_batch`).

    Args:
        zero, pipelined, replicas: see `shards_gradients`.
    """
    asked_for = job.gradients.reduce_every_micro_batch & (np.asarray(replicas) <= 1)
    return shards_gradients(zero, pipelined, replicas, job) | asked_for


def reductions(zero: int, job: Job) -> tuple[Exchange, ...]:
    """Exchanges that reduce gradients: to all ranks, or each part to the rank that stores or
    applies it."""
    on_all_ranks = zero == 0 or (zero == 1 and job.gradients.all_reduce_gradients)
    return ("all_reduce",) if on_all_ranks else ("reduce_scatter", "all_reduce_copies")


def exchanges(zero: int, job: Job) -> tuple[Exchange, ...]:
    """Exchanges of a step: gradients in training; weights after sharded updates, or for passes if
    they are sharded."""
    reduced = reductions(zero, job) if is_trained(job) else ()
    if zero == 3:
        return (*reduced, "all_gather", "all_gather_backward")
    if zero and is_trained(job):
        return (*reduced, "all_gather")
    return reduced


def exchange(
    kind: Exchange, params: float, place: StatePlace, job: Job, cluster: Cluster
) -> Collective | None:
    """The collective that exchanges the weights or gradients of this many parameters; None on one
    rank."""
    match kind:
        case "all_reduce":
            group = place.replicas
        case "all_reduce_copies":
            group = place.copies
        case "all_gather_backward":
            group = place.backward_shards(job)
        case _:
            group = place.shards
    if group.size == 1:
        return None
    if kind in ("all_gather", "all_gather_backward"):
        return group.collective("all_gather", params * stored_dtype_bytes(job), job.dtype, cluster)
    n_bytes = params * dtype_bytes(job.gradients.grad_dtype)
    if kind == "all_reduce_copies":
        # A reduction inside the sharding group has left each rank its shard.
        return group.collective(
            "all_reduce", n_bytes / place.shards.size, job.gradients.grad_dtype, cluster
        )
    return group.collective(kind, n_bytes, job.gradients.grad_dtype, cluster)


def exchanged_units(
    zero: int,
    layers: Bool[np.ndarray, " blocks"],
    counts: Float[np.ndarray, "stages segments blocks"],
) -> Float[np.ndarray, "stages segments"]:
    """Collectives that each exchange of a segment is made of."""
    single = np.ones(counts.shape[:2])
    if zero != 3:
        return single
    # ZeRO 3 exchanges layer by layer. Blocks before or after the layers are exchanged with them.
    return np.maximum(single, counts @ layers)


def update(params: float, shards: int, job: Job, on_host: bool = False) -> Op:
    """The optimizer step on one of `shards` equal parts of the parameters."""
    # Where the host's processors update them (`HostSeconds`), the device's step is that over next
    # to none.
    return optimizer_op(1 if on_host else -(-int(params) // shards), job)


def state_params(blocks: ShardBlocks, pipelined: bool) -> dict[Group, Float[np.ndarray, " blocks"]]:
    """Parameters of every block by the ranks that they are replicated over (`STATES`)."""
    return dict(zip(STATES, (blocks.dense_params(pipelined), blocks.expert_params), strict=True))


def stored_params(
    blocks: ShardBlocks, pipelined: bool, job: Job
) -> dict[Group, Float[np.ndarray, " blocks"]]:
    """Parameters of `state_params`, counted as the number of weights of the products' type that
    take the same bytes."""
    share = np.where(blocks.layers, layer_weight_share(job), 1.0)
    return {group: params * share for group, params in state_params(blocks, pipelined).items()}


def gathered_again(
    blocks: ShardBlocks, pipelined: bool, job: Job, kept_params: float
) -> Float[np.ndarray, " blocks"]:
    """Share of each layer's weights that are gathered for recompute and once more for backward; 0
    for blocks that are not layers, which are not recomputed.

    Args:
        pipelined, job: see `stored_params`.
        kept_params: see `reuse_params`.
    """
    # Recompute passes the rest of the layer after a weight, and backward passes it again before it:
    # a weight at place x of a layer of P parameters is read again 2 (1 - x) P parameters later.
    params = np.sum([*state_params(blocks, pipelined).values()], axis=0)
    return np.maximum(0.0, 1 - kept_params / np.maximum(2 * params, 1.0)) * blocks.layers


def trained_params(
    blocks: ShardBlocks, pipelined: bool, job: Job
) -> dict[Group, Float[np.ndarray, " blocks"]]:
    """Parameters of `state_params` that have gradients."""
    trained = state_params(blocks, pipelined)
    trained["dp"] = trained["dp"] - blocks.frozen_params(pipelined, job)
    return trained
