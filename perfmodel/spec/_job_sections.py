"""The sections of `Job`, by subject, and the allowed values of their fields."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, Literal, get_args

from perfmodel.errors import LayoutError, UnknownNameError
from perfmodel.spec._sections import Sectioned, flat_keywords, section
from perfmodel.units import dtype_name, require_whole

RecomputeModule = Literal[
    "core_attn",
    "layernorm",
    "mlp",
    "mlp_act",
    "moe",
    "moe_act",
    "shared_experts",
    "mla_up_proj",
    "second_products",
]
"""Parts of layers by the names of Megatron-Core's `recompute_modules`: scores, softmax and context;
norms of inputs; the dense feed-forward; the whole layer of experts, its activation alone, or the
shared experts; up projections of latent attention. `second_products`: all of a layer except every
second product and the result of attention, as in torch's selective checkpoints of operators.
`mlp_act`: the activation of the dense feed-forward, as in JAX's policies that save products."""
WideModule = Literal["attention", "latent", "further_tokens", "mamba_output"]
"""Products that may stay wider than others: projections of attention; those to and from the
experts' latent space; modules that predict further tokens; the last product of a Mamba layer, in 8
bits where others have 4."""
EagerKernel = Literal[
    "norm",
    "rope",
    "activation",
    "residual",
    "softmax",
    "cross_entropy",
    "attention_layout",
    "attention_merge",
    "gelu_formula",
    "one_hot_lookup",
    "clamp",
    "wide_softmax",
    "loss_gradient",
    "sequence_copy",
]
"""Work that frameworks do in one fused kernel or in several element-wise ones; `attention_layout`:
queries, keys and values are copied into the order that the attention kernel takes them in;
`attention_merge`: partial results of context parallelism are added up; `gelu_formula`: GELU is
written out, an operator for every sign of its formula; `one_hot_lookup`: embeddings are products
with one-hot rows; `clamp`: the two inputs of a gated activation are clamped separately
(`Transformer.clamped_glu`) and joined again; `wide_softmax`: 16-bit scores are cast to fp32 before
their mask and softmax, and back after it, a kernel each; `loss_gradient`: an eager cross entropy's
gradient passes through separate tensors, as in torch (this affects memory only); `sequence_copy`:
what tensor-parallel ranks gather and scatter along the sequence is copied into the order of
sequences, or of ranks."""
RowKernels = Literal["library", "generated", "by_reduction"]
"""How frameworks make kernels that reduce the rows of a tensor, such as a softmax of scores or a
norm, and fuse the operators next to them. `library`: kernels written by hand, within their limits.
`generated`: a compiler's, one kernel each for tensors of any type and size; that of scores has
their scale, mask, softmax and dropout (TorchScript's nvFuser). `by_reduction`: a compiler's that
ends a kernel at every reduction, so that each reads the tensor again (XLA for GPUs, until it fused
a softmax in Triton)."""
Fp8Recipe = Literal[
    "",
    "delayed",
    "current",
    "tensorwise",
    "rowwise",
    "rowwise_with_gw_hp",
    "blockwise",
    "mxfp8",
    "nvfp4",
    "aqt",
    "fused",
]
"""How scales of 8- and 4-bit operands are found: one per tensor by the maxima of earlier steps
(`delayed`) or by its own (`current`, torchao's `tensorwise`), per row, per block of 128, of 32
(`mxfp8`) or of 16 (`nvfp4`) elements; `rowwise_with_gw_hp`: per row, with weight gradients in 16
bits (torchao); `aqt`: per row, of integers (github.com/google/aqt). `fused`: the kernel that
produces an operand writes it in the narrow type."""
Dispatcher = Literal["alltoall", "deepep", "hybridep"]
"""The dispatcher that sends tokens to their experts. `alltoall`: sorted into a copy per chosen
expert, which an all-to-all exchanges, and sorted again by local expert (Megatron-LM's
`MoEAlltoAllTokenDispatcher`); `deepep`: a token goes once to every node and once to every rank that
holds any of its experts (github.com/deepseek-ai/DeepEP), and is copied per expert there;
`hybridep`: the same in fewer kernels, which the host waits for once (its `hybrid-ep` branch)."""
AdapterModule = Literal[
    "linear_qkv",
    "q_proj",
    "k_proj",
    "v_proj",
    "linear_proj",
    "linear_fc1",
    "gate_proj",
    "up_proj",
    "linear_fc2",
]
"""Products that have adapters, by the names of Megatron-Core (and of Hugging Face, which divides
some of them): queries, keys and values together or separately; attention's output; the first
product of a dense feed-forward, as a whole or gate and value separately; its last product."""
_PARTS_OF_PRODUCTS: Final = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_fc1": ("gate_proj", "up_proj"),
}
BaseWeights = Literal["", "nf4", "int8", "fp32"]
"""Storage of frozen layer weights. `nf4`: 4 bits, and for every 64 of them a scale of 8 bits, of
which 256 share one of 32 (QLoRA, Dettmers et al., arXiv 2305.14314, section 3); `int8`: 8 bits, a
scale per row (LLM.int8()); `fp32`: as they were loaded, and cast by autocast."""
BASE_WEIGHT_BYTES: Final[Mapping[str, float]] = {
    "nf4": (4 + 8 / 64 + 32 / (64 * 256)) / 8,
    "int8": 1.0,
    "fp32": 4.0,
}
"""Bytes per weight."""
Head = Literal["vocabulary", "token_labels", "sequence_label"]
"""Output of the last block. `vocabulary`: words; `token_labels`: two numbers for every token, as
for the start and the end of an answer (SQuAD) or a tag; `sequence_label`: a class of every
sequence, from its pooled first token."""
CudaGraphs = Literal["none", "layers", "step"]
"""Work that the host replays from CUDA graphs instead of issuing it kernel by kernel: each pass of
a layer has its own graph, which leaves out routed experts, or one graph has the whole step."""


