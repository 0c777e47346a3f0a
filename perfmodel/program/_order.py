"""Program order: where ops stand relative to the schedule's instructions.

An op's key is its instruction's slot, then its place around the instruction's parts, then its device.
Slots grow along data dependencies, so keys do too.
"""

from dataclasses import dataclass
from enum import IntEnum

from perfmodel.program._structure_builder import Column, Ids


class Around(IntEnum):
    """Places around one part (segment) of an instruction, in order."""

    GATHER = 0
    COMPUTE = 1
    REDUCE = 2
    SEND = 3
    UPDATE = 4
    UPDATE_END = 5


@dataclass(frozen=True)
class ProgramOrder:
    """Keys for `StructureBuilder.sort`."""

    devices: int
    segments: int
    """Most parts that an instruction is split into."""
    lead_in: int
    """Extra places before an instruction's first part."""

    def key(self, slot: Ids, device: Ids, part: Column, around: Around) -> Ids:
        """Key of an op at one of the places around a part."""
        return self._key(slot, device, self.lead_in + len(Around) * part + around)

    def lead_in_key(self, slot: Ids, device: Ids, place: Ids) -> Ids:
        """Key of an op at one of the `lead_in` places before an instruction."""
        return self._key(slot, device, place)

    def prologue_key(self, device: Ids, place: Ids, places: int) -> Ids:
        """Key of an op before all instructions, `place` in 0..places-1."""
        return (place - places) * self.devices + device

    def _key(self, slot: Ids, device: Ids, place: Column) -> Ids:
        width = self.lead_in + len(Around) * self.segments
        return (slot.astype("int64") * width + place) * self.devices + device
