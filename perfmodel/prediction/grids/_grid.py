"""Grids of layouts: products of a few choices that are never written out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from perfmodel.errors import LayoutError
from perfmodel.spec import Layout, Recompute
from perfmodel.spec.notation import PerStage


class PipelineChoice(NamedTuple):
    """Pipeline fields of a layout, as in `Layout`."""

    schedule: str
    vpp: int


class ShardChoice(NamedTuple):
    """Fields that place blocks and ranks on devices, besides the degrees."""

    sequence_parallel: bool
    tp_overlap: bool
    order: str


class RecomputeChoice(NamedTuple):
    """Recomputation fields of a layout."""

    recompute: Recompute
    recompute_full_layers: PerStage = None
    """At most one number, which applies to all stages."""


class StateChoice(NamedTuple):
    """Fields for sharding and moving weights, gradients and optimizer states."""

    zero: int
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    offload: bool
    offload_layers: int = 0

    @property
    def resident(self) -> "StateChoice":
        """The choice without activation offloading."""
        return self._replace(offload=False, offload_layers=0)


@dataclass(frozen=True, eq=False)
class LayoutGrid:
    """All layouts with the same degrees and micro-batch: the product of pipeline, shard,
    recomputation and state choices."""

    degrees: Layout
    """Layout with the degrees, the micro-batch, and all fields that no axis sets; fields of the
    axes are ignored."""
    pipelines: tuple[PipelineChoice, ...]
    shards: tuple[ShardChoice, ...]
    recomputes: tuple[RecomputeChoice, ...]
    states: tuple[StateChoice, ...]
    valid: Bool[np.ndarray, "#pipelines 1 #recomputes 1"]
    """Combinations that are distinct layouts, for any shards and states."""

    def __post_init__(self) -> None:
        # Layouts are derived from this one axis by axis, and an axis must not contradict the fields
        # that are set here.
        neutral = self.degrees.replace(
            recompute="none", recompute_full_layers=None, offload=False, offload_layers=0
        )
        object.__setattr__(self, "degrees", neutral)

    @classmethod
    def of(cls, layout: Layout) -> "LayoutGrid":
        """A grid of one layout, of even stages.

        Raises:
            LayoutError: the layout divides its layers, or what it recomputes, stage by stage.
        """
        if layout.partition is not None or len(layout.recompute_full_layers or ()) > 1:
            raise LayoutError(
                f"layout {layout.label} has uneven stages, which a grid cannot hold; leave partition and "
                "recompute_full_layers out"
            )
        return cls.one(layout)

    @classmethod
    def one(cls, layout: Layout) -> "LayoutGrid":
        """Make a grid of a single layout, with any stages."""
        chosen: list[Any] = []
        for kind in (PipelineChoice, ShardChoice, RecomputeChoice, StateChoice):
            fields = [layout.value(name) for name in kind._fields]
            chosen.append((kind(*fields),))
        return cls(layout, *chosen, valid=np.ones((1, 1, 1, 1), bool))

    def only(self, chosen: Sequence[Int[np.ndarray, " choices"]]) -> "LayoutGrid":
        """Restrict the grid to some choices of each axis."""
        pipelines, shards, recomputes, states = chosen
        valid = np.broadcast_to(self.valid, (len(self.pipelines), 1, len(self.recomputes), 1))
        return LayoutGrid(
            degrees=self.degrees,
            pipelines=tuple(self.pipelines[i] for i in pipelines.tolist()),
            shards=tuple(self.shards[i] for i in shards.tolist()),
            recomputes=tuple(self.recomputes[i] for i in recomputes.tolist()),
            states=tuple(self.states[i] for i in states.tolist()),
            valid=valid[pipelines][:, :, recomputes],
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Choices along each axis."""
        return len(self.pipelines), len(self.shards), len(self.recomputes), len(self.states)

    @cached_property
    def size(self) -> int:
        """Number of valid layouts."""
        pipelines, _, recomputes, _ = self.shape
        valid = np.broadcast_to(self.valid, (pipelines, 1, recomputes, 1))
        return int(valid.sum()) * len(self.shards) * len(self.states)

    @cached_property
    def schedules(self) -> tuple[str, ...]:
        """The registered name of the schedule that really runs, for each pipeline choice."""
        return tuple(
            self.degrees.replace(**choice._asdict()).effective_schedule for choice in self.pipelines
        )

    @cached_property
    def _fields(self) -> tuple[tuple[dict[str, object], ...], ...]:
        """By axis, the layout fields of every choice."""
        fields = []
        for axis in (self.pipelines, self.shards, self.recomputes, self.states):
            fields.append(tuple(choice._asdict() for choice in axis))
        return tuple(fields)

    def layout(self, index: int) -> Layout:
        """Return the layout at a flat index of the product."""
        pipelines, shards, recomputes, states = self._fields
        pipeline, shard, recompute, state = np.unravel_index(index, self.shape)
        return self.degrees.replace(
            **pipelines[pipeline], **shards[shard], **recomputes[recompute], **states[state]
        )

    def places(self) -> Int[np.ndarray, " valid"]:
        """Flat indices of the valid layouts."""
        return np.flatnonzero(np.broadcast_to(self.valid, self.shape))

    def layouts(self) -> Iterator[Layout]:
        """The valid layouts, one by one."""
        yield from map(self.layout, self.places().tolist())
