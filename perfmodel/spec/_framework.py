"""Training frameworks: how the software runs a model, a job and a layout, and what it can run."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, get_args

from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.spec._cluster import Device
from perfmodel.spec._documented import Stated
from perfmodel.spec._job import Job, concerns
from perfmodel.spec._job_sections import Fp8Recipe, Implementation
from perfmodel.spec._layout import Layout, Recompute
from perfmodel.spec._model import Model, Transformer
from perfmodel.spec._sections import Sectioned, flat_keywords, section
from perfmodel.spec.framework_facts import (
    AttentionKernel,
    Capabilities,
    CommunicationCosts,
    Execution,
    HostCosts,
    LaunchDefaults,
    MemoryCosts,
    ReportedRanks,
    partition_by_cost,
)
from perfmodel.spec.notation import schedule_and_drains, written, written_values
from perfmodel.units import dtype_bytes, require_whole, untraced

_OF_EVERY_LAYOUT: Final = ("zero", "recompute")
_OF_TENSOR_PARALLEL: Final = ("sequence_parallel", "tp_overlap")
_OF_CONTEXT_PARALLEL: Final = ("cp_kind", "cp_balanced")
_OF_EXPERT_PARALLEL: Final = ("ep_overlap",)
_LAYOUT_DEFAULTS: Final = (
    *_OF_EVERY_LAYOUT,
    *_OF_TENSOR_PARALLEL,
    *_OF_CONTEXT_PARALLEL,
    *_OF_EXPERT_PARALLEL,
    "overlap_grad_reduce",
    "overlap_param_gather",
    "micro_batch",
)
"""Fields of `Layout` for which frameworks have their own defaults."""
_JOB_DEFAULTS: Final = (
    "recompute_modules",
    "eager_kernels",
    "row_kernels",
    "keep_gathered",
    "half_gradients",
    "all_reduce_gradients",
    "whole_gradients_in_pipelines",
    "whole_gradients_in_accumulation",
    "repeated_keys",
    "split_positions",
    "masked_head",
    "weighted_experts",
    "expert_dispatcher",
    "fused_batch_norm",
    "loss_with_gradient",
    "channels_last",
    "wide_norms",
    "fp8_recipe",
    "flash_attention",
    "grad_dtype",
    "stops_recompute",
    "fp8_params",
    "narrow_logits",
    "saves_narrow_logits",
    "gathered_logits",
)
"""Fields of the sections of `Job` for which frameworks have their own defaults."""
_NOT_NEGATIVE: Final = (
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
)


@flat_keywords
@dataclass(frozen=True, kw_only=True)
class Framework(Stated, Sectioned):
    """One version of a training framework. The defaults are those of `generic`: eager PyTorch in
    the style of Megatron-LM, with all possible overlap."""

    name: str = "generic"
    """Name in the catalog, or of the file."""
    since: int = 0
    """Year of the version."""
    sources: tuple[str, ...] = ()
    """Sources of the facts: files with their version, or pages of documentation."""
    attention: AttentionKernel = "fastest"
    """Generation of the fused attention kernel; `flash-2-then-cudnn`: torch's, which is
    FlashAttention-2, cuDNN's on Blackwell, and AOTriton on AMD's devices."""
    tuned_products: bool = False
    """Matrix products use kernels tuned for their exact sizes, instead of the library's heuristic
    choice (`STOCK_PRODUCTS`)."""
    host: HostCosts = field(default=HostCosts(), metadata=section())
    """Time that the host of this framework takes per launch, update and step."""
    communication: CommunicationCosts = field(default=CommunicationCosts(), metadata=section())
    """Overlap and costs of communication."""
    memory: MemoryCosts = field(default=MemoryCosts(), metadata=section())
    """Device memory used by the software."""
    capabilities: Capabilities = field(default=Capabilities(), metadata=section())
    """Features that the software can run."""
    launch: LaunchDefaults = field(default=LaunchDefaults(), metadata=section())
    """Further defaults of a launch."""

    default_layout: Layout = field(default=Layout(), metadata=section(*_LAYOUT_DEFAULTS))
    """Defaults for fields of a layout. `micro_batch` is the default of launch files only; layouts
    do not use it, because it might not divide their global batch."""
    default_job: Implementation = field(default=Implementation(), metadata=section(*_JOB_DEFAULTS))
    """Defaults for fields of a job: `flash_attention` for products of at least 16 bits,
    `grad_dtype` for 16-bit gradients, `fp8_recipe` for 8-bit products (empty without them; 4-bit
    products use nvfp4). Models that are compiled as a whole always have `stops_recompute` and
    `narrow_logits`."""

    def running(self, job: Job, model: Model) -> "Framework":
        """The framework adapted to a job: CUDA graphs, synchronous kernels, the expert dispatcher
        and the attention's operators."""
        host = self.host
        # Everything below concerns operators that are issued one by one, unlike those of compiled
        # programs and replayed graphs.
        if host.execution != "eager":
            return self
        if job.kernels.cuda_graphs != "none":
            execution = "graph" if job.kernels.cuda_graphs == "step" else "layer_graphs"
            return replace(self, host=replace(host, execution=execution))
        # Operators beside the kernels of a layer: those of latent attention come on top, and a
        # fused dispatcher routes tokens without some of the others.
        latent = isinstance(model, Transformer) and model.latent_attention is not None
        saved = host.fused_dispatch_saves if job.experts.expert_dispatcher == "hybridep" else (0, 0)
        running_host = replace(
            host,
            execution="blocking" if job.kernels.blocking_launches else host.execution,
            forward_bookkeeping=host.forward_bookkeeping + latent * host.latent_forward_bookkeeping,
            backward_bookkeeping=host.backward_bookkeeping
            + latent * host.latent_backward_bookkeeping,
            routing_forward_bookkeeping=max(0, host.routing_forward_bookkeeping - saved[0]),
            routing_backward_bookkeeping=max(0, host.routing_backward_bookkeeping - saved[1]),
        )
        return replace(self, host=running_host)

    def for_job(self, job: Job) -> "Framework":
        """The framework as it runs a job.

        Where training in bf16 shards the optimizer's states in any case, stage 0 of ZeRO is neither
        a default nor a choice. Narrower products have bf16 weights, too.
        """
        can = self.capabilities
        in_bf16 = job.dtype == "bf16" or dtype_bytes(job.dtype) < 2
        is_trained = job.mode == "train" and not job.fine_tuning.frozen
        if not (can.shards_bf16_states and in_bf16 and is_trained):
            return self

        # Stage 0 is taken out of the choices, with a pipeline and without.
        sharded = replace(
            can,
            zero_stages=tuple(stage for stage in can.zero_stages if stage > 0),
            zero_stages_in_pipelines=tuple(
                stage for stage in can.zero_stages_in_pipelines if stage > 0
            ),
        )

        # A default of stage 0 becomes stage 1, in which the optimizer's states are sharded.
        default_zero = max(1, self.default_layout.zero)
        launch = self.launch
        if launch.zero_in_pipelines is not None:
            launch = replace(launch, zero_in_pipelines=max(1, launch.zero_in_pipelines))
        return replace(
            self,
            capabilities=sharded,
            launch=launch,
            default_layout=replace(self.default_layout, zero=default_zero),
        )

    @property
    def costs_steps(self) -> bool:
        """Whether a step has costs beyond passes and communication."""
        return self.communication.straggling > 0 or self.host.step_overhead_s > 0

    @property
    def label(self) -> str:
        """`name@year`, as `--framework` takes it."""
        return f"{self.name}@{self.since}" if self.since else self.name

    def layout_defaults(self, stated: Mapping[str, Any]) -> dict[str, Any]:
        """This framework's defaults for the layout fields missing from `stated`.

        Overlap is only switched on where it is possible (`hides`).
        """
        can = self.capabilities
        usual = self.default_layout
        if stated.get("tp", 1) == 1:
            names = _OF_EVERY_LAYOUT
        else:
            names = (*_OF_EVERY_LAYOUT, *_OF_TENSOR_PARALLEL)
        defaults = {name: usual.value(name) for name in names}
        # Pipelines may have another default, and not every stage of ZeRO runs with them.
        if stated.get("pp", 1) > 1:
            if self.launch.zero_in_pipelines is not None:
                defaults["zero"] = self.launch.zero_in_pipelines
            elif defaults["zero"] not in can.zero_stages_in_pipelines:
                defaults["zero"] = max(can.zero_stages_in_pipelines)
            if can.schedules and Layout.schedule not in can.schedules:
                defaults["schedule"] = can.schedules[0]
        cp = stated.get("cp", 1)
        ep = stated.get("ep", 1)
        if cp > 1 or ep > 1:
            defaults |= self.degree_defaults(cp, ep)
        # A number of layers says itself what is recomputed.
        if stated.get("recompute_full_layers") is not None:
            defaults["recompute"] = "none"
        # Some frameworks overlap whatever is sharded, with no switch for it.
        zero = stated.get("zero", defaults["zero"])
        overlaps = self.communication.hides(zero, stated.get("tp", 1))
        reduces = usual.overlap.overlap_grad_reduce or (
            self.communication.sharding_overlaps and zero >= 2
        )
        gathers = usual.overlap.overlap_param_gather or (
            self.communication.sharding_overlaps and zero == 3
        )
        defaults |= {
            "overlap_grad_reduce": reduces and overlaps,
            "overlap_param_gather": gathers and overlaps,
        }
        return {name: value for name, value in defaults.items() if name not in stated}

    @property
    def cuts_collectives(self) -> bool:
        """Whether tensor-parallel collectives can be chunked and overlapped with matrix products
        (`Layout.tp_overlap`), by default or by a switch."""
        return self.default_layout.overlap.tp_overlap or self.communication.tp_overlap_copies

    def usual_micro_batch(self, stages: int, batch_per_replica: int) -> int:
        """The default micro-batch size.

        Args:
            stages: stages of the pipeline, model chunks of all its ranks.
            batch_per_replica: sequences that a replica gets per step; 0 where that is not known.
        """
        default = self.default_layout.micro_batch
        if stages == 1:
            return default
        # The number of micro-batches is given by the stages, and their size by the number.
        if self.launch.micro_batches_per_stage:
            return max(1, batch_per_replica // (self.launch.micro_batches_per_stage * stages))
        if self.launch.pipeline_micro_batch is None:
            return default
        return self.launch.pipeline_micro_batch

    def degree_defaults(self, cp: int, ep: int) -> dict[str, Any]:
        """This framework's defaults for the kinds of context and expert parallelism, if the layout
        has any."""
        context = _OF_CONTEXT_PARALLEL if cp > 1 else ()
        experts = _OF_EXPERT_PARALLEL if ep > 1 else ()
        return {name: self.default_layout.value(name) for name in (*context, *experts)}

    def layout(self, text: str, model: Model | None = None) -> tuple[Layout, str]:
        """Parse a layout, and fill in this framework's defaults, with a sentence that lists them.

        The sentence is empty if these are the defaults of `Layout` itself. With a `model`, the
        framework's rules for cutting stages and for selective recompute apply.

        Raises:
            LayoutError, UnknownNameError: as `Layout.parse`.
        """
        return self._laid_out(Layout.stated(text), model)

    def _laid_out(self, stated: dict[str, Any], model: Model | None) -> tuple[Layout, str]:
        """A layout from the fields that are stated, and a sentence on those that are filled in."""
        filled = self.layout_defaults(stated)
        if self.launch.stages_by_cost and model is not None and "partition" not in stated:
            filled["partition"] = partition_by_cost(model, stated.get("pp", 1))
        recomputes = (filled | stated).get("recompute")
        left_open = recomputes == "selective" and "recompute_full_layers" not in stated
        launch = self.launch
        if (
            left_open
            and launch.selective_layers
            and launch.selective_share
            and isinstance(model, Transformer)
        ):
            # Such a framework repeats some layers of every stage as a whole.
            layers_per_stage = (model.layers + model.decoder_layers) / (
                stated.get("pp", 1) * stated.get("vpp", 1)
            )
            stated = stated | {"recompute": "none"}
            filled["recompute_full_layers"] = (
                max(1, round(launch.selective_share * layers_per_stage)),
            )
            filled.pop("recompute", None)
        layout = Layout(**filled, **stated)

        # Only what differs from a plain layout is worth a sentence.
        layout_defaults = Layout().values()
        unusual = {name: value for name, value in filled.items() if value != layout_defaults[name]}
        return layout, self._assumed(unusual, "layout")

    def job_defaults(self, dtype: str) -> dict[str, Any]:
        """This framework's defaults for the job's fields with an element type."""
        defaults = self.default_job
        compiled = self.host.execution == "compiled"
        has_recipe = bool(defaults.narrow.fp8_recipe)

        # All recipes except that of fp4 have 8 bits. The only integers that training frameworks
        # multiply are AQT's, under JAX.
        recipe: Fp8Recipe = defaults.narrow.fp8_recipe if dtype == "fp8" else ""
        if dtype == "int8" and compiled:
            recipe = "aqt"
        elif dtype == "fp4" and has_recipe:
            recipe = "nvfp4"

        # Gradients are as wide as products of 32 bits or more, which TF32 multiplies as well.
        grad_dtype = defaults.gradients.grad_dtype
        if dtype in ("fp64", "fp32", "tf32"):
            grad_dtype = "fp64" if dtype == "fp64" else "fp32"
        elif dtype != "fp16" and self.launch.bf16_grad_dtype:
            grad_dtype = self.launch.bf16_grad_dtype

        narrow = dtype in ("fp8", "fp4") and has_recipe
        flash_attention = defaults.kernels.flash_attention
        if narrow:
            flash_attention = self.launch.fp8_flash_attention
        return {name: defaults.value(name) for name in _JOB_DEFAULTS} | {
            "fp8_recipe": recipe,
            "fp8_params": defaults.narrow.fp8_params and dtype == "fp8",
            "flash_attention": flash_attention,
            "grad_dtype": grad_dtype,
            "optimizer": self.launch.optimizer if dtype_bytes(dtype) <= 2 else "adam",
            "stops_recompute": defaults.activations.stops_recompute or compiled,
            "narrow_logits": defaults.loss.narrow_logits or compiled,
        }

    def notation(self, layout: Layout, model: Model | None = None) -> str:
        """The shortest notation from which `layout` reads the same layout.

        It contains the degrees, all fields that differ from the defaults of `Layout`, and fields at
        these defaults for which the framework has another default.
        """
        fields_said = layout.notation_fields
        defaults = Layout().values()
        for name in layout.framework_fields:
            if fields_said[name] != defaults[name]:
                continue
            shorter = {key: value for key, value in fields_said.items() if key != name}
            # The remaining fields may not form a valid layout.
            with suppress(LayoutError):
                if self._laid_out(shorter, model)[0] == layout:
                    fields_said = shorter
        return written_values(fields_said)

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
        """`Job.of` with this framework's defaults for the fields missing from `stated`.

        The job's `assumed` lists the defaults that differ from those of `Job` and affect this
        model.
        """
        base_job = Job.of(
            model, device, global_batch=global_batch, seq_len=seq_len, dtype=dtype, **stated
        )
        defaults = self.job_defaults(base_job.dtype)
        # Blocks with a scale each need hardware that multiplies them; elsewhere a tensor has one
        # scale.
        if defaults["fp8_recipe"] == "mxfp8" and not device.scales_blocks:
            defaults["fp8_recipe"] = "current"
        filled = {name: value for name, value in defaults.items() if name not in stated}
        # Only what changes something for this model is worth a sentence.
        meaningful = {n: value for n, value in filled.items() if concerns(n, model)}
        if "eager_kernels" in meaningful:
            meaningful["eager_kernels"] = tuple(
                kernel for kernel in meaningful["eager_kernels"] if concerns(kernel, model)
            )
        meaningful = {n: value for n, value in meaningful.items() if value != base_job.value(n)}
        assumed = self._assumed(meaningful, "job")
        return replace(
            base_job,
            **filled,
            assumed=(*base_job.assumed, assumed) if assumed else base_job.assumed,
        )

    def refused(self, layout: Layout) -> dict[str, str]:
        """Fields of a layout whose values this framework cannot run, each with a description."""
        can = self.capabilities
        zero_stages = can.zero_stages_in_pipelines if layout.pp > 1 else can.zero_stages
        schedule = layout.effective_schedule
        one_run, _ = schedule_and_drains(schedule)
        beside = [name for name in can.zero_0_excludes if getattr(layout, name) > 1]
        # Without replicas there is nothing to shard, and no stage of ZeRO is asked for.
        is_unsharded = layout.zero == 0 and layout.replicated
        # A degree of one asks for nothing, whatever the framework can.
        runs = {
            "zero": (layout.zero in zero_stages or not layout.replicated)
            and not (is_unsharded and beside),
            "schedule": layout.pp == 1 or not can.schedules or one_run in can.schedules,
            "recompute": layout.recompute in can.recomputes,
            "sequence_parallel": layout.tp == 1
            or layout.sequence_parallel in can.sequence_parallel_choices,
            "tp": layout.tp == 1 or can.tensor_parallel,
            "pp": layout.pp == 1 or can.pipeline_parallel,
            "cp": layout.cp == 1 or can.context_parallel,
            "ep": layout.ep == 1 or can.expert_parallel,
            "vpp": layout.vpp == 1 or can.virtual_stages,
            "partition": layout.partition is None
            or can.uneven_stages
            or self.launch.stages_by_cost,
            "offload": not layout.offload or can.offloads,
            "offload_layers": not layout.offload_layers
            or self._offloads_layers_beside(layout.recompute),
        }
        zero = f"zero={layout.zero}"
        if layout.zero == 0 and can.shards_bf16_states:
            zero += " in bf16, which shards optimizer states: use zero=1"
        elif is_unsharded and beside:
            zero += f" beside {beside[0]}={getattr(layout, beside[0])}"
        elif layout.pp > 1:
            zero += " in a pipeline"
        notations = {
            "zero": zero,
            "schedule": f"schedule={schedule}",
            "partition": "partition",
        }
        refused = {}
        for name, can_run in runs.items():
            if not can_run:
                refused[name] = notations.get(name, f"{name}={written(layout.value(name))}")
        return refused

    def _offloads_layers_beside(self, recompute: Recompute) -> bool:
        """Whether single layers can be offloaded beside recompute.

        Megatron-Core refuses both at once (transformer_config.py, `cpu_offloading`). A compiler
        places every named tensor by itself (JAX, `save_and_offload_only_these_names`).
        """
        can = self.capabilities
        offloads = can.offloads if can.offloads_layers is None else can.offloads_layers
        return offloads and (recompute == "none" or self.host.execution == "compiled")

    def cannot_run(self, layout: Layout) -> tuple[str, ...]:
        """Reasons why this framework cannot run a layout, one sentence each; empty if it can."""
        return tuple(self.refuses(setting) for setting in self.refused(layout).values())

    def refuses(self, setting: str) -> str:
        """The sentence which says that this framework cannot run something."""
        return f"{self.label} cannot run {setting}"

    def _assumed(self, values: Mapping[str, Any], record: str) -> str:
        """A sentence on fields that are filled in; empty if there are none."""
        if not values:
            return ""
        notation = ", ".join(f"{name}={written(value)}" for name, value in values.items())
        return f"taken from the defaults of {self.label}: {notation}; override them in the {record}"

    def __post_init__(self) -> None:
        owner = f"framework {self.name}"
        if self.host.execution not in get_args(Execution):
            raise PerfModelError(
                f"{owner}: execution must be one of {', '.join(get_args(Execution))}"
            )
        if self.memory.reported_ranks not in get_args(ReportedRanks):
            raise PerfModelError(
                f"{owner}: reported_ranks must be one of {', '.join(get_args(ReportedRanks))}"
            )
        # Types are checked where files are read; here it is values, which callers may set too.
        updates_per_s = self.host.host_updates_per_s
        if updates_per_s is not None and updates_per_s <= 0:
            raise PerfModelError(
                f"{owner}: host_updates_per_s must be above 0, got {updates_per_s}"
            )
        require_whole(owner, {"host_threads": self.host.host_threads}, least=0)
        for name in _NOT_NEGATIVE:
            value = self.value(name)
            if type(value) not in (int, float):
                untraced(f"{owner}: {name}", value)
            if value < 0:
                raise PerfModelError(f"{owner}: {name} must not be below 0, got {value}")
