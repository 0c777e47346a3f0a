"""Constants of links never measured: those of measured relatives, scaled by nominal figures."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from perfmodel.learn._collective_constants import Series, prior_vector
from perfmodel.learn._collective_links import link_class

_FACTORS: Final = ((0, 0.05), (1, 0.3), (3, 0.02), (4, 0.2), (5, 0.1))
"""How much less a relative counts that differs in this part of its name: source, device, kind, algorithm,
variant (see `CollectiveRows.series`)."""
_OTHER_LINK: Final = 0.05
_OTHER_KIND_OF_LINK: Final = 0.02
_NO_RELATIVE: Final = 1e-6


def relative_vector(name: str, measured: Sequence[Series], between_nodes: bool = False) -> tuple[np.ndarray, float]:
    """Constants expected of series `name` and the similarity (0..1) of its closest relative.

    The prior of its own links, moved as its relatives' fits moved from theirs: a weighted mean, so that
    efficiencies, launch costs and protocol shares carry over while bandwidths follow nominal figures.
    Only relatives measured on the asked tier count.
    """
    own = prior_vector(name)
    if not measured:
        return own, 0.0
    wanted = name.split("|")
    link = link_class(wanted[2], wanted[1], between_nodes)
    weights, moves = [], []
    for relative in measured:
        if not (relative.ranks_between if between_nodes else relative.ranks):
            continue
        has = relative.name.split("|")
        weight = 1.0
        for index, factor in _FACTORS:
            weight *= 1.0 if has[index] == wanted[index] else factor
        other = link_class(has[2], has[1], between_nodes)
        if other.name != link.name:
            same_kind = other.name.split("-")[0].rstrip("0123456789") == link.name.split("-")[0].rstrip("0123456789")
            weight *= _OTHER_LINK if same_kind else _OTHER_KIND_OF_LINK * _OTHER_LINK
        weights.append(weight)
        moves.append(relative.vector - prior_vector(relative.name))
    if not weights:
        return own, 0.0
    share = np.array(weights)
    move = share @ np.array(moves) / (share.sum() + _NO_RELATIVE)
    return own + move, float(share.max())
