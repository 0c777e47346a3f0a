"""The table of parallel dimensions that a layout may have.

To add a dimension: an entry here (`ep` stays right before `dp`), a field of `Layout` with the same
key, and the rules that name it: what it does to the shapes of blocks (`perfmodel.workload`), where
its ranks lie if it does not multiply to the devices (`perfmodel.prediction.placement`), and what
makes it impossible (a `perfmodel.errors.Reason`, raised where layouts and blocks are made).
Validation of degrees, numbering of ranks, keys of what is computed once, accounts of time and
search spaces derive from the table.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One parallel dimension."""

    key: str
    """Field of a layout with its degree."""
    name: str
    """Name of its collectives in accounts of a step's time."""
    multiplies: bool = True
    """The device count is the product of these degrees; any other dimension reuses the ranks of
    these."""
    numbered: bool = True
    """It has a place in the order in which ranks are numbered (`Layout.order`)."""
    shards_blocks: bool = False
    """Shapes of a model's blocks depend on it, and its collectives run inside them."""


DIMENSIONS: Final = (
    Dimension(key="tp", name="tensor_parallel", shards_blocks=True),
    Dimension(key="cp", name="context_parallel", shards_blocks=True),
    Dimension(key="ep", name="expert_parallel", multiplies=False, shards_blocks=True),
    Dimension(
        key="etp",
        name="tensor_parallel",
        multiplies=False,
        numbered=False,
        shards_blocks=True,
    ),
    Dimension(key="dp", name="data_parallel"),
    Dimension(key="pp", name="pipeline_parallel"),
)
"""All dimensions, in Megatron-LM's default order of ranks, innermost first."""

DEVICE_KEYS: Final = tuple(d.key for d in DIMENSIONS if d.multiplies)
"""Dimensions whose degrees multiply to the device count."""
ORDER_KEYS: Final = tuple(d.key for d in DIMENSIONS if d.numbered)
"""Dimensions that determine the numbering of ranks."""
BLOCK_KEYS: Final = tuple(d.key for d in DIMENSIONS if d.shards_blocks)
"""Dimensions that determine the shapes of blocks."""
