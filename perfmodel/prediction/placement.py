"""Placement of process groups, and the network tiers that their collectives cross.

`Layout.order` says which dimension varies fastest over consecutive ranks. Experts divide the ranks
of a pipeline stage anew (parallel folding). Ranks that shard an expert are counted along tp first,
then from the inside out. Of the remaining ranks, consecutive ones hold different experts, and the
others hold replicas. Where tp is innermost, as by default, that is how Megatron-Core numbers them
(its `RankGenerator` for experts).
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd, prod
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np

from perfmodel.display import shorten_reprs
from perfmodel.ops import Collective, Exchange
from perfmodel.spec import BLOCK_KEYS, DEVICE_KEYS, DIMENSIONS, Cluster, Layout, interleaved_groups
from perfmodel.workload import ExpertChoice

Group = Literal["tp", "cp", "ep", "etp", "dp", "expert_dp", "pp", "embedding"]
BLOCK_GROUPS: tuple[Group, ...] = BLOCK_KEYS  # pyright: ignore[reportAssignmentType]
"""Process groups whose collectives run inside blocks."""


class Axis(NamedTuple):
    """One dimension of a grid of ranks."""

    ranks: int
    """Number of ranks along it."""
    stride: int
    """Distance between neighbours, in ranks."""


def rank_strides(layout: Layout) -> dict[str, int]:
    """Distance in ranks between neighbours of each dimension of the layout (Megatron-LM's
    `RankGenerator`)."""
    strides = {}
    stride = 1
    for name in layout.order.split("-"):
        if name in DEVICE_KEYS:
            strides[name] = stride
            stride *= getattr(layout, name)
    return strides


class Network(NamedTuple):
    """Everything that determines the time of a group's collective."""

    ranks: int
    """Ranks of the group."""
    ranks_per_node: int
    """Ranks of the group that share a node."""
    level: int
    """Outermost network level that it crosses."""
    concurrent: int
    """Groups that share a node's outgoing links, if the group leaves its node."""
    interleaved: int = 1
    """See `perfmodel.ops.Collective`; 1 for a group that leaves its node."""

    def collective(
        self,
        kind: str,
        n_bytes: float,
        dtype: str,
        choice: ExpertChoice | None = None,
        exchange: Exchange | None = None,
    ) -> Collective:
        """The event of the group's collective.

        Args:
            n_bytes: bytes per rank; of tokens that are routed to experts, before they are copied
                for each.
            choice: routing of tokens to experts, where the collective exchanges them.
            exchange: the library that carries it out.
        """
        relayed_bytes = 0.0
        if choice is not None:
            # Tokens go once to every node that they are routed to, and from there once to every
            # rank of it. The collective keeps on a rank, or in a node, the share of its bytes that
            # belongs there.
            to_ranks = n_bytes * choice.reached(self.ranks)
            nodes = self.ranks / self.ranks_per_node
            relayed_bytes = to_ranks if nodes > 1 else 0.0
            n_bytes = n_bytes * choice.reached(ceil(nodes)) if nodes > 1 else to_ranks
        return Collective(
            collective=kind,  # pyright: ignore[reportArgumentType]
            bytes=float(n_bytes),
            relayed_bytes=float(relayed_bytes),
            exchange=exchange,
            num_ranks=self.ranks,
            ranks_per_node=self.ranks_per_node,
            dtype=dtype,
            level=self.level,
            concurrent=self.concurrent,
            interleaved=self.interleaved,
        )


