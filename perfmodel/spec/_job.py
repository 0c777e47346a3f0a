"""Jobs: what one step computes, apart from how it is laid out; and optimizers, one entry each: what it keeps of a
parameter and what its update passes over."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any, Final, Literal, get_args

from perfmodel.errors import LayoutError, Reason, UnknownNameError
from perfmodel.spec._device import USUAL_DTYPES, Device
from perfmodel.spec._layout import Layout
from perfmodel.spec._model import Model
from perfmodel.units import LONGEST_SEQUENCE, dtype_bytes, dtype_name, whole

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
"""Parts of layers by the names of Megatron-Core's `recompute_modules`: scores, softmax and context; norms of inputs;
the dense feed-forward; all of the experts' half, their activation alone, or the shared ones; up projections of latent
attention. `second_products`, by which torch's selective checkpoints of operators go: all of a layer but every second
product and the result of attention. And `mlp_act`, the activation of the dense feed-forward: JAX's policies that keep
products repeat it."""
WideModule = Literal["attention", "latent", "further_tokens", "mamba_output"]
"""Products that may stay wider than others: projections of attention; those to and from the experts' latent space;
modules for further tokens; the last product of a Mamba layer, in 8 bits where others have 4."""
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
]
"""Work that frameworks do in one fused kernel or in several element-wise ones; `attention_layout`: queries, keys and
values are copied into the order that the attention kernel takes them in; `attention_merge`: partial results of
context parallelism are added up; `gelu_formula`: GELU is written out, an operator for every sign of its formula;
`one_hot_lookup`: embeddings are products with one-hot rows; `clamp`: inputs of a gated activation are cut at their
limit (`Transformer.clamped_glu`) each by itself, and joined again; `wide_softmax`: 16-bit scores are cast to fp32
before their mask and softmax, and back after it, a kernel each."""
Fp8Recipe = Literal[
    "",
    "delayed",
    "current",
    "tensorwise",
    "rowwise",
    "blockwise",
    "mxfp8",
    "nvfp4",
    "aqt",
    "fused",
]
"""How scales of 8- and 4-bit operands are found: one per tensor by the maxima of earlier steps (`delayed`) or by its
own (`current`, torchao's `tensorwise`), per row, per block of 128, of 32 (`mxfp8`) or of 16 (`nvfp4`) elements;
`aqt`: per row, of integers (github.com/google/aqt). `fused`: whatever makes an operand writes it in the narrow type."""
Dispatcher = Literal["alltoall", "deepep", "hybridep"]
"""How tokens reach their experts. `alltoall`: sorted into a copy per chosen expert, which an all-to-all exchanges, and
sorted again by local expert (Megatron-LM's `MoEAlltoAllTokenDispatcher`); `deepep`: a token goes once to every node and
once to every rank that holds any of its experts (github.com/deepseek-ai/DeepEP), and is copied per expert there;
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
"""Products that adapters stand beside, by the names of Megatron-Core (and of Hugging Face where these are parts of a
product here): queries, keys and values together or each by itself; attention's output; the first product of a dense
feed-forward, whole or its gate and value each by itself; the last."""
_PARTS_OF_PRODUCTS: Final = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_fc1": ("gate_proj", "up_proj"),
}
BaseWeights = Literal["", "nf4", "int8"]
"""How frozen weights of layers lie in memory. `nf4`: 4 bits, and for every 64 of them a scale of 8 bits, of which 256
share one of 32 (QLoRA, Dettmers et al., arXiv 2305.14314, section 3); `int8`: 8 bits, a scale per row (LLM.int8())."""
BASE_WEIGHT_BYTES: Final[Mapping[str, float]] = {
    "nf4": (4 + 8 / 64 + 32 / (64 * 256)) / 8,
    "int8": 1.0,
}
"""Per weight."""
Head = Literal["vocabulary", "token_labels", "sequence_label"]
"""What the last block predicts. `vocabulary`: words; `token_labels`: two numbers for every token, as for the start and
the end of an answer (SQuAD) or a tag; `sequence_label`: a class of every sequence, from its pooled first token."""
CudaGraphs = Literal["none", "layers", "step"]
"""What the host replays instead of issuing it kernel by kernel: every pass of a layer from a graph of its own, which
leaves out routed experts, or the whole step from one."""
BLOCK_OF_8_BIT: Final = 256
"""Elements that share a scale in 8-bit states (Dettmers et al., arXiv 2110.02861; bitsandbytes since 0.44)."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """States and arithmetic of an optimizer, beside weights, gradients and a master copy of weights in fp32."""

    state_bytes: float
    """Per parameter: moments."""
    other_state_bytes: float | None = None
    """The same outside layers' matrices, where another optimizer updates embeddings and head; None: the same."""
    master: bool = True
    """Keeps an fp32 copy of weights that are narrower."""
    gradient_reads: int = 1
    """Passes over the gradient."""
    further_bytes: float = 0.0
    """What an update moves per parameter beyond gradient, weight and states."""
    clips: bool = True
    """Gradients are read for their norm and rescaled before (and 16-bit floats rid of the loss scale)."""
    newton_schulz: int = 0
    """Iterations that orthogonalise the update of every matrix of the layers."""
    kernel: str = "adam"
    """Measured kernel that it is priced like, by the bytes that it moves."""
    source: str


OPTIMIZERS: Final[Mapping[str, Optimizer]] = {
    "adam": Optimizer(state_bytes=8, source="Kingma and Ba, arXiv 1412.6980, algorithm 1"),
    "adamw": Optimizer(state_bytes=8, source="Loshchilov and Hutter, arXiv 1711.05101, algorithm 2"),
    "adam8bit": Optimizer(
        state_bytes=2 * (1 + 4 / BLOCK_OF_8_BIT),
        source="Dettmers et al., arXiv 2110.02861, section 2",
    ),
    "adam16bit": Optimizer(
        state_bytes=4,
        master=False,
        source="torch/optim/adamw.py of weights that are kept in 16 bits alone: moments in the weights' type "
        "(`torch.zeros_like`)",
    ),
    "adafactor": Optimizer(
        state_bytes=0,
        gradient_reads=3,
        clips=False,
        source="Shazeer and Stern, arXiv 1804.04235, algorithm 4: without momentum; sums of rows and columns, below a "
        "thousandth of the weights, left out; one pass for these, one for the update's norm, one to apply it",
    ),
    "lion": Optimizer(state_bytes=4, source="Chen et al., arXiv 2302.06675, algorithm 2"),
    "lamb": Optimizer(
        state_bytes=8,
        further_bytes=20,
        source="You et al., arXiv 1904.00962, algorithm 2, by apex csrc/multi_tensor_lamb.cu: Adam's update is written "
        "where the gradient was and read for its norm and again to be applied, weights are read once more for it and "
        "for their norm",
    ),
    "muon": Optimizer(
        state_bytes=4,
        other_state_bytes=8,
        newton_schulz=5,
        source="Jordan et al. 2024, Muon; Liu et al., arXiv 2502.16982, algorithm 1: AdamW outside matrices",
    ),
    "sgd": Optimizer(
        state_bytes=4,
        clips=False,
        kernel="sgd",
        source="with momentum: Qian 1999, equation 2",
    ),
    "plain-sgd": Optimizer(
        state_bytes=0,
        master=False,
        clips=False,
        kernel="sgd",
        source="Robbins and Monro 1951: w - lr * gradient",
    ),
}
"""By name; `sgd` keeps a momentum, `plain-sgd` nothing. It and `adam16bit` update weights in their own type."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one step computes, apart from how it is laid out."""

    global_batch: int
    """Sequences (or images) per optimizer step."""
    seq_len: int
    """Tokens per sequence; the model's own where nobody says it."""
    mean_tokens: float | None = None
    """Tokens of a sequence that are computed, on the mean: those of its text, where padding is left out or sequences
    of like length share a batch. None: all `seq_len`."""
    rms_tokens: float | None = None
    """Root of the mean square number of tokens that attend to one another: of a sequence's length, or where several
    documents are packed into one and do not see each other, of the root of the sum of their squared lengths.
    Attention takes time by this second moment, all else by `mean_tokens`. None: of lengths whose density follows a
    power law up to `seq_len` with that mean (`Job.attended_tokens`)."""
    input_samples_per_s: float | None = None
    """Sequences or images per second that the input pipelines of all devices together bring (reading, decoding,
    augmenting). They run ahead of the steps, so that a step takes as long as the slower of both. None: enough."""
    dtype: str = "bf16"
    """Element type of the products; the first of bf16, fp16 and fp32 that the device has where nobody says it."""
    fp8_recipe: Fp8Recipe = ""
    """How scales of 8- and 4-bit products are found, and with that what quantising their operands takes; empty: one
    pass over each."""
    mode: Literal["train", "inference"] = "train"
    """Forward, backward and update, or a forward alone."""
    cached_tokens: int = 0
    """Tokens of every sequence before those of the step, to whose keys and values these attend too: in a cache
    (inference, where with `seq_len` 1 the step generates one token a sequence), or, in the slices that a schedule makes
    of a sequence, of those that came before."""
    flash_attention: bool = True
    """Fused attention; otherwise scores are materialised (batched products and a softmax kernel)."""
    fp8_attention: bool = False
    """Fused attention multiplies in 8 bits beside products in 8 or 4 (Transformer Engine's `fp8_dpa`, of which
    `NVTE_DPA_FP8_RECIPE` says the recipe where products are in 4); otherwise in 16."""
    fp8_activation_inputs: bool = False
    """Inputs of the activation of gated feed-forwards are kept for backward in 8 bits, by a cast each way
    (Megatron-Core's `activation_func_fp8_input_store`, which takes SwiGLU alone, fused)."""
    operation_fuser: bool = False
    """Transformer Engine's operation fuser joins what stands beside products with them: scales and sums of adapters
    become part of the adapters' products, and the activation of a dense feed-forward writes the 8-bit operands of the
    products around it (Megatron-Core's `--use-transformer-engine-op-fuser`)."""
    grad_dtype: str = "fp32"
    """Element type in which gradients are accumulated and reduced."""
    fused_kernels: bool = True
    """Fused norm, bias-gelu, rope and cross-entropy kernels; otherwise element-wise eager ones."""
    eager_kernels: tuple[EagerKernel, ...] = ()
    """Kinds of work left to eager kernels though `fused_kernels` has the others fused."""
    keep_gathered: bool = False
    """Under sequence parallelism, inputs of column-parallel products are kept as they were gathered instead of being
    gathered again in backward: 2 s b h bytes a product that no tensor parallelism divides, and a collective less."""
    half_gradients: bool = False
    """Where 16-bit gradients are accumulated in fp32, they have a buffer of their own beside the fp32 one, to which
    kernels of their own add them after every backward, one per weight."""
    all_reduce_gradients: bool = False
    """ZeRO 1 reduces all gradients on all ranks, instead of each part on the rank that updates it."""
    reduce_every_micro_batch: bool = False
    """Gradients are reduced after the backward of every micro-batch though they are kept whole: accumulation under
    torch's DistributedDataParallel outside `no_sync`, or FSDP with `no_sync` that nobody calls."""
    bucket_bytes: float | None = None
    """Buffers in which ZeRO reduces gradients and gathers weights, where a run sets their size; None: those of the
    framework, as far as the gradients fill them."""
    whole_gradients_in_pipelines: bool = False
    """Under ZeRO 2 the ranks of a pipeline add up whole gradients and reduce them once, after the last micro-batch,
    instead of their part of them after each."""
    repeated_keys: bool = False
    """Keys and values are copied for every head of queries before attention, so that context parallelism exchanges as
    many copies and the kernel reads them."""
    wide_modules: tuple[WideModule, ...] = ()
    """What stays in 16 bits where products have 8 or 4."""
    wide_last_layers: int = 0
    """Layers at the end of the stack of which all products do."""
    head: Head = "vocabulary"
    """What the last block predicts: words, as in pre-training, or labels, as where a model is fine-tuned to a task. Of
    models of words alone."""
    masked_head: bool = False
    """Of a masked language model only the masked tokens are gathered for the head: 20 of 128, and 80 of 512
    (google-research/bert README, `max_predictions_per_seq`). Otherwise the head sees every token."""
    loss_with_gradient: bool = False
    """One kernel reads the logits and writes their gradient over them while it sums up the loss, so that backward has
    nothing left to do there and no wider copy of them is kept (llm.c's `fused_classifier`, Liger's cross entropy)."""
    narrow_logits: bool = False
    """Of 16-bit logits no fp32 copy is kept, and their gradient takes their place: a compiler joins their casts with
    the kernels that read them, forward and backward, and reuses their buffer, which is read for the last time there
    (XLA's buffer assignment; torch.compile's `donated_buffer`)."""
    secondary_shards: int = 0
    """Ranks among which ZeRO 3 keeps the weights once more, so that backward gathers them nearby (ZeRO++'s hpZ, arXiv
    2306.10209, section 3.2); 0: none. Their memory is counted; gathers are counted over all ranks."""
    fp8_params: bool = False
    """Weights of 8-bit products are kept in 8 bits alone, both ways round, instead of in 16 with 8-bit copies beside
    (Megatron-Core's `--fp8-param-gather`)."""
    chunked_loss: bool = False
    """Head and loss take one part of the tokens after the other, with all gradients, so that of the logits no more
    exists at a time than the hidden states are large: V / h parts (Liger's fused linear cross entropy)."""
    fused_batch_norm: bool = False
    """Of convolutional networks, the kernel of a batch norm adds the shortcut and applies the ReLU that follow."""
    channels_last: bool = False
    """Images of convolutional networks lie with their channels together (NHWC), where they have 16 bits: batch norms
    then run at the memory's bandwidth, and not by the slower kernels of images that lie channel by channel."""
    weighted_experts: bool = False
    """The router's weights multiply the activation inside the experts, so that their outputs are not kept for the
    router's gradient (Megatron-Core since 0.12)."""
    fused_experts: bool = False
    """Between the grouped products of experts without biases, activations and casts to 8 bits by mxfp8 are part of the
    products' kernels, forward and backward (Transformer Engine's `ForwardGroupedMLP_CuTeGEMMSwiGLU_MXFP8`)."""
    expert_dispatcher: Dispatcher = "alltoall"
    """How tokens reach their experts."""
    expert_imbalance: float = 1.0
    """Tokens of the rank whose experts get most, over the mean of all ranks: the others wait for it. 1 where routing is
    forced to be even, as benchmarks do."""
    expert_capacity_factor: float | None = None
    """Places of every expert, over the mean number of its tokens: it takes as long as if all were full, and drops what
    exceeds them (GShard, arXiv 2006.16668, section 2.2). None: dropless."""
    cuda_graphs: CudaGraphs = "none"
    """What the host replays as a whole instead of issuing it kernel by kernel."""
    blocking_launches: bool = False
    """The host waits for every kernel before it issues the next operator (CUDA_LAUNCH_BLOCKING=1), so that no kernel
    hides its own time. Nothing of the host's graphs is."""
    frozen: bool = False
    """Weights are not trained: no gradients of them, no reduction, no optimizer."""
    frozen_embedding: bool = False
    """The embedding's tables alone are not trained, nor a head that is tied to them."""
    adapter_rank: int = 0
    """Rank of adapters beside frozen products (LoRA); 0: what is trained instead is left out."""
    adapter_modules: tuple[AdapterModule, ...] = ("linear_qkv", "linear_proj")
    """Products that adapters stand beside. Those of experts and of latent attention's inputs have none."""
    adapter_dropout: bool = True
    """Adapters drop some of their input, each by a mask of its own; otherwise they take it as it is."""
    base_weights: BaseWeights = ""
    """How frozen weights of the layers are stored; every product first brings its weight to 16 bits. Empty: in the
    type of the products."""
    adapter_all_to_all: bool = False
    """Adapters of row-parallel products bring their result from parts of its columns to parts of the sequence by an
    all-to-all, instead of gathering it whole (NeMo `LoRA`, `a2a_experimental`)."""
    stops_recompute: bool = False
    """Recompute of blocks, and of dense feed-forwards, stops before the last product, whose result backward does not
    need: under a compiler (XLA) that sees forward and backward as one, and torch's checkpoint without reentry."""
    recompute_modules: tuple[RecomputeModule, ...] = ("core_attn",)
    """What `Layout.recompute=selective` recomputes."""
    optimizer: str = "adam"
    """One of `OPTIMIZERS`: adam, adamw, adam8bit, adam16bit, adafactor, lamb, lion, muon, sgd (with momentum),
    plain-sgd."""
    weight_average: bool = False
    """An exponential moving average of the weights is kept in fp32 beside the optimizer's states, and brought up to
    date by a pass of its own after every step."""
    assumed: tuple[str, ...] = ()
    """What nobody said and was chosen instead, one sentence each."""

    @classmethod
    def of(
        cls,
        model: Model,
        device: Device,
        *,
        global_batch: int,
        seq_len: int | None = None,
        dtype: str | None = None,
        **fields: Any,
    ) -> "Job":
        """The job of a model on a device, with defaults for a sequence length or element type that is not given.

        These are the model's own length, and the first of bf16, fp16 and fp32 that the device has; `assumed` names
        those that are not obvious.
        """
        assumed = []
        if seq_len is None:
            seq_len = model.seq_len
            longest = getattr(model, "longest_seq_len", 0)
            if longest:
                assumed.append(
                    f"sequences of {seq_len:,} tokens are assumed: {model.name} states only that it takes up to "
                    f"{longest:,}; give --seq-len (seq_len) for others"
                )
        if dtype is None:
            dtype = device.usual_dtype
            if dtype != USUAL_DTYPES[0]:
                assumed.append(f"dtype {dtype} is assumed: device {device.name} has no {USUAL_DTYPES[0]}")
        return cls(
            global_batch=global_batch,
            seq_len=seq_len,
            dtype=dtype,
            assumed=tuple(assumed),
            **fields,
        )

    def __post_init__(self) -> None:
        for name in ("dtype", "grad_dtype"):
            stated = getattr(self, name)
            if isinstance(stated, str) and dtype_name(stated) != stated:
                object.__setattr__(self, name, dtype_name(stated))
        whole("job", {"global_batch": self.global_batch})
        whole("job", {"seq_len": self.seq_len}, most=LONGEST_SEQUENCE)
        none_or_more = ("adapter_rank", "cached_tokens", "wide_last_layers", "secondary_shards")
        whole("job", {name: getattr(self, name) for name in none_or_more}, least=0)
        if self.adapter_rank and not self.frozen:
            raise LayoutError("job: adapter_rank needs frozen weights; set frozen, or adapter_rank=0")
        self._check_adapters()
        unknown = set(self.recompute_modules) - set(get_args(RecomputeModule))
        if unknown:
            raise UnknownNameError("recompute module", str(min(unknown)), get_args(RecomputeModule))
        unknown = set(self.wide_modules) - set(get_args(WideModule))
        if unknown:
            raise UnknownNameError("wide module", str(min(unknown)), get_args(WideModule))
        if self.optimizer not in OPTIMIZERS:
            raise UnknownNameError("optimizer", str(self.optimizer), OPTIMIZERS)
        if self.fp8_recipe not in get_args(Fp8Recipe):
            known = ", ".join(filter(None, get_args(Fp8Recipe)))
            raise LayoutError(f"job: fp8_recipe must be {known} or empty; got {self.fp8_recipe!r}")
        if self.fp8_attention and not (self.dtype in ("fp8", "fp4") and self.flash_attention):
            raise LayoutError(
                "job: fp8_attention is fused attention beside 8- or 4-bit products; set dtype=fp8, or leave it out"
            )
        if self.cuda_graphs not in get_args(CudaGraphs):
            raise LayoutError(f"job: cuda_graphs must be {', '.join(get_args(CudaGraphs))}; got {self.cuda_graphs!r}")
        if self.expert_dispatcher not in get_args(Dispatcher):
            raise LayoutError(
                f"job: expert_dispatcher must be {', '.join(get_args(Dispatcher))}; got {self.expert_dispatcher!r}"
            )
        if self.head not in get_args(Head):
            raise LayoutError(f"job: head must be {', '.join(get_args(Head))}; got {self.head!r}")
        if not 1 <= self.expert_imbalance < inf:
            raise LayoutError(f"job: expert_imbalance must be a number of at least 1, got {self.expert_imbalance!r}")
        self._check_lengths()
        rate = self.input_samples_per_s
        if rate is not None and not 0 < rate < inf:
            raise LayoutError(f"job: input_samples_per_s must be a number above 0, got {rate!r}")
        capacity = self.expert_capacity_factor
        if capacity is not None and not 0 < capacity < inf:
            raise LayoutError(f"job: expert_capacity_factor must be a number above 0, got {capacity!r}")

    def _check_adapters(self) -> None:
        """Refuse adapters beside a product and a part of it, and stored weights that are trained or cast anyway."""
        unknown = set(self.adapter_modules) - set(get_args(AdapterModule))
        if unknown:
            raise UnknownNameError("adapter module", str(min(unknown)), get_args(AdapterModule))
        for product, parts in _PARTS_OF_PRODUCTS.items():
            doubled = set(parts) & set(self.adapter_modules)
            if product in self.adapter_modules and doubled:
                raise LayoutError(f"job: adapter_modules has {product} and its part {min(doubled)}; give one of them")
        if self.base_weights not in get_args(BaseWeights):
            known = ", ".join(filter(None, get_args(BaseWeights)))
            raise LayoutError(f"job: base_weights must be {known} or empty; got {self.base_weights!r}")
        if self.base_weights and not (self.frozen and dtype_bytes(self.dtype) >= 2):
            raise LayoutError(
                f"job: base_weights={self.base_weights} is of frozen weights that products of at least 16 bits use; "
                "set frozen and such a dtype, or leave it out"
            )

    def _check_lengths(self) -> None:
        """Refuse moments that no lengths of at most `seq_len` tokens have."""
        mean, rms = self.mean_tokens, self.rms_tokens
        if mean is not None and not 0 < mean <= self.seq_len:
            raise LayoutError(f"job: mean_tokens must be above 0 and at most seq_len={self.seq_len}; got {mean!r}")
        largest = sqrt(self.tokens_per_sequence * self.seq_len)
        if rms is not None and not 0 < rms <= largest * (1 + 1e-9):
            raise LayoutError(
                f"job: rms_tokens must be above 0 and at most {largest:.6g}, the root mean square of lengths that are "
                f"either seq_len={self.seq_len} or nothing; got {rms!r}"
            )
        if self.varied_lengths and self.cached_tokens:
            raise LayoutError("job: sequences of varied lengths have no cached_tokens; leave mean_tokens out")

    @property
    def input_s(self) -> float:
        """Seconds in which input pipelines bring the samples of a step; 0 where they bring enough."""
        return 0.0 if self.input_samples_per_s is None else self.global_batch / self.input_samples_per_s

    @property
    def varied_lengths(self) -> bool:
        """Whether sequences are shorter than `seq_len`, or made of several documents."""
        return self.mean_tokens is not None or self.rms_tokens is not None

    @property
    def tokens_per_sequence(self) -> float:
        """Tokens of a sequence that are computed, on the mean."""
        return self.seq_len if self.mean_tokens is None else self.mean_tokens

    @property
    def attended_tokens(self) -> float:
        """Length of equal sequences that take the same time in attention and elsewhere: mean square over mean.

        Lengths x up to L of density x^(a-1) have the mean u L with u = a / (a + 1), and the mean square
        L^2 a / (a + 2) = L^2 u / (2 - u): evenly spread ones at u = 1/2, all of length L at u = 1.
        """
        if self.rms_tokens is not None:
            return self.rms_tokens**2 / self.tokens_per_sequence
        if self.mean_tokens is None:
            return self.seq_len
        return self.seq_len / (2 - self.mean_tokens / self.seq_len)

    @property
    def adds_half_gradients(self) -> bool:
        """Whether 16-bit gradients are added to wider ones that lie beside them."""
        return self.half_gradients and dtype_bytes(self.grad_dtype) > 2 >= dtype_bytes(self.dtype)

    @property
    def expert_load(self) -> float:
        """Tokens that the busiest rank's experts work on, over the mean of all ranks."""
        return self.expert_imbalance if self.expert_capacity_factor is None else self.expert_capacity_factor

    def fuses(self, kind: EagerKernel) -> bool:
        """Whether a kind of element-wise work runs as one kernel."""
        return self.fused_kernels and kind not in self.eager_kernels

    def num_microbatches(self, layout: Layout) -> int:
        """Micro-batches per replica and step; raises `LayoutError` if the batch does not divide."""
        per_step = layout.micro_batch * layout.dp
        if self.global_batch % per_step:
            raise LayoutError(
                f"global batch {self.global_batch} is not divisible by dp*micro_batch = "
                f"{layout.dp}*{layout.micro_batch}; the nearest that is: "
                f"{max(1, round(self.global_batch / per_step)) * per_step}",
                Reason.BATCH,
            )
        return self.global_batch // per_step
