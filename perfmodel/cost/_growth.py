"""How a kernel's time grows with the tokens, sequences or images that it works on, in a step.

Tables time a kernel by itself, again and again: some sizes find their operands in the cache or end before clocks fall,
others fit tiles that the next size does not. Measurements, and more so what is learned of them, so have twice the work
take less time than half of it, or more than twice as long. In a step every kernel comes from other kernels, and a
framework is free to cut a large one in two: there twice the samples take as long at least, and twice as long at most.
What was measured stays, as far as measurements grow so among themselves; all else gives way to it. Element-wise kernels
are left as they are: what they leave in the cache the next kernel does find.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64

from perfmodel.cost.learn import rising
from perfmodel.ops import Collective, KernelOp, Op

FEWEST: Final[Mapping[str, int]] = {"m": 64, "k": 64, "tokens": 64}
"""Number of samples below which a kernel does not fill a tile: its time gives way to that of more, where steps are of
training. 1 of sequences and images."""
_MOST: Final = 2**16
"""Beyond this number of samples times grow in proportion: measurements end there."""


def _sizes(op: Op, fewest: Mapping[str, int]) -> tuple[KernelOp, ...]:
    """A kernel with every number of samples that is its own times or over a power of two, from what fills a tile (from
    its own, where that does not) to the largest that is compared, in ascending order; none of collectives."""
    if isinstance(op, Collective):
        return ()
    name = op.samples
    count = getattr(op, name) if name else 0
    if count < 1:
        return ()
    odd, least = count // (count & -count), min(count, fewest.get(name, 1))
    every = [odd << i for i in range(_MOST.bit_length()) if least <= odd << i <= _MOST]
    return tuple(replace(op, **{name: n}) for n in every)


def _too_few(chain: Sequence[KernelOp], fewest: Mapping[str, int]) -> int:
    """How many of a kernel's sizes do not fill a tile."""
    name = chain[0].samples
    return sum(getattr(one, name) < fewest.get(name, 1) for one in chain)


def growing(log_s: Float64[np.ndarray, "n"], measured: Bool[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
    """Times over samples that double made to grow by nothing at least and by half at most, in logarithms: each is the
    mean of what those of fewer and those of more samples leave it, first among the measured ones, between which the
    others then stay. Growing times are left as they are.

    Monotone in every time, and moved with all of them (`rising`).
    """
    at = np.arange(len(log_s)) * np.log(2.0)
    found = rising(log_s, at_most=at)
    if not measured.any():
        return found
    held, beyond = rising(log_s[measured], at_most=at[measured]), at[:, None] - at[measured]
    least, most = (held + np.minimum(beyond, 0.0)).max(axis=1), (held + np.maximum(beyond, 0.0)).min(axis=1)
    return np.clip(found, least, most)


def _with_few(log_s: Float64[np.ndarray, "n"], few: int, measured: Bool[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
    """`growing`, where the first `few` times give way to the others, each to the one of twice the samples."""
    found = np.concatenate([log_s[:few], growing(log_s[few:], measured[few:])])
    for i in reversed(range(min(few, len(found) - 1))):
        found[i] = np.clip(found[i], found[i + 1] - np.log(2.0), found[i + 1])
    return found


def with_sizes(ops: Iterable[Op], fewest: Mapping[str, int] = FEWEST) -> list[Op]:
    """The events, each once, and all kernels that theirs are compared with."""
    found: dict[Op, None] = {}
    for op in ops:
        if op not in found:  # with an event come all that it is compared with
            found |= dict.fromkeys((op, *_sizes(op, fewest)))
    return list(found)


def growth(
    ops: Sequence[Op],
    time_s: Float64[np.ndarray, "n"],
    measured: Sequence[bool] | Bool[np.ndarray, "n"],
    fewest: Mapping[str, int] = FEWEST,
) -> Float64[np.ndarray, "n"]:
    """Times of events in a step over their times by themselves (`time_s`); 1 for collectives.

    Args:
        ops: as `with_sizes` gives them, with the same `fewest`.
        measured: whose time was measured, not learned.
        fewest: see `FEWEST`; none where steps of few samples are the usual ones.
    """
    place = {op: i for i, op in enumerate(ops)}
    log_s, out, known = np.log(np.maximum(time_s, 1e-300)), np.zeros(len(ops)), np.asarray(measured, bool)
    done: set[int] = set()
    for i, op in enumerate(ops):
        if i in done or isinstance(op, Collective) or not (chain := _sizes(op, fewest)):
            continue
        places = [place[one] for one in chain]
        few = _too_few(chain, fewest)
        grown = _with_few(log_s[places], few, known[places])
        out[places] = grown - log_s[places]
        done.update(places)
        if i not in done:  # beyond the last
            over = getattr(op, op.samples) / getattr(chain[-1], op.samples)
            out[i] = grown[-1] + np.log(over) - log_s[i]
    return np.exp(out)
