"""A pipeline schedule: the order in which each device runs its forward and backward passes."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from perfmodel.errors import PerfModelError

NEVER = -1
"""Slot of an instruction that never starts (deadlock); index of an instruction that does not
exist."""


class Phase(IntEnum):
    """Kind of work of an instruction, for one micro-batch on one stage."""

    FORWARD = 0
    BACKWARD = 1
    """Input and weight gradient in one."""
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3

    @property
    def symbol(self) -> str:
        """The usual abbreviation: F, B, BI or BW."""
        return ("F", "B", "BI", "BW")[self]


_ROLE = np.array([0, 1, 1, 2])
"""Role of each phase: forward, input gradient (alone or in a whole backward), weight gradient
alone."""
_FORWARD, _, _WEIGHT_GRADIENT = range(3)


class Dependencies(NamedTuple):
    """Indices of the instructions that each instruction waits for, `NEVER` for none.

    An instruction of several micro-batches waits for the last of those that it needs on one device.
    """

    upstream: Int[np.ndarray, " instructions"]
    """Pass of the neighbouring stage: forward of the stage before, input gradient of the stage
    after."""
    same_stage: Int[np.ndarray, " instructions"]
    """Earlier pass of the same stage: forward before backward, input gradient before weight
    gradient."""
    neighbouring_slice: Int[np.ndarray, " instructions"]
    """Pass of the neighbouring sequence slice on the same stage: keys and values come from the
    slice before, their gradients from the slice after."""


class Instruction(NamedTuple):
    """One entry of a device's order, for display."""

    device: int
    position: int
    """Place in the device's order."""
    phase: Phase
    chunk: int
    micro_batch: int
    span: int = 1

    def __str__(self) -> str:
        many = f"es {self.micro_batch} to {self.micro_batch + self.span - 1}"
        which = many if self.span > 1 else f" {self.micro_batch}"
        what = f"{self.phase.symbol} chunk {self.chunk} micro-batch{which}"
        return f"device {self.device} position {self.position} ({what})"