@dataclass(frozen=True)
class Placement:
    """A group of ranks as a grid, with its axes innermost first."""

    axes: tuple[Axis, ...]
    """Axes of more than one rank; none of them continues the one before it."""

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return prod(axis.ranks for axis in self.axes)

    def times(self, replicas: int, layout: Layout) -> "Placement":
        """Join the group with the groups of the pipeline ranks that hold replicas of the stage.

        Replicas are taken to be evenly spread over the pipeline (those of Chimera lie opposite each
        other).
        """
        # Replicas on one rank have nothing to reduce.
        if replicas == 1 or layout.pp < replicas:
            return self
        stride = rank_strides(layout)["pp"] * layout.pp // replicas
        return Placement((*self.axes, Axis(replicas, stride)))

    def split(self, inner: int) -> tuple["Placement", "Placement"]:
        """Split into groups of the `inner` nearest ranks, and groups across them."""
        inside, between = _split(list(self.axes), inner)
        return _grid(*inside), _grid(*between)

    @classmethod
    def of(cls, group: Group, layout: Layout) -> "Placement":
        """The placement of a process group of `layout`."""
        return _placement(group, layout.order, layout.degrees)

    def on_network(self, cluster: Cluster) -> Network:
        """The part of a cluster's network that the group uses."""
        node = min(cluster.devices_per_node, cluster.capacity)
        size = self.size
        # From the first to the last member.
        reach = sum((n - 1) * stride for n, stride in self.axes) + 1
        per_node = size
        if reach > node:
            per_node = prod(max(1, min(n, node // stride)) for n, stride in self.axes)
        leaves_node = size > per_node

        # All groups of the dimension communicate at once: those whose ranks share a node share its
        # links.
        concurrent = max(1, node // per_node) if leaves_node else 1
        interleaved = 1 if leaves_node or size == 1 else interleaved_groups(size, reach)
        return Network(size, per_node, cluster.level_of(reach), concurrent, interleaved)

    def collective(self, kind: str, n_bytes: float, dtype: str, cluster: Cluster) -> Collective:
        """The event of this group's collective on `cluster`."""
        return self.on_network(cluster).collective(kind, n_bytes, dtype)


def placement_on_network(layout: Layout, cluster: Cluster) -> tuple[object, ...]:
    """Key of a layout's order: equal for orders that put every group on the same links."""
    groups: tuple[Group, ...] = (*BLOCK_GROUPS, "dp", "expert_dp")
    places = [Placement.of(group, layout) for group in groups]
    # Bidirectional pipelines join replicas on ranks that lie half a pipeline apart.
    two_stages = [place.times(2, layout) for place in places[-2:]] if layout.pp % 2 == 0 else []
    networks = [place.on_network(cluster) for place in (*places, *two_stages)]

    # Which transfers around the pipeline leave a group of devices, by network level.
    rank = np.arange(layout.pp) * rank_strides(layout)["pp"]
    crossings = []
    for level in cluster.levels:
        group_of_rank = rank // level.size
        crossings.append((np.diff(group_of_rank, append=group_of_rank[:1]) != 0).tobytes())
    return *networks, *crossings


@lru_cache(maxsize=1 << 16)
def _placement(group: Group, order: str, degrees: tuple[int, ...]) -> Placement:
    """`Placement.of` with only the arguments that it depends on."""
    by_key: dict[str, Any] = dict(zip((d.key for d in DIMENSIONS), degrees, strict=True))
    layout = Layout(order=order, **by_key)
    strides = rank_strides(layout)
    match group:
        case "tp" | "cp" | "pp":
            return _grid(Axis(getattr(layout, group), strides[group]))
        case "embedding":
            # First and last stage.
            return _grid(Axis(2, strides["pp"] * (layout.pp - 1)))

    # Weights are replicated over context-parallel ranks too.
    by_stride = attrgetter("stride")
    data = sorted([Axis(layout.cp, strides["cp"]), Axis(layout.dp, strides["dp"])], key=by_stride)
    if group == "dp":
        return _grid(*data)

    # Experts divide the ranks of a stage anew: those that shard an expert first along tp, then from
    # the inside out; then those with different experts; the rest are replicas.
    sharding, remaining = _split([Axis(layout.tp, strides["tp"]), *data], layout.expert_tp)
    holding, replicas = _split(sorted(remaining, key=by_stride), layout.ep)
    axes_of_group = {"etp": sharding, "ep": holding, "expert_dp": replicas}
    return _grid(*axes_of_group[group])


def _split(axes: list[Axis], degree: int) -> tuple[list[Axis], list[Axis]]:
    """Split a grid into groups of the first `degree` ranks along its axes, and the grid of these
    groups."""
    inside, between = [], []
    for n, stride in axes:
        # As many ranks of this axis as divide the group's degree; the next axes give the rest.
        inside_degree = gcd(degree, n)
        degree //= inside_degree
        inside.append(Axis(inside_degree, stride))
        between.append(Axis(n // inside_degree, stride * inside_degree))
    return inside, between


def _grid(*axes: Axis) -> Placement:
    """A placement along some axes in normal form, so that equal groups compare equal."""
    merged: list[Axis] = []
    for axis in axes:
        # Drop axes of one rank, and merge an axis that continues the one before it.
        if axis.ranks == 1:
            continue
        last = merged[-1] if merged else None
        if last is not None and last.ranks * last.stride == axis.stride:
            merged[-1] = Axis(last.ranks * axis.ranks, last.stride)
        else:
            merged.append(axis)
    return Placement(tuple(merged))


shorten_reprs(__name__)
