"""How a kernel's time grows with the tokens, sequences, images or heads that it works on, in a step.

Tables time a kernel by itself, again and again: some sizes find their operands in the cache or end before clocks fall,
others fit tiles that the next size does not. Measurements, and more so what is learned of them, so have twice the work
take less time than half of it, or more than twice as long. In a step every kernel comes from other kernels, and a
framework is free to cut a large one in two: there twice the samples take as long at least, and twice as long at most.
What was measured stays, as far as measurements grow so among themselves; all else gives way to it. Element-wise kernels
are left as they are: what they leave in the cache the next kernel does find.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64

from perfmodel.ops import Attention, Collective, KernelOp, Op

FEWEST: Final[Mapping[str, int]] = {"m": 64, "k": 64, "tokens": 64}
"""Number of samples below which a kernel does not fill a tile: its time gives way to that of more, where steps are of
training. 1 of sequences and images."""
_MOST: Final = 2**16
"""Beyond this number of samples times grow in proportion: measurements end there."""
_MOST_SEQUENCES: Final = 2**10
"""The same of attention."""
_MOST_HEADS: Final = 2**7
"""Attention of more heads is compared by its sequences alone."""


@dataclass(frozen=True)
class _Lattice:
    """Kernels that do more or less of the same work: of more samples or heads."""

    ops: tuple[KernelOp, ...]
    octaves: Float64[np.ndarray, "n axes"]
    """log2 of their heads (0 where they have none) and of their numbers of samples."""
    few: Bool[np.ndarray, "n"]
    """Which of them do not fill a tile."""
    last: int
    """Position of the kernel of most samples that differs in nothing else from the one asked for."""
    over: float
    """Samples of the one asked for over those of that one."""


def _octaves(count: int, least: int, most: int) -> list[int]:
    """A number times and over every power of two that leaves it whole, from `least` to `most`, in ascending order."""
    odd = count // (count & -count)
    return [odd << i for i in range(most.bit_length()) if least <= odd << i <= most]


def _lattice(op: Op, fewest: Mapping[str, int]) -> _Lattice | None:
    """A kernel with every number of samples that is its own times or over a power of two, from what fills a tile (from
    its own, where that does not) to the largest that is compared, and attention of each with as many heads less or
    more; None of collectives, and of numbers of samples that are compared with no others."""
    name = "" if isinstance(op, Collective) else op.samples
    if isinstance(op, Collective) or not name or (count := getattr(op, name)) < 1:
        return None
    tile = fewest.get(name, 1)
    samples = _octaves(count, min(count, tile), _MOST_SEQUENCES if isinstance(op, Attention) else _MOST)
    if not samples:
        return None
    of_heads: list[KernelOp] = [op]
    if isinstance(op, Attention) and op.heads <= _MOST_HEADS:
        group = op.heads // gcd(op.heads, op.kv_heads)
        heads = [n for n in _octaves(op.heads, group, _MOST_HEADS) if n % group == 0]
        of_heads = [replace(op, heads=n, kv_heads=n * op.kv_heads // op.heads) for n in heads]
    ops = tuple(replace(one, **{name: n}) for one in of_heads for n in samples)
    octaves = np.log2([(getattr(one, "heads", 1), getattr(one, name)) for one in ops])
    few = np.array([getattr(one, name) < tile for one in ops], bool)
    return _Lattice(ops, octaves, few, (of_heads.index(op) + 1) * len(samples) - 1, count / samples[-1])


def _beyond(octaves: Float64[np.ndarray, "n axes"]) -> Float64[np.ndarray, "n n"]:
    """Log of how much longer every kernel (rows) may take than every other (columns) at most: twice as long for each
    doubling by which it is larger, no longer for those by which it is smaller."""
    return np.log(2.0) * np.maximum(octaves[:, None] - octaves[None], 0.0).sum(axis=2)


def growing(
    log_s: Float64[np.ndarray, "n"], measured: Bool[np.ndarray, "n"], octaves: Float64[np.ndarray, "n axes"]
) -> Float64[np.ndarray, "n"]:
    """Times of kernels made to grow by nothing at least and by half at most for every doubling of an axis, in
    logarithms: each is the mean of the most and the least that all others leave it, first among the measured ones,
    between which the others then stay. Growing times are left as they are.

    Monotone in every time, and moved with all of them. Both bounds are such times themselves (the largest and the
    smallest Lipschitz extensions: McShane, Bull. AMS 40(12), 1934), hence their mean is, and what is cut at them.
    """
    more = _beyond(octaves)

    def bounds(at: Bool[np.ndarray, "n"], held: Float64[np.ndarray, "k"]) -> tuple[np.ndarray, np.ndarray]:
        return (held - more[at].T).max(axis=1), (held + more[:, at]).min(axis=1)

    found = np.mean(bounds(np.ones(len(log_s), bool), log_s), axis=0)
    if not measured.any():
        return found
    held = np.mean(bounds(measured, log_s[measured]), axis=0)[measured]
    return np.clip(found, *bounds(measured, held))


def _with_few(log_s: Float64[np.ndarray, "n"], lattice: _Lattice, measured: Bool[np.ndarray, "n"]) -> np.ndarray:
    """`growing`, where the times of too few samples give way to the others, each to the one of twice the samples."""
    found, fill = log_s.copy(), ~lattice.few
    found[fill] = growing(log_s[fill], measured[fill], lattice.octaves[fill])
    for i in reversed(np.flatnonzero(lattice.few)[: len(log_s) - 1]):
        found[i] = np.clip(found[i], found[i + 1] - np.log(2.0), found[i + 1])
    return found


def with_sizes(ops: Iterable[Op], fewest: Mapping[str, int] = FEWEST) -> list[Op]:
    """The events, each once, and all kernels that theirs are compared with."""
    found: dict[Op, None] = {}
    for op in ops:
        if op not in found:  # with an event come all that it is compared with
            lattice = _lattice(op, fewest)
            found |= dict.fromkeys((op, *(lattice.ops if lattice else ())))
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
        if i in done or (lattice := _lattice(op, fewest)) is None:
            continue
        places = [place[one] for one in lattice.ops]
        grown = _with_few(log_s[places], lattice, known[places])
        out[places] = grown - log_s[places]
        done.update(places)
        if i not in done:  # beyond the last
            out[i] = grown[lattice.last] + np.log(lattice.over) - log_s[i]
    return np.exp(out)
