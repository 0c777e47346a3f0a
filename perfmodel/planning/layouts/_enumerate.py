"""Enumerates a space as grids of layouts: every combination of degrees and options that can run."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Final, TypeVar

import numpy as np
from jaxtyping import Bool

from perfmodel.errors import LayoutError, Reason, Rejection
from perfmodel.planning.layouts._space import LOOPED, SearchSpace
from perfmodel.prediction import check_machine
from perfmodel.prediction.composition import (
    Setting,
    check_pipeline,
    placement_on_network,
    shard_blocks,
    stages_without_layer,
)
from perfmodel.prediction.grids import (
    LayoutGrid,
    PipelineChoice,
    RecomputeChoice,
    ShardChoice,
    StateChoice,
)
from perfmodel.schedule import get_schedule
from perfmodel.spec import Cluster, Framework, Job, Layout, Model, Problem
from perfmodel.units import divisors
from perfmodel.workload import BlockOps, Shard, layer_count

PLAIN_RECOMPUTE: Final = RecomputeChoice("none")
Choice = TypeVar("Choice", PipelineChoice, ShardChoice, RecomputeChoice, StateChoice)
_DEGREES: Final = ("tp", "pp", "cp", "ep")


def enumerate_layouts(
    space: SearchSpace, problem: Problem, rejected: Counter[Rejection]
) -> Iterator[Layout]:
    """Iterate over all valid layouts of `space`; `rejected` counts the reasons why other
    combinations are invalid."""
    for grid in enumerate_grids(space, problem, rejected):
        yield from grid.layouts()


def enumerate_grids(
    space: SearchSpace, problem: Problem, rejected: Counter[Rejection]
) -> Iterator[LayoutGrid]:
    """Group all valid layouts of `space` on the problem's devices (or fewer, if the space allows
    it) by degrees and micro-batch.

    Args:
        space, problem: layouts to try, and the job that they lay out.
        rejected: gets the number of combinations that are not possible, by reason.
    """
    model = problem.model
    cluster = problem.cluster
    job = problem.job
    devices = problem.require_devices()
    check_machine(cluster, job, devices, f"a search over {devices} devices")
    setting = Setting.of(model, cluster, job, problem.framework)

    # The same few shards, orders and pipelines occur under thousands of degrees, so each is
    # worked out once per call. The caches die with this generator.
    divided = cache(lambda shard: _divided(setting, shard))
    orders = cache(lambda degrees: _orders(space, degrees, cluster))
    unschedulable = cache(
        lambda layout, layers, ends: _unschedulable(model, job, layout, layers, ends)
    )
    runnable = _Runnable(problem.framework, space, rejected)
    if getattr(model, "experts", None) is None:
        space = replace(space, etp=space.etp[:1])
    for degrees in runnable.degrees(_degrees(space, problem, devices, rejected)):
        # Placement does not depend on the micro-batch, so that one entry of the cache serves all
        # of them.
        shards = _shards(space, degrees, orders(degrees.replace(micro_batch=1)), divided, rejected)
        shards = tuple(runnable.choices(degrees, shards))
        if not shards:
            continue

        # Neither the number of layers nor the set of different recompute modes depends on sequence
        # parallelism, so any valid shard determines them.
        cut = divided(Shard.of(degrees.replace(sequence_parallel=shards[0].sequence_parallel)))
        if not isinstance(cut, Divided):  # `_shards` has counted why
            continue
        pipelines = tuple(
            runnable.choices(degrees, _pipelines(space, degrees, cut, unschedulable, rejected))
        )
        if not pipelines:
            continue

        recomputes = tuple(runnable.choices(degrees, _recomputes(space, cut)))
        states = tuple(
            runnable.choices(degrees, _states(space, degrees, problem, cut.layers, rejected))
        )

        resident = tuple(state for state in states if not state.offload_layers)
        if recomputes and resident:
            valid = _few_enough(pipelines, recomputes, degrees.pp, cut.layers)
            yield LayoutGrid(
                degrees, pipelines, shards, recomputes, resident, valid[:, None, :, None]
            )

        # Offloaded layers need a pipeline of one stage and no recompute. They are a grid of their
        # own, or else most points of the common grid would be invalid.
        offloaded = tuple(state for state in states if state.offload_layers)
        is_one_stage = pipelines == (PipelineChoice("1f1b", 1),)
        if offloaded and is_one_stage and PLAIN_RECOMPUTE in recomputes:
            valid = np.ones((1, 1, 1, 1), bool)
            yield LayoutGrid(degrees, pipelines, shards, (PLAIN_RECOMPUTE,), offloaded, valid)


def _recomputes(space: SearchSpace, cut: "Divided") -> Iterator[RecomputeChoice]:
    """Recompute modes that differ for a model's blocks, combined with each number of layers that
    are recomputed in full."""
    modes = dict.fromkeys(cut.recompute[mode] for mode in space.recompute)
    for mode in modes:
        # Full recompute leaves no layers over to recompute in full, so that it is combined with
        # no number of them.
        full_layers = space.recompute_full_layers if mode != "full" else (None,)
        for n in full_layers:
            yield RecomputeChoice(mode, n)  # pyright: ignore[reportArgumentType]


class _Runnable:
    """Choices of layouts that a framework can run. Each axis is judged by its own fields
    (`Framework.refused`), because refusals depend on other fields only by whether a degree is above
    one, and whether there are replicas."""

    def __init__(
        self, framework: Framework, space: SearchSpace, rejected: Counter[Rejection]
    ) -> None:
        self._framework = framework
        self._everything = space.any_framework
        self._rejected = rejected
        self._refused: dict[Hashable, str] = {}

    def degrees(self, candidates: Iterable[Layout]) -> Iterator[Layout]:
        """The degrees that can run."""
        for degrees in candidates:
            if self._runs(_above_one(degrees), degrees, _DEGREES):
                yield degrees

    def choices(self, degrees: Layout, axis: Iterable[Choice]) -> Iterator[Choice]:
        """The choices of an axis that can run with these degrees."""
        if self._everything:
            yield from axis
            return

        # A framework's verdict on a choice depends on which degrees exceed one, not on how far,
        # so that one verdict serves all such degrees.
        degrees_above_one = _above_one(degrees)
        for choice in axis:
            if (degrees_above_one, choice) in self._refused:
                layout = degrees
            else:
                layout = degrees.replace(**choice._asdict())
            if self._runs((degrees_above_one, choice), layout, choice._fields):
                yield choice

    def _runs(self, key: Hashable, layout: Layout, names: Sequence[str]) -> bool:
        """Whether the framework runs a layout, judged by some fields; counts it as rejected if not.

        Args:
            key: stands for all layouts with the same verdict.
            layout: looked at only if no verdict is known for `key`.
            names: fields of the layout that may be refused.
        """
        if self._everything:
            return True
        if key not in self._refused:
            refused = self._framework.refused(layout)
            self._refused[key] = next((refused[name] for name in names if name in refused), "")
        setting = self._refused[key]
        if setting:
            self._rejected[Rejection(Reason.FRAMEWORK, self._framework.refuses(setting))] += 1
        return not setting


def _above_one(degrees: Layout) -> tuple[bool, ...]:
    return (*(getattr(degrees, name) > 1 for name in _DEGREES), degrees.replicated)


def _degrees(
    space: SearchSpace, problem: Problem, devices: int, rejected: Counter[Rejection]
) -> Iterator[Layout]:
    """Degrees and micro-batches, with context and expert parallelism as the framework runs it."""
    job, framework = problem.job, problem.framework
    for tp, cp, pp in product(space.tp, space.cp, space.pp):
        if space.fewer_devices:
            # Any number of replicas that fits onto the devices and divides the batch.
            replicas = divisors(job.global_batch, devices // (tp * cp * pp))
        elif devices % (tp * cp * pp):
            rejected[Rejection(Reason.DEVICES)] += 1
            continue
        else:
            replicas = (devices // (tp * cp * pp),)

        # `etp=None` stands for tp. Where two values come to the same degree, the first in the
        # space wins: later assignments overwrite, hence the reversed order.
        foldings = {tp if etp is None else etp: etp for etp in reversed(space.etp)}
        for dp, ep, etp, micro_batch in product(
            replicas, space.ep, foldings.values(), space.micro_batch
        ):
            # Experts divide the tp * cp * dp ranks of a stage anew (parallel folding,
            # arXiv:2504.14960).
            if (tp * cp * dp) % (ep * (tp if etp is None else etp)):
                reason = Reason.EXPERT_RANKS if etp is None else Reason.FOLDED_RANKS
                rejected[Rejection(reason)] += 1
            elif job.global_batch % (dp * micro_batch):
                rejected[Rejection(Reason.BATCH)] += 1
            else:
                defaults = framework.degree_defaults(cp, ep)
                yield Layout(
                    tp=tp,
                    cp=cp,
                    pp=pp,
                    dp=dp,
                    ep=ep,
                    etp=etp,
                    micro_batch=micro_batch,
                    **defaults,
                )


def _pipelines(
    space: SearchSpace,
    degrees: Layout,
    cut: "Divided",
    unschedulable: Callable[[Layout, int, int], Rejection | None],
    rejected: Counter[Rejection],
) -> Iterator[PipelineChoice]:
    """Yield the schedules and numbers of model chunks that some degrees can have."""
    pp, layers = degrees.pp, cut.layers
    if pp == 1:
        # One stage runs micro-batches one after the other whatever the schedule's name.
        yield PipelineChoice("gpipe" if space.schedule == ("gpipe",) else "1f1b", 1)
        return
    if pp > layers + cut.riders:
        rejected[Rejection(Reason.STAGES)] += 1
        return
    for vpp, name in product(space.vpp, space.schedule):
        # Only looped schedules give a rank several chunks.
        if vpp > 1 and name not in LOOPED:
            continue
        if vpp > 1 and layers % (pp * vpp):
            rejected[Rejection(Reason.UNEVEN_CHUNKS)] += 1
        elif vpp == 1 and name == "breadth-first" and "gpipe" in space.schedule:
            # With one chunk it is GPipe.
            continue
        else:
            schedule = name if vpp == 1 else LOOPED[name]
            # These are the only degrees that matter to a schedule.
            canonical = Layout(
                pp=pp,
                micro_batch=degrees.dp * degrees.micro_batch,
                schedule=schedule,
                vpp=vpp,
            )
            reason = unschedulable(canonical, layers, cut.riders)
            if reason:
                rejected[reason] += 1
            else:
                yield PipelineChoice(schedule, vpp)


def _unschedulable(
    model: Model, job: Job, layout: Layout, layers: int, riders: int
) -> Rejection | None:
    """Why a layout's schedule cannot run, or None; fixed chunks need a layer in every stage."""
    # Bidirectional and V-shaped schedules fix the number of chunks by themselves.
    scheduler = get_schedule(layout.schedule)
    if scheduler.chunks and layers:
        stages = scheduler.stage_map(layout.pp, scheduler.chunks_for(layout.vpp))
        if int(stages.max()) + 1 > layers:
            return Rejection(Reason.SCHEDULE_STAGES, layout.schedule)
    try:
        check_pipeline(model, job, layout, layers, riders)
    except LayoutError as error:
        return error.rejection
    return None


