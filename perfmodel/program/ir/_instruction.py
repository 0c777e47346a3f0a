"""Instructions: what stands on one line of a program, and the errors that name it."""

from dataclasses import dataclass
from typing import Any, Final, Literal

from perfmodel.errors import PerfModelError
from perfmodel.program.ir._types import Tensor

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


def attributes(**values: Any) -> Attributes:
    """Attributes in canonical form: sorted by name, lists made tuples."""
    return tuple(sorted((name, frozen(value)) for name, value in values.items()))


def frozen(value: Any) -> Any:
    """Lists as tuples, at any depth."""
    return tuple(frozen(item) for item in value) if isinstance(value, (list, tuple)) else value


class ProgramError(PerfModelError):
    """A program that is malformed: one line that names the function, the line and the value.

    Lines count from 1 in the text that the program was parsed from, otherwise in its printed form.
    """

    def __init__(self, function: str, line: int, value: str, message: str) -> None:
        self.function, self.line, self.value = function, line, value
        super().__init__(f"@{function} line {line}: %{value}: {message}")


class RuleError(PerfModelError):
    """Raised inside an op's rule; the interpreter adds line and value."""