def _require_known(kind: str, names: Iterable[str], literal: Any) -> None:
    """Raise `UnknownNameError` for a name that a literal type does not have."""
    unknown = set(names) - set(get_args(literal))
    if unknown:
        raise UnknownNameError(kind, str(min(unknown)), get_args(literal))


def _require_choice(name: str, value: str, literal: Any) -> None:
    """Raise `LayoutError` unless a field of a job has one of the values of a literal type."""
    choices = get_args(literal)
    if value in choices:
        return
    listed = ", ".join(filter(None, choices))
    remedy = f"{listed} or empty" if "" in choices else f"one of {listed}"
    raise LayoutError(f"job: {name} must be {remedy}; got {value!r}")


@dataclass(frozen=True, kw_only=True)
class KernelChoices:
    """Fusion of kernels, and how the host launches them."""

    flash_attention: bool = True
    """Fused attention; false: scores are written to memory (batched products and a softmax
    kernel)."""
    fused_kernels: bool = True
    """Fused norm, bias-gelu, rope and cross-entropy kernels; false: eager element-wise kernels."""
    eager_kernels: tuple[EagerKernel, ...] = ()
    """Kinds of element-wise work that stay eager although `fused_kernels` is set."""
    row_kernels: RowKernels = "library"
    """Kernels of softmax and norms."""
    operation_fuser: bool = False
    """Transformer Engine's operation fuser merges element-wise work into matrix products: scales
    and sums of adapters, and the activation of a dense feed-forward, which then writes 8-bit
    operands (Megatron-Core's `--use-transformer-engine-op-fuser`)."""
    repeated_keys: bool = False
    """Keys and values are copied for every query head before attention, so context parallelism
    exchanges the copies and the kernel reads them."""
    split_positions: bool = False
    """Under sequence parallelism, each tensor-parallel rank stores the learned position embeddings
    of its part of the sequence only, instead of all of them."""
    fused_batch_norm: bool = False
    """In convolutional networks, the kernel of a batch norm also adds the shortcut and applies the
    ReLU that follow it."""
    channels_last: bool = False
    """16-bit images of convolutional networks are stored channels-last (NHWC), so that batch norms
    run at the memory's bandwidth instead of by the slower channels-first kernels."""
    wide_norms: bool = False
    """Layer norms and group norms of 16-bit activations run in fp32, with casts of their inputs
    and outputs (torch.autocast). So does a SiLU between a group norm and a convolution."""
    cuda_graphs: CudaGraphs = "none"
    """Work that the host replays from CUDA graphs."""
    blocking_launches: bool = False
    """The host waits for every kernel before it issues the next operator
    (CUDA_LAUNCH_BLOCKING=1)."""

    def __post_init__(self) -> None:
        _require_choice("cuda_graphs", self.cuda_graphs, CudaGraphs)
        _require_choice("row_kernels", self.row_kernels, RowKernels)

    def fuses(self, kind: EagerKernel) -> bool:
        """Whether an elementwise operation is fused into one kernel."""
        return self.fused_kernels and kind not in self.eager_kernels


