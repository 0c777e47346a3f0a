"""Facts about a training framework, by subject: host, communication, memory, capabilities, launch
defaults; and the stages of a framework that balances them by cost."""

from dataclasses import dataclass
from itertools import accumulate
from math import exp, inf, log, sqrt
from typing import Literal

from perfmodel.spec._job_sections import Dispatcher
from perfmodel.spec._layout import Recompute
from perfmodel.spec._model import Model, Transformer
from perfmodel.spec.notation import PerStage

CollectiveChecks = Literal["never", "pipelines", "always"]
StepGraphs = Literal["never", "without_experts", "always"]
"""Models whose whole steps a launch may replay from one CUDA graph. Dropless experts are included
only if the host never needs the sizes of their products."""
AttentionKernel = Literal[
    "fastest",
    "torch-fastest",
    "flash-2-then-cudnn",
    "torch-flash-2",
    "flash-2",
    "flash-1-triton",
    "flash-1",
]
"""Generations of fused attention kernels; `fastest`: the newest there is for the device.
`torch-fastest` and `torch-flash-2`: by torch's `scaled_dot_product_attention`, which is AOTriton on
AMD's devices."""
Execution = Literal["eager", "compiled", "graph", "layer_graphs", "blocking"]
"""Operators issued one by one by the host, a step compiled as one program (XLA), a step replayed
from a graph, every pass of a layer from one of its own, or operators issued one by one, each after
the previous one has run."""
MemoryCounter = Literal["allocated", "reserved", "device", "resting"]
"""Counters of memory: bytes of live tensors; the segments that the allocator holds for them; the
same plus the context and buffers of libraries, as nvidia-smi shows them; tensors that live from
step to step."""
ReportedRanks = Literal["fullest", "first_rank", "first_node"]
"""Ranks whose memory is reported: the fullest of all, global rank 0 on the first pipeline stage, or
the fullest of the first node, as nvidia-smi shows it where a job was started."""


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """Costs of the host: issuing operators, launches, bookkeeping and updates."""

    execution: Execution = "eager"
    """How operators are executed: eagerly, compiled or from graphs."""
    host_op_s: float = 66e-6
    """Host time to issue one operator of an eager framework: Python, autograd and the dispatch of
    its few kernels. A block of short operators runs no faster than this. Small models show it as a
    floor per layer that neither batch nor tensor parallelism lowers: 4.5 ms for forward and
    backward of a nanotron layer of 68 operators (30 and 38, counted in its source)."""
    forward_bookkeeping: int = 0
    """Additional small operators per layer in the forward pass, which take host time but almost no
    device time."""
    backward_bookkeeping: int = 0
    """Additional small operators per layer in the backward pass."""
    routing_forward_bookkeeping: int = 0
    """Further operators of routing and dispatch in the forward of a layer of experts: histograms,
    sorts, masks, auxiliary losses, sizes of what ranks exchange."""
    routing_backward_bookkeeping: int = 0
    """Further operators of routing and dispatch in the backward of a layer of experts."""
    fused_dispatch_saves: tuple[int, int] = (0, 0)
    """Number of routing operators, forward and backward, that the dispatcher `hybridep` saves."""
    latent_forward_bookkeeping: int = 0
    """Further operators of latent attention in the forward pass, which split queries and keys,
    rotate a part of them and join them again."""
    latent_backward_bookkeeping: int = 0
    """Further operators of latent attention in the backward pass."""
    grouped_launch_s: float = 0.0
    """Host time to launch each further kernel of a grouped product that runs as one product per
    expert; 0 if it is a single kernel."""
    kernel_gap_s: float = 1.0e-6
    """Idle time of the device between two dependent kernels."""
    partition_copy_s: float = 0.0
    """Host time to cut out and copy one rank's part of one weight, if ZeRO 3 passes lists of such
    parts to its collectives; 0 if each weight is one buffer. Each gather and reduction takes this
    time for every weight and rank, while the device is idle, so that layers become slower with more
    ranks."""
    step_overhead_s: float = 0.0
    """Time per step outside kernels: data loading, logging, bookkeeping."""
    host_updates_per_s: float | None = None
    """Measured number of parameters per second that a host's processors update, for all of its
    devices together. None: derived from the bandwidth of the host's memory
    (`perfmodel.prediction.host`)."""
    host_threads: int = 0
    """Threads that each rank updates with on the host (OMP_NUM_THREADS); 0: enough to use its share
    of the memory's bandwidth."""
    eager_host_updates: bool = False
    """Updates on the host run operator by operator (torch's optimizers on a processor) instead of
    in one loop (DeepSpeed's CPU-Adam)."""

    @property
    def issue_s(self) -> float:
        """Host time to issue one operator; 0 if the whole step is compiled or replayed."""
        return self.host_op_s if self.execution in ("eager", "layer_graphs", "blocking") else 0.0


