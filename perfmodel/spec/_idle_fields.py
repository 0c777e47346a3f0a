"""Fields of a layout that act only under a condition, such as a schedule without a pipeline."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from perfmodel.spec._layout import Layout


class IdleField(NamedTuple):
    """A field, and when it acts."""

    name: str
    acts: "Callable[[Layout], bool]"
    """Whether the field has an effect on a layout."""
    why: str
    """Why it has none otherwise; ends a sentence that begins with the field and its value."""


IDLE_FIELDS: Final[tuple[IdleField, ...]] = (
    IdleField(
        "schedule",
        lambda layout: layout.pp > 1,
        "has no effect with pp=1, because there is no pipeline",
    ),
    IdleField(
        "partition",
        lambda layout: layout.pp > 1,
        "has no effect with pp=1, because there is only one stage",
    ),
    IdleField(
        "replicate",
        lambda layout: layout.zero > 0,
        "has no effect with zero=0, which shards nothing",
    ),
    IdleField(
        "prefetch",
        lambda layout: layout.zero == 3 and layout.overlap.overlap_param_gather,
        "has no effect without zero=3 and overlap_param_gather=true",
    ),
    IdleField("sequence_parallel", lambda layout: layout.tp > 1, "has no effect with tp=1"),
    IdleField("tp_overlap", lambda layout: layout.tp > 1, "has no effect with tp=1"),
    IdleField("cp_kind", lambda layout: layout.cp > 1, "has no effect with cp=1"),
    IdleField("cp_balanced", lambda layout: layout.cp > 1, "has no effect with cp=1"),
    IdleField("ep_overlap", lambda layout: layout.ep > 1, "has no effect with ep=1"),
)
"""All such fields, in the order in which remarks name them."""
