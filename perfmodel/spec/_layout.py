"""Layouts: how a step is distributed over devices."""

from dataclasses import dataclass, field
from functools import cache
from itertools import permutations
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack, get_args

from perfmodel.errors import LayoutError, Reason
from perfmodel.spec._dimensions import DEVICE_KEYS, DIMENSIONS, ORDER_KEYS
from perfmodel.spec._idle_fields import IDLE_FIELDS
from perfmodel.spec._sections import (
    Sectioned,
    flat_keywords,
    key_fields,
    require_switches,
    section,
)
from perfmodel.spec.notation import (
    PerRank,
    PerStage,
    read_values,
    schedule_and_drains,
    schedule_name,
    with_drains,
    written,
    written_values,
)
from perfmodel.units import untraced

if TYPE_CHECKING:
    from perfmodel.spec.keywords import LayoutKeywords

Recompute = Literal["none", "selective", "full"]
ContextParallel = Literal["ring", "all_gather", "gathered_ring", "ulysses"]
"""How attention sees the whole sequence. `ring`: keys and values pass around a ring, and each step
computes a part of the scores (Liu et al., arXiv 2310.01889); `all_gather`: they are gathered before
one kernel per chunk of queries (Llama 3, arXiv 2407.21783, section 3.3.2); `gathered_ring`: the
steps of a ring, over keys and values that are gathered during the first step (PyTorch's context
parallelism, rotate method allgather); `ulysses`: two all-to-alls swap the split of the sequence for
one of the heads (Jacobs et al., arXiv 2309.14509)."""
StateOffload = Literal["none", "optimizer", "weights"]
"""Model states that lie in host memory."""
_DEVICES = attrgetter(*DEVICE_KEYS)
_DEGREES = attrgetter(*("expert_tp" if d.key == "etp" else d.key for d in DIMENSIONS))
_CP_KINDS: Final = get_args(ContextParallel)

# Expert-parallel ranks are some of the data-parallel ones, so that they are numbered right before
# these.
_ORDERS: Final = frozenset(
    "-".join(order)
    for order in permutations(ORDER_KEYS)
    if order.index("dp") == order.index("ep") + 1
)
_KEYS = (*(d.key for d in DIMENSIONS), "vpp", "micro_batch", "replicate", "prefetch")
"""Fields that are whole numbers of at least 1."""


@dataclass(frozen=True, kw_only=True)
class CommunicationOverlap:
    """Kinds of communication that a layout overlaps with kernels."""

    overlap_grad_reduce: bool = True
    """Overlap gradient reductions, bucket by bucket, with the backward pass."""
    overlap_param_gather: bool = True
    """Overlap weight all-gathers with compute: prefetches under ZeRO 3, gathers after the step
    under ZeRO 1 and 2."""
    tp_overlap: bool = False
    """Overlap tensor-parallel collectives with the matrix products that feed them."""
    ep_overlap: bool = False
    """Overlap dispatch and combine of one micro-batch with the kernels of another (Megatron-Core's
    `overlap_moe_expert_parallel_comm`, as DeepSeek-V3's DualPipe, arXiv 2412.19437, section 3.2.1),
    wherever a backward pass runs together with a forward pass: not while a pipeline fills and
    drains."""