def _orders(space: SearchSpace, degrees: Layout, cluster: Cluster) -> list[str]:
    """Orders of dimensions that place some process group differently."""
    # Orders that give every process group the same placement are one; the first in the space
    # stands for all.
    first_of_placement: dict[Hashable, str] = {}
    for order in space.order:
        first_of_placement.setdefault(
            placement_on_network(degrees.replace(order=order), cluster), order
        )
    return list(first_of_placement.values())


def _shards(
    space: SearchSpace,
    degrees: Layout,
    orders: list[str],
    divided: Callable[[Shard], "Divided | Rejection"],
    rejected: Counter[Rejection],
) -> Iterator[ShardChoice]:
    """Yield the choices of sequence parallelism, overlap and order that some degrees can have."""
    # Sequence parallelism and overlap of tensor-parallel collectives mean nothing for tp=1.
    split = degrees.tp > 1
    reasons: dict[Rejection, None] = {}
    for sequence_parallel in _sequence_parallel(space, degrees, divided) if split else (False,):
        shard = Shard.of(degrees.replace(sequence_parallel=sequence_parallel))
        division = divided(shard)
        if isinstance(division, Rejection):
            reasons[division] = None
            continue
        for tp_overlap, order in product(
            space.tp_overlap if split else space.tp_overlap[:1], orders
        ):
            yield ShardChoice(sequence_parallel, tp_overlap, order)
    rejected.update(list(reasons))


