"""Groups equivalent ranks of a job, so that one of each class is run (NeuronaBox, section 2.3)."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from perfmodel.emulate._launch import Emulation, emulate
from perfmodel.emulate._prices import Prices
from perfmodel.emulate.runs import EmulatedRun, RankRun
from perfmodel.errors import PerfModelError
from perfmodel.ir import Program, instruction_devices, lower
from perfmodel.spec import Cluster

_SCOUTED: Final = 2
"""Number of trial iterations of a rank; the first differs from the others."""
_PLACES: Final = ("device", "to")
"""Attributes that name ranks."""


@dataclass(frozen=True)
class Classes:
    """Ranks of a job, grouped by equal behaviour."""

    ranks: tuple[tuple[int, ...], ...]
    """Ranks of each class, ascending; classes by their first rank."""

    @property
    def representatives(self) -> tuple[int, ...]:
        """The first rank of each class."""
        return tuple(ranks[0] for ranks in self.ranks)

    def turns(self, at_once: int) -> list[tuple[int, ...]]:
        """Representatives in groups of `at_once` that are real at the same time.

        Raises:
            PerfModelError: none can.
        """
        if at_once < 1:
            raise PerfModelError(f"emulate: at least 1 rank must be real at a time, got {at_once}")
        first = self.representatives
        return [first[start : start + at_once] for start in range(0, len(first), at_once)]


def classes_of_program(program: Program) -> Classes:
    """Group ranks whose instructions are equal up to rank numbers.

    Two stages with equal layers differ: one sends what the other receives.
    """
    # NeuronaBox classifies nodes by the part of the model they contain (section 2.3). Programs
    # allow a stricter test: equal instructions on equal shapes. Names of ranks (`device`, `to`) are
    # left out, or every rank would be its own class.
    function, types = program.function, program.types
    groups = dict(
        zip((i.outputs for i in function.instructions), instruction_devices(function), strict=True)
    )

    def local_types(rank: int, names: Sequence[str]) -> Hashable:
        return tuple(
            (types[name].dtype, types[name].shape) for name in names if types[name].device == rank
        )

    def signature(rank: int, instructions: Sequence[Any]) -> Hashable:
        signatures = []
        for instruction in instructions:
            attributes = tuple(
                (name, str(value)) for name, value in instruction.attributes if name not in _PLACES
            )
            signatures.append(
                (
                    instruction.op,
                    len(groups[instruction.outputs]),
                    local_types(rank, instruction.inputs),
                    local_types(rank, instruction.outputs),
                    attributes,
                )
            )
        return tuple(signatures)

    return _grouped([signature(rank, code) for rank, code in enumerate(lower(function))])


def classes_of_script(emulation: Emulation, cluster: Cluster, at_once: int = 1) -> Classes:
    """Group ranks with equal parameter shapes and equal calls in an iteration.

    Every rank is run for two iterations, its calls answered at once.

    Args:
        emulation: emulation of the script; its real ranks, wire and prices are ignored.
        cluster: the emulated cluster.
        at_once: number of ranks that are real at once.

    Raises:
        EmulationError: as `emulate`; a rank that makes no two optimizer steps.
        PerfModelError: no rank at once.
    """
    # Scouting is cheap: collectives take no time, ranks exchange no data, and each stops after two
    # iterations.
    single_rank_classes = Classes(tuple((rank,) for rank in range(emulation.world_size)))
    free = Prices(cluster, lambda op: 0.0)
    rank_runs: dict[int, RankRun] = {}
    for ranks in single_rank_classes.turns(at_once):
        scout = replace(emulation, real_ranks=ranks, wire=None, prices=free, quiet=True)
        run = emulate(replace(scout, conditions={"stop_after": _SCOUTED, "apart": True}))
        run.iteration_s()  # or says that there are none
        rank_runs |= {rank.rank: rank for rank in run.ranks}
    return _grouped([_part(rank_runs[rank]) for rank in range(emulation.world_size)])


def run_classes(emulation: Emulation, classes: Classes, at_once: int = 1) -> list[EmulatedRun]:
    """Run the script as one rank of each class, a few at a time, with the other ranks emulated."""
    return [emulate(replace(emulation, real_ranks=ranks)) for ranks in classes.turns(at_once)]


def _part(rank: RankRun) -> Hashable:
    """Return a rank's class: parameters, messages in order, collectives in any order.

    Collectives of several groups run side by side, so their order is of no matter.
    """
    # The last scouted iteration stands for all that follow.
    last: Any = rank.collectives[rank.collectives.iteration == _SCOUTED - 1]
    calls = list(zip(last.kind, last["ranks"], last.bytes, strict=True))
    messages = tuple(call for call in calls if call[0] in ("send", "recv"))
    return rank.parameters, messages, tuple(sorted(call for call in calls if call not in messages))


def _grouped(parts: Sequence[Hashable]) -> Classes:
    groups: dict[Hashable, list[int]] = {}
    for rank, part in enumerate(parts):
        groups.setdefault(part, []).append(rank)
    return Classes(tuple(map(tuple, groups.values())))
