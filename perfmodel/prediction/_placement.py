"""Which ranks a collective joins, and so which network tiers it crosses.

`Layout.order` says which dimension varies fastest over consecutive ranks. Expert groups are consecutive ranks
of the data- and context-parallel group, which the weights outside experts are replicated over.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from typing import Literal

import numpy as np

from perfmodel.spec import Cluster, Collective, Layout

Group = Literal["tp", "cp", "ep", "dp", "expert_dp", "pp", "embedding"]
Axis = tuple[int, int]
"""So many ranks, so far apart."""


def rank_strides(layout: Layout) -> dict[str, int]:
    """Ranks between neighbours of each dimension of the layout (Megatron-LM's `RankGenerator`)."""
    strides, stride = {}, 1
    for name in layout.order.split("-"):
        if name != "ep":
            strides[name] = stride
            stride *= getattr(layout, name)
    return strides


@dataclass(frozen=True)
class Placement:
    """A group of ranks as a grid: its axes, innermost first."""

    axes: tuple[Axis, ...]

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return prod(n for n, _ in self.axes)

    def times(self, replicas: int, layout: Layout) -> "Placement":
        """The group joined with its likes on the other pipeline ranks that hold replicas of a stage, taken
        to be evenly spread (those of Chimera lie opposite each other)."""
        if replicas == 1 or layout.pp < replicas:  # on one rank nothing has to be reduced
            return self
        stride = rank_strides(layout)["pp"] * layout.pp // replicas
        return Placement((*self.axes, (replicas, stride)))

    @classmethod
    def of(cls, group: Group, layout: Layout) -> "Placement":
        """Where a process group of `layout` lies."""
        return _placement(group, layout.order, layout.tp, layout.cp, layout.dp, layout.ep, layout.pp)

    def ranks_per_node(self, node: int) -> int:
        """Members of the group that share a node of `node` devices."""
        if self.reach <= node:
            return self.size
        return prod(max(1, min(n, node // stride)) for n, stride in self.axes)

    def on_network(self, cluster: Cluster) -> tuple[int, int, int, int]:
        """All that the time of a collective depends on: ranks, ranks per node, outermost network level, and groups
        that share a node's outgoing links (the like groups beside it, if it leaves the node)."""
        node = min(cluster.devices_per_node, cluster.max_devices)
        per_node = self.ranks_per_node(node)
        beside = max(1, node // per_node) if self.size > per_node else 1
        return self.size, per_node, cluster.level_of(self.reach), beside

    @property
    def reach(self) -> int:
        """Ranks from the first to the last member."""
        return sum((n - 1) * stride for n, stride in self.axes) + 1

    def collective(self, kind: str, n_bytes: float, dtype: str, cluster: Cluster) -> Collective:
        """The event of this group's collective on `cluster`."""
        ranks, per_node, level, beside = self.on_network(cluster)
        return Collective(
            collective=kind,  # pyright: ignore[reportArgumentType]
            bytes=float(n_bytes),
            num_ranks=ranks,
            ranks_per_node=per_node,
            dtype=dtype,
            level=level,
            concurrent=beside,
        )


def placement_on_network(layout: Layout, cluster: Cluster) -> tuple[object, ...]:
    """What of a layout's order matters: equal for orders that put every group on the same links."""
    groups: tuple[Group, ...] = ("tp", "cp", "ep", "dp", "expert_dp")
    places = [Placement.of(group, layout) for group in groups]
    # bidirectional pipelines join replicas on ranks that lie half a pipeline apart
    joined = [place.times(2, layout) for place in places[-2:]] if layout.pp % 2 == 0 else []
    rank = np.arange(layout.pp) * rank_strides(layout)["pp"]
    crosses = tuple(
        (np.diff(rank // level.size, append=rank[:1] // level.size) != 0).tobytes() for level in cluster.levels
    )
    return *(place.on_network(cluster) for place in (*places, *joined)), *crosses


@lru_cache(maxsize=1 << 16)
def _placement(group: Group, order: str, tp: int, cp: int, dp: int, ep: int, pp: int) -> Placement:
    layout = Layout(order=order, tp=tp, cp=cp, dp=dp, ep=ep, pp=pp)
    strides = rank_strides(layout)
    match group:
        case "tp" | "cp" | "pp":
            return _grid((getattr(layout, group), strides[group]))
        case "embedding":  # first and last stage
            return _grid((2, strides["pp"] * (pp - 1)))
    inner, outer = sorted(("cp", "dp"), key=lambda name: strides[name])
    near = gcd(ep, getattr(layout, inner))
    far = ep // near
    match group:
        case "dp":  # weights are replicated over context-parallel ranks too
            return _grid((getattr(layout, inner), strides[inner]), (getattr(layout, outer), strides[outer]))
        case "ep":
            return _grid((near, strides[inner]), (far, strides[outer]))
        case "expert_dp":
            rest = getattr(layout, inner) // near, getattr(layout, outer) // far
            return _grid((rest[0], strides[inner] * near), (rest[1], strides[outer] * far))


def _grid(*axes: Axis) -> Placement:
    """Axes of one rank left out, and those that continue one another joined."""
    joined: list[Axis] = []
    for n, stride in axes:
        if n == 1:
            continue
        if joined and joined[-1][0] * joined[-1][1] == stride:
            joined[-1] = (joined[-1][0] * n, joined[-1][1])
        else:
            joined.append((n, stride))
    return Placement(tuple(joined))
