"""Paths through a program that give lower bounds of the step time for any durations.

The makespan is the longest of all paths through the program, so any of them bounds it from below.
Only paths that are long in practice are used: down the stages to a rank's first pass, through the
rank's own passes, and from its last input gradient back up to the first stage.
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
    """How often each path passes through each kind of work."""

    passes: Float[np.ndarray, "paths variants stages 3"]
    """Forwards, input gradients and weight gradients of every stage; variants as in
    `Structure.variants`."""
    sends: Float[np.ndarray, "paths 2 stages"]
    """Transfers from every stage, forwards and backwards."""
    variants: Int[np.ndarray, "variants 3"]
    """Variants of passes, as in `Structure.variants`."""
    transit: Float[np.ndarray, "paths variants stages 3"]
    """If steps overlap: passes on the way to a path's steady work and back, whose transfers are
    `sends`; otherwise zero."""
    cycle: Float[np.ndarray, " paths"]
    """Number of steps over which a path that leads from a device's first pass to its last repeats,
    because the next step waits for the last pass; counted in the shorter of the two streams whose
    difference is taken. 0 for other paths."""

    def only(self, paths: Int[np.ndarray, " chosen"]) -> "Paths":
        """The selected paths alone."""
        return replace(
            self,
            passes=self.passes[paths],
            sends=self.sends[paths],
            transit=self.transit[paths],
            cycle=self.cycle[paths],
        )


def flushed_paths(schedule: Schedule, combines: bool = False) -> Paths:
    """Two paths for each rank of a schedule that runs a whole step.

    The first leaves the rank after its last input gradient and returns through the stages before
    it. The second ends with the rank's last pass.

    Args:
        combines: see `ProgramSpec.combines_passes`.
    """
    variants = variants_of(schedule, combines)
    shape = (2 * schedule.devices, len(variants.table), schedule.n_stages)
    # Variant and stage of every instruction as one number, by which passes are counted.
    code = np.ravel_multi_index((variants.of_pass, schedule.instruction_stage), shape[1:])
    passes = np.zeros((shape[0], shape[1] * shape[2], 3))
    sends = np.zeros((shape[0], 2, schedule.n_stages))

    # The rank's own passes.
    first = schedule.offsets[:-1]
    last = schedule.offsets[1:] - 1
    leave = _last_input_gradient(schedule)
    _add_stretches(passes, schedule, code, np.tile(first, 2), np.concatenate([leave, last]))

    # The way of a micro-batch to the rank's first pass, and for the first path the way of its
    # gradient back.
    path = np.arange(2 * schedule.devices)
    _walk(passes, sends, schedule, code, np.tile(first, 2), schedule.dependencies.upstream, path)
    end = _walk(
        passes,
        sends,
        schedule,
        code,
        leave,
        _gradient_of_stage_before(schedule),
        path[: schedule.devices],
    )

    # Where that way ends, the rank there still has its remaining passes before it.
    changed_lanes = np.flatnonzero(end != leave)
    stretch = np.zeros_like(passes[: len(changed_lanes)])
    _add_stretches(
        stretch, schedule, code, end[changed_lanes] + 1, last[schedule.device[end[changed_lanes]]]
    )
    passes[changed_lanes] += stretch
    return Paths(
        passes.reshape(*shape, 3), sends, variants.table, np.zeros((*shape, 3)), np.zeros(shape[0])
    )


def cycles(schedule: Schedule, steps: int, combines: bool = False) -> Paths:
    """Paths that end on the device where they start, so that the next step waits for them.

    Args:
        steps: number of steps of the longer stream.
        combines: see `ProgramSpec.combines_passes`.
    """
    start = _end_of_walk(schedule.offsets[:-1], schedule.dependencies.upstream)
    end = _end_of_walk(_last_input_gradient(schedule), _gradient_of_stage_before(schedule))
    round_trip = np.flatnonzero(schedule.device[start] == schedule.device[end])
    paths = flushed_paths(schedule, combines).only(round_trip)
    return replace(paths, cycle=np.full(len(round_trip), steps // 2, float))


def joined(paths: Paths, further: Paths) -> Paths:
    """The paths of both if they distinguish the same variants, else only `paths`."""
    if not np.array_equal(paths.variants, further.variants):
        return paths
    return replace(
        paths,
        passes=np.concatenate([paths.passes, further.passes]),
        sends=np.concatenate([paths.sends, further.sends]),
        transit=np.concatenate([paths.transit, further.transit]),
        cycle=np.concatenate([paths.cycle, further.cycle]),
    )


def steady_paths(schedule: Schedule, steps: int, combines: bool = False) -> Paths:
    """Work on the path through each rank's own passes, per step of `steps` overlapping ones.

    `transit` is the work on a micro-batch before the rank's first pass and after its last input
    gradient.

    Args:
        combines: see `ProgramSpec.combines_passes`.
    """
    variants = variants_of(schedule, combines)
    shape = (schedule.devices, len(variants.table), schedule.n_stages)
    code = np.ravel_multi_index((variants.of_pass, schedule.instruction_stage), shape[1:])
    passes, transit = np.zeros((2, shape[0], shape[1] * shape[2], 3))
    sends = np.zeros((shape[0], 2, schedule.n_stages))
    first = schedule.offsets[:-1]
    last = schedule.offsets[1:] - 1
    _add_stretches(passes, schedule, code, first, last)
    every_device = np.arange(schedule.devices)
    _walk(transit, sends, schedule, code, first, schedule.dependencies.upstream, every_device)
    _walk(
        transit,
        sends,
        schedule,
        code,
        _last_input_gradient(schedule),
        _gradient_of_stage_before(schedule),
        every_device,
    )
    return Paths(
        passes.reshape(*shape, 3) / steps,
        sends,
        variants.table,
        transit.reshape(*shape, 3),
        np.zeros(schedule.devices),
    )


def undominated(values: Float[np.ndarray, "rows features"]) -> Int[np.ndarray, " kept"]:
    """The non-dominated rows: no other row is at least as large in every feature; the first of
    equal rows."""
    # Equal rows would eliminate each other below.
    _, distinct = np.unique(values, axis=0, return_index=True)
    distinct = np.sort(distinct)
    rows = values[distinct]
    # Feature by feature, as all comparisons at once would fill the memory.
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
    """Add, to each path, one rank's instructions from `first` to `last` (none where that lies
    before)."""
    codes = passes.shape[1]
    for path, (start, end) in enumerate(zip(first.tolist(), (last + 1).tolist(), strict=True)):
        code_and_phase = code[start:end] * len(Phase) + schedule.phase[start:end]
        counts = np.bincount(code_and_phase, minlength=codes * len(Phase))
        passes[path] += counts.reshape(codes, len(Phase)) @ _PARTS


def _last_input_gradient(schedule: Schedule) -> Int[np.ndarray, " devices"]:
    """Last input gradient of every device (its last pass, if it has none)."""
    leave = schedule.offsets[1:] - 1
    input_gradients = np.flatnonzero(
        (schedule.phase == Phase.BACKWARD) | (schedule.phase == Phase.BACKWARD_INPUT)
    )
    # Instructions are in the order of each device, and of repeated indices the last one assigned
    # stays.
    leave[schedule.device[input_gradients]] = input_gradients
    return leave


def _gradient_of_stage_before(schedule: Schedule) -> Int[np.ndarray, " instructions"]:
    """The input gradient of the stage before that each input gradient is for (`NEVER` where there
    is none)."""
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
    """Add the instructions that each walk reaches from its start, itself left out; returns where
    the walks end.

    Args:
        passes, sends: arrays to which the instructions and the transfers between them are added.
        code: row of `passes` of each instruction.
        following: the instruction that each one leads to, `NEVER` for none.
        path: the path that each walk belongs to.
    """
    here = start.copy()
    while True:
        walking = np.flatnonzero(following[here] != NEVER)
        if not walking.size:
            return here
        before, after = here[walking], following[here[walking]]
        np.add.at(passes, (path[walking], code[after]), _PARTS[schedule.phase[after]])

        # Walks go against the data in forwards and with it in backwards. Transfers are those of the
        # sender.
        backwards = (schedule.phase[after] != Phase.FORWARD).astype(int)
        sender = np.where(backwards == 1, before, after)
        crosses = schedule.device[before] != schedule.device[after]
        stage = schedule.instruction_stage[sender]
        np.add.at(sends, (path[walking][crosses], backwards[crosses], stage[crosses]), 1.0)
        here[walking] = after


def _end_of_walk(
    start: Int[np.ndarray, " walks"], following: Int[np.ndarray, " instructions"]
) -> Int[np.ndarray, " walks"]:
    """The last instruction that each walk reaches from its start (`_walk`)."""
    here = start.copy()
    while True:
        walking = following[here] != NEVER
        if not walking.any():
            return here
        here[walking] = following[here[walking]]