@dataclass(frozen=True, kw_only=True)
class CommunicationCosts:
    """Costs of communication: possible overlap, slowdown by overlap, and waits between ranks."""

    blocking_sends: bool = False
    """A transfer between stages holds up the sender's kernels (one stream for everything, as in
    DistIR, section 2.1) instead of running beside them."""
    zero_overlaps: bool = True
    """Communication of gradients and weights overlaps with passes under ZeRO too. False: with ZeRO,
    gradients are reduced after the last backward and weights gathered after the step."""
    sharding_overlaps: bool = False
    """Reductions of sharded gradients (ZeRO 2 and 3) always overlap with the backward pass, and
    gathers of sharded weights (ZeRO 3) with earlier layers, whatever `overlap_grad_reduce` and
    `overlap_param_gather` say."""
    tp_overlaps: bool = True
    """Communication of gradients and weights overlaps with passes under tensor parallelism too.
    False: with tensor parallelism, all collectives share the stream of the kernels."""
    tp_gradients_wait: bool = False
    """Tensor-parallel ranks reduce the gradient of a product's input after its weight gradient,
    instead of beside it (autograd makes both gradients in one node, and the collective is the
    next)."""
    contends: bool = True
    """Collectives take multiprocessors from concurrent kernels (`perfmodel.prediction`: kernels
    slowed by communication), where the device's collectives are kernels at all."""
    tp_overlap_copies: bool = False
    """The device's copy engines carry the ring steps of `tp_overlap`, so that concurrent kernels
    keep all multiprocessors."""
    checks_collectives: CollectiveChecks = "never"
    """When the hosts of a group check each collective with one another over TCP before they issue
    it (torch's TORCH_DISTRIBUTED_DEBUG=DETAIL); `pipelines`: only with more than one stage."""
    collective_skew_s: float = 0.0
    """Spread of the times at which the ranks of a group reach a collective, which waits for the
    last; the additional spread of a site is fitted to runs (`perfmodel.prediction.Site`)."""
    tp_overlap_loss: float = 0.0
    """Share of the time of a block's hidden collectives that still lengthens the step, in addition
    to the slowdown of kernels."""
    dp_overlap_loss: float = 0.0
    """Share of the time of overlapped gradient reductions and weight gathers that still lengthens
    the step."""
    straggling: float = 0.0
    """Relative spread of the ranks' speeds. A step waits for the slowest of n ranks, which takes
    exp(spread sqrt(2 ln n)) of the usual time (mean of the largest of n normal draws, to first
    order)."""

    def checks(self, stages: int) -> bool:
        """Whether hosts check collectives with this number of pipeline stages."""
        return self.checks_collectives == "always" or (
            self.checks_collectives == "pipelines" and stages > 1
        )

    def slowest_of(self, ranks: int) -> float:
        """Time of the slowest of this many ranks, relative to a typical rank."""
        return exp(self.straggling * sqrt(2 * log(ranks)))

    def hides(self, zero: int, tp: int) -> bool:
        """Whether gradient reductions and weight gathers can overlap with kernels at a ZeRO stage
        and tensor-parallel degree."""
        return (self.zero_overlaps or zero == 0) and (self.tp_overlaps or tp == 1)


