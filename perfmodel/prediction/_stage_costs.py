"""Times and memory of all possible stages of a layout's pipeline, for optimising partitions.

A stage is any run of consecutive layers, from one cut of the model to a later one. Costs of all of
them at once are small matrices, as blocks and bytes are differences of cumulated sums over the
layers.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from perfmodel.errors import LayoutError
from perfmodel.prediction._communication import across, hops, transfers
from perfmodel.prediction._compose import LayoutBatch, layout_batches, pass_s, phase_s
from perfmodel.prediction._memory import rank_memory
from perfmodel.prediction._memory_inputs import RankBlocks, Sharding
from perfmodel.prediction._price import priced_events
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction._programs import program_live
from perfmodel.prediction.phases import full_recompute_s
from perfmodel.program import Kind, by_layer, segment_sizes
from perfmodel.schedule.memory import LiveState
from perfmodel.spec import Layout

OfStages = Float[np.ndarray, "stages cuts cuts"]
"""A quantity of every possible stage, by the cuts at its two ends."""


@dataclass(frozen=True, eq=False)
class StageCosts:
    """Costs of stage s with layers i to j - 1, indexed [s, i, j]."""

    forward_s: OfStages
    """Seconds per micro-batch; `inf` where the stage is impossible or does not fit into memory."""
    backward_s: OfStages
    """Seconds of a backward pass per micro-batch, including recomputation; 0 for inference."""
    sends_s: Float[np.ndarray, "stages cuts"]
    """Both transfers between a stage that ends before layer j and the next one; 0 after the last
    stage."""
    full_layers: Int[np.ndarray, "stages cuts cuts"]
    """Number of layers, from the first, that must be recomputed in full for the stage to fit."""

    @property
    def both_s(self) -> OfStages:
        """Forward and backward."""
        return self.forward_s + self.backward_s


def stage_costs(
    problem: StepProblem,
    layout: Layout,
    recompute_to_fit: bool = True,
    link: StepProblem | None = None,
) -> StageCosts:
    """Costs of all stages of a pipeline with one stage per rank.

    Args:
        problem: model, job, cluster and cost models.
        layout: a layout, whose partition, recompute by stage and kinds of nodes are of no account.
        recompute_to_fit: a stage that does not fit recomputes as few of its layers in full as make
            it fit (with buffers for the largest of them); otherwise it is impossible.
        link: network that joins these nodes to other kinds (`StepProblem.links`), which the next
            stage may lie on: transfers then cost the least that they can.

    Raises:
        LayoutError: a schedule with several stages per rank, or with passes of several kinds.
    """
    layout = layout.replace(partition=None, recompute_full_layers=None, kinds=None)
    (layout_batch,) = layout_batches(problem, [layout])
    if not one_stage_per_rank(layout_batch):
        raise LayoutError(
            f"stage costs need a schedule with one plain stage per rank, which {layout.schedule} is not; use "
            "another, such as 1f1b"
        )

    # Blocks between any two cuts; embedding and head come on top of the first and the last stage.
    before, cumulative, after = by_layer(layout_batch.tables[0].pairs)
    blocks = np.repeat(
        (cumulative[None, :] - cumulative[:, None])[None], layout_batch.spec.stages, axis=0
    )
    blocks[0] += before
    blocks[-1] += after

    recomputes = recompute_to_fit and layout.recompute != "full" and problem.job.mode == "train"
    full, fits = _full_layers(problem, layout_batch, recomputes)
    runs = fits & _possible(layout_batch)

    # The first layers of a stage are recomputed in full: their time is a difference of cumulated
    # seconds.
    block_s = pass_s(problem, layout_batch)
    recomputed_s = (
        cumulative @ full_recompute_s(phase_s(problem, layout_batch), layout_batch.modes)[0]
    )
    start = np.arange(len(cumulative))[:, None]
    extra_s = recomputed_s[start + full] - recomputed_s[start]
    backward_s = 0.0
    if problem.job.mode == "train":
        backward_s = blocks @ block_s[Kind.BACKWARD][0] + extra_s
    return StageCosts(
        forward_s=np.where(runs, blocks @ block_s[Kind.FORWARD][0], np.inf),
        backward_s=np.where(runs, backward_s, np.inf),
        sends_s=_sends_s(problem, layout_batch, link),
        full_layers=np.where(runs, full, 0),
    )


def one_stage_per_rank(layout_batch: LayoutBatch) -> bool:
    """Whether each rank holds exactly one stage, in order, with plain passes."""
    spec = layout_batch.spec
    return spec.scheduler.plain and spec.stage_map.tolist() == [[s] for s in range(spec.stages)]


def _possible(layout_batch: LayoutBatch) -> np.ndarray:
    """Mark the stages that a pipeline may have: none is empty (the ends may hold only an embedding
    or head), the first starts the model and the last ends it."""
    before, cumulative, after = by_layer(layout_batch.tables[0].pairs)
    cuts = len(cumulative)
    start = np.arange(cuts)[:, None]
    end = np.arange(cuts)
    possible = np.repeat((start < end)[None], layout_batch.spec.stages, axis=0)
    possible[0] |= (start == end) & before.any()
    possible[-1] |= (start == end) & after.any()
    possible[0] &= start == 0
    possible[-1] &= end == cuts - 1
    return possible


def _full_layers(
    problem: StepProblem, layout_batch: LayoutBatch, recomputes: bool
) -> tuple[Int[np.ndarray, "stages cuts cuts"], np.ndarray]:
    """The fewest layers that every stage must recompute in full, and whether it then fits."""
    usable = problem.usable_bytes
    fits = _memory(problem, layout_batch, full=False) <= usable
    full = np.zeros(fits.shape, int)
    if not recomputes or fits.all():
        return full, fits
    cumulative = by_layer(layout_batch.tables[0].pairs).cumulative
    blocks = layout_batch.bytes

    # Bytes per micro-batch that the layers before each cut free if they are recomputed in full.
    freed = np.append(
        0.0,
        np.cumsum(np.diff(cumulative, axis=0) @ (blocks.kept_bytes - blocks.kept_full_bytes)[0]),
    )
    start = np.arange(len(freed))[:, None]
    end = np.arange(len(freed))

    # Start from all layers recomputed, and let the last ones of the stage keep what memory has room
    # for.
    alive = program_live(problem.setting, layout_batch.spec).activations[:, 0]
    everything = _memory(problem, layout_batch, full=True)
    spare = (usable - everything) / alive[:, None, None]
    enough = np.searchsorted(freed, freed[end] - spare) - start
    full = np.where(fits, 0, np.clip(enough, 1, end - start))
    return full, fits | ((spare >= 0) & (start < end))


def _memory(problem: StepProblem, layout_batch: LayoutBatch, full: bool) -> OfStages:
    """Bytes of every possible stage, with all of its layers recomputed in full or only as the
    layout says."""
    table = layout_batch.tables[0]
    spec = layout_batch.spec
    before, cumulative, after = by_layer(table.pairs)
    # Where the segments of a stage of n layers begin and end.
    bounds = np.cumsum(
        [np.append(0, segment_sizes(n, spec.segments)) for n in range(len(cumulative))], axis=1
    )
    live = program_live(problem.setting, spec)
    blocks = layout_batch.bytes
    peak_bytes = np.full((spec.stages, len(cumulative), len(cumulative)), np.inf)
    start = np.zeros(0, int)
    end = np.zeros(0, int)
    memory = None
    for stage, possible in enumerate(_possible(layout_batch)):
        # Inner stages may hold the same blocks and only keep other numbers of micro-batches alive.
        if memory is None or stage in (1, spec.stages - 1):
            start, end = np.nonzero(possible)
            counts = np.diff(cumulative[start[:, None] + bounds[end - start]], axis=1)
            recomputed = counts * [block.is_layer * full for block in table.blocks]
            if stage == 0:
                counts[:, 0] += before
            if stage == spec.stages - 1:
                counts[:, 0] += after

            # Each possible stage as a rank of its own that keeps one micro-batch and one version of
            # its weights.
            ones = np.ones(len(start), int)
            stage_of_rank = np.arange(len(start))[:, None]
            one_micro_batch = LiveState(
                stage_of_rank, ones[:, None], ones, ones, spec.replicas, split=False
            )
            ranks = RankBlocks.of(counts.sum(axis=1), recomputed.sum(axis=1), one_micro_batch)
            memory = rank_memory(
                ranks, blocks, Sharding.of(layout_batch.layouts, problem.job), problem.setting
            )
        peak_bytes[stage, start, end] = (
            memory.weights[0] * live.versions[stage]
            + memory.gradients[0]
            + memory.optimizer[0]
            + memory.activations[0] * live.activations[stage, 0]
            + memory.buffers[0]
        )
    return peak_bytes


def _sends_s(
    problem: StepProblem, layout_batch: LayoutBatch, link: StepProblem | None
) -> Float[np.ndarray, "stages cuts"]:
    """Seconds of the transfers of both directions, by the block that a stage ends with."""
    spec = layout_batch.spec
    layout = layout_batch.layouts[0]
    table = layout_batch.tables[0]
    before, cumulative, _ = by_layer(table.pairs)
    sends_s = np.zeros((spec.stages, len(cumulative)))
    if spec.stages == 1:
        return sends_s
    sent = transfers(layout, table.blocks, 1.0, problem.job, problem.cluster)
    seconds = sent.seconds(priced_events(problem, sent.ops).time_s)
    tier = hops(spec, layout_batch.program.counts, layout, problem.cluster).tier
    ends = []
    for blocks in (before, *np.diff(cumulative, axis=0)):
        ends.append(int(np.flatnonzero(blocks)[-1]) if blocks.any() else 0)
    if link is not None:
        # The next stage may lie on this kind of nodes, at any distance that occurs, or on another
        # one.
        tiers = np.unique(np.concatenate([tier[0, :-1], tier[1, 1:]]))
        leaving = [
            across(op, link.cluster)
            for op in np.array(sent.ops, object)[sent.send[ends, 0]].tolist()
        ]
        least_s = np.minimum(
            seconds[ends][:, tiers].min(axis=1), priced_events(link, leaving).time_s
        )
        sends_s[:-1] = least_s * (1 if spec.is_forward_only else 2)
        return sends_s
    sends_s[:-1] = seconds[ends][:, tier[0, :-1]].T
    if not spec.is_forward_only:
        sends_s[:-1] += seconds[ends][:, tier[1, 1:]].T
    return sends_s
