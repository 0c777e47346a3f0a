"""What grids of layouts share: block tables, pipelines, transfers and state events, each worked out once."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from jaxtyping import Float, Int

from perfmodel.prediction._blocks import BlockDraft, BlockTable
from perfmodel.prediction._grid import LayoutGrid, PipelineChoice
from perfmodel.prediction._grid_pipelines import PipelineTerms, pipeline_terms
from perfmodel.prediction._grid_sends import SendDraft, hops_of, send_draft
from perfmodel.prediction._grid_states import StageShape, StateDraft, StateTerms
from perfmodel.prediction._pipeline import PipelineCache
from perfmodel.prediction._placement import Group, rank_strides
from perfmodel.prediction._program_spec import MAX_SEGMENTS_GATHER, MAX_SEGMENTS_OVERLAP, program_spec
from perfmodel.prediction._stages import fully_recomputed, layer_count, stage_blocks
from perfmodel.prediction._step_model import StepModel
from perfmodel.spec import Layout, PerStage

T = TypeVar("T")


@dataclass(eq=False)
class GridModel:
    """Parts of the costs of some grids under one step model."""

    fixed: StepModel
    full_layers: Sequence[PerStage]
    """Layers recomputed in full, as they occur in the grids' choices."""
    pipelines: PipelineCache = field(default_factory=PipelineCache)
    _known: dict[Hashable, object] = field(default_factory=dict)

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]  # pyright: ignore[reportReturnType]

    def time_events(self, grids: Sequence[LayoutGrid]) -> None:
        """Time the events of all grids in one call."""
        drafts: dict[int, BlockDraft | SendDraft | StateDraft] = {}
        for grid in grids:
            for layout, (draft, _) in zip(self.shards(grid), self.senders(grid), strict=True):
                for one in (draft, self.send_draft(layout, draft, 1.0)):
                    drafts[id(one)] = one
            for one in self.state_drafts(grid):
                drafts[id(one)] = one
        self.fixed.timed(list(dict.fromkeys(op for draft in drafts.values() for op in draft.ops)))

    def shards(self, grid: LayoutGrid) -> list[Layout]:
        """A layout for each shard choice."""
        return self._once(("shards", grid), lambda: [grid.degrees.replace(**s._asdict()) for s in grid.shards])

    def drafts(self, grid: LayoutGrid) -> list[BlockDraft]:
        """Blocks of each shard choice."""
        return self._once(("drafts", grid), lambda: [self.fixed.draft(layout) for layout in self.shards(grid)])

    def orders(self, grid: LayoutGrid) -> tuple[list[Layout], Int[np.ndarray, " shards"]]:
        """A layout for each order of dimensions, and which of them each shard choice has."""
        layouts = self.shards(grid)
        first, of_shard = distinct([layout.order for layout in layouts])
        return [layouts[s] for s in first], of_shard

    def terms(self, grid: LayoutGrid, choice: PipelineChoice, offload: bool = False) -> PipelineTerms:
        """A pipeline with the model's blocks."""
        layout, job = grid.degrees, self.fixed.job

        def make() -> PipelineTerms:
            draft = self.drafts(grid)[0]
            tied = bool(getattr(self.fixed.model, "tied_embeddings", False))
            chosen = layout.replace(schedule=choice.schedule, vpp=choice.vpp, offload=offload)
            spec = program_spec(chosen, job, layer_count(draft.pairs), tied)
            counts, full = self._once(
                ("counts", spec.n_stages, draft.repeats), lambda: self._counts(draft, spec.n_stages)
            )
            kinds = tuple(zip(draft.layers.tolist(), draft.repeats, strict=True))
            pipeline = self.pipelines.get(spec, counts, draft.layers, kinds)
            return pipeline_terms(spec, pipeline, counts, full)

        repeats = self.drafts(grid)[0].repeats
        return self._once(("terms", choice, layout.pp, job.num_microbatches(layout), offload, repeats), make)

    def _counts(self, draft: BlockDraft, stages: int) -> tuple[np.ndarray, np.ndarray]:
        """Blocks of every stage; those that are recomputed in full, under each of `full_layers`."""
        counts = stage_blocks(draft.pairs, stages, 1).sum(axis=1)
        full = [fully_recomputed(counts, draft.layers, n) for n in self.full_layers]
        return counts, np.stack(full)

    def full_places(self, grid: LayoutGrid) -> Int[np.ndarray, " recomputes"]:
        """Place in `full_layers` of each recompute choice."""
        return np.array([self.full_layers.index(choice.recompute_full_layers) for choice in grid.recomputes])

    def shapes(self, grid: LayoutGrid) -> tuple[list[StageShape], Int[np.ndarray, " pipelines"]]:
        """What stages the ranks of the grid's pipelines hold, and which of these each pipeline has."""
        specs = [self.terms(grid, choice).spec for choice in grid.pipelines]
        keys = [
            (spec.stage_map.shape, spec.stage_map.tobytes(), spec.steps > 1, spec.scheduler.plain) for spec in specs
        ]
        first, of_pipeline = distinct(keys)
        draft = self.drafts(grid)[0]

        def shape(place: int) -> StageShape:
            stages = specs[place].n_stages
            segments = [_segments(draft, stages, most) for most in (1, MAX_SEGMENTS_OVERLAP, MAX_SEGMENTS_GATHER)]
            return StageShape(specs[place], tuple(stage_blocks(draft.pairs, stages, n) for n in segments))

        known = [self._once(("shape", keys[place], draft.repeats), lambda p=place: shape(p)) for place in first]
        return known, of_pipeline

    def senders(self, grid: LayoutGrid) -> list[tuple[BlockDraft, int]]:
        """What the transfers of each shard choice depend on: its blocks, and ranks from one stage to the next."""
        return self._once(
            ("senders", grid),
            lambda: [
                (draft, rank_strides(layout)["pp"])
                for layout, draft in zip(self.shards(grid), self.drafts(grid), strict=True)
            ],
        )

    def send_draft(self, layout: Layout, draft: BlockDraft, share: float) -> SendDraft:
        """Transfers of a shard that carry `share` of a micro-batch."""
        return self._once(
            ("sends", draft, share),
            lambda: send_draft(layout, draft.blocks, share, self.fixed.job, self.fixed.cluster),
        )

    def send_s(self, grid: LayoutGrid, shape: StageShape) -> Float[np.ndarray, "2 stages shards"]:
        """Seconds of the transfers out of every stage."""
        spec, counts = shape.spec, shape.by_segments[0]
        if spec.n_stages == 1:
            return np.zeros((2, 1, len(grid.shards)))

        def seconds(layout: Layout, sender: tuple[BlockDraft, int]) -> Float[np.ndarray, "2 stages"]:
            draft = self.send_draft(layout, sender[0], 1 / spec.scheduler.slices)
            table = self._once(("send table", draft), lambda: draft.seconds(self.timed_s(draft), counts.shape[2]))
            hops = self._once(("hops", shape, sender[1]), lambda: hops_of(spec, counts, layout, self.fixed.cluster))
            return hops.seconds(table)

        own, of_shard = distinct(self.senders(grid))
        shards, senders = self.shards(grid), self.senders(grid)
        return np.stack([seconds(shards[s], senders[s]) for s in own], axis=-1)[..., of_shard]

    def timed_s(self, draft: SendDraft | StateDraft) -> Float[np.ndarray, " ops"]:
        """Seconds of a draft's events."""
        return self.fixed.timed(draft.ops).time_s

    def state_drafts(self, grid: LayoutGrid) -> list[StateDraft]:
        """Events of weights, gradients and optimizer states for all shapes of the grid, by order of dimensions."""
        shapes, draft = self.shapes(grid)[0], self.drafts(grid)[0]
        params: dict[Group, Float[np.ndarray, " blocks"]] = {
            "dp": draft.dense_params(grid.degrees.pp > 1), "expert_dp": draft.expert_params,
        }  # fmt: skip
        return [
            self._once(
                ("states", lay.tp, lay.cp, lay.ep, lay.pp, lay.dp, lay.order, tuple(shapes)),
                lambda lay=lay: StateDraft(lay, shapes, params, self.fixed.job, self.fixed.cluster),
            )
            for lay in self.orders(grid)[0]
        ]

    def state_terms(self, grid: LayoutGrid) -> list[StateTerms]:
        """Bounds on what the grid's states add, by order of dimensions."""
        return [
            self._once(
                ("state terms", draft, grid.states),
                lambda draft=draft: draft.terms(self.timed_s(draft), grid.states),
            )
            for draft in self.state_drafts(grid)
        ]

    def tables(self, grid: LayoutGrid) -> list[BlockTable]:
        """Timed blocks of each shard choice."""
        return [self.fixed.table(layout) for layout in self.shards(grid)]


def _segments(draft: BlockDraft, stages: int, most: int) -> int:
    return min(max(1, layer_count(draft.pairs) // stages), most)


def distinct(keys: Sequence[Hashable]) -> tuple[list[int], Int[np.ndarray, " keys"]]:
    """Place of the first of each distinct key, and which of them each key is."""
    number: dict[Hashable, int] = {}
    of_key = np.array([number.setdefault(key, len(number)) for key in keys])
    return np.unique(of_key, return_index=True)[1].tolist(), of_key
