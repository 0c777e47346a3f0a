"""The search space: the values that each field of a layout may take."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import permutations
from typing import Any, Final

from perfmodel.errors import LayoutError, PerfModelError, UnknownNameError
from perfmodel.schedule import get_schedule, schedule_names
from perfmodel.spec import Cluster, ConvNet, Framework, Layout, Problem, Transformer
from perfmodel.spec.notation import PerStage, schedule_name
from perfmodel.spec.unet import UNet
from perfmodel.units import divisors
from perfmodel.workload import Shard, blocks, layer_count

OPTIONS = {
    "overlap": ("overlap_grad_reduce", "overlap_param_gather"),
    "tp_overlap": ("tp_overlap",),
    "recompute": ("recompute_full_layers",),
    "offload": ("offload", "offload_layers"),
    "order": ("order",),
    "folding": ("etp",),
}
"""Options by name, with the layout fields that a search varies for each; otherwise these keep their
defaults (`with_options`)."""
_ORDERS = tuple(
    "-".join(order).replace("dp", "ep-dp") for order in permutations(("tp", "cp", "dp", "pp"))
)
_FULL_LAYERS = (None, *((n,) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)))
_OFFLOADED_LAYERS = (0, 4, 8, 12, 16, 24, 32, 48, 64)
_VALUES = {
    "order": _ORDERS,
    "recompute_full_layers": _FULL_LAYERS,
    "etp": (None, 1),
    "offload_layers": _OFFLOADED_LAYERS,
}
"""Values that a search tries for varied fields that are not switches."""
_LONG_SEQUENCE: Final = 16384
"""Tokens from which context parallelism is offered."""
MOST_SHOWN: Final = 12
"""Most values of one dimension that a text lists."""
LOOPED = {"1f1b": "interleaved", "breadth-first": "breadth-first"}
"""Schedules that become another one with `vpp` above 1: name in a space -> name in such layouts."""


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The values that each field of a layout may take; not every combination is valid.

    Where a field makes no difference (sequence parallelism without tensor parallelism, ZeRO without
    replicas), layouts have its first value.
    """

    tp: tuple[int, ...]
    """Tensor-parallel degrees."""
    pp: tuple[int, ...]
    """Pipeline stages."""
    cp: tuple[int, ...]
    """Context-parallel degrees."""
    ep: tuple[int, ...]
    """Expert-parallel degrees."""
    etp: tuple[int | None, ...] = (None,)
    """Expert tensor-parallel degrees; models without experts use only the first."""
    vpp: tuple[int, ...]
    """Model chunks per pipeline rank (interleaved schedules)."""
    micro_batch: tuple[int, ...]
    """Sequences per micro-batch."""
    schedule: tuple[str, ...] = ("1f1b", "gpipe")
    """Names of pipeline schedules."""
    zero: tuple[int, ...] = (0, 1, 2, 3)
    """Stages of ZeRO."""
    recompute: tuple[str, ...] = ("none", "selective", "full")
    """Modes of recompute."""
    recompute_full_layers: tuple[PerStage, ...] = (None,)
    """Numbers of layers that are recomputed in full while the others follow `recompute`
    (`Layout.recompute_full_layers`)."""
    sequence_parallel: tuple[bool, ...] = (True, False)
    """Whether norms are sharded along the sequence over tensor-parallel ranks."""
    overlap_grad_reduce: tuple[bool, ...] = (True,)
    """Whether gradient reductions overlap with backward passes."""
    overlap_param_gather: tuple[bool, ...] = (True,)
    """Whether weight gathers overlap with forward passes."""
    tp_overlap: tuple[bool, ...] = (False,)
    """Whether tensor-parallel collectives overlap with matrix products."""
    offload: tuple[bool, ...] = (False,)
    """Whether activations go to the host in pipelines; layouts without a pipeline use only the
    first."""
    offload_layers: tuple[int, ...] = (0,)
    """Numbers of layers whose activations go to the host; above 0 only without a pipeline and
    without recompute."""
    order: tuple[str, ...] = (Layout().order,)
    """Orders of the dimensions over ranks. Of orders that place all process groups alike, only the
    first is tried."""
    fewer_devices: bool = False
    """Whether layouts may leave devices unused."""
    any_framework: bool = False
    """Whether layouts that the problem's framework cannot run are tried too."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        """List the fields and their values, without those that have only their default."""
        defaults = {field.name: field.default for field in fields(self)}
        shown = {
            name: getattr(self, name) for name in defaults if not isinstance(defaults[name], bool)
        }
        varied = [
            f"{name} {_values(values)}"
            for name, values in shown.items()
            if len(values) > 1 or values != defaults[name]
        ]
        if self.fewer_devices:
            devices = "dp up to the remaining devices"
        else:
            devices = "dp from the remaining devices"
        return ", ".join([*varied, devices])


Space = SearchSpace | Callable[[Problem], SearchSpace]
"""A space, or a function that returns the space of a problem."""


def _values(values: tuple[Any, ...]) -> str:
    """A few values in full, the ends of many."""
    texts = []
    for value in values:
        text = "-".join(map(str, value)) if isinstance(value, tuple) else str(value)
        texts.append(text.lower() if text in ("True", "False", "None") else text)
    if len(texts) > MOST_SHOWN:
        return f"{texts[0]} {texts[1]} .. {texts[-1]} ({len(texts)})"
    return " ".join(texts)


def default_space(problem: Problem, *, fewer_devices: bool = False) -> SearchSpace:
    """All layouts that model, cluster and batch allow, with the framework's default options.

    Micro-batches are all divisors of the batch. Tensor parallel goes up to two nodes (beyond, its
    collectives cross the network several times a layer), context parallel is offered from 16k
    tokens on. With `fewer_devices` degrees may also be powers of two and divisors of the layers. A
    framework's own schedules are tried besides the usual ones (layouts that it cannot run are left
    out in the enumeration).
    """
    model = problem.model
    cluster = problem.cluster
    job = problem.job
    devices = problem.require_devices()
    layers = layer_count(blocks(model, job, Shard()))

    # On all devices degrees have to divide them. With devices to spare, powers of two and
    # divisors of the layers are worth trying too.
    degrees = stages = divisors(devices)
    if fewer_devices:
        powers_of_two = [2**i for i in range(devices.bit_length())]
        degrees = tuple(sorted({*degrees, *powers_of_two}))
        stages = tuple(sorted({*degrees, *divisors(layers)}))
    tp = cp = (1,)
    if not isinstance(model, ConvNet | UNet):
        tp = tuple(d for d in degrees if d <= 2 * cluster.devices_per_node)
    if isinstance(model, Transformer) and job.seq_len >= _LONG_SEQUENCE:
        cp = tuple(d for d in degrees if d <= 16)
    experts = model.experts.count if isinstance(model, Transformer) and model.experts else 1
    every_mode = SearchSpace(
        tp=tp,
        pp=tuple(d for d in stages if d <= min(layers, devices)),
        cp=cp,
        ep=tuple(d for d in divisors(experts) if fewer_devices or devices % d == 0),
        vpp=tuple(d for d in range(1, 13) if layers % d == 0),
        micro_batch=divisors(job.global_batch),
        schedule=("gpipe",),
        zero=(0,),
        recompute=("none",),
        fewer_devices=fewer_devices,
    )
    if job.mode != "train":
        return every_mode
    return replace(
        every_mode,
        schedule=_training_schedules(problem.framework),
        zero=(0, 1, 2, 3),
        recompute=("none", "selective", "full"),
    )


def _training_schedules(framework: Framework) -> tuple[str, ...]:
    """The usual schedules, then those of a framework."""
    schedules = ["1f1b", "gpipe"]
    for name in framework.capabilities.schedules:
        # Asynchronous schedules train with stale weights: they are another algorithm, not another
        # layout. `1f1b` with `vpp` above one is the interleaved schedule.
        if not get_schedule(name).asynchronous:
            schedules.append("1f1b" if name == "interleaved" else name)
    return tuple(dict.fromkeys(schedules))


def with_options(space: SearchSpace, text: str, cluster: Cluster) -> SearchSpace:
    """Let further options vary: names from `OPTIONS` separated by commas, or `all`.

    Raises:
        UnknownNameError: for an unknown name.
    """
    stated_names = [name.strip() for name in text.split(",") if name.strip()]
    names = list(OPTIONS) if text == "all" else stated_names
    changes: dict[str, tuple[object, ...]] = {}
    for name in names:
        if name not in OPTIONS:
            raise UnknownNameError("search option", name, (*OPTIONS, "all"))
        for field in OPTIONS[name]:
            values = _VALUES.get(field, (True, False))
            changes[field] = tuple(dict.fromkeys((*getattr(space, field), *values)))

    # Nothing can be offloaded to the host over an unknown link. Whoever asks for `offload` by
    # name gets the error instead.
    if cluster.device.host_bandwidth_bytes_per_s is None and text == "all":
        changes |= {"offload": (False,), "offload_layers": (0,)}
    return replace(space, **changes)  # pyright: ignore[reportArgumentType]


def with_schedules(space: SearchSpace, text: str) -> SearchSpace:
    """Set the pipeline schedules: names separated by commas, or `all` (without the asynchronous
    ones, which change the training); `1f1b` includes its interleaved form.

    Raises:
        UnknownNameError: for a name that no schedule has.
    """
    if not text:
        return space
    if text == "all":
        # `forward` trains nothing, and `1f1b` with several chunks is the interleaved schedule.
        flushing = (n for n in schedule_names() if n not in ("forward", "interleaved"))
        return replace(
            space, schedule=tuple(n for n in flushing if not get_schedule(n).asynchronous)
        )
    names = tuple(dict.fromkeys(schedule_name(name) for name in text.split(",") if name.strip()))
    if not names:
        raise PerfModelError(
            f"search: {text!r} does not name a schedule; leave it out, or name one such as 1f1b"
        )
    for name in names:
        get_schedule(name)
    return replace(
        space, schedule=tuple("1f1b" if name == "interleaved" else name for name in names)
    )


def restrict(space: SearchSpace, text: str) -> SearchSpace:
    """Fix some fields by a layout notation, e.g. `"tp=8,zero=1"`.

    Raises:
        LayoutError, UnknownNameError: for keys or values that no layout has.
    """
    if not text:
        return space
    values = Layout.stated(text)
    if "dp" in values:
        raise LayoutError("a search derives dp from the devices; fix tp, pp or cp instead")
    # The record checks the values. It gets replicas enough for its experts; the search finds out
    # whether there are.
    Layout(**values, dp=values.get("ep", 1) * (values.get("etp") or 1))
    return replace(space, **{key: (value,) for key, value in values.items()})
