"""Paths that a program contains whatever its durations: each is a lower bound of the step time.

The makespan is the longest of all paths through the program, so any of them bounds it from below. Taken are
those that are long in practice: to a rank's first pass down the stages before it, through the rank's own
passes, and from its last input gradient back up to the first stage.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from perfmodel.program import variants_of
from perfmodel.schedule import NEVER, Phase, Schedule

_PARTS = np.zeros((len(Phase), 3))
"""By phase of an instruction: forward, input gradient and weight gradient that it computes."""
_PARTS[Phase.FORWARD, 0] = _PARTS[Phase.BACKWARD, 1:] = _PARTS[Phase.BACKWARD_INPUT, 1] = 1
_PARTS[Phase.BACKWARD_WEIGHT, 2] = 1


@dataclass(frozen=True, eq=False)
class Paths:
    """How often each path passes what."""

    passes: Float[np.ndarray, "paths variants stages 3"]
    """Forwards, input gradients and weight gradients of every stage; variants as in `Structure.variants`."""
    sends: Float[np.ndarray, "paths 2 stages"]
    """Transfers from every stage, forwards and backwards."""
    variants: Int[np.ndarray, "variants 3"]
    transit: Float[np.ndarray, "paths variants stages 3"]
    """Where steps run into each other: passes of the way to a path's steady work and back, to which `sends` belong;
    otherwise zero."""
    cycle: Float[np.ndarray, " paths"]
    """Steps, of the shorter of the two streams whose difference is taken, over which a whole path repeats: it leads
    from a device's first pass to its last, which its next step waits for. 0 for other paths."""


def flushed_paths(schedule: Schedule, combines: bool = False) -> Paths:
    """Two paths for each rank of a schedule that runs a whole step: they leave it after its last input gradient,
    or end with its last pass. `combines`: see `ProgramSpec.combines_passes`, here and below."""
    s = schedule
    variants = variants_of(s, combines)
    shape = (2 * s.devices, len(variants.table), s.n_stages)
    code = np.ravel_multi_index((variants.of_pass, s.instruction_stage), shape[1:])
    passes = np.zeros((shape[0], shape[1] * shape[2], 3))
    sends = np.zeros((shape[0], 2, s.n_stages))
    first, last = s.offsets[:-1], s.offsets[1:] - 1
    leave = _leaving(s)
    _add_stretches(passes, s, code, np.tile(first, 2), np.concatenate([leave, last]))
    path = np.arange(2 * s.devices)
    _walk(passes, sends, s, code, np.tile(first, 2), s.dependencies.upstream, path)
    end = _walk(passes, sends, s, code, leave, _down(s), path[: s.devices])
    moved = np.flatnonzero(end != leave)
    stretch = np.zeros_like(passes[: len(moved)])
    _add_stretches(stretch, s, code, end[moved] + 1, last[s.device[end[moved]]])
    passes[moved] += stretch
    return Paths(passes.reshape(*shape, 3), sends, variants.table, np.zeros((*shape, 3)), np.zeros(shape[0]))


