"""What a pass is made of: its blocks in order, and the kernels and collectives of each."""

from collections.abc import Iterator
from typing import Final

import numpy as np
from jaxtyping import Float

from perfmodel.prediction._blocks import BlockTimes
from perfmodel.prediction._compose import Bundle, bundle_passes
from perfmodel.prediction._durations import OnKind, parts
from perfmodel.prediction._phases import Phase, phase_counts
from perfmodel.prediction._prediction import PassEvent, PassPart
from perfmodel.prediction._price import variant_times
from perfmodel.prediction._problem import StepProblem
from perfmodel.program import Kind

_ORDER: Final = (
    Phase.FORWARD, Phase.RECOMPUTE_SELECTIVE, Phase.RECOMPUTE_FULL, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT,
)  # fmt: skip
"""In which a pass runs through the phases of a block."""


def pass_parts(
    problem: StepProblem, bundle: Bundle, durations_s: Float[np.ndarray, " classes"]
) -> dict[int, tuple[PassPart, ...]]:
    """Blocks of each class of pass, in the order in which they run; together they take as long as the class.

    Args:
        bundle: of one layout.
        durations_s: of its program's classes.
    """
    found: dict[int, tuple[PassPart, ...]] = {}
    for part in parts(problem, bundle):
        found |= _of_kind(part, durations_s)
    return found


def _of_kind(part: OnKind, durations_s: Float[np.ndarray, " classes"]) -> dict[int, tuple[PassPart, ...]]:
    """The same of the classes on one kind of nodes."""
    problem, bundle = part.problem, part.bundle
    layout, passes = bundle.layouts[0], bundle_passes(problem, bundle)
    found: dict[int, tuple[PassPart, ...]] = {}
    for variant, of_kind in passes.of_variant.items():
        table = variant_times(problem, layout, variant, bundle.spec.scheduler.slices)
        hidden = np.ones_like(table.phase_s)
        if variant[2]:
            hidden = table.overlapped_phase_s / np.maximum(table.phase_s, 1e-300)
        for kind, where in of_kind.items():
            known: dict[tuple[int, bool], PassPart] = {}
            for each in where.tolist() if part.on is None else where[part.on[where]].tolist():
                blocks = list(_blocks(kind, passes.blocks[each], passes.full[each]))
                for block, in_full in set(blocks) - known.keys():
                    (runs,) = phase_counts(kind, layout.recompute, np.ones(1), np.array([float(in_full)]))
                    known[block, in_full] = _part(table, block, runs, hidden[block])
                pieces = [known[one] for one in blocks]
                total_s = sum(one.time_s for one in pieces)
                if total_s > 0:
                    found[each] = tuple(_scaled(one, float(durations_s[each]) / total_s) for one in pieces)
    return found


def _part(
    table: BlockTimes, block: int, runs: Float[np.ndarray, " phases"], hidden: Float[np.ndarray, " phases"]
) -> PassPart:
    """A block that runs through its phases so often, of whose time so much is left that nothing else hides."""
    event_s = (table.event_s + table.slowing_s)[block] * (runs * hidden)[:, None]
    events = tuple(
        PassEvent(table.ops[o].label, table.groups[o], float(runs[p] * table.counts[block, p, o]), float(event_s[p, o]))
        for p in _ORDER
        for o in np.flatnonzero(event_s[p]).tolist()
    )
    return PassPart(table.blocks[block].name, float((runs * hidden) @ table.phase_s[block]), events)


def _blocks(
    kind: Kind, counts: Float[np.ndarray, " blocks"], full: Float[np.ndarray, " blocks"]
) -> Iterator[tuple[int, bool]]:
    """Blocks of a pass one by one, and whether each is recomputed in full; backward runs through them from the end."""
    backward = kind != Kind.FORWARD
    for block in range(len(counts))[:: -1 if backward else 1]:
        n, in_full = round(counts[block]), round(full[block])
        yield from ((block, i < in_full) for i in range(n)[:: -1 if backward else 1])


def _scaled(part: PassPart, factor: float) -> PassPart:
    events = (PassEvent(one.name, one.group, one.count, one.time_s * factor) for one in part.events)
    return PassPart(part.name, part.time_s * factor, tuple(events))
