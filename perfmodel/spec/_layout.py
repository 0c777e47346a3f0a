"""Layouts: how a step is spread over devices, and the job that they run."""

from dataclasses import dataclass, fields
from itertools import permutations
from math import inf, prod
from operator import attrgetter
from typing import Any, Final, Literal, get_args

from perfmodel.errors import LayoutError, Reason, UnknownNameError
from perfmodel.spec._device import Device
from perfmodel.spec._dimensions import DEVICE_KEYS, DIMENSIONS, ORDER_KEYS
from perfmodel.spec._model import Model
from perfmodel.spec._notation import PerRank, PerStage, read_values, schedule_name, written, written_values
from perfmodel.spec._optimizer import OPTIMIZERS
from perfmodel.units import dtype_bytes, untraced, whole

Recompute = Literal["none", "selective", "full"]
RecomputeModule = Literal["core_attn", "layernorm", "mlp", "mlp_act", "moe", "moe_act", "shared_experts",
                          "mla_up_proj"]  # fmt: skip
"""Parts of layers by the names of Megatron-Core's `recompute_modules`: scores, softmax and context; norms of inputs;
the dense feed-forward; all of the experts' half, their activation alone, or the shared ones; up projections of latent
attention. And `mlp_act`, the activation of the dense feed-forward: JAX's policies that keep products repeat it."""
WideModule = Literal["attention", "latent", "further_tokens", "mamba_output"]
"""Products that may stay wider than others: projections of attention; those to and from the experts' latent space;
modules for further tokens; the last product of a Mamba layer, in 8 bits where others have 4."""
EagerKernel = Literal["norm", "rope", "activation", "residual", "softmax", "cross_entropy", "attention_layout",
                      "attention_merge", "gelu_formula", "one_hot_lookup"]  # fmt: skip
"""Work that frameworks do in one fused kernel or in several element-wise ones; `attention_layout`: queries, keys and
values are copied into the order that the attention kernel takes them in; `attention_merge`: partial results of
context parallelism are added up; `gelu_formula`: GELU is written out, an operator for every sign of its formula;
`one_hot_lookup`: embeddings are products with one-hot rows."""
Fp8Recipe = Literal["", "delayed", "current", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4", "aqt",
                    "fused"]  # fmt: skip
