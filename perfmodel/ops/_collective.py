"""Collectives: what an event sends, independent of model, layout and network."""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast"]

ExchangeWay = Literal["dispatch", "combine"]


class Exchange(NamedTuple):
    """An exchange of tokens with experts by a library of its own."""

    dispatcher: str
    """As `perfmodel.spec.Dispatcher`."""
    way: ExchangeWay
    """Towards the experts or back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective over a group of ranks, sized as nccl-tests does.

    `bytes`: all_reduce the buffer; all_gather the gathered output; reduce_scatter the full input;
    all_to_all the buffer of one rank; send_recv the message; broadcast the buffer.
    """

    collective: CollectiveKind
    bytes: float
    num_ranks: int
    ranks_per_node: int
    """Ranks of this group that share a node (innermost network level)."""
    dtype: str = "bf16"
    level: int = 0
    """Outermost network level of the cluster that the group spans."""
    concurrent: int = 1
    """Groups of this kind that share each node's outgoing links at the same time."""
    relayed_bytes: float = 0.0
    """Of an all-to-all over nodes: what each rank sends on inside its node at the same time, of all that its node
    receives. The collective takes as long as the longer of the two."""
    exchange: Exchange | None = None
    """Of an all-to-all: the library that carries it out, whose rate may be published; None: the usual one."""

    uses_matrix_units: ClassVar[bool] = False
    """As of kernels."""

    @property
    def family(self) -> str:
        """One regressor family per collective kind."""
        return self.collective

    @property
    def num_nodes(self) -> int:
        return -(-self.num_ranks // self.ranks_per_node)

    @property
    def label(self) -> str:
        """A short, readable name: kind, bytes, ranks and where they are."""
        where = "intra-node" if self.num_nodes == 1 else f"{self.num_nodes} nodes"
        return f"{self.collective} {self.bytes / 1e6:.3g} MB x{self.num_ranks} ({where})"
