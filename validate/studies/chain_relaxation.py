"""Cuts, recompute and bandwidth together: discrete and continuous unknowns over the exact timeline.

Cuts and modes come from the dynamic program (links as given) and from a relaxation of everything at
once; for every such partition the links' shares are relaxed, sixteen partitions at a time; then
single layers are moved, each move with shares of its own. No exact solver covers the whole.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float
from studies.chain import Chain

from perfmodel.planning.optimise._contiguous import NothingFitsError, least_sum_plus_max
from perfmodel.planning.optimise._pipeline import Certificate
from perfmodel.planning.optimise._relax import relax
from perfmodel.timeline import makespan, makespan_lanes

_BATCH: Final = 16
_IN_VAIN: Final = 4
"""Batches of moves without a better one after which the search ends."""
_EQUAL: Final = 1e-6


@dataclass(frozen=True, eq=False)
class ChainResult:
    """The optimised cuts, recompute modes and shares of the links."""

    partition: tuple[int, ...]
    mode: tuple[int, ...]
    """Recompute of every stage, the fastest that fits."""
    links: Float[np.ndarray, " hops"]
    """Share of every hop in the bandwidth, 1 as given; they keep the sum."""
    step_s: float
    certificate: Certificate
    """Over all partitions, modes and shares."""
    seconds: float


def optimise_chain(chain: Chain) -> ChainResult:
    """Minimise the chain's makespan over contiguous stages, recompute by stage, and a split of the
    bandwidth.

    Raises:
        NothingFitsError: no partition fits into memory.
    """
    began = time.perf_counter()

    # Partitions to begin with: the exact ones for links as given, and what the relaxation of
    # everything at once rounds to.
    everything = relax(chain.relaxation(links=True), n_starts=_BATCH)
    rounded = [tuple(map(int, values["layers"])) for values, *_ in everything.starts]
    front = [cuts.partition for cuts in chain.exact()[: _BATCH // 2]]
    candidates = [*dict.fromkeys([chain.improved(front)[0], *front, *rounded])]

    best: tuple[int, ...] | None = None
    links = np.ones(chain.stages - 1)
    best_s = np.inf
    tried: set[tuple[int, ...]] = set()
    in_vain = 0
    while in_vain < _IN_VAIN:
        # the most promising under the shares found so far get shares of their own
        promising = [
            partition
            for partition in dict.fromkeys(candidates)
            if partition not in tried and chain.mode_of(partition) is not None
        ]
        if not promising:
            break
        order = np.argsort(makespan_lanes(chain.program, chain.durations_s(promising, links)))
        chosen: list[tuple[int, ...]] = [promising[i] for i in order[:_BATCH]]
        tried.update(chosen)
        shares, spans_s = share_links(chain, chosen)
        shortest = int(np.argmin(spans_s))
        if spans_s[shortest] >= best_s * (1 - _EQUAL):
            in_vain += 1
            continue

        # A better one: the search goes on among its neighbours.
        in_vain = 0
        best = chosen[shortest]
        links = shares[shortest]
        best_s = float(spans_s[shortest])
        candidates = list(chain.moved(best))
    mode = None if best is None else chain.mode_of(best)
    if best is None or mode is None:
        raise NothingFitsError("no way to cut the layers into these stages fits")

    # Shares of a partition are found in few steps, those of the best one in many; should these
    # have ended worse, the former count.
    shares, _ = share_links(chain, [best], steps=1000)
    ends = []
    for split in (links, shares[0]):
        durations_s = chain.durations_s([best], split)[0]
        ends.append((float(makespan(chain.program, durations_s)), tuple(split)))
    step_s, best_links = min(ends)
    return ChainResult(
        partition=best,
        mode=tuple(mode.argmax(axis=1).tolist()),
        links=np.array(best_links),
        step_s=step_s,
        certificate=Certificate(
            _lower_bound_s(chain), "", "1F1B's paths with the cheapest transfer on every hop"
        ),
        seconds=time.perf_counter() - began,
    )


def share_links(
    chain: Chain, partitions: Sequence[tuple[int, ...]], *, steps: int = 150
) -> tuple[Float[np.ndarray, "partitions hops"], Float[np.ndarray, " partitions"]]:
    """The best split of the bandwidth for each of at most 16 partitions, and the makespans."""
    # Padded to one size: the relaxation is compiled once for all batches.
    padded = [*partitions, *[partitions[0]] * (_BATCH - len(partitions))]
    modes = [chain.mode_of(partition) for partition in padded]
    per_start = {"layers": np.array(padded, float), "mode": np.array(modes, float)}
    relaxation = chain.relaxation(links=True, stages=False)
    relaxed = relax(relaxation, n_starts=_BATCH, steps=steps, per_start=per_start, spread=0.0)
    links = np.array([values["links"] for values, *_ in relaxed.starts])[: len(partitions)]
    return links, makespan_lanes(chain.program, chain.durations_s(partitions, links))


def _lower_bound_s(chain: Chain) -> float:
    """Lower bound of 1F1B's makespan over all partitions: each stage once, then the slowest stage
    for the rest (as `lower_bound_s` of pipelines).

    n hops of transfer b / x whose shares x add up to n take n b together at least (the harmonic
    mean).
    """
    seconds, _ = chain.tables
    m = chain.micro_batches
    # Forwards of the warm-up may run while the first micro-batch passes the other stages.
    warm_up = np.minimum(chain.stages - np.arange(chain.stages), m)[:, None, None]
    rest = (m - 1) * seconds - (warm_up - 1) * chain.forward_table_s
    (best, *_) = least_sum_plus_max(
        seconds[None], np.where(np.isfinite(seconds), rest, np.inf)[None]
    )
    return best.value + 2 * (chain.stages - 1) * float(chain.boundary_s[:-1].min())
