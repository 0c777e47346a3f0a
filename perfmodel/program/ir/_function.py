"""Functions of instructions in static single assignment form."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

from perfmodel.program.ir._types import Tensor

if TYPE_CHECKING:
    from perfmodel.program.ir._infer import Typing

Phase = Literal["", "forward", "backward", "update"]
Stream = Literal["compute", "data_comm", "send"]
STREAMS: Final = ("compute", "data_comm", "send")
PHASES: Final = ("", "forward", "backward", "update")
CALL: Final = "call"
"""Op of an instruction that calls another function of the module (attribute `function`)."""

Attributes = tuple[tuple[str, Any], ...]
"""(name, value) pairs sorted by name; values are numbers, strings, booleans or nested tuples of them."""


@dataclass(frozen=True, slots=True)
class Tag:
    """Where an instruction belongs: transforms read it, results do not depend on it."""

    phase: Phase = ""
    layer: int = -1
    """Layer of the model, -1 for none."""
    micro_batch: int = -1
    stream: Stream = "compute"
    """Stream of each device that the instruction occupies; streams of a device run side by side."""


UNTAGGED: Final = Tag()


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation: `outputs = op(inputs) {attributes}`; values are known by name.

    An instruction of several devices (a collective) runs on all of them at once: it starts when the last
    of them is ready for it.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Attributes = ()
    tag: Tag = UNTAGGED

    def attribute(self, name: str, default: Any = None) -> Any:
        """Value of an attribute, or the default where it is not given."""
        return next((value for key, value in self.attributes if key == name), default)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A formal parameter; without a type the function takes whatever its callers pass."""

    name: str
    type: Tensor | None = None


@dataclass(frozen=True)
class Function:
    """Instructions in program order: what one device runs, it runs in this order.

    Consecutive instructions on disjoint sets of devices run in parallel (DistIR, section 2.1).
    """

    name: str
    parameters: tuple[Parameter, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[str, ...]

    @cached_property
    def typing(self) -> "Typing":
        """Type of every value, by abstract interpretation (raises `ProgramError`)."""
        from perfmodel.program.ir._infer import infer

        return infer(self)

    @property
    def types(self) -> Mapping[str, Tensor]:
        """Type of every value."""
        return self.typing.types

    @property
    def n_devices(self) -> int:
        """Devices 0 to the highest that any value lives on."""
        return self.typing.n_devices


@dataclass(frozen=True)
class Module:
    """Functions that may call those above them; the last is where a program starts."""

    functions: tuple[Function, ...]

    @property
    def main(self) -> Function:
        return self.functions[-1]


def attributes(**values: Any) -> Attributes:
    """Attributes in canonical form: sorted by name, lists made tuples."""
    return tuple(sorted((name, frozen(value)) for name, value in values.items()))


def frozen(value: Any) -> Any:
    """Lists as tuples, at any depth."""
    return tuple(frozen(item) for item in value) if isinstance(value, (list, tuple)) else value