@flat_keywords
@dataclass(frozen=True, kw_only=True)
class Layout(Sectioned):
    """A parallel layout. Its degrees multiply to the number of devices: tp * cp * pp * dp =
    devices."""

    tp: int = 1
    """Tensor-parallel degree (Megatron column/row parallel)."""
    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Data-parallel replicas."""
    cp: int = 1
    """Context-parallel degree (sequence split through attention)."""
    cp_kind: ContextParallel = "ring"
    """How context parallelism exchanges keys and values: ring, all_gather, gathered_ring or
    ulysses."""
    cp_balanced: bool = True
    """Each context-parallel rank has an early and a late chunk of a causal sequence, so that their
    work is equal (zigzag); false: contiguous chunks, where the last rank has nearly twice the mean
    work."""
    ep: int = 1
    """Expert-parallel degree. Experts divide the tp * cp * dp ranks of a stage independently: etp
    ranks shard an expert, ep hold different experts, and the rest (`edp`) are replicas (parallel
    folding of Megatron-Core, arXiv 2504.14960)."""
    etp: int | None = None
    """Tensor-parallel degree inside experts; default: `tp`, as in Megatron-Core. If it is below
    `tp`, expert parallelism also spans tensor-parallel ranks."""
    vpp: int = 1
    """Virtual stages (model chunks) per pipeline rank; 1: the schedule's default."""
    micro_batch: int = 1
    """Sequences per micro-batch and data-parallel replica."""
    schedule: str = "1f1b"
    """Pipeline schedule by name (`perfmodel schedules` lists them), with a number if it takes one
    (`chimera:4`), or `file:PATH`; `1f1b*4` runs through the pipeline four times in a step."""
    zero: int = 0
    """ZeRO stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also weights, over dp *
    cp ranks (experts: `edp` ranks)."""
    recompute: Recompute = "none"
    """`selective` recomputes the job's `recompute_modules`, usually core attention; `full`
    recomputes every layer (Korthikanti section 5)."""
    sequence_parallel: bool = False
    """Shard norms and dropout over tp along the sequence (Korthikanti section 4.2.2)."""
    overlap: CommunicationOverlap = field(default=CommunicationOverlap(), metadata=section())
    """Communication that hides behind kernels."""
    offload: bool = False
    """Offload activations to host memory until their backward pass."""
    offload_layers: int = 0
    """Number of layers, from the first on, whose activations are offloaded to host memory, with
    copies overlapped with other layers (Megatron-Core's `cpu_offloading_num_layers`)."""
    replicate: int = 1
    """Number of groups for hybrid sharding: each group of neighbouring ranks shards model states as
    `zero` says, groups are replicas, and gradients are also reduced over the groups."""
    prefetch: int = 1
    """Number of layers (groups of layers in deep stages) whose weights ZeRO 3 gathers ahead."""
    offload_states: StateOffload = "none"
    """`optimizer` keeps optimizer states, master weights and sharded gradients in host memory and
    updates weights there (ZeRO-Offload); `weights` keeps the weights there too, with ZeRO 3
    (ZeRO-Infinity, FSDP's `CPUOffload`)."""
    order: str = "-".join(ORDER_KEYS)
    """Order of rank numbering, from the innermost dimension to the outermost (Megatron-LM's
    notation)."""
    partition: PerStage = None
    """Layers of every pipeline stage; default: as even as possible."""
    recompute_full_layers: PerStage = None
    """Number of layers of every stage, from its first on, that are recomputed in full
    (Megatron-LM's recompute method `block`); the others follow `recompute`. One number applies to
    all stages."""
    kinds: PerRank = None
    """Kind of nodes of every pipeline rank, for clusters with several kinds; default: filled in the
    cluster's order."""

    if TYPE_CHECKING:
        # Editors and type checkers complete the keys of the section too (`flat_keywords`).
        def __init__(
            self, *, overlap: CommunicationOverlap = ..., **keys: Unpack[LayoutKeywords]
        ) -> None: ...

    def __post_init__(self) -> None:
        # Degrees and the like are whole numbers from 1 on. Searches create tens of thousands of
        # layouts, so the usual case is tested first.
        numbers = *self.degrees, self.vpp, self.micro_batch, self.replicate, self.prefetch
        for name, value in zip(_KEYS, numbers, strict=True):
            if type(value) is int and value >= 1:
                continue
            untraced(f"layout: {name}", value)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise LayoutError(
                    f"layout: {name} must be a whole number of at least 1, got {value!r}"
                )

        self._check_choices()
        if (
            self.partition is not None
            or self.recompute_full_layers is not None
            or self.kinds is not None
        ):
            self._check_lists()
        self._check_ranks()
        self._check_combinations()
        if self.offload_layers != 0:
            self._check_offload_layers()

    def _check_choices(self) -> None:
        """Raise `LayoutError` unless fields of a few values have one of them."""
        require_switches("layout", self)
        if type(self.zero) is not int or self.zero not in (0, 1, 2, 3):
            raise LayoutError(f"layout: zero must be 0, 1, 2 or 3, got {self.zero!r}")
        if self.offload_states not in ("none", "optimizer", "weights"):
            raise LayoutError(
                f"layout: offload_states must be none, optimizer or weights, got {self.offload_states!r}"
            )
        if self.recompute not in ("none", "selective", "full"):
            raise LayoutError(
                f"layout: recompute must be none, selective or full, got {self.recompute!r}"
            )
        if self.cp_kind not in _CP_KINDS:
            raise LayoutError(
                f"layout: cp_kind must be one of {', '.join(_CP_KINDS)}; got {self.cp_kind!r}"
            )
        if self.order not in _ORDERS:
            raise LayoutError(
                f"layout: order must name each of {', '.join(ORDER_KEYS)} once with ep right before dp, as in "
                f"{'-'.join(ORDER_KEYS)}; got {self.order!r}"
            )

    def _check_ranks(self) -> None:
        """Raise `LayoutError` unless the ranks of a stage divide over experts, and replicas over
        their groups."""
        # Experts divide the ranks of a pipeline stage anew, across tensor, context and data
        # parallelism.
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
        # States are sharded inside a group of replicas and copied between the groups.
        if self.dp % self.replicate or self.edp % self.replicate:
            expert_text = f" and the {self.edp} replicas of an expert" if self.ep > 1 else ""
            raise LayoutError(
                f"layout: replicate={self.replicate} must divide dp={self.dp}{expert_text}"
            )

    def _check_combinations(self) -> None:
        """Raise `LayoutError` for a field that excludes another, or needs one that is not set."""
        if self.recompute == "full" and self.recompute_full_layers is not None:
            raise LayoutError(
                "layout: recompute=full already recomputes every layer; leave out either it or recompute_full_layers"
            )
        # Below stage 3 every rank needs all of its weights on the device all the time.
        if self.offload_states == "weights" and self.zero < 3:
            raise LayoutError(
                "layout: offload_states=weights needs zero=3; set it, or use offload_states=optimizer"
            )
        if self.offload_states == "optimizer" and self.replicated and not self.zero:
            raise LayoutError(
                "layout: offload_states=optimizer needs sharded states; use zero=1, 2 or 3"
            )
        # Model chunks are interleaved between pipeline ranks: one rank has nothing to interleave.
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(f"layout: vpp={self.vpp} needs pp > 1; use vpp=1")

    def _check_lists(self) -> None:
        """Raise `LayoutError` unless the lists with a value per stage or pipeline rank are well
        formed."""
        for name in ("partition", "recompute_full_layers"):
            value = getattr(self, name)
            if value is not None and not (value and all(type(n) is int and n >= 0 for n in value)):
                raise LayoutError(
                    f"layout: {name} must be a whole number per stage, like 7-9-9-7, got {value!r}"
                )
        if self.kinds is not None and (len(self.kinds) != self.pp or not all(self.kinds)):
            raise LayoutError(
                f"layout: kinds={written(self.kinds)} must name a kind of nodes for each of {self.pp} pipeline ranks, "
                "like fast-fast-slow",
                Reason.KINDS,
            )

    def _check_offload_layers(self) -> None:
        """Raise `LayoutError` unless layers can be offloaded one by one."""
        n = self.offload_layers
        untraced("layout: offload_layers", n)
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise LayoutError(
                f"layout: offload_layers must be a whole number of at least 0, got {n!r}"
            )

        # Megatron-Core refuses pipelines with `cpu_offloading` too (transformer_config.py).
        if self.pp > 1:
            raise LayoutError(
                f"layout: offload_layers={n} needs pp=1; in pipelines use offload=true",
                Reason.OFFLOADED_LAYERS,
            )

        # A layer that is recomputed keeps nothing but its input; `offload` moves everything anyway.
        if self.recompute == "full" or any(self.recompute_full_layers or ()):
            raise LayoutError(
                f"layout: offload_layers={n} needs recompute=none (or selective with a compiler) and "
                "recompute_full_layers left out",
                Reason.OFFLOADED_LAYERS,
            )
        if self.offload:
            raise LayoutError(
                f"layout: offload=true already offloads every layer; leave out either it or offload_layers={n}"
            )

    @property
    def effective_schedule(self) -> str:
        """The registered name of the schedule that really runs."""
        # 1F1B with several model chunks per rank is what Megatron-LM calls interleaved 1F1B (arXiv
        # 2104.04473, section 2.2). A single stage passes nothing on: it runs all micro-batches one
        # after another.
        if self.pp == 1:
            return Layout.schedule
        name = schedule_name(self.schedule)
        if self.vpp == 1:
            return name
        schedule, drains = schedule_and_drains(name)
        looped = "interleaved" if schedule == "1f1b" else schedule
        return with_drains(looped, drains)

    @property
    def effective_sequence_parallel(self) -> bool:
        """Whether norms and dropout are sharded over tensor-parallel ranks; never with tp=1."""
        return self.sequence_parallel and self.tp > 1

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel degree inside experts."""
        return self.tp if self.etp is None else self.etp

    @property
    def edp(self) -> int:
        """Data-parallel degree of experts: ep * etp * edp * pp = devices."""
        return self.tp * self.cp * self.dp // (self.ep * self.expert_tp)

    @property
    def degrees(self) -> tuple[int, ...]:
        """The effective degrees of all parallel dimensions, in table order."""
        return _DEGREES(self)

    @property
    def replicated(self) -> bool:
        """Whether several ranks hold the same weights, in experts or elsewhere."""
        return self.dp * self.cp > 1 or self.edp > 1

    @property
    def forms(self) -> dict[str, Any]:
        """Fields whose values may be equivalent, each with its canonical value."""
        # A field that has nothing to act on takes its default, so that such layouts are priced
        # once.
        return {
            "schedule": self.effective_schedule,
            "sequence_parallel": self.effective_sequence_parallel,
            "tp_overlap": self.overlap.tp_overlap and self.tp > 1,
            "etp": None if self.etp == self.tp else self.etp,
            "replicate": self.replicate if self.zero else 1,
            "prefetch": self.prefetch
            if self.zero == 3 and self.overlap.overlap_param_gather
            else 1,
            "cp_kind": self.cp_kind if self.cp > 1 else Layout.cp_kind,
            "cp_balanced": self.cp_balanced if self.cp > 1 else Layout.cp_balanced,
            "ep_overlap": self.overlap.ep_overlap and self.ep > 1,
        }

    @property
    def canonical(self) -> "Layout":
        """The canonical form of the layout: layouts that run in the same way are equal in it."""
        changed = {name: form for name, form in self.forms.items() if form != self.value(name)}
        return self.replace(**changed) if changed else self

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences about fields that have no effect or run as something else."""
        # With several model chunks per rank 1F1B is the interleaved schedule.
        remarks = []
        if self.pp > 1 and self.effective_schedule != schedule_name(self.schedule):
            remarks.append(
                f"schedule={self.schedule} with vpp={self.vpp} runs as schedule={self.effective_schedule}"
            )
        for idle in IDLE_FIELDS:
            value = self.value(idle.name)
            if value != _DEFAULTS[idle.name] and not idle.acts(self):
                remarks.append(f"{idle.name}={written(value)} {idle.why}")
        return tuple(remarks)

    @property
    def notation_fields(self) -> dict[str, Any]:
        """The fields needed to read this layout back under any framework, in record order.

        These are the degrees, every field that differs from its default here, and every field whose
        default a framework may have otherwise (`framework_fields`).
        """
        always = {"tp", "pp", "dp", *self.framework_fields}
        return {
            name: value
            for name, value in self.values().items()
            if name in always or value != _DEFAULTS[name]
        }

    @property
    def framework_fields(self) -> tuple[str, ...]:
        """The relevant fields that a framework fills in if a notation leaves them out."""
        names = ["zero", "recompute", "overlap_grad_reduce", "overlap_param_gather"]
        if self.pp > 1:
            names += ["schedule", "partition"]
        if self.tp > 1:
            names += ["sequence_parallel", "tp_overlap"]
        if self.cp > 1:
            names += ["cp_kind", "cp_balanced"]
        if self.ep > 1:
            names += ["ep_overlap"]
        # Some frameworks read `selective` as a number of whole layers.
        if self.recompute == "selective":
            names += ["recompute_full_layers"]
        return tuple(names)

    @property
    def columns(self) -> dict[str, Any]:
        """All fields as table columns: numbers and words; per-stage fields in the notation."""
        columns = {}
        for name, value in self.values().items():
            columns[name] = written(value) if isinstance(value, tuple) else value
        return columns

    @property
    def devices(self) -> int:
        """tp * cp * dp * pp."""
        return prod(_DEVICES(self))

    @classmethod
    def parse(cls, text: str, **defaults: Any) -> "Layout":
        """Parse `"tp=8,pp=16,..."` or DistSim's notation `8M16P1D` (section 5.1: model, pipeline,
        data).

        Raises:
            LayoutError, UnknownNameError: as `stated`, and for values that no layout has.
        """
        return cls(**(defaults | cls.stated(text)))

    @classmethod
    def stated(cls, text: str) -> dict[str, Any]:
        """Parse a notation into the fields that it states.

        Raises:
            LayoutError: for a value that does not parse, a key that is given twice, or an empty
                text.
            UnknownNameError: for a key that no layout has.
        """
        return read_values(text, _types())

    def replace(self, **changes: Any) -> "Layout":
        """A copy with some fields changed."""
        # `dataclasses.replace` takes twice as long, and searches make millions of layouts.
        values = vars(self) | changes
        if len(values) > len(self.__dataclass_fields__):
            overlap = {name: values.pop(name) for name in _OVERLAP_KEYS if name in values}
            values["overlap"] = CommunicationOverlap(**(vars(values["overlap"]) | overlap))
        return type(self)(**values)

    @property
    def label(self) -> str:
        """A short name for messages: the degrees and what differs from the defaults of `Layout`.

        `parse` reads this layout from it; a framework with other defaults may read another.
        """
        values = {}
        for name, value in self.values().items():
            if name in ("tp", "pp", "dp") or value != _DEFAULTS[name]:
                values[name] = value
        return written_values(values)

    def __str__(self) -> str:
        """The complete notation, from which `parse` and every framework read this layout again.

        `Framework.notation` is shorter: it leaves out what that framework would fill in itself.
        """
        return written_values(self.notation_fields)


@cache
def _types() -> dict[str, Any]:
    """Type of the values of each key."""
    return {key: key_field.hint for key, key_field in key_fields(Layout).items()}


_OVERLAP_KEYS: Final = tuple(key_fields(CommunicationOverlap))
_DEFAULTS: Final = Layout().values()
"""Default of each key."""
