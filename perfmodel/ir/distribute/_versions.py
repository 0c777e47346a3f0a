"""Weight versions in programs that update weights while micro-batches are in flight."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from perfmodel.errors import LayoutError
from perfmodel.ir import Instruction, Program, Tag, attributes
from perfmodel.schedule import Schedule, WeightPolicy, weight_versions

Holders = Mapping[tuple[str, int], dict[int, str]]
"""(name, micro-batch; -1 for all) -> the value that holds it, by device."""


class Versions:
    """Tracks the value of each weight version, and creates updates.

    A version stays alive as long as a pass reads it, which is what keeping versions costs.
    """

    def __init__(self, program: Program, schedule: Schedule, policy: WeightPolicy) -> None:
        self._schedule = schedule
        self._version_of_pass = weight_versions(schedule, policy).used
        self._names = program.values_of("parameter")
        self._states = program.values_of("state")
        self._versions_of: dict[str, list[str]] = {}
        """Versions of each weight, in order."""
        self._device_of: dict[str, int] = {}
        self._backwards: dict[int, int] = defaultdict(int)
        """Micro-batches whose backward each device has run since its last update."""
        self._index = 0

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def enter(self, index: int, values: Holders) -> None:
        """Start the pass with number `index` in the schedule.

        Raises:
            LayoutError: a weight that sits on several devices.
        """
        # The first pass fixes where weights are: by then every input has been placed.
        for name in () if self._versions_of else self._names:
            holders = values[name, -1]
            if len(holders) != 1:
                raise LayoutError(
                    f"%{name} is used on {len(holders)} stages, which would update it differently; untie it"
                )
            ((self._device_of[name], value),) = holders.items()
            self._versions_of[name] = [value]
        self._index = index
        # A micro-batch counts towards a mean once its whole backward is done, not its first half.
        if self._schedule.ends_backward[index]:
            self._backwards[int(self._schedule.device[index])] += int(self._schedule.span[index])

    def value(self, name: str, device: int) -> str:
        """The weight version used by the current pass."""
        return self._versions_of[name][int(self._version_of_pass[self._index])]

    def update(
        self, updates: Sequence[Instruction], device: int, values: Holders
    ) -> list[Instruction]:
        """Update a device's weights with the mean gradient since its last update."""
        # The loss averages over all micro-batches of the program; a mean over those since the last
        # update is larger by this.
        share = self._schedule.micro_batches / self._backwards.pop(device)
        written: list[Instruction] = []
        for instruction in updates:
            weight = next((name for name in instruction.inputs if name in self._names), None)
            if weight is None or self._device_of[weight] != device:
                continue
            # The new version is a new value. Old ones stay in the list for passes that still
            # compute with them, and live analysis frees each after its last use.
            number = len(self._versions_of[weight])
            inputs = [self._operand(name, weight, device, values) for name in instruction.inputs]
            gradient = next(
                k
                for k, name in enumerate(instruction.inputs)
                if name not in self._names | self._states
            )
            mean = f"{inputs[gradient]}.mean{number}"
            tag = Tag("update", instruction.tag.layer)
            written.append(
                Instruction("scale", (inputs[gradient],), (mean,), attributes(factor=share), tag)
            )
            inputs[gradient] = mean
            outputs = tuple(f"{name}{number}" for name in instruction.outputs)
            written.append(replace(instruction, inputs=tuple(inputs), outputs=outputs))
            self._versions_of[weight].append(outputs[0])
            for name, output in zip(instruction.outputs, outputs, strict=True):
                values[name, -1][device] = output
            # Moments advance with their weight: the next update reads the new ones.
            for name, output in zip(
                (n for n in instruction.inputs if n in self._states), outputs[1:], strict=True
            ):
                values[name, -1][device] = output
            # The next gradient starts from nothing.
            del values[instruction.inputs[gradient], -1][device]
        return written

    def _operand(self, name: str, weight: str, device: int, values: Holders) -> str:
        return self._versions_of[weight][-1] if name == weight else values[name, -1][device]