"""How scales of 8- and 4-bit operands are found: one per tensor by the maxima of earlier steps (`delayed`) or by its
own (`current`, torchao's `tensorwise`), per row, per block of 128, of 32 (`mxfp8`) or of 16 (`nvfp4`) elements;
`aqt`: per row, of integers (github.com/google/aqt). `fused`: whatever makes an operand writes it in the narrow type."""
Dispatcher = Literal["alltoall", "deepep", "hybridep"]
"""How tokens reach their experts. `alltoall`: sorted into a copy per chosen expert, which an all-to-all exchanges, and
sorted again by local expert (Megatron-LM's `MoEAlltoAllTokenDispatcher`); `deepep`: a token goes once to every node and
once to every rank that holds any of its experts (github.com/deepseek-ai/DeepEP), and is copied per expert there;
`hybridep`: the same in fewer kernels, which the host waits for once (its `hybrid-ep` branch)."""
CudaGraphs = Literal["none", "layers", "step"]
"""What the host replays instead of issuing it kernel by kernel: every pass of a layer from a graph of its own, which
leaves out routed experts, or the whole step from one."""
ContextParallel = Literal["ring", "all_gather", "gathered_ring", "ulysses"]
"""How attention sees the whole sequence. `ring`: keys and values pass around a ring, a part of the scores a step (Liu
et al., arXiv 2310.01889); `all_gather`: they are gathered before one kernel per chunk of queries (Llama 3, arXiv
2407.21783, section 3.3.2); `gathered_ring`: the steps of a ring, over keys and values that were gathered beside the
first (PyTorch's context parallelism, rotate method allgather); `ulysses`: two all-to-alls swap the split of the
sequence for one of the heads (Jacobs et al., arXiv 2309.14509)."""
StateOffload = Literal["none", "optimizer", "weights"]
USUAL_DTYPES = ("bf16", "fp16", "fp32")
"""What models are trained in, the first that a device has."""
_DEVICES = attrgetter(*DEVICE_KEYS)
_DEGREES = attrgetter(*("expert_tp" if d.key == "etp" else d.key for d in DIMENSIONS))
_CP_KINDS: Final = get_args(ContextParallel)
_ORDERS: Final = frozenset(
    "-".join(order) for order in permutations(ORDER_KEYS) if order.index("dp") == order.index("ep") + 1
)
_KEYS = (*(d.key for d in DIMENSIONS), "vpp", "micro_batch", "replicate", "prefetch")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One parallel layout. Degrees multiply to the device count: tp * cp * pp * dp = devices."""

    tp: int = 1
    """Tensor-parallel degree (Megatron column/row parallel)."""
    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Data-parallel replicas."""
    cp: int = 1
    """Context-parallel degree (sequence split through attention)."""
    cp_kind: ContextParallel = "ring"
    """How context parallelism exchanges keys and values."""
    cp_balanced: bool = True
    """Each context-parallel rank holds an early and a late chunk of a causal sequence, so that all see as many keys
    (zigzag); otherwise a contiguous part, of which the last sees nearly twice the mean."""
    ep: int = 1
    """Expert-parallel degree. Experts have tp * cp * dp ranks of a stage to themselves, of which etp shard an expert,
    ep hold different experts, and the others (`edp`) replicas (parallel folding of Megatron-Core, arXiv 2504.14960)."""
    etp: int | None = None
    """Tensor-parallel degree inside experts; None: `tp`, as in Megatron-Core. Below `tp` expert parallelism spans
    ranks of tensor parallelism too."""
    vpp: int = 1
    """Virtual stages (model chunks) per pipeline rank; 1 leaves it to the schedule."""
    micro_batch: int = 1
    """Sequences per micro-batch and data-parallel replica."""
    schedule: str = "1f1b"
    """Pipeline schedule by name (`perfmodel schedules` lists them), with a number where it takes one
    (`chimera:4`), or `file:PATH`."""
    zero: int = 0
    """ZeRO stage: 0 replicated, 1 optimizer states, 2 and gradients, 3 and weights sharded over dp * cp (of experts:
    over `edp` ranks)."""
    recompute: Recompute = "none"
    """`selective` recomputes `Job.recompute_modules`, usually the attention core, `full` every layer (Korthikanti
    section 5)."""
    sequence_parallel: bool = False
    """Norms and dropouts sharded over tp along the sequence (Korthikanti section 4.2.2)."""
    overlap_grad_reduce: bool = True
    """Gradient reduction runs on its own stream, bucket by bucket, behind backward."""
    overlap_param_gather: bool = True
    """ZeRO-3 weight all-gathers (and ZeRO-1/2 gathers after the step) are prefetched behind compute."""
    tp_overlap: bool = False
    """Tensor-parallel collectives hidden behind the products that feed them."""
    ep_overlap: bool = False
    """Dispatch and combine of one micro-batch run beside the kernels of another (Megatron-Core's
    `overlap_moe_expert_parallel_comm`, as DeepSeek-V3's DualPipe, arXiv 2412.19437, section 3.2.1), where a backward
    has a forward beside it: not while a pipeline fills and drains."""
    offload: bool = False
    """Activations wait for their backward in host memory."""
    offload_layers: int = 0
    """Activations of so many layers, the first ones, wait in host memory: each layer's are copied there while later
    layers run forward, and back while they run backward (Megatron-Core's `cpu_offloading_num_layers`)."""
    replicate: int = 1
    """Groups that each shard model states among themselves, as `zero` says, and hold copies of each other's (hybrid
    sharding); gradients are reduced over the groups too. Ranks of a group are the nearest ones."""
    prefetch: int = 1
    """ZeRO 3 gathers the weights of so many layers (groups of them in deep stages) ahead of the one in use."""
    offload_states: StateOffload = "none"
    """`optimizer`: optimizer states, master weights and sharded gradients lie in host memory, where weights are updated
    (ZeRO-Offload); `weights`: weights too, under ZeRO 3 (ZeRO-Infinity, FSDP's `CPUOffload`)."""
    order: str = "-".join(ORDER_KEYS)
    """Dimensions from that of consecutive ranks to the outermost (Megatron-LM's notation)."""
    partition: PerStage = None
    """Layers of every pipeline stage; None: as even as can be."""
    recompute_full_layers: PerStage = None
    """So many layers of every stage, the first ones, are recomputed in full, the others as `recompute` says
    (Megatron-LM's recompute method `block`); one number: of every stage alike, as far as it has them."""
    kinds: PerRank = None
    """Kind of nodes (`Cluster.kinds`) that every pipeline rank lies on, where a cluster has several; None: in the
    cluster's order, each kind as far as it goes (`Cluster.hosting`)."""

    def __post_init__(self) -> None:
        numbers = *self.degrees, self.vpp, self.micro_batch, self.replicate, self.prefetch
        for name, value in zip(_KEYS, numbers, strict=True):
            if type(value) is int and value >= 1:  # as nearly all are: layouts are made by the ten thousand
                continue
            untraced(f"layout: {name}", value)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise LayoutError(f"layout: {name} must be a whole number of at least 1, got {value!r}")
        if self.zero not in (0, 1, 2, 3):
            raise LayoutError(f"layout: zero must be 0, 1, 2 or 3, got {self.zero!r}")
        if self.offload_states not in ("none", "optimizer", "weights"):
            raise LayoutError(f"layout: offload_states must be none, optimizer or weights, got {self.offload_states!r}")
        if self.recompute not in ("none", "selective", "full"):
            raise LayoutError(f"layout: recompute must be none, selective or full, got {self.recompute!r}")
        if self.cp_kind not in _CP_KINDS:
            raise LayoutError(f"layout: cp_kind must be {', '.join(_CP_KINDS)}; got {self.cp_kind!r}")
        if self.order not in _ORDERS:
            raise LayoutError(
                f"layout: order must name each of {', '.join(ORDER_KEYS)} once with ep right before dp, as in "
                f"{'-'.join(ORDER_KEYS)}; got {self.order!r}"
            )
        for name in ("partition", "recompute_full_layers"):
            value = getattr(self, name)
            if value is not None and not all(isinstance(n, int) and n >= 0 for n in value):
                raise LayoutError(f"layout: {name} must be a whole number per stage, like 7-9-9-7, got {value!r}")
        if self.kinds is not None and (len(self.kinds) != self.pp or not all(self.kinds)):
            raise LayoutError(
                f"layout: kinds={written(self.kinds)} must name a kind of nodes for each of {self.pp} pipeline ranks, "
                "like fast-fast-slow",
                Reason.KINDS,
            )
        if self.recompute == "full" and self.recompute_full_layers is not None:
            raise LayoutError("layout: recompute=full leaves nothing to recompute_full_layers; give one of them")
        if (self.tp * self.cp * self.dp) % (self.ep * self.expert_tp):
            if self.expert_tp == self.tp:
                raise LayoutError(
                    f"layout: ep={self.ep} must divide dp*cp={self.dp * self.cp}; "
                    "with etp=1 experts spread over ranks of tp too",
                    Reason.EXPERT_RANKS,
                )
            raise LayoutError(
                f"layout: ep*etp={self.ep}*{self.expert_tp} must divide tp*cp*dp={self.tp * self.cp * self.dp}, "
                "the ranks of a pipeline stage",
                Reason.FOLDED_RANKS,
            )
        if self.dp % self.replicate or self.edp % self.replicate:
            raise LayoutError(
                f"layout: replicate={self.replicate} must divide dp={self.dp}"
                + (f" and the {self.edp} replicas of an expert" if self.ep > 1 else "")
            )
        if self.offload_states == "weights" and self.zero < 3:
            raise LayoutError("layout: offload_states=weights needs zero=3; or take offload_states=optimizer")
        if self.offload_states == "optimizer" and self.replicated and not self.zero:
            raise LayoutError("layout: offload_states=optimizer needs sharded states; take zero=1, 2 or 3")
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(f"layout: vpp={self.vpp} needs pp > 1; use vpp=1")
        if self.offload_layers != 0:
            self._check_offload_layers()

    def _check_offload_layers(self) -> None:
        """Raise `LayoutError` beside a pipeline or recompute, as Megatron-Core does with `cpu_offloading`
        (transformer_config.py), and beside `offload`, which leaves nothing to it."""
        n = self.offload_layers
        untraced("layout: offload_layers", n)
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise LayoutError(f"layout: offload_layers must be a whole number of at least 0, got {n!r}")
        if self.pp > 1 or self.effective_schedule != "1f1b":
            raise LayoutError(
                f"layout: offload_layers={n} needs one micro-batch at a time, pp=1 and schedule=1f1b; "
                "in pipelines take offload=true",
                Reason.OFFLOADED_LAYERS,
            )
        if self.recompute != "none" or any(self.recompute_full_layers or ()):
            raise LayoutError(
                f"layout: offload_layers={n} needs recompute=none and no recompute_full_layers", Reason.OFFLOADED_LAYERS
            )
        if self.offload:
            raise LayoutError(f"layout: offload=true leaves nothing to offload_layers={n}; give one of them")

    @property
    def effective_schedule(self) -> str:
        """The schedule that runs, by its registered name: 1F1B with several model chunks per rank is what Megatron-LM
        calls interleaved 1F1B (arXiv 2104.04473, section 2.2)."""
        name = schedule_name(self.schedule)
        return "interleaved" if name == "1f1b" and self.vpp > 1 else name

    @property
    def effective_sequence_parallel(self) -> bool:
        """Whether norms and dropouts are sharded: not without tensor parallelism, whose ranks would hold the shards."""
        return self.sequence_parallel and self.tp > 1

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel degree inside experts."""
        return self.tp if self.etp is None else self.etp

    @property
    def edp(self) -> int:
        """Ranks of a stage that hold the same experts: ep * etp * edp * pp = devices."""
        return self.tp * self.cp * self.dp // (self.ep * self.expert_tp)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Effective degrees of all parallel dimensions, in the table's order."""
        return _DEGREES(self)

    @property
    def replicated(self) -> bool:
        """Whether several ranks hold the same weights, inside experts or outside."""
        return self.dp * self.cp > 1 or self.edp > 1

    @property
    def forms(self) -> dict[str, Any]:
        """Fields of which several values may run alike, each with the one that stands for these."""
        return {
            "schedule": self.effective_schedule,
            "sequence_parallel": self.effective_sequence_parallel,
            "etp": None if self.etp == self.tp else self.etp,
            "replicate": self.replicate if self.zero else 1,
            "prefetch": self.prefetch if self.zero == 3 and self.overlap_param_gather else 1,
            "cp_kind": self.cp_kind if self.cp > 1 else Layout.cp_kind,
            "cp_balanced": self.cp_balanced if self.cp > 1 else Layout.cp_balanced,
            "ep_overlap": self.ep_overlap and self.ep > 1,
        }

    @property
    def canonical(self) -> "Layout":
        """The layout as what runs: layouts that run alike are equal in this form."""
        changed = {name: form for name, form in self.forms.items() if form != getattr(self, name)}
        return self.replace(**changed) if changed else self

    @property
    def remarks(self) -> tuple[str, ...]:
        """Where what runs is not what the words alone say."""
        found = []
        if self.effective_schedule != schedule_name(self.schedule):
            found.append(f"schedule={self.schedule} with vpp={self.vpp} runs as schedule={self.effective_schedule}")
        if self.replicate > 1 and not self.zero:
            found.append(f"replicate={self.replicate} has nothing to shard with zero=0")
        if self.sequence_parallel and not self.effective_sequence_parallel:
            found.append("sequence_parallel=true has nothing to shard with tp=1")
        return tuple(found)

    @property
    def said(self) -> dict[str, Any]:
        """Degrees, and fields that are not as they are by default."""
        usual = vars(_PLAIN)
        return {name: value for name, value in vars(self).items()
                if name in ("tp", "pp", "dp") or value != usual[name]}  # fmt: skip

    @property
    def columns(self) -> dict[str, Any]:
        """All fields as a row of a table has them: numbers and words; those per stage as in the notation."""
        return {
            name: written(value) if isinstance(value, tuple) else value
            for name, value in ((f.name, getattr(self, f.name)) for f in fields(self))
        }

    @property
    def devices(self) -> int:
        """tp * cp * dp * pp."""
        return prod(_DEVICES(self))

    @classmethod
    def parse(cls, text: str, **defaults: Any) -> "Layout":
        """Read `"tp=8,pp=16,..."` or DistSim's notation `8M16P1D` (section 5.1: model, pipeline, data).

        Raises:
            LayoutError, UnknownNameError: as `values`, and for values that no layout has.
        """
        return cls(**(defaults | cls.values(text)))

    @classmethod
    def values(cls, text: str) -> dict[str, Any]:
        """The fields that a layout's notation says, and no others.

        Raises:
            LayoutError: for a value that does not parse, a key that is given twice, or an empty text.
            UnknownNameError: for a key that no layout has.
        """
        return read_values(text, {f.name: f.type for f in fields(cls)})

    def replace(self, **changes: Any) -> "Layout":
        """A copy with some fields changed."""
        return type(self)(**(vars(self) | changes))  # `dataclasses.replace` takes twice as long; searches make millions

    def __str__(self) -> str:
        """The non-default fields in the notation that `parse` reads."""
        return written_values(self.said)