def cycles(schedule: Schedule, steps: int, combines: bool = False) -> Paths:
    """Those of the paths of a step that end on the device that they start on, whose next step waits for them."""
    s = schedule
    upstream, down = s.dependencies.upstream, _down(s)
    start, end = s.offsets[:-1].copy(), _leaving(s)
    for here, following in ((start, upstream), (end, down)):
        while (going := following[here] != NEVER).any():
            here[going] = following[here[going]]
    round_trip = np.flatnonzero(s.device[start] == s.device[end])
    found = flushed_paths(schedule, combines)
    return Paths(
        found.passes[round_trip],
        found.sends[round_trip],
        found.variants,
        found.transit[round_trip],
        np.full(len(round_trip), steps // 2, float),
    )


def joined(some: Paths, others: Paths) -> Paths:
    """Both, if they tell the same variants apart; otherwise the former alone."""
    if not np.array_equal(some.variants, others.variants):
        return some
    parts = ("passes", "sends", "transit", "cycle")
    return replace(some, **{name: np.concatenate([getattr(some, name), getattr(others, name)]) for name in parts})


def steady_paths(schedule: Schedule, steps: int, combines: bool = False) -> Paths:
    """The work of every rank in one of `steps` steps that run into each other; and in `transit` the way of a
    micro-batch to the rank's first pass and from its last input gradient."""
    s = schedule
    variants = variants_of(s, combines)
    shape = (s.devices, len(variants.table), s.n_stages)
    code = np.ravel_multi_index((variants.of_pass, s.instruction_stage), shape[1:])
    passes, transit = np.zeros((2, shape[0], shape[1] * shape[2], 3))
    sends = np.zeros((shape[0], 2, s.n_stages))
    first, last = s.offsets[:-1], s.offsets[1:] - 1
    _add_stretches(passes, s, code, first, last)
    every = np.arange(s.devices)
    _walk(transit, sends, s, code, first, s.dependencies.upstream, every)
    _walk(transit, sends, s, code, _leaving(s), _down(s), every)
    return Paths(
        passes.reshape(*shape, 3) / steps, sends, variants.table, transit.reshape(*shape, 3), np.zeros(s.devices)
    )


def undominated(values: Float[np.ndarray, "rows features"]) -> Int[np.ndarray, " kept"]:
    """Rows that no other row equals or exceeds in every feature; the first of equal ones."""
    _, distinct = np.unique(values, axis=0, return_index=True)
    distinct = np.sort(distinct)
    rows = values[distinct]
    exceeds = np.ones((len(rows), len(rows)), bool)
    for feature in rows.T:
        exceeds &= feature[:, None] >= feature
    np.fill_diagonal(exceeds, False)
    return distinct[~exceeds.any(axis=0)]


def _add_stretches(
    passes: Float[np.ndarray, "paths codes 3"],
    schedule: Schedule,
    code: Int[np.ndarray, " instructions"],
    first: Int[np.ndarray, " paths"],
    last: Int[np.ndarray, " paths"],
) -> None:
    """Add, to each path, one rank's instructions from `first` to `last` (none where that lies before)."""
    codes = passes.shape[1]
    for path, (a, b) in enumerate(zip(first.tolist(), (last + 1).tolist(), strict=True)):
        of_phase = np.bincount(code[a:b] * len(Phase) + schedule.phase[a:b], minlength=codes * len(Phase))
        passes[path] += of_phase.reshape(codes, len(Phase)) @ _PARTS


def _leaving(schedule: Schedule) -> Int[np.ndarray, " devices"]:
    """Last input gradient of every device (its last pass, if it has none)."""
    s = schedule
    leave = s.offsets[1:] - 1
    leaves = np.flatnonzero((s.phase == Phase.BACKWARD) | (s.phase == Phase.BACKWARD_INPUT))
    leave[s.device[leaves]] = leaves  # of repeated indices the last assigned stays
    return leave


def _down(schedule: Schedule) -> Int[np.ndarray, " instructions"]:
    """The input gradient of the stage before that each one is for."""
    upstream = schedule.dependencies.upstream
    down = np.full(schedule.n_instructions, NEVER)
    needs = np.flatnonzero((schedule.phase != Phase.FORWARD) & (upstream != NEVER))
    down[upstream[needs]] = needs
    return down


def _walk(
    passes: Float[np.ndarray, "paths codes 3"],
    sends: Float[np.ndarray, "paths 2 stages"],
    schedule: Schedule,
    code: Int[np.ndarray, " instructions"],
    start: Int[np.ndarray, " walks"],
    following: Int[np.ndarray, " instructions"],
    path: Int[np.ndarray, " walks"],
) -> Int[np.ndarray, " walks"]:
    """Add the instructions that each walk reaches from `start`, itself left out; returns where the walks end.

    Walks go against the data in forwards, with it in backwards; transfers are those of the sender.
    """
    here = start.copy()
    while (going := np.flatnonzero(following[here] != NEVER)).size:
        before, after = here[going], following[here[going]]
        np.add.at(passes, (path[going], code[after]), _PARTS[schedule.phase[after]])
        backwards = (schedule.phase[after] != Phase.FORWARD).astype(int)
        sender = np.where(backwards == 1, before, after)
        crosses = schedule.device[before] != schedule.device[after]
        np.add.at(sends, (path[going][crosses], backwards[crosses], schedule.instruction_stage[sender][crosses]), 1.0)
        here[going] = after
    return here
