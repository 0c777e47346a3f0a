"""What every kernel has: a name, an element type, a pass, and the work that follows from its shape.

The fields of a kernel are the columns of the measurement tables, so that a row of a table and an event of a program
are the same thing. All are hashable: equal ops are one event (DistSim section 4.1: events are told apart by operator
name, parameters and input shape, and for communication by whether they stay inside a node).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from math import exp, floor
from typing import Any, ClassVar, Final, Literal, NamedTuple

from perfmodel.units import dtype_bytes

Pass = Literal["fwd", "bwd", "dgrad", "wgrad", "bwd_one_gemm", "grad_accum", "optimizer_update"]
Shape = Mapping[str, Any]
"""Shape columns by name: numbers, or arrays [n]."""


class Numbers:
    """The part of an array namespace that the formulas need, for plain numbers."""

    exp, floor = staticmethod(exp), staticmethod(floor)
    minimum, maximum = staticmethod(min), staticmethod(max)

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Any:
        return a if condition else b


NUMBERS: Final = Numbers()


class Work(NamedTuple):
    """Operations and traffic."""

    flops: Any
    bytes: Any
    """Compulsory memory traffic: every input read once, every output written once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelOp:
    """One kernel. A family is a subclass whose fields are its shape and whose `work` is its formula.

    `work(xp, shape)` takes the shape as a mapping of names to values and an array namespace `xp`, so that the same
    formula serves one op (plain numbers, `NUMBERS`) and columns of many (NumPy, or jax.numpy where gradients are
    wanted). Besides the shape it reads `element_bytes` and the flags `bwd` (both gradients) and `nongated`, 0 or 1.
    Where the quantities that FLOPs and traffic are made of say more of a kernel, they are returned beside them.
    """

    op: str
    dtype: str = "bf16"
    pass_: Pass = "fwd"

    family: ClassVar[str]
    uses_matrix_units: ClassVar[bool] = False
    """Whether its FLOPs are matrix products."""
    is_matmul: ClassVar[bool] = False
    """Whether it is nothing but matrix products, dense or of experts."""
    samples_field: ClassVar[str] = ""
    """Name of the field that grows in proportion to the tokens, sequences or images that the kernel works on; empty
    where none does."""
    work: ClassVar[Callable[[Any, Shape], Any]]

    @property
    def label(self) -> str:
        """A short, readable name: operator, shape, pass."""
        return f"{self.op} {self.pass_}"

    @property
    def samples(self) -> str:
        """`samples_field`, or what takes its place in kernels of this name and pass."""
        return self.samples_field

    @property
    def flops(self) -> float:
        """Operations, by the family's formula."""
        return float(self.work(NUMBERS, self.shape()).flops)

    @property
    def bytes(self) -> float:
        """Compulsory memory traffic, by the family's formula."""
        return float(self.work(NUMBERS, self.shape()).bytes)

    def shape(self) -> dict[str, Any]:
        """Fields as the formula of the work reads them."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return own | {"element_bytes": dtype_bytes(self.dtype), "bwd": int(self.pass_ == "bwd")}