def _sequence_parallel(
    space: SearchSpace,
    degrees: Layout,
    divided: Callable[[Shard], "Divided | Rejection"],
) -> tuple[bool, ...]:
    """Values of sequence parallelism to try; without a sequence, both give the same blocks."""
    either = [
        divided(Shard.of(degrees.replace(sequence_parallel=value))) for value in (True, False)
    ]
    divides_alike = (
        all(isinstance(division, Divided) for division in either) and either[0] == either[1]
    )
    if divides_alike and False in space.sequence_parallel:
        return (False,)
    return space.sequence_parallel


def _states(
    space: SearchSpace,
    degrees: Layout,
    problem: Problem,
    layers: int,
    rejected: Counter[Rejection],
) -> Iterator[StateChoice]:
    """Yield the choices of ZeRO, overlap and offload that some degrees can have.

    Choices with offloaded layers occur without a pipeline only; the caller combines them with no
    recompute.
    """
    job = problem.job
    is_trained = job.mode == "train" and not job.fine_tuning.frozen
    # Without gradients and optimizer states only weights can be sharded (ZeRO 3), and nothing is
    # reduced. Without replicas nothing is sharded.
    zeros: dict[int, None] = {}
    for zero in space.zero:
        is_effective = degrees.replicated and (is_trained or zero == 3)
        zeros[zero if is_effective else 0] = None
    has_reductions = degrees.replicated and is_trained
    reduces = space.overlap_grad_reduce if has_reductions else space.overlap_grad_reduce[:1]

    # Pipelines offload the activations of whole micro-batches (`offload`), other layouts those of
    # single layers (`offload_layers`). Only states of replicas are reduced or gathered.
    offloads = space.offload if degrees.pp > 1 else space.offload[:1]
    most_layers = layers - 1 if degrees.pp == 1 else 0
    counts = [n for n in space.offload_layers if n <= most_layers]
    if job.mode != "train":
        counts = [0]
    elif not counts:
        rejected[Rejection(Reason.OFFLOADED_LAYERS)] += 1
    for zero in zeros:
        # Some frameworks cannot hide the collectives of a ZeRO stage; then they are exposed,
        # whatever the space says.
        gathers = space.overlap_param_gather if zero else space.overlap_param_gather[:1]
        exposed = not (
            space.any_framework or problem.framework.communication.hides(zero, degrees.tp)
        )
        if exposed:
            hidden_reduces, hidden_gathers = (False,), (False,)
        else:
            hidden_reduces, hidden_gathers = reduces, gathers
        for reduce, offload, gather in product(hidden_reduces, offloads, hidden_gathers):
            for n in (0,) if offload else counts:
                yield StateChoice(zero, reduce, gather, offload, n)


