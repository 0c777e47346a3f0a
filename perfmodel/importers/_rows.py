"""Rows of an op table."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from perfmodel.ops import Collective, CollectiveKind, KernelOp
from perfmodel.spec import Cluster

Groups = tuple[tuple[int, ...], ...]
"""Ranks that communicate with one another, group by group; for `send_recv` (source, target) pairs."""


@dataclass(frozen=True, slots=True)
class KernelRow:
    """Equal kernels of one device."""

    op: KernelOp
    """What the kernel is timed as."""
    flops: float
    """Of one execution, exactly (`op.flops` may round)."""
    bytes: float
    """Read and written by one execution."""
    source: str
    """What the imported program calls it; a fused chain is named by its ops."""
    count: float = 1.0
    """Executions."""


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """Equal collectives that one device takes part in."""

    collective: CollectiveKind
    bytes: float
    """Sized as `spec.Collective` does."""
    groups: Groups
    dtype: str
    source: str
    count: float = 1.0

    @property
    def num_ranks(self) -> int:
        """Ranks of the largest group."""
        return max(map(len, self.groups), default=1)

    def on(self, cluster: Cluster) -> Collective:
        """The collective on a cluster whose devices are numbered node by node, in the order of the ranks.

        Of groups that lie differently in the network the one that spans most nodes is taken: the slowest
        decides when all go on.

        Raises:
            PerfModelError: a rank that the cluster does not have.
        """
        highest = max((max(group, default=0) for group in self.groups), default=0)
        cluster.require(highest + 1, "the program")
        node = cluster.devices_per_node
        nodes = [{rank // node for rank in group} for group in self.groups]
        widest = self.groups[max(range(len(nodes)), key=lambda i: len(nodes[i]))]
        leaving = Counter(n for of_group in nodes if len(of_group) > 1 for n in of_group)
        place = cluster.reach(widest)._replace(concurrent=max(leaving.values(), default=1))
        return Collective(
            collective=self.collective, bytes=self.bytes, num_ranks=len(widest), dtype=self.dtype, **place._asdict()
        )


@dataclass(frozen=True, slots=True)
class Unmapped:
    """Something that has no kernel."""

    name: str
    reason: str
    flops: float
    """Of one execution; one per output element where nothing better is known."""
    count: float = 1.0


Row = TypeVar("Row", KernelRow, CollectiveRow, Unmapped)


def repeated(rows: Iterable[Row], count: float) -> list[Row]:
    """Rows executed `count` times as often."""
    return [replace(row, count=row.count * count) for row in rows]


def merged(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Equal rows as one, in order of first appearance."""
    total: dict[Any, float] = {}
    for row in rows:
        once = replace(row, count=1.0)
        total[once] = total.get(once, 0.0) + row.count
    return tuple(replace(once, count=count) for once, count in total.items())
