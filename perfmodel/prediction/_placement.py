"""Which ranks a collective joins, and so which network tiers it crosses.

Rank order is the common one: tensor parallel fastest, then context, then data, then pipeline
(Megatron-LM's default `tp-cp-ep-dp-pp`; expert groups are consecutive data-parallel ranks).
"""

from dataclasses import dataclass
from typing import Literal

from perfmodel.spec import Cluster, Collective, Layout

Group = Literal["tp", "cp", "ep", "dp", "expert_dp", "pp", "embedding"]


@dataclass(frozen=True)
class Placement:
    """A group of `size` ranks, `stride` apart."""

    size: int
    stride: int

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
        return max(1, min(self.size, node // self.stride))

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
            level=cluster.level_of((self.size - 1) * self.stride + 1),
            concurrent=max(1, node // per_node) if leaves_node else 1,
        )