@dataclass(frozen=True, kw_only=True)
class MemoryCosts:
    """Memory that the software takes besides weights, states and activations, and how it reports
    memory."""

    memory_counter: MemoryCounter | None = None
    """Counter that its own reports use; None if it is stated elsewhere or depends on the
    observer."""
    reported_ranks: ReportedRanks = "fullest"
    """The ranks whose memory its reports state."""
    context_bytes: float = 1.0e9
    """CUDA context, library handles and buffers of one communicator that no tensor accounts for."""
    communicator_bytes: float = 0.0
    """Device memory of each communicator, outside the allocator: those of all ranks, of data,
    model, tensor and pipeline parallelism, where they have several ranks. 0: `context_bytes` has
    them."""
    bucket_bytes: float = 320e6
    """Copies of gradients that a reduction holds in flight: two buckets of 40 M fp32 elements
    (Megatron-LM's default size before its buffers were reduced in place); 0 if gradients are
    reduced in place (Megatron-LM's contiguous gradient buffers, without overlap)."""
    step_bytes_per_param: float = 0.0
    """Bytes per updated parameter that the optimizer's step allocates in addition to its states,
    after activations are freed: gradients made fp32, temporaries of an optimizer that is not
    fused."""
    step_params: float = inf
    """Parameters of a rank's shard that the step updates at once under ZeRO 3."""
    casts_when_gathered: bool = False
    """Under ZeRO 3, trained weights are stored only in fp32, and cast to the narrow type when they
    are gathered."""
    autocast: bool = False
    """Weights are kept and gathered in fp32, trained or not, and operators cast their inputs
    (torch.autocast). The residual stream is of the wider type, so that full recompute saves it in
    fp32 too."""
    keeps_keys_values: bool = False
    """Layers return their keys and values, which the model's output holds until backward
    (Transformers' `use_cache`, which is on unless a launch or its own gradient checkpointing turns
    it off). Full recompute does not free them."""
    live_params: float = 0.0
    """Largest number of parameters that ZeRO 3 keeps gathered after their use. Under full
    recompute, a layer with more than half as many parameters is gathered once for its recompute and
    again for its backward. 0: it keeps none, and one gather serves a layer's recompute and backward
    (FSDP)."""
    fp8_copy_bytes: float = 0.0
    """Bytes that 8-bit copies take for each weight of trained layers, in addition to the weight
    itself, if products are in 8 bits."""
    frees_gradients: bool = False
    """Gradients are freed between steps instead of set to zero (`zero_grad(set_to_none=True)`); in
    a step's first micro-batch they are allocated while activations are freed."""
    ddp_buckets: bool = False
    """Without ZeRO, torch's DistributedDataParallel also keeps a copy of every gradient in 16-bit
    buckets."""
    cached_weight_gradients: bool = False
    """Gradients accumulate inside the products, and autograd is handed a dummy of the weight's
    shape instead, kept for each distinct shape (Transformer Engine's `get_dummy_wgrad`)."""
    keeps_outputs: bool = False
    """A stage keeps the tensor that it sends until its backward (Megatron-LM frees it once it is
    sent)."""
    receives_apart: bool = False
    """A pipeline stage has a buffer of its own for the input and for the output's gradient of every
    micro-batch of a step (torch.distributed.pipelining). Else those that are not in flight take no
    memory."""
    slots_per_stage: int = 0
    """Number of micro-batches per pipeline stage for whose activations every rank except the last
    reserves memory; 0: memory is allocated and freed as passes run."""
    planned_memory: bool = False
    """Memory is planned before the run, so that none is lost to fragmentation (OneFlow, XLA)."""
    memory_margin: float = 0.04
    """Share of device memory lost to fragmentation; a layout must fit into the rest."""

    def usable_bytes(self, memory_bytes: float) -> float:
        """Bytes of device memory that a layout may use."""
        return memory_bytes * (1 - self.memory_margin)

    def memory_to_hold(self, taken_bytes: float) -> float:
        """The device memory needed for a layout of this size: the inverse of `usable_bytes`."""
        return taken_bytes / (1 - self.memory_margin)


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Features that the software can run, and switches that a launch has."""

    schedules: tuple[str, ...] = ()
    """Pipeline schedules by perfmodel's names (`perfmodel schedules`); empty: every one."""
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages that run without pipeline stages."""
    zero_stages_in_pipelines: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages that run with pipeline stages."""
    shards_bf16_states: bool = False
    """Training in bf16 shards the optimizer's states even without ZeRO, so that stage 0 runs as
    stage 1 (DeepSpeed's `BF16_Optimizer`)."""
    zero_0_excludes: tuple[str, ...] = ()
    """Degrees that stage 0 of ZeRO, plain data parallelism, does not run beside (torchtitan's
    DistributedDataParallel)."""
    recomputes: tuple[Recompute, ...] = ("none", "selective", "full")
    """Kinds of recompute that a layout may have."""
    expert_dispatchers: tuple[Dispatcher, ...] = ("alltoall",)
    """Dispatchers of experts over nodes that it can run; `expert_dispatcher` says which is the
    default."""
    sequence_parallel_choices: tuple[bool, ...] = (True, False)
    """Allowed values of sequence parallelism with tensor parallelism."""
    tensor_parallel: bool = True
    """Products can be split over ranks (`tp`)."""
    pipeline_parallel: bool = True
    """Layers can be split into stages (`pp`)."""
    context_parallel: bool = True
    """Sequences can be split through attention (`cp`)."""
    expert_parallel: bool = True
    """Experts can lie on different ranks (`ep`)."""
    virtual_stages: bool = True
    """Several model chunks per pipeline rank (`vpp`)."""
    uneven_stages: bool = True
    """Layers per stage can be stated one by one (`partition`)."""
    offloads: bool = True
    """Activations can be offloaded to host memory."""
    offloads_layers: bool | None = None
    """Activations of single layers can be offloaded (`Layout.offload_layers`); None: as
    `offloads`."""
    pairs_passes: bool = False
    """A switch overlaps the exchanges of experts with the pass of another micro-batch
    (`Layout.ep_overlap`)."""
    keeps_fp8_activation_inputs: bool = False
    """A launch may keep inputs of activations in 8 bits (`Job.fp8_activation_inputs`)."""
    layer_graphs: bool = False
    """A launch may have the host replay layers from CUDA graphs (`Job.cuda_graphs`)."""
    step_graphs: StepGraphs = "never"
    """Whether a launch may have it replay the whole step from one."""

    def graphs_step(self, experts: bool) -> bool:
        """Whether the step of a model, with or without experts, can be replayed from one CUDA
        graph."""
        return self.step_graphs == "always" or (
            self.step_graphs == "without_experts" and not experts
        )