@dataclass(frozen=True, kw_only=True)
class NarrowProducts:
    """Which operations use 8 or 4 bits with such a `Job.dtype`, and which stay wide."""

    fp8_recipe: Fp8Recipe = ""
    """Scaling recipe of 8- and 4-bit products, which determines the cost of quantising operands;
    empty: one pass over each operand."""
    fp8_attention: bool = False
    """Fused attention multiplies in 8 bits when products are in 8 or 4 bits (Transformer Engine's
    `fp8_dpa`; `NVTE_DPA_FP8_RECIPE` sets its recipe where products are in 4 bits); otherwise in 16
    bits."""
    fp8_activation_inputs: bool = False
    """Inputs of the activation of gated feed-forwards are saved in 8 bits, cast when they are
    saved and when they are read (Megatron-Core's `activation_func_fp8_input_store`, which supports
    only fused SwiGLU)."""
    fp8_params: bool = False
    """Trained weights of 8-bit products are stored only in 8 bits, instead of in 16 bits with 8-bit
    copies (Megatron-Core's `--fp8-param-gather`). If the products need the transpose too, it is
    stored as well."""
    wide_modules: tuple[WideModule, ...] = ()
    """Products that stay in 16 bits while the others use 8 or 4 bits."""
    wide_last_layers: int = 0
    """Number of layers at the end of the stack whose products all stay in 16 bits."""

    def __post_init__(self) -> None:
        require_whole("job", {"wide_last_layers": self.wide_last_layers}, least=0)
        _require_known("wide module", self.wide_modules, WideModule)
        _require_choice("fp8_recipe", self.fp8_recipe, Fp8Recipe)


@dataclass(frozen=True, kw_only=True)
class GradientReduction:
    """Accumulation and reduction of gradients, and their buffers."""

    grad_dtype: str = "fp32"
    """Element type in which gradients are accumulated and reduced."""
    half_gradients: bool = False
    """16-bit gradients have their own buffer besides the fp32 one, and separate kernels add them to
    it after each backward pass."""
    all_reduce_gradients: bool = False
    """ZeRO 1 all-reduces the gradients, instead of reducing each part only to the rank that updates
    it."""
    reduce_every_micro_batch: bool = False
    """Gradients are reduced after the backward pass of every micro-batch although they are not
    sharded, as in torch's DistributedDataParallel without `no_sync`."""
    whole_gradients_in_pipelines: bool = False
    """Under ZeRO 2 and 3, pipeline ranks accumulate unsharded gradients and reduce them once, after
    the last micro-batch, instead of after every micro-batch."""
    whole_gradients_in_accumulation: bool = False
    """Under ZeRO 2 and 3, unsharded gradients are accumulated over the micro-batches of a step and
    reduced once, after the last one, instead of after every micro-batch (torch's `no_sync`)."""
    bucket_bytes: float | None = None
    """Size of the buffers in which ZeRO reduces gradients and gathers weights; default: the
    framework's."""
    secondary_shards: int = 0
    """Number of ranks that hold a second sharded copy of the weights under ZeRO 3, for gathers in
    the backward pass (ZeRO++'s hpZ, arXiv 2306.10209, section 3.2); 0: none."""
    saves_gathered_weights: bool = False
    """Autograd keeps the weights that ZeRO 3 gathered for a layer's products until the layer's
    backward, as in DeepSpeed with `zero.Init(mem_efficient_linear=False)`; otherwise they are freed
    after their use."""

    def __post_init__(self) -> None:
        require_whole("job", {"secondary_shards": self.secondary_shards}, least=0)
        if isinstance(self.grad_dtype, str) and dtype_name(self.grad_dtype) != self.grad_dtype:
            object.__setattr__(self, "grad_dtype", dtype_name(self.grad_dtype))


