"""The discrete space of layouts: which values every field may take."""

from dataclasses import dataclass, replace
from itertools import permutations

from perfmodel.errors import LayoutError, UnknownNameError
from perfmodel.schedule import get_schedule, schedule_names
from perfmodel.spec import Cluster, Job, Layout, Model, PerStage, Transformer

OPTIONS = {
    "overlap": ("overlap_grad_reduce", "overlap_param_gather"),
    "tp_overlap": ("tp_overlap",),
    "recompute": ("recompute_full_layers",),
    "offload": ("offload",),
    "order": ("order",),
}
"""Names under which fields that a search holds at their defaults can be let free, see `with_options`."""
_ORDERS = tuple("-".join(order).replace("dp", "ep-dp") for order in permutations(("tp", "cp", "dp", "pp")))
_FULL_LAYERS = (None, *((n,) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)))
LOOPED = {"1f1b": "interleaved", "breadth-first": "breadth-first"}
"""Schedules that a larger `vpp` makes another of: by the name in a space that of their layouts."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Which values every dimension may take; degrees that do not divide are counted as rejected.

    Where a field makes no difference (sequence parallelism without tensor parallelism, ZeRO without replicas),
    layouts have its first value.
    """

    tp: tuple[int, ...]
    pp: tuple[int, ...]
    cp: tuple[int, ...]
    ep: tuple[int, ...]
    vpp: tuple[int, ...]
    micro_batch: tuple[int, ...]
    schedule: tuple[str, ...] = ("1f1b", "gpipe")
    zero: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = ("none", "selective", "full")
    recompute_full_layers: tuple[PerStage, ...] = (None,)
    """Beside every other mode of recompute; see `Layout.recompute_full_layers`. At most one number each."""
    sequence_parallel: tuple[bool, ...] = (True, False)
    overlap_grad_reduce: tuple[bool, ...] = (True,)
    overlap_param_gather: tuple[bool, ...] = (True,)
    tp_overlap: tuple[bool, ...] = (False,)
    offload: tuple[bool, ...] = (False,)
    order: tuple[str, ...] = (Layout().order,)
    """Of those that place all process groups alike only the first is taken."""
    fewer_devices: bool = False
    """Whether layouts may leave devices unused."""


def default_space(model: Model, cluster: Cluster, job: Job, devices: int, *, fewer_devices: bool = False) -> Space:
    """Everything that model, cluster and batch allow, with the options that frameworks set by default.

    Tensor parallel goes up to two nodes (beyond, its collectives cross the network several times a
    layer), context parallel is offered from 16k tokens on. With `fewer_devices` degrees may also be powers of two
    and divisors of the layers.
    """
    transformer = isinstance(model, Transformer)
    layers = model.layers + model.decoder_layers if transformer else getattr(model, "layers", 1)
    degrees = stages = _divisors(devices)
    if fewer_devices:
        degrees = tuple(sorted({*degrees, *(1 << i for i in range(devices.bit_length()))}))
        stages = tuple(sorted({*degrees, *_divisors(layers)}))
    experts = model.experts.count if transformer and model.experts else 1
    training = job.mode == "train"
    return Space(
        tp=tuple(d for d in degrees if d <= 2 * cluster.devices_per_node),
        pp=tuple(d for d in stages if d <= min(layers, devices)),
        cp=tuple(d for d in degrees if d <= 16) if transformer and job.seq_len >= 16384 else (1,),
        ep=tuple(d for d in _divisors(experts) if fewer_devices or devices % d == 0),
        vpp=tuple(d for d in range(1, 13) if layers % d == 0),
        micro_batch=tuple(d for d in _divisors(job.global_batch) if d <= 16 or not training),
        schedule=("1f1b", "gpipe") if training else ("gpipe",),
        zero=(0, 1, 2, 3) if training else (0,),
        recompute=("none", "selective", "full") if training else ("none",),
        fewer_devices=fewer_devices,
    )


def with_options(space: Space, text: str, cluster: Cluster) -> Space:
    """The space with further options let free: names of `OPTIONS` separated by commas, or `all`.

    Raises:
        UnknownNameError: for a name that is none of them.
    """
    names = list(OPTIONS) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    changes: dict[str, tuple[object, ...]] = {}
    for name in names:
        if name not in OPTIONS:
            raise UnknownNameError("search option", name, (*OPTIONS, "all"))
        for field in OPTIONS[name]:
            values = {"order": _ORDERS, "recompute_full_layers": _FULL_LAYERS}.get(field, (True, False))
            changes[field] = tuple(dict.fromkeys((*getattr(space, field), *values)))
    if cluster.device.host_bandwidth_bytes_per_s is None and text == "all":
        changes["offload"] = (False,)
    return replace(space, **changes)  # pyright: ignore[reportArgumentType]


def _divisors(n: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, n + 1) if n % d == 0)


def with_schedules(space: Space, text: str) -> Space:
    """The space with other pipeline schedules: names separated by commas, or `all` that flush (the asynchronous
    ones train another way); `1f1b` brings the interleaved ones with it.

    Raises:
        UnknownNameError: for a name that no schedule has.
    """
    if not text:
        return space
    if text == "all":
        flushing = (n for n in schedule_names() if n not in ("forward", "interleaved"))
        return replace(space, schedule=tuple(n for n in flushing if not get_schedule(n).asynchronous))
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        get_schedule(name)
    return replace(space, schedule=tuple("1f1b" if name == "interleaved" else name for name in names))


def restrict(space: Space, text: str) -> Space:
    """Fix some dimensions by a layout notation, e.g. `"tp=8,zero=1"`.

    Raises:
        LayoutError, UnknownNameError: for keys or values that no layout has.
    """
    if not text:
        return space
    keys = [item.partition("=")[0].strip() for item in text.split(",") if item.strip()]
    layout = Layout.parse(text)
    changes: dict[str, tuple[object, ...]] = {}
    for key in keys:
        value = getattr(layout, key)
        if key == "dp":
            raise LayoutError("a search derives dp from the devices; fix tp, pp or cp instead")
        changes[key] = (value,)
    return replace(space, **changes)  # pyright: ignore[reportArgumentType]