def _few_enough(
    pipelines: tuple[PipelineChoice, ...],
    recomputes: tuple[RecomputeChoice, ...],
    pp: int,
    layers: int,
) -> Bool[np.ndarray, "pipelines recomputes"]:
    """Whether a choice recomputes fewer layers than the fullest stage has (recomputing all of them
    is a separate choice)."""
    # Layers per stage are even, with the remainder on the first stages: ceil(layers / stages) in
    # the fullest.
    stages = []
    for pipeline in pipelines:
        schedule = get_schedule(pipeline.schedule)
        stages.append(schedule.stage_map(pp, schedule.chunks_for(pipeline.vpp)).max() + 1)
    most_layers = -(-layers // np.array(stages))
    in_full = np.array([sum(recompute.recompute_full_layers or ()) for recompute in recomputes])
    return in_full < np.maximum(most_layers, 1)[:, None]


@dataclass(frozen=True)
class Divided:
    """A model's blocks on one shard, as a search needs them."""

    blocks: Sequence[tuple[BlockOps, int]]
    layers: int
    """Blocks that a pipeline may be cut between."""
    riders: int
    """Ends of the model that can be a stage without a layer."""
    recompute: dict[str, str]
    """Each recompute mode -> the first mode that is equivalent for these blocks (without attention
    there is nothing to select)."""


def _divided(setting: Setting, shard: Shard) -> Divided | Rejection:
    """The blocks of a shard, or why the model cannot be divided in this way."""
    try:
        blocks = shard_blocks(setting, shard, 1)
    except LayoutError as error:
        if error.rejection is None:
            raise
        return error.rejection

    # Two recompute modes are the same if no block recomputes other kernels or collectives, nor
    # keeps another number of bytes.
    kinds = [block for block, _ in blocks]
    modes = {
        "none": [((), (), block.activation_bytes.none) for block in kinds],
        "selective": [
            (
                b.recompute_selective,
                b.recompute_selective_comm,
                b.activation_bytes.selective,
            )
            for b in kinds
        ],
        "full": [(b.recompute_full, b.recompute_full_comm, b.activation_bytes.full) for b in kinds],
    }

    # Modes under which all blocks do the same are one; it has the name of the first.
    first: dict[str, str] = {}
    for mode, mode_blocks in modes.items():
        first[mode] = next((earlier for earlier in first if modes[earlier] == mode_blocks), mode)
    return Divided(blocks, layer_count(blocks), stages_without_layer(blocks), first)