@dataclass(frozen=True, kw_only=True)
class HeadAndLoss:
    """The output head, and how its logits are stored."""

    head: Head = "vocabulary"
    """Output of the last block: words (pre-training) or labels (fine-tuning to a task). Only for
    text models."""
    masked_head: bool = False
    """Only masked tokens of a masked language model go through the head: 20 of 128, and 80 of 512
    (google-research/bert README, `max_predictions_per_seq`). Otherwise the head sees every
    token."""
    loss_with_gradient: bool = False
    """One kernel computes the loss and overwrites the logits with their gradient, so that no wider
    copy is kept (llm.c's `fused_classifier`, Liger's cross entropy)."""
    narrow_logits: bool = False
    """No fp32 copy of 16-bit logits is kept and their gradient reuses their buffer, because a
    compiler fuses the casts (XLA's buffer assignment; torch.compile's `donated_buffer`)."""
    saves_narrow_logits: bool = False
    """The loss is one kernel that reads 16-bit logits, saves them as they are, and writes their
    gradient to a tensor of its own (Apex's `xentropy`, which FlashAttention's
    `losses.cross_entropy` calls)."""
    gathered_logits: bool = False
    """Tensor-parallel ranks gather the logits of the whole vocabulary, and each computes the loss
    of all of them."""
    chunked_loss: bool = False
    """Head and loss process the tokens in V / h chunks, so that the logits in memory are never
    larger than the hidden states (Liger's fused linear cross entropy)."""

    def __post_init__(self) -> None:
        _require_choice("head", self.head, Head)


@dataclass(frozen=True, kw_only=True)
class ExpertTokens:
    """Dispatch of tokens to experts, load balance, and the experts' computation."""

    expert_dispatcher: Dispatcher = "alltoall"
    """The dispatcher that sends tokens to their experts."""
    expert_imbalance: float = 1.0
    """Load of the busiest rank's experts relative to the mean; the other ranks wait for it. 1 if
    routing is forced to be even, as in benchmarks."""
    expert_capacity_factor: float | None = None
    """Capacity of every expert relative to its mean number of tokens; experts compute full capacity
    and drop tokens beyond it (GShard, arXiv 2006.16668, section 2.2). None: dropless."""
    einsum_dispatch: bool = False
    """With a capacity, tokens are dispatched to experts and combined by matrix products with masks
    (every token by every slot of its sequence), instead of by kernels that copy them (GShard,
    algorithm 2; MaxText `dense_matmul`)."""
    weighted_experts: bool = False
    """The router's weights multiply the activation inside the experts, so that their outputs need
    not be saved for the router's gradient (Megatron-Core since 0.12)."""
    fused_experts: bool = False
    """Between the grouped products of experts without biases, activations and casts to 8 bits by
    mxfp8 are part of the products' kernels, forward and backward (Transformer Engine's
    `ForwardGroupedMLP_CuTeGEMMSwiGLU_MXFP8`)."""

    def __post_init__(self) -> None:
        _require_choice("expert_dispatcher", self.expert_dispatcher, Dispatcher)
        if not 1 <= self.expert_imbalance < inf:
            raise LayoutError(
                f"job: expert_imbalance must be a number of at least 1, got {self.expert_imbalance!r}"
            )
        capacity = self.expert_capacity_factor
        if capacity is not None and not 0 < capacity < inf:
            raise LayoutError(
                f"job: expert_capacity_factor must be a number above 0, got {capacity!r}"
            )

    @property
    def load(self) -> float:
        """Load of the busiest rank's experts, relative to the mean over ranks."""
        if self.expert_capacity_factor is None:
            return self.expert_imbalance
        return self.expert_capacity_factor


