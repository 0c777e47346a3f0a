"""Training frameworks: what the software does with a model, a job and a layout, and what it can run."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import exp, inf, log, sqrt
from typing import Any, Final, Literal, get_args

from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.spec._device import Device
from perfmodel.spec._documented import Stated
from perfmodel.spec._job import Dispatcher, EagerKernel, Fp8Recipe, Job
from perfmodel.spec._layout import ContextParallel, Layout, Recompute
from perfmodel.spec._model import Model, Transformer
from perfmodel.spec._notation import written, written_values
from perfmodel.spec._relevance import concerns
from perfmodel.spec._stage_partition import partition_by_cost
from perfmodel.units import untraced, whole

AttentionKernel = Literal["fastest", "flash-2-then-cudnn", "flash-2", "flash-1-triton", "flash-1"]
"""Generations of fused attention kernels; `fastest`: the newest there is for the device."""
CollectiveChecks = Literal["never", "pipelines", "always"]
Execution = Literal["eager", "compiled", "graph", "layer_graphs", "blocking"]
"""Operators issued one by one by the host, a step compiled as one program (XLA), a step replayed from a graph, every
pass of a layer from one of its own, or operators issued one by one, each once the one before it has run."""
MemoryCounter = Literal["allocated", "reserved", "device", "resting"]
"""What a figure of memory counts: bytes of live tensors; the segments that the allocator holds for them; these with
the context and the buffers of libraries, as nvidia-smi shows them; tensors that live from step to step."""
ReportedRanks = Literal["fullest", "first_rank", "first_node"]
"""Ranks whose memory is told: the fullest of all, global rank 0 on the first pipeline stage, or the fullest of the
first node, as nvidia-smi shows it where a job was started."""

_OF_TENSOR_PARALLEL: Final = ("sequence_parallel", "tp_overlap")
_LAYOUT_DEFAULTS: Final = ("zero", "recompute", *_OF_TENSOR_PARALLEL)
_CONTEXT_DEFAULTS: Final = ("cp_kind", "cp_balanced")
_EXPERT_DEFAULTS: Final = ("ep_overlap",)
"""What means nothing without context or expert parallelism."""
_JOB_DEFAULTS: Final = (
    "eager_kernels",
    "keep_gathered",
    "half_gradients",
    "all_reduce_gradients",
    "whole_gradients_in_pipelines",
    "repeated_keys",
    "masked_head",
    "weighted_experts",
    "expert_dispatcher",
    "fused_batch_norm",
    "loss_with_gradient",
    "channels_last",
)


@dataclass(frozen=True, kw_only=True)
class Framework(Stated):
    """One version of a training framework. The defaults are those of `generic`: eager PyTorch, Megatron-LM like, with
    everything overlapped that can be."""

    name: str = "generic"
    since: int = 0
    """Year of the version."""
    sources: tuple[str, ...] = ()
    """Where the facts are from: files with their version, or pages of documentation."""

    # kernels and host
    execution: Execution = "eager"
    host_op_s: float = 66e-6
    """Host time to issue one operator of an eager framework: Python, autograd and dispatch of the few kernels that it
    is. A block of short operators runs no faster than this. Small models show it as a floor per layer that neither
    batch nor tensor parallelism lowers: 4.5 ms for forward and backward of a nanotron layer of 68 operators (30 and 38,
    counted in its source)."""
    forward_bookkeeping: int = 0
    backward_bookkeeping: int = 0
    """Operators that a layer's passes issue beyond the kernels counted here: sums over masks, products in parts,
    partial sums. They take the host's time and next to none of the device's."""
    routing_forward_bookkeeping: int = 0
    routing_backward_bookkeeping: int = 0
    """The same of routing and dispatch in a layer of experts: histograms, sorts, masks, auxiliary losses, sizes of what
    ranks exchange."""
    fused_dispatch_saves: tuple[int, int] = (0, 0)
    """Of these, in forward and backward, what `hybridep` does without."""
    latent_forward_bookkeeping: int = 0
    latent_backward_bookkeeping: int = 0
    """The same of latent attention: parts of queries and keys that are cut, rotated and put together one by one."""
    grouped_launch_s: float = 0.0
    """Host time to launch each further kernel of a grouped product that is no kernel of its own but a product per
    expert; 0 where it is one."""
    kernel_gap_s: float = 1.0e-6
    """Device idle time between two dependent kernels of one stream."""
    eager_kernels: tuple[EagerKernel, ...] = ()
    """Kinds of element-wise work that are not fused."""
    attention: AttentionKernel = "fastest"
    """Generation of the fused attention kernel; `flash-2-then-cudnn`: FlashAttention-2, and cuDNN's on Blackwell."""
    fp8_recipe: Fp8Recipe = ""
    """How scales of 8-bit products are found where nothing else is said; empty where there are no such products.
    Products of 4 bits go by nvfp4."""

    # communication
    blocking_sends: bool = False
    """A transfer between stages holds up the sender's kernels (one stream for everything, as in DistIR, section 2.1)
    instead of running beside them."""
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    """Both as in `Layout`, where a launch does not say."""
    zero_overlaps: bool = True
    """False: with ZeRO, gradients are reduced after the last backward and weights gathered after the step."""
    sharding_overlaps: bool = False
    """Sharded gradients (ZeRO 2 and 3) are always reduced beside the backward, and sharded weights (ZeRO 3) always
    gathered beside the layers before, whatever `overlap_grad_reduce` and `overlap_param_gather` are otherwise."""
    tp_overlaps: bool = True
    """False: the same with tensor parallelism, where all collectives share the stream of the kernels."""
    tp_overlap: bool = False
    ep_overlap: bool = False
    cp_kind: ContextParallel = "ring"
    cp_balanced: bool = True
    """All as in `Layout`."""
    pairs_passes: bool = False
    """A switch runs the exchanges of experts beside the pass of another micro-batch (`Layout.ep_overlap`)."""
    expert_dispatcher: Dispatcher = "alltoall"
    all_reduce_gradients: bool = False
    whole_gradients_in_pipelines: bool = False
    repeated_keys: bool = False
    masked_head: bool = False
    loss_with_gradient: bool = False
    fused_batch_norm: bool = False
    channels_last: bool = False
    """All as in `Job`."""
    partition_copy_s: float = 0.0
    """Host time to cut out and copy the part of one weight that one rank holds, where ZeRO 3 hands its collectives
    lists of such parts; 0 where each weight is one buffer. A gather and a reduction take it for every weight and rank
    while the device idles, so that more ranks make a layer slower."""
    contends: bool = True
    """Collectives take multiprocessors from the kernels beside them (`perfmodel.prediction`: kernels slowed by
    communication), where the device's collectives are kernels at all."""
    tp_overlap_copies: bool = False
    """The device's copy engines carry the ring steps of `tp_overlap`, which so take nothing from the kernels beside
    them."""
    checks_collectives: CollectiveChecks = "never"
    """When hosts of a group agree on each collective, over TCP, before they issue it (torch's
    TORCH_DISTRIBUTED_DEBUG=DETAIL); in `pipelines`: with more than one stage."""
    collective_skew_s: float = 0.0
    """Spread of the times at which the ranks of a group reach a collective, which waits for the last; what sites add
    is fitted to runs (`perfmodel.prediction.Site`)."""
    tp_overlap_loss: float = 0.0
    """Share of a block's hidden collectives that shows after all, beside what the device's multiprocessors lose."""
    dp_overlap_loss: float = 0.0
    """The same of gradient reductions and weight gathers that run beside passes."""
    straggling: float = 0.0
    """Relative spread of the ranks' speeds. A step waits for the slowest of n ranks, which takes
    exp(spread sqrt(2 ln n)) of the usual time (mean of the largest of n normal draws, to first order)."""
    length_bin_tokens: int = 0
    """Width of the bins into which its loader sorts the sequences of an encoder's pre-training by length; a batch comes
    from one bin and is padded to the bin's end. Data of the shortest length that models are pre-trained with
    (128 tokens) are not sorted. 0: nothing is sorted, or nobody knows."""
    step_overhead_s: float = 0.0
    """Time of a step that no kernel accounts for: data loading, logging, bookkeeping."""

    # what a launch leaves unsaid
    zero: int = 0
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    """All as in `Layout`."""
    micro_batch: int = 1
    """What a launch file means that says none. Not filled into layouts, which go with a global batch that it might not
    divide."""
    pipeline_micro_batch: int | None = None
    """The same in a pipeline; None: as `micro_batch`."""
    micro_batches_per_stage: int = 0
    """Micro-batches that a pipeline makes of what a replica gets for each of its stages (model chunks of all ranks),
    where a run states neither their number nor their size; 0: their size is what has a default."""
    stages_by_cost: bool = False
    """Pipeline stages are cut by the multiplications of layers and head instead of the number of layers."""
    flash_attention: bool = True
    fp8_flash_attention: bool = True
    """Fused attention, in 16 bits and where products are in 8 bits (which Transformer Engine runs, with fused attention
    of its own)."""
    grad_dtype: str = "fp32"
    """Element type in which 16-bit gradients are accumulated and reduced."""
    bf16_grad_dtype: str = ""
    """The same of bf16 gradients, which narrower products have too, where it is another."""
    half_gradients: bool = False
    keep_gathered: bool = False
    weighted_experts: bool = False
    """All as in `Job`."""
    stops_recompute: bool = False
    """As in `Job`; compiled steps do anyway."""
    keeps_fp8_activation_inputs: bool = False
    """A launch may keep inputs of activations in 8 bits (`Job.fp8_activation_inputs`)."""
    chunks_loss_unsaid: bool = False
    """Published runs may have Liger's fused linear cross entropy (`Job.chunked_loss`) on without a word of it."""
    fuses_operations_unsaid: bool = False
    """Published runs may have Transformer Engine's operation fuser (`Job.operation_fuser`) on without a word of it."""
    selective_layers: bool = False
    """`selective` recompute means some whole layers and none of the others, instead of a part of every layer."""
    selective_share: float = 0.0
    """The share of the layers that these are where nothing else tells; 0 where it is not known, and `selective` is then
    taken as in `Layout`."""
    layer_graphs: bool = False
    """A launch may have the host replay layers from CUDA graphs (`Job.cuda_graphs`)."""
    vocab_multiple: int = 1
    """The vocabulary is padded to a multiple of this times `tp` (what readers of launch files do with it)."""

    # memory
    memory_counter: MemoryCounter | None = None
    """What its own reports count; None where that is said besides, or depends on who looks."""
    reported_ranks: ReportedRanks = "fullest"
    """Whose memory its own reports, or those of its users, tell."""
    context_bytes: float = 1.0e9
    """CUDA context, library handles and buffers of one communicator that no tensor accounts for."""
    communicator_bytes: float = 0.0
    """Device memory of each communicator, outside the allocator: those of all ranks, of data, model, tensor and
    pipeline parallelism, where they have several ranks. 0: as `context_bytes` has them."""
    host_updates_per_s: float | None = None
    """Parameters per second that the processors of a host update, for all of its devices together, where that was
    measured. None: as the bandwidth of the host's memory allows (`perfmodel.prediction._host`)."""
    host_threads: int = 0
    """Threads that each rank updates with on the host (OMP_NUM_THREADS); 0: as many as its share of the memory's
    bandwidth takes."""
    eager_host_updates: bool = False
    """Updates on the host run operator by operator (torch's optimizers on a processor) instead of in one loop
    (DeepSpeed's CPU-Adam)."""
    bucket_bytes: float = 320e6
    """Copies of gradients that a reduction holds in flight: two buckets of 40 M fp32 elements (Megatron-LM's default
    size before its buffers were reduced in place); 0 where they are reduced where they lie (Megatron-LM's contiguous
    gradient buffers, without overlap)."""
    step_bytes_per_param: float = 0.0
    """Bytes per updated parameter that the optimizer's step allocates beside its states, when activations are gone:
    gradients made fp32, temporaries of an optimizer that is not fused."""
    step_params: float = inf
    """Parameters of a rank's shard that the step updates at once under ZeRO 3."""
    live_params: float = 0.0
    """Parameters that ZeRO 3 keeps gathered after their use, as long as no more than so many are."""
    fp8_copy_bytes: float = 0.0
    """Bytes per weight of trained layers that its 8-bit copies take beside it, where products are in 8 bits."""
    ddp_buckets: bool = False
    """Without ZeRO, torch's DistributedDataParallel keeps a 16-bit bucket of every gradient besides."""
    cached_weight_gradients: bool = False
    """Gradients accumulate inside the products, and autograd is handed a dummy of the weight's shape instead, kept for
    each distinct shape (Transformer Engine's `get_dummy_wgrad`)."""
    keeps_outputs: bool = False
    """What a stage sends is kept until its backward (Megatron-LM frees it once it is sent)."""
    planned_memory: bool = False
    """Tensors are placed before the run, so that nothing is lost between them (OneFlow, XLA)."""
    memory_margin: float = 0.04
    """Share of device memory that fragmentation makes unusable; a layout fits below the rest."""

    # what it can run
    schedules: tuple[str, ...] = ()
    """Pipeline schedules by their names here (`perfmodel schedules`); empty: every one."""
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    zero_stages_in_pipelines: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages, without and with pipeline stages."""
    zero_in_pipelines: int | None = None
    """ZeRO stage of pipelines where nothing is said. None: as without, or the highest that pipelines take."""
    recomputes: tuple[Recompute, ...] = ("none", "selective", "full")
    expert_dispatchers: tuple[Dispatcher, ...] = ("alltoall",)
    """Those of experts over nodes that it can run; which of them is taken by default says `expert_dispatcher`."""
    sequence_parallel_choices: tuple[bool, ...] = (True, False)
    tensor_parallel: bool = True
    pipeline_parallel: bool = True
    context_parallel: bool = True
    expert_parallel: bool = True
    virtual_stages: bool = True
    """Several model chunks per pipeline rank (`vpp`)."""
    uneven_stages: bool = True
    """Layers per stage can be said one by one (`partition`)."""
    offloads: bool = True
    """Activations can wait in host memory."""
    offloads_layers: bool | None = None
    """Those of single layers can (`Layout.offload_layers`); None: as `offloads`."""

    @property
    def issue_s(self) -> float:
        """Host time to issue an operator of a step; 0 where the step is compiled or replayed as a whole."""
        return self.host_op_s if self.execution in ("eager", "layer_graphs", "blocking") else 0.0

    def running(self, job: Job, model: Model) -> "Framework":
        """As it issues the steps of a job: with some of their kernels in CUDA graphs (what is compiled needs none), or
        waiting for every kernel, and the operators of its dispatcher and of the model's attention."""
        if self.execution != "eager":
            return self
        if job.cuda_graphs != "none":
            return replace(self, execution="graph" if job.cuda_graphs == "step" else "layer_graphs")
        latent = isinstance(model, Transformer) and model.latent_attention is not None
        saved = self.fused_dispatch_saves if job.expert_dispatcher == "hybridep" else (0, 0)
        return replace(
            self,
            execution="blocking" if job.blocking_launches else self.execution,
            forward_bookkeeping=self.forward_bookkeeping + latent * self.latent_forward_bookkeeping,
            backward_bookkeeping=self.backward_bookkeeping + latent * self.latent_backward_bookkeeping,
            routing_forward_bookkeeping=max(0, self.routing_forward_bookkeeping - saved[0]),
            routing_backward_bookkeeping=max(0, self.routing_backward_bookkeeping - saved[1]),
        )

    @property
    def costs_steps(self) -> bool:
        """Whether a step takes more than its passes and the communication between them."""
        return self.straggling > 0 or self.step_overhead_s > 0

    def checks(self, stages: int) -> bool:
        """Whether hosts check collectives in runs of so many pipeline stages."""
        return self.checks_collectives == "always" or (self.checks_collectives == "pipelines" and stages > 1)

    def slowest_of(self, ranks: int) -> float:
        """Time of the slowest of so many ranks, relative to the usual one."""
        return exp(self.straggling * sqrt(2 * log(ranks)))

    @property
    def label(self) -> str:
        """`name@year`, as `--framework` takes it."""
        return f"{self.name}@{self.since}" if self.since else self.name

    def layout_defaults(self, stated: Mapping[str, Any]) -> dict[str, Any]:
        """Values of a layout's fields that `stated` leaves out, as this framework sets them.

        Nothing is overlapped that cannot be (`hides`).
        """
        defaults = {name: getattr(self, name) for name in _LAYOUT_DEFAULTS}
        if stated.get("tp", 1) == 1:
            defaults = {name: value for name, value in defaults.items() if name not in _OF_TENSOR_PARALLEL}
        if stated.get("pp", 1) > 1 and self.zero_in_pipelines is not None:
            defaults["zero"] = self.zero_in_pipelines
        elif stated.get("pp", 1) > 1 and defaults["zero"] not in self.zero_stages_in_pipelines:
            defaults["zero"] = max(self.zero_stages_in_pipelines)
        if stated.get("pp", 1) > 1 and self.schedules and Layout.schedule not in self.schedules:
            defaults["schedule"] = self.schedules[0]
        defaults |= self.degree_defaults(stated.get("cp", 1), stated.get("ep", 1))
        if stated.get("recompute_full_layers") is not None:
            defaults["recompute"] = "none"
        zero = stated.get("zero", defaults["zero"])
        overlaps = self.hides(zero, stated.get("tp", 1))
        reduces = self.overlap_grad_reduce or (self.sharding_overlaps and zero >= 2)
        gathers = self.overlap_param_gather or (self.sharding_overlaps and zero == 3)
        defaults |= {
            "overlap_grad_reduce": reduces and overlaps,
            "overlap_param_gather": gathers and overlaps,
        }
        return {name: value for name, value in defaults.items() if name not in stated}

    def hides(self, zero: int, tp: int) -> bool:
        """Whether gradients can be reduced and weights gathered beside kernels under a stage of ZeRO and a degree of
        tensor parallelism."""
        return (self.zero_overlaps or zero == 0) and (self.tp_overlaps or tp == 1)

    @property
    def cuts_collectives(self) -> bool:
        """Whether tensor-parallel collectives can run in parts beside products (`Layout.tp_overlap`), by default or by
        a switch."""
        return self.tp_overlap or self.tp_overlap_copies

    def usable_bytes(self, memory_bytes: float) -> float:
        """Bytes of a device's memory that a layout may take."""
        return memory_bytes * (1 - self.memory_margin)

    def memory_to_hold(self, taken_bytes: float) -> float:
        """The memory of a device of which a layout may take so much: the inverse of `usable_bytes`."""
        return taken_bytes / (1 - self.memory_margin)

    def usual_micro_batch(self, stages: int, batch_per_replica: int) -> int:
        """Sequences of a micro-batch where nothing is said.

        Args:
            stages: of the pipeline, model chunks of all its ranks.
            batch_per_replica: sequences that a replica gets per step; 0 where that is not known.
        """
        if stages == 1:
            return self.micro_batch
        if self.micro_batches_per_stage:
            return max(1, batch_per_replica // (self.micro_batches_per_stage * stages))
        return self.micro_batch if self.pipeline_micro_batch is None else self.pipeline_micro_batch

    def degree_defaults(self, cp: int, ep: int) -> dict[str, Any]:
        """Values of the fields that say how context and expert parallelism work, where there is any, as this framework
        has them."""
        context, experts = _CONTEXT_DEFAULTS * (cp > 1), _EXPERT_DEFAULTS * (ep > 1)
        return {name: getattr(self, name) for name in (*context, *experts)}

    def layout(self, text: str, model: Model | None = None) -> tuple[Layout, str]:
        """A layout from its notation, and a sentence on what was not said and is taken as this framework has it.

        The sentence is empty where that is as in `Layout` itself. With a `model`, stages are cut and selective
        recompute is as the framework has them.

        Raises:
            LayoutError, UnknownNameError: as `Layout.parse`.
        """
        return self._laid_out(Layout.values(text), model)

    def _laid_out(self, stated: dict[str, Any], model: Model | None) -> tuple[Layout, str]:
        """A layout from the fields that are stated, and a sentence on those that are filled in."""
        filled = self.layout_defaults(stated)
        if self.stages_by_cost and model is not None and "partition" not in stated:
            filled["partition"] = partition_by_cost(model, stated.get("pp", 1))
        recomputes = (filled | stated).get("recompute")
        left_open = recomputes == "selective" and "recompute_full_layers" not in stated
        full_layers = self._selective_layers(stated, model) if left_open else 0
        if full_layers:
            stated = stated | {"recompute": "none"}
            filled["recompute_full_layers"] = (full_layers,)
            filled.pop("recompute", None)
        layout = Layout(**filled, **stated)

        # Only what differs from a plain layout is worth a sentence.
        layout_defaults = {field.name: field.default for field in fields(Layout)}
        unusual = {name: value for name, value in filled.items() if value != layout_defaults[name]}
        return layout, self._assumed(unusual, "layout")

    def job_defaults(self, dtype: str) -> dict[str, Any]:
        """Values of a job's fields as this framework sets them for products of an element type."""
        narrow = dtype in ("fp8", "fp4") and bool(self.fp8_recipe)
        return {name: getattr(self, name) for name in _JOB_DEFAULTS} | {
            "fp8_recipe": self._recipe(dtype),
            "flash_attention": self.fp8_flash_attention if narrow else self.flash_attention,
            "grad_dtype": self._grad_dtype(dtype),
            "stops_recompute": self.stops_recompute or self.execution == "compiled",
            "narrow_logits": self.execution == "compiled",
        }

    def _recipe(self, dtype: str) -> Fp8Recipe:
        # The only integers that training frameworks multiply are AQT's, under JAX.
        if dtype == "int8":
            return "aqt" if self.execution == "compiled" else ""
        return self.fp8_recipe if dtype == "fp8" else "nvfp4" if dtype == "fp4" and self.fp8_recipe else ""

    def _grad_dtype(self, dtype: str) -> str:
        if dtype in ("fp64", "fp32"):
            return dtype
        # TF32 is a way to multiply fp32 tensors, whose gradients are fp32.
        if dtype == "tf32":
            return "fp32"
        return ("" if dtype == "fp16" else self.bf16_grad_dtype) or self.grad_dtype

    def _selective_layers(self, stated: Mapping[str, Any], model: Model | None) -> int:
        """Layers of every stage that `selective` recompute repeats as a whole; 0 where it is no whole layers."""
        if not self.selective_layers or not self.selective_share or not isinstance(model, Transformer):
            return 0
        per_stage = (model.layers + model.decoder_layers) / (stated.get("pp", 1) * stated.get("vpp", 1))
        return max(1, round(self.selective_share * per_stage))

    def notation(self, layout: Layout, model: Model | None = None) -> str:
        """A short notation from which `layout` reads this very layout.

        It says the degrees, what differs from the defaults of `Layout`, and those defaults that this framework would
        set otherwise.
        """
        fields_said = layout.notation_fields
        defaults = {field.name: field.default for field in fields(Layout)}
        for name in layout.framework_fields:
            if fields_said[name] != defaults[name]:
                continue
            shorter = {key: value for key, value in fields_said.items() if key != name}
            if self._reads(shorter, model) == layout:
                fields_said = shorter
        return written_values(fields_said)

    def _reads(self, fields_said: dict[str, Any], model: Model | None) -> Layout | None:
        """The layout of these fields as this framework completes them; None where they make none."""
        try:
            return self._laid_out(fields_said, model)[0]
        except LayoutError:
            return None

    def job(
        self,
        model: Model,
        device: Device,
        *,
        global_batch: int,
        seq_len: int | None = None,
        dtype: str | None = None,
        **stated: Any,
    ) -> Job:
        """`Job.of` with this framework's defaults for the fields that `stated` leaves out.

        `assumed` of the job names those that differ from `Job`'s own defaults and mean something for the model.
        """
        plain = Job.of(model, device, global_batch=global_batch, seq_len=seq_len, dtype=dtype, **stated)
        defaults = self.job_defaults(plain.dtype)
        if defaults["fp8_recipe"] == "mxfp8" and not device.scales_blocks:
            defaults["fp8_recipe"] = "current"
        filled = {name: value for name, value in defaults.items() if name not in stated}
        meaningful = {n: value for n, value in filled.items() if concerns(n, model)}
        if "eager_kernels" in meaningful:
            meaningful["eager_kernels"] = tuple(
                kernel for kernel in meaningful["eager_kernels"] if concerns(kernel, model)
            )
        meaningful = {n: value for n, value in meaningful.items() if value != getattr(plain, n)}
        assumed = self._assumed(meaningful, "job")
        return replace(plain, **filled, assumed=(*plain.assumed, assumed) if assumed else plain.assumed)

    def refused(self, layout: Layout) -> dict[str, str]:
        """Fields of a layout with values that this framework cannot run, and these in words."""
        stages = self.zero_stages_in_pipelines if layout.pp > 1 else self.zero_stages
        schedule = layout.effective_schedule
        runs = {
            "zero": layout.zero in stages,
            "schedule": layout.pp == 1 or not self.schedules or schedule in self.schedules,
            "recompute": layout.recompute in self.recomputes,
            "sequence_parallel": layout.tp == 1 or layout.sequence_parallel in self.sequence_parallel_choices,
            "tp": layout.tp == 1 or self.tensor_parallel,
            "pp": layout.pp == 1 or self.pipeline_parallel,
            "cp": layout.cp == 1 or self.context_parallel,
            "ep": layout.ep == 1 or self.expert_parallel,
            "vpp": layout.vpp == 1 or self.virtual_stages,
            "partition": layout.partition is None or self.uneven_stages or self.stages_by_cost,
            "offload": not layout.offload or self.offloads,
            "offload_layers": not layout.offload_layers or self._offloads_layers_beside(layout.recompute),
        }
        notations = {
            "zero": f"zero={layout.zero}{' in a pipeline' * (layout.pp > 1)}",
            "schedule": f"schedule={schedule}",
            "partition": "partition",
        }
        refused = {}
        for name, can_run in runs.items():
            if not can_run:
                refused[name] = notations.get(name, f"{name}={written(getattr(layout, name))}")
        return refused

    def _offloads_layers_beside(self, recompute: Recompute) -> bool:
        """Whether single layers can be offloaded beside recompute.

        Megatron-Core refuses both at once (transformer_config.py, `cpu_offloading`). A compiler places every named
        tensor by itself (JAX, `save_and_offload_only_these_names`).
        """
        offloads = self.offloads if self.offloads_layers is None else self.offloads_layers
        return offloads and (recompute == "none" or self.execution == "compiled")

    def cannot_run(self, layout: Layout) -> tuple[str, ...]:
        """Why this framework cannot run a layout, one sentence each; empty if it can."""
        return tuple(self.refuses(what) for what in self.refused(layout).values())

    def refuses(self, what: str) -> str:
        """The sentence that this framework does not run something."""
        return f"{self.label} does not run {what}"

    def _assumed(self, values: Mapping[str, Any], record: str) -> str:
        """A sentence on fields that are filled in; empty if there are none."""
        if not values:
            return ""
        notation = ", ".join(f"{name}={written(value)}" for name, value in values.items())
        return f"assumed as {self.label} has it: {notation}; say otherwise in the {record}"

    def __post_init__(self) -> None:
        if self.execution not in get_args(Execution):
            raise PerfModelError(f"framework {self.name}: execution must be one of {', '.join(get_args(Execution))}")
        if self.reported_ranks not in get_args(ReportedRanks):
            known = ", ".join(get_args(ReportedRanks))
            raise PerfModelError(f"framework {self.name}: reported_ranks must be one of {known}")
        if self.host_updates_per_s is not None and self.host_updates_per_s <= 0:
            raise PerfModelError(
                f"framework {self.name}: host_updates_per_s must be above 0, got {self.host_updates_per_s}"
            )
        whole(f"framework {self.name}", {"host_threads": self.host_threads}, least=0)
        for name in (
            "host_op_s",
            "grouped_launch_s",
            "partition_copy_s",
            "kernel_gap_s",
            "context_bytes",
            "communicator_bytes",
            "bucket_bytes",
            "step_bytes_per_param",
            "step_params",
            "live_params",
            "fp8_copy_bytes",
        ):
            untraced(f"framework {self.name}: {name}", getattr(self, name))
            if getattr(self, name) < 0:
                raise PerfModelError(f"framework {self.name}: {name} must not be below 0, got {getattr(self, name)}")
