"""The discrete space of layouts: every combination of degrees and options that can run."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from perfmodel.errors import LayoutError
from perfmodel.prediction import check_layout
from perfmodel.schedule import get_schedule, schedule_names
from perfmodel.spec import Cluster, Job, Layout, Model, Transformer


@dataclass(frozen=True, kw_only=True)
class Space:
    """Which values every dimension may take; degrees that do not divide are counted as rejected."""

    tp: tuple[int, ...]
    pp: tuple[int, ...]
    cp: tuple[int, ...]
    ep: tuple[int, ...]
    vpp: tuple[int, ...]
    micro_batch: tuple[int, ...]
    schedule: tuple[str, ...] = ("1f1b", "gpipe")
    zero: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = ("none", "selective", "full")
    sequence_parallel: tuple[bool, ...] = (True, False)
    fixed: tuple[tuple[str, Any], ...] = field(default=())
    """Layout fields that are the same everywhere, e.g. overlap options."""


def default_space(model: Model, cluster: Cluster, job: Job, devices: int) -> Space:
    """Everything that model, cluster and batch allow.

    Tensor parallel goes up to two nodes (beyond, its collectives cross the network several times a
    layer), context parallel is offered from 16k tokens on.
    """
    transformer = isinstance(model, Transformer)
    layers = model.layers + model.decoder_layers if transformer else getattr(model, "layers", 1)
    degrees = _divisors(devices)
    experts = model.experts.count if transformer and model.experts else 1
    training = job.mode == "train"
    return Space(
        tp=tuple(d for d in degrees if d <= 2 * cluster.devices_per_node),
        pp=tuple(d for d in degrees if d <= layers),
        cp=tuple(d for d in degrees if d <= 16) if transformer and job.seq_len >= 16384 else (1,),
        ep=tuple(d for d in _divisors(experts) if devices % d == 0),
        vpp=tuple(d for d in range(1, 13) if layers % d == 0),
        micro_batch=tuple(d for d in _divisors(job.global_batch) if d <= 16),
        schedule=("1f1b", "gpipe") if training else ("gpipe",),
        zero=(0, 1, 2, 3) if training else (0,),
        recompute=("none", "selective", "full") if training else ("none",),
    )


def enumerate_layouts(
    space: Space, model: Model, cluster: Cluster, job: Job, devices: int, rejected: Counter[str]
) -> Iterator[Layout]:
    """All valid layouts of `space` on exactly `devices` devices; `rejected` counts why others are not."""
    layers = model.layers + model.decoder_layers if isinstance(model, Transformer) else 0
    fixed = dict(space.fixed)
    for tp, cp, pp in product(space.tp, space.cp, space.pp):
        if devices % (tp * cp * pp):
            rejected["tp*cp*pp does not divide the devices"] += 1
            continue
        dp = devices // (tp * cp * pp)
        for ep, micro_batch in product(space.ep, space.micro_batch):
            if (dp * cp) % ep:
                rejected["ep does not divide dp*cp"] += 1
                continue
            if job.global_batch % (dp * micro_batch):
                rejected["global batch not divisible by dp*micro_batch"] += 1
                continue
            degrees: dict[str, Any] = {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "ep": ep, "micro_batch": micro_batch}
            try:
                check_layout(model, cluster, job, Layout(**degrees), devices)
            except LayoutError as error:
                rejected[_short(error)] += 1
                continue
            for vpp, schedule in _pipelines(space, pp, layers, job.global_batch // (dp * micro_batch), rejected):
                for options in _options(space, tp, dp * cp):
                    yield Layout(**degrees, vpp=vpp, schedule=schedule, **options, **fixed)


def _pipelines(
    space: Space, pp: int, layers: int, micro_batches: int, rejected: Counter[str]
) -> Iterator[tuple[int, str]]:
    for vpp in space.vpp:
        if vpp == 1 and pp == 1:
            # one stage runs micro-batches one after the other whatever the schedule's name
            yield 1, "gpipe" if space.schedule == ("gpipe",) else "1f1b"
        elif vpp == 1:
            yield from ((1, name) for name in space.schedule if _possible(name, pp, layers, micro_batches, rejected))
        elif pp > 1 and "1f1b" in space.schedule:
            if layers % (pp * vpp):
                rejected["layers not divisible by pp*vpp"] += 1
            else:
                yield vpp, "interleaved"


def _possible(name: str, pp: int, layers: int, micro_batches: int, rejected: Counter[str]) -> bool:
    scheduler = get_schedule(name)
    chunks = scheduler.chunks_for(1)
    try:
        scheduler.require(pp, micro_batches, chunks)
    except LayoutError:
        rejected[f"schedule {name} cannot do these stages and micro-batches"] += 1
        return False
    if scheduler.chunks and layers and int(scheduler.stage_map(pp, chunks).max()) + 1 > layers:
        rejected[f"schedule {name} has more stages than layers"] += 1
        return False
    return True


def _options(space: Space, tp: int, replicas: int) -> list[dict[str, Any]]:
    zero = space.zero if replicas > 1 else tuple(z for z in space.zero if z == 0) or (0,)
    sequence = space.sequence_parallel if tp > 1 else (False,)
    return [{"zero": z, "recompute": r, "sequence_parallel": s} for z, r, s in product(zero, space.recompute, sequence)]


def _divisors(n: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, n + 1) if n % d == 0)


def _short(error: LayoutError) -> str:
    text = str(error)
    for words, reason in (
        ("attention heads", "attention heads not divisible by tp"),
        ("experts", "experts not divisible by ep"),
        ("sequence length", "sequence not divisible by cp (and tp)"),
        ("stages are too many", "more stages than layers"),
    ):
        if words in text:
            return reason
    return text


def with_schedules(space: Space, text: str) -> Space:
    """The space with other pipeline schedules: names separated by commas, or `all` that flush (the asynchronous
    ones train another way); `1f1b` brings the interleaved ones with it.

    Raises:
        UnknownNameError: for a name that no schedule has.
    """
    if not text:
        return space
    if text == "all":
        flushing = (n for n in schedule_names() if n not in ("forward", "interleaved", "gems", "breadth-first"))
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
    changes: dict[str, Any] = {}
    fixed: Sequence[tuple[str, Any]] = space.fixed
    for key in keys:
        value = getattr(layout, key)
        if key == "dp":
            raise LayoutError("a search derives dp from the devices; fix tp, pp or cp instead")
        if hasattr(space, key):
            changes[key] = (value,)
        else:
            fixed = (*fixed, (key, value))
    return Space(**{**{f: getattr(space, f) for f in space.__dataclass_fields__}, **changes, "fixed": tuple(fixed)})
