"""Plausible values of open degrees, micro-batches and element types of a run.

These are filled in as cells of a row, since the batch, the devices and the rest of the layout
follow from them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, Final

import numpy as np

from perfmodel.validation.rows import (
    Row,
    count,
    names_dtype,
    number,
    open_shapes,
    schedule_of,
    text,
)
from perfmodel.validation.rows.phrases import read_phrases
from perfmodel.validation.rows.vocabulary import SHARDING
from perfmodel.validation.unstated._features import RunFeatures
from perfmodel.validation.unstated.priors import ChoicePriors

_DEGREES: Final = ("tp", "pp", "dp")
MOST_STAGES: Final = 16
MOST_TENSOR: Final = 16
MOST_CONTEXT: Final = 8
MOST_EXPERT_GROUPS: Final = 64
MOST_CHUNKS: Final = 16
MOST_MICRO_BATCH: Final = 1024

DEGREE_CHAIN: Final = (("kind",), ("size",), ("framework",))
MICRO_BATCH_CHAIN: Final = (
    ("kind", "length"),
    ("size", "length"),
    ("stages", "size"),
    ("framework",),
)
ACCUMULATION: Final = "accumulation"
"""Name of the choice between one micro-batch in a step and several, of runs without a pipeline."""
WHOLE_SHARE, IN_PARTS = "one micro-batch", "several micro-batches"
"""Values of `ACCUMULATION`."""
ACCUMULATION_CHAIN: Final = (("kind",), ("size",), ("framework",))
CHUNKS_CHAIN: Final = (("framework",),)
DTYPE_CHAIN: Final = (("architecture",), ("framework",))


@dataclass(frozen=True)
class FilledRow:
    """A row with some of its open cells filled in."""

    cells: Row
    weight: float = 1.0
    """Prior probability of the values that were filled in."""
    chosen: dict[str, str] = field(default_factory=dict)
    """Values that were filled in, by choice."""

    def filled(self, name: str, value: str, weight: float, **cells: Any) -> "FilledRow":
        """The row with a further choice filled in."""
        return FilledRow(
            {**self.cells, **cells}, self.weight * weight, {**self.chosen, name: value}
        )


def filled_rows(
    row: Row,
    features: RunFeatures,
    priors: ChoicePriors,
    micro_batch: int | None,
    narrow: str | None,
    *,
    names_schedules: bool,
    experts: int = 0,
) -> list[FilledRow]:
    """Fill in open degrees, micro-batch, chunks and element type in every plausible way; returns
    the row itself if none is open.

    - The shape of a dense model of which only family and parameters are known: three widths per
      layer.
    - Two or more degrees: tensor parallelism of up to `MOST_TENSOR` ranks within a node (a slice of
      TPUs), up to `MOST_STAGES` stages and `MOST_CONTEXT` parts of the sequence (where that is not
      stated either), in powers of two, such that replicas share out the batch.
    - Degrees that contradict the devices: replicas are what the other degrees leave, as launchers
      have it.
    - Expert parallelism of a mixture of experts: groups of up to `MOST_EXPERT_GROUPS` ranks, in
      powers of two, that share out the experts and the ranks of a stage.
    - The micro-batch: powers of two that divide what a replica gets; without a pipeline also all
      that it gets, as often as runs of this kind and framework do not accumulate gradients.
    - Model chunks per stage, in a pipeline of no stated schedule, of 1F1B unless its framework
      names schedules, or of an interleaved one (several then): all that divide the layers of a
      stage, and powers of two (chunks may be uneven). What a framework cannot run is left out
      later.
    - Over how many replicas weights are sharded, where `sharding` says `FSDP+DP` and no number: a
      node and more, in powers of two, each as likely.
    - The element type: 16 bits, and the narrower type of the framework on the device, if it has
      one.

    Args:
        row: cells of one run.
        features: features of the run.
        priors: prior probabilities of the values.
        micro_batch: the framework's default, if that is known; used where it divides the batch.
        narrow: the element type of 8 bits that the framework runs on the device, if any.
        names_schedules: whether its launches name their schedule
            (`LaunchDefaults.names_schedules`).
        experts: routed experts of a layer; 0 for models without.

    Raises:
        Unusable: a cell that is not a number.
    """
    # Fill in one group of cells after the other. Each step multiplies the rows by its possible
    # values, or leaves a row that states them as it is.
    rows = [FilledRow(row)]
    with_experts = partial(_with_expert_groups, experts=experts)
    with_micro_batch = partial(_with_micro_batch, default=micro_batch)
    steps = [_with_shape, _with_degrees, _with_replicas, with_experts, with_micro_batch]
    if not names_schedules or schedule_of(row).name != "1f1b":
        steps.append(_with_chunks)
    steps.append(_with_shards)
    for step in steps:
        filled: list[FilledRow] = []
        for before in rows:
            choices = list(step(before, features, priors))
            filled += choices or [before]
        rows = filled
    if not narrow:
        return rows
    filled = []
    for before in rows:
        filled += _with_dtype(before, features, priors, narrow)
    return filled


def _with_shape(
    before: FilledRow, features: RunFeatures, priors: ChoicePriors
) -> Iterator[FilledRow]:
    """Yield the row with possible shapes of its model, if it states only family and parameters."""
    for cells, chance in open_shapes(before.cells):
        yield before.filled("shape", f"hidden={cells['hidden']}", chance, **cells)


def _with_degrees(
    before: FilledRow, features: RunFeatures, priors: ChoicePriors
) -> Iterator[FilledRow]:
    """Yield the row with possible degrees, if it leaves two or more open."""
    row = before.cells
    if sum(number(row, name) is None for name in _DEGREES) < 2 or number(row, "n_devices") is None:
        return
    devices = count(row, "n_devices")
    batch = count(row, "global_batch", 0)
    # Tensor parallelism stays within a node, whose links are fast enough for its collectives.
    inside = min(devices, count(row, "devices_per_node", 8), MOST_TENSOR)
    usual = {
        "tp": powers_of_two(inside),
        "pp": powers_of_two(MOST_STAGES),
        "cp": powers_of_two(MOST_CONTEXT),
    }
    contexts = features.contexts(DEGREE_CHAIN)
    possible, chances = [], []
    for name, values in usual.items():
        if number(row, name) is not None:
            values = (count(row, name),)
        weights = priors.probabilities(name, contexts, tuple(map(str, values)))
        possible.append(values)
        chances.append(dict(zip(values, weights.tolist(), strict=True)))
    # Degrees whose replicas do not come out even, or do not share out the batch, cannot have run.
    for tp, pp, cp in product(*possible):
        dp, rest = divmod(devices, tp * pp * cp)
        if dp and not rest and (not batch or batch % dp == 0) and count(row, "dp", dp) == dp:
            weight = chances[0][tp] * chances[1][pp] * chances[2][cp]
            yield before.filled(
                "degrees",
                f"tp={tp},pp={pp},cp={cp}",
                weight,
                tp=tp,
                pp=pp,
                cp=cp,
                dp=dp,
            )


def _with_replicas(
    before: FilledRow, features: RunFeatures, priors: ChoicePriors
) -> Iterator[FilledRow]:
    """Yield the row with the replicas that its other degrees imply, if all are stated and
    contradict the devices."""
    row = before.cells
    if any(number(row, name) is None for name in (*_DEGREES, "n_devices")):
        return

    # Where all degrees are stated and do not multiply to the devices, launchers derive the
    # replicas from the rest.
    devices = count(row, "n_devices")
    devices_per_replica = count(row, "tp") * count(row, "pp") * count(row, "cp", 1)
    if devices_per_replica * count(row, "dp") != devices and devices % devices_per_replica == 0:
        yield before.filled(
            "dp",
            str(devices // devices_per_replica),
            1.0,
            dp=devices // devices_per_replica,
        )


def _with_expert_groups(
    before: FilledRow, features: RunFeatures, priors: ChoicePriors, *, experts: int
) -> Iterator[FilledRow]:
    """Yield the row with degrees of expert parallelism, if its model has experts and it states
    none."""
    row = before.cells
    if not experts or number(row, "ep") is not None:
        return
    # One degree may be left to the devices.
    if number(row, "n_devices") is not None and number(row, "pp") is not None:
        ranks_of_stage = count(row, "n_devices") // count(row, "pp")
    else:
        ranks_of_stage = count(row, "tp", 1) * count(row, "cp", 1) * count(row, "dp", 1)
    degrees = powers_of_two(MOST_EXPERT_GROUPS)
    contexts = features.contexts(DEGREE_CHAIN)
    chances = priors.probabilities("ep", contexts, tuple(map(str, degrees)))
    for ep, chance in zip(degrees, chances.tolist(), strict=True):
        if experts % ep == 0 and ranks_of_stage % ep == 0:
            yield before.filled("ep", str(ep), chance, ep=ep)


def _with_micro_batch(
    before: FilledRow, features: RunFeatures, priors: ChoicePriors, *, default: int | None
) -> Iterator[FilledRow]:
    """Yield the row with micro-batches that divide a replica's batch, if neither the row nor its
    framework's default decides them."""
    row = before.cells
    if number(row, "micro_batch") is not None or number(row, "num_microbatches") is not None:
        return
    batch = count(row, "global_batch", 0)
    devices_per_replica = count(row, "tp", 1) * count(row, "pp", 1) * count(row, "cp", 1)
    dp = count(
        row,
        "dp",
        max(1, count(row, "n_devices", devices_per_replica) // devices_per_replica),
    )

    # Micro-batches have to divide what a replica gets of the batch. A default that does not was
    # overridden in this run.
    is_shared = batch > 0 and batch % dp == 0
    share = batch // dp if is_shared else 1
    if default is not None and (not is_shared or share % default == 0):
        return
    is_pipeline = count(row, "pp", 1) > 1
    contexts = replace(features, stages="pipeline" if is_pipeline else "one stage").contexts(
        MICRO_BATCH_CHAIN
    )

    # Probabilities are over all powers of two, since counts do not know which of them divide this
    # batch. They are normalised over the possible ones later.
    all_sizes = powers_of_two(MOST_MICRO_BATCH)
    all_chances = priors.probabilities("micro_batch", contexts, tuple(map(str, all_sizes)))
    chances = {
        size: float(chance)
        for size, chance in zip(all_sizes, all_chances, strict=True)
        if share % size == 0
    }

    # A pipeline needs several micro-batches. Without a pipeline, most programs run a replica's
    # whole batch at once unless a setting accumulates gradients.
    if not is_pipeline and share > 1:
        contexts = features.contexts(ACCUMULATION_CHAIN)
        at_once, in_parts = priors.probabilities(ACCUMULATION, contexts, (WHOLE_SHARE, IN_PARTS))
        part_chances = {size: chance for size, chance in chances.items() if size < share}
        total = sum(part_chances.values())
        chances = {size: float(in_parts) * chance / total for size, chance in part_chances.items()}
        chances[share] = float(at_once)
    for size, chance in chances.items():
        yield before.filled("micro_batch", str(size), chance, micro_batch=size)


def nearest_power_of_two(value: float) -> int:
    """The power of two nearest in the logarithm, as micro-batches and degrees are counted."""
    return 1 << max(0, round(float(np.log2(value))))


def _with_chunks(
    before: FilledRow, features: RunFeatures, priors: ChoicePriors
) -> Iterator[FilledRow]:
    """Yield the row with numbers of model chunks, if it leaves them open."""
    row = before.cells
    stages = count(row, "pp", 1)
    schedule = schedule_of(row).name
    is_interleaved = schedule == "interleaved"
    if stages == 1 or text(row, "vpp") or not (is_interleaved or schedule in ("", "1f1b")):
        return

    # All published runs that state an interleaved schedule and a number of chunks have several.
    per_stage = max(1, count(row, "layers", stages) // stages)
    dividing = {n for n in range(1, min(MOST_CHUNKS, per_stage) + 1) if per_stage % n == 0}
    possible = sorted(dividing | {*powers_of_two(min(MOST_CHUNKS, per_stage))})
    if is_interleaved:
        possible = [chunks for chunks in possible if chunks > 1] or possible

    # Published runs are counted by three kinds of chunks; numbers of one kind share its
    # probability.
    kinds = [chunks_of(chunks, per_stage) for chunks in possible]
    known = tuple(dict.fromkeys(kinds))
    chances = priors.probabilities("vpp", features.contexts(CHUNKS_CHAIN), known)
    chance = dict(zip(known, chances.tolist(), strict=True))
    for chunks, kind in zip(possible, kinds, strict=True):
        yield before.filled("vpp", str(chunks), chance[kind] / kinds.count(kind), vpp=chunks)


def chunks_of(chunks: int, layers_per_stage: int) -> str:
    """The class of model chunks per stage by which published runs are counted."""
    if chunks == 1:
        return "one"
    return "a layer each" if chunks >= layers_per_stage else "some"


def _with_shards(
    before: FilledRow, features: RunFeatures, priors: ChoicePriors
) -> Iterator[FilledRow]:
    """Yield the row with each size of sharding group, if it says only `FSDP+DP`."""
    row = before.cells
    sharding = text(row, "sharding")
    if not read_phrases(sharding, SHARDING).has_meaning("fsdp and dp"):
        return
    dp = count(row, "dp", 1)
    node = count(row, "devices_per_node", 8)

    # Weights are sharded over a node at least, since within a node gathers are cheap.
    groups = [size for size in powers_of_two(dp) if min(node, dp) <= size]
    for size in groups:
        yield before.filled(
            "replicate",
            str(dp // size),
            1 / len(groups),
            sharding=f"FSDP over {size} devices",
        )


def _with_dtype(
    before: FilledRow, features: RunFeatures, priors: ChoicePriors, narrow: str
) -> Iterator[FilledRow]:
    """Yield the row in 16 and in 8 bits, if it does not name its element type."""
    if names_dtype(before.cells):
        yield before
        return
    chances = priors.probabilities("dtype", features.contexts(DTYPE_CHAIN), ("16 bits", "8 bits"))
    yield before.filled("dtype", "bf16", float(chances[0]), dtype="bf16")
    yield before.filled("dtype", narrow, float(chances[1]), dtype=narrow)


def powers_of_two(limit: int) -> tuple[int, ...]:
    """Powers of two up to a number."""
    return tuple(1 << i for i in range(limit.bit_length()))


PARALLELISM: Final = "parallelism"
"""The choice between `PARALLELISMS`; degrees state their extent."""
PARALLELISMS: Final = ("data", "tensor", "pipeline")
PARALLELISM_CHAIN: Final = (("size",), ("framework",))


def parallelism_of(tp: int, pp: int) -> str:
    """The most complex kind of parallelism in a layout."""
    if pp > 1:
        return "pipeline"
    return "tensor" if tp > 1 else "data"


def stated_degrees(row: Row) -> dict[str, str]:
    """Stated degrees and micro-batch of a row by name, in the form in which they are counted."""
    stated = {}
    for name in ("tp", "pp", "cp", "micro_batch"):
        if number(row, name) is not None:
            stated[name] = str(nearest_power_of_two(count(row, name)))
    return stated