_PLAIN: Final = Layout()


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one step computes, apart from how it is laid out."""

    global_batch: int
    """Sequences (or images) per optimizer step."""
    seq_len: int
    """Tokens per sequence; the model's own where nobody says it."""
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
    """Fused attention multiplies in 8 bits as products do (Transformer Engine's `fp8_dpa`); otherwise in 16."""
    fp8_activation_inputs: bool = False
    """Inputs of the activation of gated feed-forwards are kept for backward in 8 bits, by a cast each way
    (Megatron-Core's `activation_func_fp8_input_store`, which takes SwiGLU alone, fused)."""
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
    masked_head: bool = False
    """Of a masked language model only the masked tokens are gathered for the head: 20 of 128, and 80 of 512
    (google-research/bert README, `max_predictions_per_seq`). Otherwise the head sees every token."""
    fused_batch_norm: bool = False
    """Of convolutional networks, the kernel of a batch norm adds the shortcut and applies the ReLU that follow."""
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
    """Rank of adapters beside the frozen products of self-attention (LoRA); 0: what is trained instead is left out."""
    adapter_all_to_all: bool = False
    """Adapters of row-parallel products bring their result from parts of its columns to parts of the sequence by an
    all-to-all, instead of gathering it whole (NeMo `LoRA`, `a2a_experimental`)."""
    stops_recompute: bool = False
    """Recompute of blocks, and of dense feed-forwards, stops before the last product, whose result backward does not
    need: under a compiler (XLA) that sees forward and backward as one, and torch's checkpoint without reentry."""
    recompute_modules: tuple[RecomputeModule, ...] = ("core_attn",)
    """What `Layout.recompute=selective` recomputes."""
    optimizer: str = "adam"
    """One of `OPTIMIZERS`: adam, adamw, adam8bit, adam16bit, adafactor, lion, muon, sgd (with momentum),
    plain-sgd."""
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
        **others: Any,
    ) -> "Job":
        """The job of a model on a device, with defaults where sequence length or dtype are not given: the model's own
        length, and the first of bf16, fp16 and fp32 that the device has. `assumed` says what is not obvious of them."""
        assumed = []
        if seq_len is None:
            seq_len = model.seq_len
            if longest := getattr(model, "longest_seq_len", 0):
                assumed.append(
                    f"sequences of {seq_len:,} tokens are assumed: {model.name} states only that it takes up to "
                    f"{longest:,}; give --seq-len (seq_len) for others"
                )
        if dtype is None:
            dtype = next((name for name in USUAL_DTYPES if name in device.dtypes), USUAL_DTYPES[0])
            if dtype != USUAL_DTYPES[0]:
                assumed.append(f"dtype {dtype} is assumed: device {device.name} has no {USUAL_DTYPES[0]}")
        return cls(global_batch=global_batch, seq_len=seq_len, dtype=dtype, assumed=tuple(assumed), **others)

    def __post_init__(self) -> None:
        whole("job", {"global_batch": self.global_batch, "seq_len": self.seq_len})
        none_or_more = ("adapter_rank", "cached_tokens", "wide_last_layers")
        whole("job", {name: getattr(self, name) for name in none_or_more}, least=0)
        if self.adapter_rank and not self.frozen:
            raise LayoutError("job: adapter_rank needs frozen weights; set frozen, or adapter_rank=0")
        if unknown := set(self.recompute_modules) - set(get_args(RecomputeModule)):
            raise UnknownNameError("recompute module", str(min(unknown)), get_args(RecomputeModule))
        if unknown := set(self.wide_modules) - set(get_args(WideModule)):
            raise UnknownNameError("wide module", str(min(unknown)), get_args(WideModule))
        if self.optimizer not in OPTIMIZERS:
            raise UnknownNameError("optimizer", str(self.optimizer), OPTIMIZERS)
        if self.fp8_recipe not in get_args(Fp8Recipe):
            known = ", ".join(filter(None, get_args(Fp8Recipe)))
            raise LayoutError(f"job: fp8_recipe must be {known} or empty; got {self.fp8_recipe!r}")
        if self.fp8_attention and not (self.dtype == "fp8" and self.flash_attention):
            raise LayoutError(
                "job: fp8_attention is fused attention beside 8-bit products; set dtype=fp8, or leave it out"
            )
        if self.cuda_graphs not in get_args(CudaGraphs):
            raise LayoutError(f"job: cuda_graphs must be {', '.join(get_args(CudaGraphs))}; got {self.cuda_graphs!r}")
        if self.expert_dispatcher not in get_args(Dispatcher):
            raise LayoutError(
                f"job: expert_dispatcher must be {', '.join(get_args(Dispatcher))}; got {self.expert_dispatcher!r}"
            )
        if not 1 <= self.expert_imbalance < inf:
            raise LayoutError(f"job: expert_imbalance must be a number of at least 1, got {self.expert_imbalance!r}")
        capacity = self.expert_capacity_factor
        if capacity is not None and not 0 < capacity < inf:
            raise LayoutError(f"job: expert_capacity_factor must be a number above 0, got {capacity!r}")

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
