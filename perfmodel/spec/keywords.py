"""Typed keywords of functions that take a problem or a layout, and of records in sections.

They are written out so that editors complete them and type checkers know them;
`tests/spec/test_keywords.py` holds them to the fields of `Job`, `Layout` and `Transformer`.
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
    RowKernels,
    WideModule,
)
from perfmodel.spec._layout import ContextParallel, Recompute, StateOffload
from perfmodel.spec.notation import PerRank, PerStage
from perfmodel.spec.parts import (
    AdaLN,
    CompressedAttention,
    DeltaNet,
    Distances,
    Experts,
    FrozenEncoder,
    HyperConnections,
    Indexer,
    LatentAttention,
    LayerEmbedding,
    Mamba,
    NarrowEmbedding,
    Patches,
    SelectiveScan,
    SharedBlock,
    ShortConv,
    Spectrogram,
    Streams,
    TextCondition,
    TimeMix,
    WindowHeads,
)


class KernelKeywords(TypedDict, total=False):
    """Fields of `KernelChoices`."""

    flash_attention: bool
    fused_kernels: bool
    eager_kernels: tuple[EagerKernel, ...]
    row_kernels: RowKernels
    operation_fuser: bool
    repeated_keys: bool
    split_positions: bool
    fused_batch_norm: bool
    channels_last: bool
    wide_norms: bool
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
    whole_gradients_in_accumulation: bool
    bucket_bytes: float | None
    secondary_shards: int
    saves_gathered_weights: bool


class LossKeywords(TypedDict, total=False):
    """Fields of `HeadAndLoss`."""

    head: Head
    masked_head: bool
    loss_with_gradient: bool
    narrow_logits: bool
    saves_narrow_logits: bool
    gathered_logits: bool
    chunked_loss: bool


class ExpertKeywords(TypedDict, total=False):
    """Fields of `ExpertTokens`."""

    expert_dispatcher: Dispatcher
    expert_imbalance: float
    expert_capacity_factor: float | None
    einsum_dispatch: bool
    weighted_experts: bool
    fused_experts: bool


class ActivationKeywords(TypedDict, total=False):
    """Fields of `SavedActivations`."""

    keep_gathered: bool
    recompute_modules: tuple[RecomputeModule, ...]
    stops_recompute: bool
    in_place_activation: bool


class FineTuningKeywords(TypedDict, total=False):
    """Fields of `FineTuning`."""

    frozen: bool
    frozen_embedding: bool
    adapter_rank: int
    adapter_modules: tuple[AdapterModule, ...]
    adapter_dropout: bool
    base_weights: BaseWeights
    adapter_all_to_all: bool
    cached_latents: bool
    cached_text: bool


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
    """Fields of `Job` and its sections, except global batch, sequence length and element type."""

    mean_tokens: float | None
    rms_tokens: float | None
    input_samples_per_s: float | None
    generation_s: float
    mode: Literal["train", "inference"]
    cached_tokens: int
    optimizer: str
    weight_average: bool


class AttentionKeywords(TypedDict, total=False):
    """Fields of `AttentionForm`."""

    causal: bool
    window: int
    chunked_window: bool
    full_attention_every: int
    window_heads: WindowHeads | None
    value_dim: int
    keys_as_values: bool
    qkv_bias: bool
    output_bias: bool
    unbiased_projections: tuple[Literal["query", "key", "value"], ...]
    distances: Distances | None
    qk_norm: bool
    qk_norm_of_all_heads: bool
    attention_gate: bool
    head_gate: bool
    attention_sinks: bool
    attention_softcap: bool


class BlockKeywords(TypedDict, total=False):
    """Fields of `BlockForm`."""

    parallel_blocks: Literal["none", "one_norm", "two_norms"]
    gated_ffn: bool
    activation: Literal["gelu", "silu", "relu", "relu2"]
    clamped_glu: bool
    bias: bool
    dropout: bool


class NormKeywords(TypedDict, total=False):
    """Fields of `Norms`."""

    norm: Literal["layer_norm", "rms_norm"]
    norm_at: Literal["input", "output", "both"]
    norm_bias: bool | None
    norm_parameters: bool
    sub_norms: bool
    embedding_norm: bool
    final_norm: bool
    adaln: AdaLN | None


class InputKeywords(TypedDict, total=False):
    """Fields of `Inputs`."""

    positions: Literal["learned", "rope", "alibi", "relative", "none"]
    position_offset: int
    longest_seq_len: int
    token_types: int
    narrow_embedding: NarrowEmbedding | None
    patches: Patches | None
    spectrogram: Spectrogram | None
    text_condition: TextCondition | None
    encoders: tuple[FrozenEncoder, ...]


class OutputHeadKeywords(TypedDict, total=False):
    """Fields of `OutputHead`."""

    tied_embeddings: bool
    logit_softcap: bool
    pooler_and_mlm_head: bool
    pooler: bool


class HybridKeywords(TypedDict, total=False):
    """Fields of `HybridStack`."""

    mixers: str
    parallel_mixers: bool
    mamba: Mamba | None
    selective_scan: SelectiveScan | None
    delta_net: DeltaNet | None
    short_conv: ShortConv | None
    time_mix: TimeMix | None
    shared_block: SharedBlock | None
    indexer: Indexer | None
    compressed_attention: CompressedAttention | None
    hyper_connections: HyperConnections | None
    layer_embedding: LayerEmbedding | None
    streams: Streams | None
    ffn_sizes: tuple[int, ...]
    shortcut_experts: bool


class FurtherTokenKeywords(TypedDict, total=False):
    """Fields of `FurtherTokens`."""

    mtp_layers: int
    mtp_mixers: str
    mtp_repeated: bool


class TransformerKeywords(
    AttentionKeywords,
    BlockKeywords,
    NormKeywords,
    InputKeywords,
    OutputHeadKeywords,
    HybridKeywords,
    FurtherTokenKeywords,
    total=False,
):
    """Fields of `Transformer` that have defaults, and those of its sections."""

    layer_groups: int
    decoder_layers: int
    decoder_seq_len: int
    experts: Experts | None
    latent_attention: LatentAttention | None
    left_out: str
    source: str
    aliases: tuple[str, ...]


class OverlapKeywords(TypedDict, total=False):
    """Fields of `CommunicationOverlap`."""

    overlap_grad_reduce: bool
    overlap_param_gather: bool
    tp_overlap: bool
    ep_overlap: bool


class LayoutKeywords(OverlapKeywords, total=False):
    """Fields of `Layout` and its section."""

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
