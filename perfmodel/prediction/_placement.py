"""Which ranks a collective joins, and so which network tiers it crosses.

Rank order is the common one: tensor parallel fastest, then context, then data, then pipeline
(Megatron-LM's default `tp-cp-ep-dp-pp`; expert groups are consecutive data-parallel ranks).
"""

from dataclasses import dataclass, replace
from typing import Literal

from perfmodel.spec import Cluster, Collective, Layout

Group = Literal["tp", "cp", "ep", "dp", "expert_dp", "pp", "embedding"]


@dataclass(frozen=True)
class Placement:
    """A group of `size` ranks, `stride` apart."""

    size: int
    stride: int
    copies: int = 1
    """So many groups of that kind are joined, which lie `copy_stride` apart."""
    copy_stride: int = 0

    def times(self, replicas: int, layout: Layout) -> "Placement":
        """The group joined with its likes on the other pipeline ranks that hold replicas of a stage, taken
        to be evenly spread (those of Chimera lie opposite each other)."""
        if replicas == 1:
            return self
        stride = Placement.of("pp", layout).stride * layout.pp // replicas
        return replace(self, size=self.size * replicas, copies=replicas, copy_stride=stride)

    @classmethod
    def of(cls, group: Group, layout: Layout) -> "Placement":
        """Size and stride of a process group of `layout`."""
        tp, cp, dp, ep = layout.tp, layout.cp, layout.dp, layout.ep
        match group:
            case "tp":
                return cls(tp, 1)
            case "cp":
                return cls(cp, tp)
            case "ep":
                return cls(ep, tp)
            case "dp":  # weights are replicated over context-parallel ranks too
                return cls(dp * cp, tp)
            case "expert_dp":
                return cls(dp * cp // ep, tp * ep)
            case "pp":
                return cls(layout.pp, tp * cp * dp)
            case "embedding":  # first and last stage
                return cls(2, tp * cp * dp * (layout.pp - 1))

    def ranks_per_node(self, node: int) -> int:
        """Members of the group that share a node of `node` devices."""
        return max(1, min(self.size // self.copies, node // self.stride)) * self._copies_per_node(node)

    def _copies_per_node(self, node: int) -> int:
        return max(1, min(self.copies, node // self.copy_stride)) if self.copies > 1 else 1

    @property
    def reach(self) -> int:
        """Ranks from the first to the last member."""
        return (self.size // self.copies - 1) * self.stride + (self.copies - 1) * self.copy_stride + 1

    def collective(self, kind: str, n_bytes: float, dtype: str, cluster: Cluster) -> Collective:
        """The event of this group's collective on `cluster`.

        Groups that leave the node share its outgoing links with the like groups beside them.
        """
        node = min(cluster.devices_per_node, cluster.max_devices)
        per_node = self.ranks_per_node(node)
        leaves_node = self.size > per_node
        return Collective(
            collective=kind,  # pyright: ignore[reportArgumentType]
            bytes=float(n_bytes),
            num_ranks=self.size,
            ranks_per_node=per_node,
            dtype=dtype,
            level=cluster.level_of(self.reach),
            concurrent=max(1, node // per_node) if leaves_node else 1,
        )
