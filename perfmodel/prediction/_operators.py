"""What the passes of a timeline consist of: the kernels and collectives of every block, for a trace of them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from perfmodel.prediction._blocks import BlockTimes
from perfmodel.prediction._compose import bundle_passes, bundles
from perfmodel.prediction._phases import PHASES, Phase, phase_counts
from perfmodel.prediction._problem import StepProblem
from perfmodel.program import Kind
from perfmodel.spec import Layout


@dataclass(frozen=True)
class Operators:
    """Part of a pass: one block, and in it its operators, one after another."""

    block: str
    seconds: float
    """With gaps between kernels and waits for the host or other ranks."""
    labels: tuple[str, ...]
    groups: tuple[str, ...]
    """Process group of each that is a collective (`tp`, `ep`, `cp`), "" for kernels."""
    operator_s: tuple[float, ...]
    """Of all calls of each; what is hidden beside kernels is not counted."""


def pass_operators(problem: StepProblem, layout: Layout) -> dict[int, tuple[Operators, ...]]:
    """The blocks of every class of passes of a layout's program, in the order in which a pass runs through them.

    A block's operators are in the order of its description, those of a backward in reverse; calls of equal operators
    in one block are joined. Classes that are no passes are left out.

    Raises:
        LayoutError: the model does not divide as the layout asks.
    """
    (bundle,) = bundles(problem, [layout])
    classes, table = bundle_passes(problem, bundle), bundle.tables[0]
    found: dict[int, tuple[Operators, ...]] = {}
    for of_kind in classes.of_variant.values():
        for kind, members in of_kind.items():
            for one in members.tolist():
                counts = phase_counts(kind, layout.recompute, classes.blocks[one], classes.full[one])
                found[one] = tuple(_blocks(kind, counts, table))
    return found


def _blocks(kind: Kind, counts: np.ndarray, table: BlockTimes) -> Iterator[Operators]:
    forward = kind == Kind.FORWARD
    order = range(len(table.blocks))
    for block in order if forward else reversed(order):
        often = int(np.ceil(counts[block, PHASES[kind]].max()))
        for _ in range(often):
            share = counts[block] / often
            labels, groups, seconds = _operators(table, block, share)
            whole = float(share @ table.phase_s[block])
            if whole > 0:
                yield Operators(table.blocks[block].name, whole, labels, groups, seconds)


def _operators(
    table: BlockTimes, block: int, share: np.ndarray
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[float, ...]]:
    rows: list[tuple[str, str, float]] = []
    # what is recomputed comes first, in the forward's order
    again = (Phase.FORWARD, Phase.RECOMPUTE_SELECTIVE, Phase.RECOMPUTE_FULL)
    for phase in (*again, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT):
        seconds, calls = share[phase] * table.event_s[block, phase], share[phase] * table.counts[block, phase]
        used = np.flatnonzero(seconds > 0).tolist()
        # collectives depend on what is before them
        for i in sorted(used if phase in again else reversed(used), key=lambda i: bool(table.groups[i])):
            many = f"{calls[i]:g} x " if round(float(calls[i]), 9) != 1 else ""
            rows.append((many + table.ops[i].label, table.groups[i], float(seconds[i])))
    labels, groups, times = zip(*rows, strict=True) if rows else ((), (), ())
    return labels, groups, times