@dataclass(frozen=True, eq=False)
class Schedule:
    """Each device's instructions in order, device after device, as flat arrays.

    Build one with `from_keys` or `from_orders`, which fill `slot`; `check` tells whether it can
    run. Several chunks may hold the same stage (replicas, as in bidirectional pipelines); a
    micro-batch then passes the stage on one of them.

    Raises:
        PerfModelError: a phase, chunk or micro-batch is out of range, or array lengths disagree.
    """

    name: str
    stage: Int[np.ndarray, "devices chunks"]
    """Global stage that each device runs as each of its chunks."""
    micro_batches: int
    """Micro-batches that pass through; where sequences are sliced, a slice counts as one."""
    offsets: Int[np.ndarray, " devices+1"]
    """Device d runs instructions `offsets[d]` to `offsets[d + 1]` (exclusive)."""
    phase: Int[np.ndarray, " instructions"]
    chunk: Int[np.ndarray, " instructions"]
    micro_batch: Int[np.ndarray, " instructions"]
    """The first micro-batch of the instruction."""
    span: Int[np.ndarray, " instructions"]
    """Number of micro-batches, from that one on, that the instruction computes at once."""
    paired: Bool[np.ndarray, " instructions"]
    """Whether the instruction and the next one of its device run together, overlapped
    (DualPipe)."""
    updates: Bool[np.ndarray, " instructions"]
    """Whether the device's weights are updated right after the instruction (if none: once, at the
    end of the step)."""
    slot: Int[np.ndarray, " instructions"]
    """A start in unit time: grows along each device's order and along data dependencies; `NEVER` if
    the instruction is stuck in a deadlock."""
    slices: int = 1
    """Slices per sequence: micro-batch i is slice i % slices of sequence i // slices."""
    length: Int[np.ndarray, " instructions"] | None = None
    """Slots that each instruction takes; None: one each."""

    def __post_init__(self) -> None:
        # Each field's least value that is too large. Of a span of micro-batches the last must exist
        # too.
        limits = {
            "phase": len(Phase),
            "chunk": self.chunks,
            "micro_batch": self.micro_batches + 1 - self.span,
            "span": self.micro_batches + 1,
        }
        rises = (np.diff(self.offsets) >= 0).all()
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.phase) or not rises:
            raise PerfModelError(
                f"schedule {self.name}: offsets must rise from 0 to {len(self.phase)}"
            )
        for field, limit in limits.items():
            values = getattr(self, field)
            if len(values) != self.n_instructions:
                raise PerfModelError(
                    f"schedule {self.name}: {field} must have {self.n_instructions} entries"
                )
            least = 1 if field == "span" else 0
            bad = np.flatnonzero((values < least) | (values >= limit))
            if bad.size:
                place = f"device {self.device[bad[0]]} position {self.position[bad[0]]}"
                most = int(np.broadcast_to(limit, len(values))[bad[0]]) - 1
                raise PerfModelError(
                    f"schedule {self.name}: {place}: {field} {values[bad[0]]} is not in 0..{most}"
                )

    @property
    def devices(self) -> int:
        return self.stage.shape[0]

    @property
    def chunks(self) -> int:
        """Model chunks (virtual stages) per device."""
        return self.stage.shape[1]

    @property
    def n_stages(self) -> int:
        """Global stages that a micro-batch passes through."""
        return int(self.stage.max()) + 1

    @property
    def n_instructions(self) -> int:
        return len(self.phase)

    @cached_property
    def device(self) -> Int[np.ndarray, " instructions"]:
        """Device that runs each instruction."""
        return np.repeat(np.arange(self.devices, dtype=np.int32), np.diff(self.offsets))

    @cached_property
    def position(self) -> Int[np.ndarray, " instructions"]:
        """Position of each instruction in its device's order."""
        return np.arange(self.n_instructions) - self.offsets[self.device]

    def picked(self, index: np.ndarray) -> dict[str, np.ndarray]:
        """The fields of selected instructions."""
        fields = ("phase", "chunk", "micro_batch", "span", "paired", "updates")
        return {name: getattr(self, name)[index] for name in fields}

    def running_total(self, change: np.ndarray) -> np.ndarray:
        """Cumulative sums of a column along each device's order."""
        # One sum over all devices; totals of earlier devices cancel, up to rounding.
        total = np.cumsum(change)
        before = np.append(0, total)[self.offsets[:-1]]
        return total - before[self.device]

    def taken(self, size: np.ndarray) -> np.ndarray:
        """Change of live activations: forwards add `size`, ends of backwards remove it.

        An input gradient that is split off changes nothing: its weight gradient still needs the
        activations.
        """
        return np.where(self.phase == Phase.FORWARD, size, np.where(self.ends_backward, -size, 0))

    @cached_property
    def all_updates_before(self) -> Int[np.ndarray, " instructions"]:
        """Number of updates before each instruction, including all earlier devices."""
        return np.cumsum(self.updates) - self.updates

    @cached_property
    def updates_before(self) -> Int[np.ndarray, " instructions"]:
        """Updates of the device's weights before each instruction."""
        return self.running_total(self.updates) - self.updates

    @cached_property
    def instruction_stage(self) -> Int[np.ndarray, " instructions"]:
        """Stage of each instruction, counted over the whole pipeline."""
        return self.stage[self.device, self.chunk]

    @property
    def end_slot(self) -> Int[np.ndarray, " instructions"]:
        """The slot after each instruction's last."""
        return self.slot + (1 if self.length is None else self.length)

    @property
    def replicas(self) -> int:
        """Copies of each stage's weights (bidirectional pipelines have several)."""
        return self.stage.size // self.n_stages

    @property
    def forward_only(self) -> bool:
        """Whether no instruction is a backward pass (inference)."""
        return not self.phase.any()

    @property
    def ends_backward(self) -> Bool[np.ndarray, " instructions"]:
        """Instructions that end a micro-batch's work on a stage, with its weight gradient."""
        return (self.phase == Phase.BACKWARD) | (self.phase == Phase.BACKWARD_WEIGHT)

    @cached_property
    def covers(self) -> tuple[Int[np.ndarray, " covered"], Int[np.ndarray, " covered"]]:
        """Pairs of instruction and micro-batch that it computes."""
        index = np.repeat(np.arange(self.n_instructions), self.span)
        first_of_cover = np.cumsum(self.span) - self.span
        place_in_cover = np.arange(len(index)) - np.repeat(first_of_cover, self.span)
        return index, self.micro_batch[index] + place_in_cover

    @cached_property
    def dependencies(self) -> Dependencies:
        """Data dependencies of each instruction, without those on missing work.

        Where several instructions do the same work, the first of them counts.
        """
        index, micro_batch = self.covers
        role, stage = _ROLE[self.phase][index], self.instruction_stage[index]

        # The device of each piece of work, by role, stage and micro-batch. One more stage on either
        # side, which no instruction belongs to, stands for "none", so that stage s is row s + 1. Of
        # repeated indices NumPy keeps the last one assigned, hence latest first.
        doer = np.full((3, self.n_stages + 2, self.micro_batches), NEVER, np.int32)
        latest_first = slice(None, None, -1)
        work = (role[latest_first], stage[latest_first] + 1, micro_batch[latest_first])
        doer[work] = index[latest_first]

        # A backward needs its own stage's forward, a weight gradient its input gradient: the role
        # before.
        is_forward = role == _FORWARD
        role_before = doer[np.maximum(role - 1, 0), stage + 1, micro_batch]
        same_stage = np.where(is_forward, NEVER, role_before)

        # Slices of a sequence share keys and values; a weight gradient is made of its own slice
        # alone.
        neighbouring_slice = np.full_like(same_stage, NEVER)
        if self.slices > 1:
            neighbour = micro_batch + np.where(is_forward, -1, 1)
            same_sequence = neighbour // self.slices == micro_batch // self.slices
            shares = same_sequence & (role != _WEIGHT_GRADIENT)
            neighbouring_slice[shares] = doer[role[shares], stage[shares] + 1, neighbour[shares]]

        # Forwards take the output of the stage before (row s), input gradients that of the stage
        # after (row s + 2). Weight gradients are of use to no other stage and wait for none.
        doer[_WEIGHT_GRADIENT] = NEVER
        upstream = doer[role, np.where(is_forward, stage, stage + 2), micro_batch]
        return Dependencies(
            self._last_of_cover(upstream),
            self._last_of_cover(same_stage),
            self._last_of_cover(neighbouring_slice),
        )

    def _last_of_cover(self, need: Int[np.ndarray, " covered"]) -> Int[np.ndarray, " instructions"]:
        """The latest instruction that any micro-batch of each instruction needs."""
        # Every instruction computes one micro-batch: nothing to reduce.
        if len(need) == self.n_instructions:
            return need
        return np.maximum.reduceat(need, np.cumsum(self.span) - self.span)

    @cached_property
    def waits(self) -> tuple[Int[np.ndarray, " instructions"], ...]:
        """The dependencies of each instruction; the first of a pair also waits for its partner's.

        Results of a pair are available when both instructions have run, so that dependents of the
        first also wait for the second.
        """
        needs = list(self.dependencies)
        if not self.paired.any():
            return tuple(needs)

        # A pair's second instruction directly follows its first, so waiting for it is an index one
        # higher.
        needs = [need + ((need != NEVER) & self.paired[need]) for need in needs]

        # Both start together: the first also waits for the dependencies of the second.
        first_of_pair = np.flatnonzero(self.paired)
        for need in list(needs):
            need_of_partner = np.full_like(need, NEVER)
            need_of_partner[first_of_pair] = need[first_of_pair + 1]
            needs.append(need_of_partner)
        return tuple(needs)

    def __getitem__(self, index: int) -> Instruction:
        return Instruction(
            int(self.device[index]),
            int(self.position[index]),
            Phase(self.phase[index]),
            int(self.chunk[index]),
            int(self.micro_batch[index]),
            int(self.span[index]),
        )

    def order(self, device: int) -> Iterator[Instruction]:
        """The instructions of one device, in order."""
        return (self[i] for i in range(self.offsets[device], self.offsets[device + 1]))
