"""Keywords of functions that take a problem or a layout in words.

They are written out so that editors complete them and type checkers know them; `tests/spec/test_keywords.py` holds them
to the fields of `Job` and `Layout`.
"""

from typing import Literal, TypedDict

from perfmodel.spec._job_sections import (
    AdapterModule,
    BaseWeights,
    CudaGraphs,
    Dispatcher,
    EagerKernel,
    Fp8Recipe,
    Head,
    RecomputeModule,
    WideModule,
)
from perfmodel.spec._layout import ContextParallel, Recompute, StateOffload
from perfmodel.spec._notation import PerRank, PerStage


class KernelKeywords(TypedDict, total=False):
    """Fields of `KernelChoices`."""

    flash_attention: bool
    fused_kernels: bool
    eager_kernels: tuple[EagerKernel, ...]
    operation_fuser: bool
    repeated_keys: bool
    fused_batch_norm: bool
    channels_last: bool
    cuda_graphs: CudaGraphs
    blocking_launches: bool


class NarrowKeywords(TypedDict, total=False):
    """Fields of `NarrowProducts`."""

    fp8_recipe: Fp8Recipe
    fp8_attention: bool
    fp8_activation_inputs: bool
    fp8_params: bool
    wide_modules: tuple[WideModule, ...]
    wide_last_layers: int


class GradientKeywords(TypedDict, total=False):
    """Fields of `GradientReduction`."""

    grad_dtype: str
    half_gradients: bool
    all_reduce_gradients: bool
    reduce_every_micro_batch: bool
    whole_gradients_in_pipelines: bool
    bucket_bytes: float | None
    secondary_shards: int


class LossKeywords(TypedDict, total=False):
    """Fields of `HeadAndLoss`."""

    head: Head
    masked_head: bool
    loss_with_gradient: bool
    narrow_logits: bool
    chunked_loss: bool


class ExpertKeywords(TypedDict, total=False):
    """Fields of `ExpertTokens`."""

    expert_dispatcher: Dispatcher
    expert_imbalance: float
    expert_capacity_factor: float | None
    weighted_experts: bool
    fused_experts: bool


class ActivationKeywords(TypedDict, total=False):
    """Fields of `SavedActivations`."""

    keep_gathered: bool
    recompute_modules: tuple[RecomputeModule, ...]
    stops_recompute: bool


class FineTuningKeywords(TypedDict, total=False):
    """Fields of `FineTuning`."""

    frozen: bool
    frozen_embedding: bool
    adapter_rank: int
    adapter_modules: tuple[AdapterModule, ...]
    adapter_dropout: bool
    base_weights: BaseWeights
    adapter_all_to_all: bool


class JobKeywords(
    KernelKeywords,
    NarrowKeywords,
    GradientKeywords,
    LossKeywords,
    ExpertKeywords,
    ActivationKeywords,
    FineTuningKeywords,
    total=False,
):
    """Fields of `Job` and of its sections, but for global batch, sequence length and element type."""

    mean_tokens: float | None
    rms_tokens: float | None
    input_samples_per_s: float | None
    mode: Literal["train", "inference"]
    cached_tokens: int
    optimizer: str
    weight_average: bool


class LayoutKeywords(TypedDict, total=False):
    """Fields of `Layout`."""

    tp: int
    pp: int
    dp: int
    cp: int
    cp_kind: ContextParallel
    cp_balanced: bool
    ep: int
    etp: int | None
    vpp: int
    micro_batch: int
    schedule: str
    zero: int
    recompute: Recompute
    sequence_parallel: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    tp_overlap: bool
    ep_overlap: bool
    offload: bool
    offload_layers: int
    replicate: int
    prefetch: int
    offload_states: StateOffload
    order: str
    partition: PerStage
    recompute_full_layers: PerStage
    kinds: PerRank


class StepKeywords(JobKeywords, LayoutKeywords, total=False):
    """Fields of `Job` and of `Layout`."""