@dataclass(frozen=True, kw_only=True)
class LaunchDefaults:
    """Defaults of a launch beyond the fields of `Layout` and `Job`."""

    zero_in_pipelines: int | None = None
    """Default ZeRO stage with a pipeline. None: the same as without one, or the highest stage that
    pipelines can run."""
    pipeline_micro_batch: int | None = None
    """Sequences of a micro-batch in a pipeline; None: as `micro_batch`."""
    micro_batches_per_stage: int = 0
    """Default number of micro-batches per pipeline stage (model chunks of all ranks), for runs that
    state neither the number nor the size of micro-batches; 0: the size has a default instead."""
    names_schedules: bool = False
    """A launch names its pipeline schedule, so that 1F1B means one model chunk per stage. False:
    the number of chunks determines the schedule, which is called 1F1B in any case."""
    stages_by_cost: bool = False
    """Pipeline stages are cut by the multiplications of layers and head instead of the number of
    layers."""
    selective_layers: bool = False
    """`selective` recompute means some whole layers and none of the others, instead of a part of
    every layer."""
    selective_share: float = 0.0
    """The share of layers that `selective` recomputes if the launch does not state it; 0 if
    unknown, when `selective` has the meaning of `Layout`."""
    fp8_flash_attention: bool = True
    """Whether fused attention is used with 8-bit products (Transformer Engine has a kernel for
    it)."""
    bf16_grad_dtype: str = ""
    """Element type of bf16 gradients, which narrower products have too; empty: `grad_dtype`."""
    optimizer: str = "adam"
    """The optimizer of weights of at most 16 bits (`Job.optimizer`)."""
    chunks_loss_unsaid: bool = False
    """Published runs may have Liger's fused linear cross entropy (`Job.chunked_loss`) on without
    stating it."""
    fuses_operations_unsaid: bool = False
    """Published runs may have Transformer Engine's operation fuser (`Job.operation_fuser`) on
    without stating it."""
    drops_tokens_unsaid: bool = False
    """Published runs may have experts with a capacity (`Job.expert_capacity_factor`), and drop
    tokens, without stating it."""
    vocab_multiple: int = 1
    """The vocabulary is padded to a multiple of this times `tp` (what readers of launch files do
    with it)."""
    length_bin_tokens: int = 0
    """Width in tokens of the bins by which the loader sorts sequences for pre-training encoders; a
    batch comes from one bin and is padded to the end of the bin. Data of the shortest usual length
    (128 tokens) are not sorted. 0: sequences are not sorted, or it is unknown."""


def partition_by_cost(model: Model, stages: int) -> PerStage:
    """Layers per stage, balanced by multiplications as in nanotron's `build_model`.

    A layer costs 4 h^2 (with grouped keys and values, and with heads of another size, too) + 3 h f,
    or 2 h f without a gate; the head costs h V. None (even stages) where there are too few layers.
    """
    if stages == 1 or not isinstance(model, Transformer):
        return None
    ffn_products = model.inner_projections + 1
    layer_cost = 4 * model.hidden**2 + ffn_products * model.hidden * model.ffn_hidden
    head_cost = model.hidden * model.vocab
    cumulative_costs = list(accumulate([layer_cost] * model.layers + [head_cost]))
    total_cost = cumulative_costs[-1]

    # A stage is closed by the first block that carries the sum beyond its share.
    layers_of_stage = [0] * stages
    stage = 0
    for cost in cumulative_costs[:-1]:
        layers_of_stage[stage] += 1
        stage += cost > total_cost * (stage + 1) / stages

    # Stages near the end may be left without a layer (they hold the head or the loss alone): each
    # takes one from the stage before it that has several.
    for stage in range(stages - 2, 0, -1):
        donor = next((i for i in range(stage - 1, -1, -1) if layers_of_stage[i] > 1), None)
        if layers_of_stage[stage] == 0 and donor is not None:
            layers_of_stage[donor] -= 1
            layers_of_stage[stage] = 1
    return tuple(layers_of_stage) if all(layers_of_stage[:-1]) else None
