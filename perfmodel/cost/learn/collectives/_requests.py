"""Collectives to price, as columns, and their prices."""

from dataclasses import dataclass

import numpy as np

from perfmodel.cost.learn.collectives._fabrics import Fabric
from perfmodel.cost.learn.collectives._rows import SeriesKey
from perfmodel.cost.learn.collectives._weights import EntryKey


@dataclass(frozen=True)
class CollectiveRequest:
    """A pricing request for one kind on one fabric, with the names of measured series."""

    kind: str
    fabric: Fabric
    keys: tuple[EntryKey | SeriesKey, ...] = ()
    """A measured series to price by, most specific first; without one the fabric's usual price."""
    algorithm: str = ""
    """The algorithm that must be used; by default the fastest."""
    any_algorithm: bool = True
    host_launches: bool = False
    """Whether the host launches each call, rather than a graph that replays it."""


@dataclass(frozen=True)
class Groups:
    """`n` collectives as columns, float64[n] (`level` int64)."""

    buffer_bytes: np.ndarray
    ranks: np.ndarray
    ranks_per_node: np.ndarray
    level: np.ndarray
    """Outermost network level reached."""
    concurrent: np.ndarray
    """Groups that share each node's outgoing links."""
    interleaved: np.ndarray
    """Groups whose ranks alternate within one span of a node and share its host bridge if it has
    one."""

    @classmethod
    def on(
        cls,
        fabric: Fabric,
        *,
        buffer_bytes: np.ndarray,
        ranks: np.ndarray,
        ranks_per_node: np.ndarray,
        level: np.ndarray,
        concurrent: np.ndarray,
        interleaved: np.ndarray | float = 1.0,
    ) -> "Groups":
        """Make groups on a fabric; groups that leave their node reach at least its first network
        level."""
        last = len(fabric.levels) - 1
        level = np.clip(level.astype(np.int64), 0, last)
        if fabric.flat:
            ranks_per_node = np.ones(len(ranks))
        else:
            ranks_per_node = np.clip(ranks_per_node, 1, ranks)
            level = np.where(ranks > ranks_per_node, np.maximum(level, min(1, last)), 0)
        concurrent = np.maximum(concurrent, 1.0)

        # Groups that leave a node share its bridge with all that leave it beside them. Behind a
        # switch, or with links between pairs, groups do not slow one another.
        bridged = fabric.inside.link_class.bridged
        sharing_inside = interleaved if bridged else 1.0
        sharing_between = concurrent if bridged else 1.0
        sharing = np.where(ranks > ranks_per_node, sharing_between, sharing_inside)
        return cls(buffer_bytes, ranks, ranks_per_node, level, concurrent, np.maximum(sharing, 1.0))

    def take(self, index: np.ndarray) -> "Groups":
        """The groups at some positions."""
        return Groups(**{name: column[index] for name, column in vars(self).items()})


@dataclass(frozen=True)
class Priced:
    """Times with 90 % intervals."""

    time_s: np.ndarray
    half_width: np.ndarray
    """Half-width of the interval in log time."""
    provenance: np.ndarray
    least_s: np.ndarray
    """Shortest time that the links' full rates allow: no time, nor any end of an interval, is
    shorter."""

    @classmethod
    def unknown(cls, n: int) -> "Priced":
        """An empty record of `n` prices."""
        return cls(
            np.full(n, np.nan), np.full(n, np.nan), np.full(n, "", dtype=object), np.zeros(n)
        )

    def put(self, index: np.ndarray, prices: "Priced") -> None:
        """Set the prices at positions."""
        for name, column in vars(self).items():
            column[index] = getattr(prices, name)