@dataclass(frozen=True, kw_only=True)
class SavedActivations:
    """Which activations the forward pass saves, and which the backward pass recomputes."""

    keep_gathered: bool = False
    """Under sequence parallelism, gathered inputs of column-parallel products are saved instead of
    being gathered again in the backward pass: 2 s b h more bytes per product, but one collective
    less."""
    recompute_modules: tuple[RecomputeModule, ...] = ("core_attn",)
    """Modules that `recompute=selective` recomputes."""
    stops_recompute: bool = False
    """Recomputation of blocks and dense feed-forwards stops before the last product, whose result
    the backward pass does not need (XLA; torch's non-reentrant checkpoint)."""
    in_place_activation: bool = False
    """The gradients of gate and value overwrite them, instead of being new tensors (Liger-Kernel
    src/liger_kernel/ops/swiglu.py and geglu.py, the backward kernels)."""

    def __post_init__(self) -> None:
        _require_known("recompute module", self.recompute_modules, RecomputeModule)


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """Which weights are trained: all, none, or adapters with frozen base weights; and frozen
    encoders."""

    frozen: bool = False
    """All weights are frozen: no gradients, no reduction, no optimizer."""
    frozen_embedding: bool = False
    """The embedding tables (and a head tied to them) are frozen."""
    adapter_rank: int = 0
    """Rank of LoRA adapters on frozen products; 0: no adapters."""
    adapter_modules: tuple[AdapterModule, ...] = ("linear_qkv", "linear_proj")
    """Products that have adapters. Products of experts and of latent attention's inputs have
    none."""
    adapter_dropout: bool = True
    """Adapters apply dropout to their input."""
    base_weights: BaseWeights = ""
    """Storage of frozen layer weights; every product first converts its weight to 16 bits. Empty:
    the type of the products."""
    adapter_all_to_all: bool = False
    """Adapters of row-parallel products redistribute their result from columns to the sequence by
    an all-to-all, instead of an all-gather (NeMo `LoRA`, `a2a_experimental`)."""
    cached_latents: bool = True
    """Latents of images were computed before; false: the frozen encoder of a diffusion model runs
    in every step."""
    cached_text: bool = True
    """Outputs of text encoders were computed before; false: the frozen text encoders of a diffusion
    model run in every step."""

    def __post_init__(self) -> None:
        require_whole("job", {"adapter_rank": self.adapter_rank}, least=0)
        if self.adapter_rank and not self.frozen:
            raise LayoutError(
                "job: adapter_rank needs frozen weights; set frozen, or adapter_rank=0"
            )
        _require_known("adapter module", self.adapter_modules, AdapterModule)

        # An adapter beside a joint product and another beside one of its parts would count twice.
        for product, parts in _PARTS_OF_PRODUCTS.items():
            doubled = set(parts) & set(self.adapter_modules)
            if product in self.adapter_modules and doubled:
                raise LayoutError(
                    f"job: adapter_modules has {product} and its part {min(doubled)}; give one of them"
                )
        _require_choice("base_weights", self.base_weights, BaseWeights)


@flat_keywords
@dataclass(frozen=True, kw_only=True)
class Implementation(Sectioned):
    """How the software computes a job, in sections; frameworks set their defaults."""

    kernels: KernelChoices = field(default=KernelChoices(), metadata=section())
    """Fusion of kernels, and how the host launches them."""
    narrow: NarrowProducts = field(default=NarrowProducts(), metadata=section())
    """Operations in 8 or 4 bits."""
    gradients: GradientReduction = field(default=GradientReduction(), metadata=section())
    """Accumulation and reduction of gradients."""
    loss: HeadAndLoss = field(default=HeadAndLoss(), metadata=section())
    """The output head and its logits."""
    experts: ExpertTokens = field(default=ExpertTokens(), metadata=section())
    """The dispatcher that sends tokens to their experts."""
    activations: SavedActivations = field(default=SavedActivations(), metadata=section())
    """Saved and recomputed activations."""
