"""Kernels and collectives, one event each, and what defines a family of kernels.

Every kernel has a name, an element type, a pass, and the work that follows from its shape. Its
fields are the columns of the measurement tables, so that a row of a table and an event of a program
are the same thing. All are hashable: equal ops are one event (DistSim section 4.1: events are told
apart by operator name, parameters and input shape, and for communication by whether they stay
inside a node). No event depends on model, layout or device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from math import exp, floor
from operator import attrgetter
from typing import Any, ClassVar, Final, Literal, NamedTuple

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.ops.physics import Machine, Physics
from perfmodel.ops.programs import Program, Tensors
from perfmodel.units import dtype_bytes

Pass = Literal["fwd", "bwd", "dgrad", "wgrad", "bwd_one_gemm", "grad_accum", "optimizer_update"]
Shape = Mapping[str, Any]
"""Shape columns by name: numbers, or arrays [n]."""


class Numbers:
    """A minimal array namespace for plain numbers."""

    # NumPy on single numbers takes several times as long as Python does, and every event of a step
    # asks for its work.
    exp = staticmethod(exp)
    floor = staticmethod(floor)
    minimum = staticmethod(min)
    maximum = staticmethod(max)

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
    """A kernel. Each family is a subclass with its shape as fields and its formula as `work`.

    `work(xp, shape)` takes the shape as a mapping of names to values and an array namespace `xp`,
    so that the same formula serves one op (plain numbers, `NUMBERS`) and columns of many (NumPy, or
    jax.numpy where gradients are wanted). Besides the shape it reads `element_bytes` and the flags
    `bwd` (both gradients) and `nongated`, 0 or 1. Some families also return the quantities that
    FLOPs and traffic are computed from.
    """

    op: str
    dtype: str = "bf16"
    pass_: Pass = "fwd"

    family: ClassVar[str]
    uses_matrix_units: ClassVar[bool] = False
    """Whether its FLOPs are matrix products."""
    is_matmul: ClassVar[bool] = False
    """Whether the kernel consists only of matrix products, dense or of experts."""
    samples_field: ClassVar[str] = ""
    """Name of the field that grows in proportion to the tokens, sequences or images that the kernel
    works on; empty if there is none."""
    work: ClassVar[Callable[[Any, Shape], Any]]

    @property
    def label(self) -> str:
        """A short, readable name: operator, shape, pass."""
        return f"{self.op} {self.pass_}"

    @property
    def samples(self) -> str:
        """Name of the field that counts samples, depending on the pass (`samples_field`)."""
        return self.samples_field

    def amounts(self) -> Work:
        """Return FLOPs and bytes by the family's formula."""
        return _amounts(self)

    @property
    def flops(self) -> float:
        """Floating-point operations of the kernel."""
        return self.amounts().flops

    @property
    def bytes(self) -> float:
        """Compulsory memory traffic."""
        return self.amounts().bytes

    def stated(self) -> dict[str, Any]:
        """Fields by name, as constructor arguments."""
        names, values = _field_getter(type(self))
        return dict(zip(names, values(self), strict=True))

    def shape(self) -> dict[str, Any]:
        """Fields in the form that the work formula needs."""
        return self.stated() | {
            "element_bytes": dtype_bytes(self.dtype),
            "bwd": int(self.pass_ == "bwd"),
        }


@lru_cache(maxsize=2**15)
def _amounts(op: KernelOp) -> Work:
    """`KernelOp.amounts`, computed once: prices, energies and laws of one event all ask for it."""
    flops, moved, *_ = op.work(NUMBERS, op.shape())
    return Work(float(flops), float(moved))


@cache
def _field_getter(kind: type[KernelOp]) -> tuple[tuple[str, ...], Callable[[KernelOp], tuple]]:
    """Names of a family's fields, and a function that reads their values off a kernel."""
    # once per family: `fields` builds its answer anew at every call
    names = tuple(field.name for field in fields(kind))
    return names, attrgetter(*names)


CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast"
]

ExchangeWay = Literal["dispatch", "combine"]


class Exchange(NamedTuple):
    """An expert exchange by a specialised library."""

    dispatcher: str
    """Name of the library (`perfmodel.spec.Dispatcher`)."""
    way: ExchangeWay
    """Towards the experts or back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective over a group of ranks, sized as nccl-tests does.

    `bytes`: all_reduce the buffer; all_gather the gathered output; reduce_scatter the full input;
    all_to_all the buffer of one rank; send_recv the message; broadcast the buffer.
    """

    collective: CollectiveKind
    bytes: float
    num_ranks: int
    ranks_per_node: int
    """Ranks of this group that share a node (innermost network level)."""
    dtype: str = "bf16"
    level: int = 0
    """Outermost network level of the cluster that the group spans."""
    concurrent: int = 1
    """Groups of this kind that share each node's outgoing links at the same time."""
    interleaved: int = 1
    """Groups of this kind, itself included, whose ranks alternate within one span of a node. They
    share a host bridge (PCIe) if there is one; behind a switch they do not slow one another."""
    relayed_bytes: float = 0.0
    """Bytes of an all-to-all between nodes that each rank forwards inside its node meanwhile, out
    of all that the node receives; the slower of the two parts determines the time."""
    exchange: Exchange | None = None
    """Library of an all-to-all, if it is not the default one; its rate may be published."""

    uses_matrix_units: ClassVar[bool] = False
    """Whether its FLOPs are matrix products: those of a collective are not."""

    @property
    def family(self) -> str:
        """One regressor family per collective kind."""
        return self.collective

    @property
    def num_nodes(self) -> int:
        # rounded up: the last node may hold fewer
        return -(-self.num_ranks // self.ranks_per_node)

    @property
    def label(self) -> str:
        """A short, readable name: kind, bytes, ranks and where they are."""
        nodes = "intra-node" if self.num_nodes == 1 else f"{self.num_nodes} nodes"
        return f"{self.collective} {self.bytes / 1e6:.3g} MB x{self.num_ranks} ({nodes})"


def family_with_bmm(op: KernelOp | Collective) -> str:
    """An op's family, with batched products of small matrices (`bmm`) as a separate one."""
    return "bmm" if isinstance(op, KernelOp) and op.op == "bmm" else op.family


# --- families -------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True, slots=True)
class KernelKind:
    """A kind of kernels, as used by regressors."""

    dtype: str
    """Class of equally fast element types: `half` for fp16 and bf16, `fp8` for all 8-bit floats."""
    op: str
    pass_: str

    @classmethod
    def parse(cls, text: str) -> "KernelKind":
        """Inverse of `str`."""
        return cls(*text.split("/"))

    def __str__(self) -> str:
        """`dtype/op/pass`, as files have it."""
        return f"{self.dtype}/{self.op}/{self.pass_}"


class KindColumns(NamedTuple):
    """Kinds of rows as columns [n] of words (object dtype)."""

    dtype: np.ndarray
    op: np.ndarray
    pass_: np.ndarray

    @classmethod
    def of(cls, kinds: Sequence[KernelKind], index: np.ndarray) -> "KindColumns":
        """Columns of `kinds[index[i]]`."""

        def column(field: str) -> np.ndarray:
            return np.array([getattr(kind, field) for kind in kinds], object)[index]

        return cls(dtype=column("dtype"), op=column("op"), pass_=column("pass_"))

    def same_op_and_pass(self, kinds: "KindColumns") -> np.ndarray:
        """Whether the kinds have the same op and pass, per row, bool[n]."""
        return (self.op == kinds.op) & (self.pass_ == kinds.pass_)


@dataclass(frozen=True)
class ShapeColumn:
    """A shape column of the tables."""

    default: float | None = None
    """Value for rows that leave the column empty; without a default, such rows are incomplete."""
    low: float = 1.0
    """Least value that a table may hold."""
    column: str = ""
    """Name of the column in tables, if it differs."""
    from_text: Callable[[str], float] | None = None
    """Reads the number from a column of words."""


@dataclass(frozen=True)
class Axis:
    """An axis of a regressor's tables, over the log2 of a quantity."""

    name: str
    low: float
    """Log2 of the quantity at the first node."""
    high: float
    """Log2 of the quantity at the last node."""
    nodes_per_doubling: int


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """How kernels of a family are measured."""

    passes: tuple[str, ...]
    """Passes with a program."""
    jax_program: Callable[[Any, np.random.Generator], Program]
    """Makes a kernel's JAX program on random inputs."""
    torch_program: Callable[[Any, Tensors], Program]
    """Makes a kernel's torch program on random tensors."""
    jax_dtypes: tuple[str, ...] = ()
    """Element types beyond fp32, bf16 and fp16."""
    torch_dtypes: tuple[str, ...] = ()
    check: Callable[[Any], None] = lambda op: None
    """Raises `PerfModelError` for a kernel without a program."""


@dataclass(frozen=True, kw_only=True)
class GradientProducts:
    """Conversion between a product's backward pass (`bwd`) and its two gradient products (`dgrad`,
    `wgrad`)."""

    split: Callable[
        [Mapping[str, np.ndarray], KindColumns],
        tuple[dict[str, np.ndarray], dict[str, np.ndarray]],
    ]
    """`(shape columns, kinds of the rows)`: columns of the input's and of the weight's gradient
    that differ."""
    join: Callable[[Mapping[str, np.ndarray], KindColumns], dict[str, np.ndarray]]
    """`(shape columns, kinds of the rows)` of either product: columns of both gradients, without
    accumulation."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kernel family, listed in `FAMILIES` (`perfmodel/ops/__init__.py`)."""

    op: type[KernelOp]
    """Events of the family."""
    columns: Mapping[str, ShapeColumn]
    """Shape columns of its kernels by name, as tables state them."""
    axes: tuple[Axis, ...]
    """Axes of the tables that a regressor keeps for every stack."""
    physics: Callable[[Any, Any, Machine], Physics]
    """`(xp, shape columns, machine)`: FLOPs rounded up to whole tiles and waves, traffic, and
    features."""
    known_op: Callable[[str], str]
    """Name under which regressors know an op; empty if its shape determines the op."""
    op_by_shape: Callable[[Mapping[str, np.ndarray]], np.ndarray] | None = None
    """Names of the ops that their shape determines."""
    kind_flags: Callable[[KernelKind], Mapping[str, float]] = lambda kind: {}
    """Shape columns that a kind fixes."""
    as_measured: Callable[
        [dict[str, np.ndarray], KindColumns, KindColumns, KindColumns],
        dict[str, np.ndarray],
    ] = lambda shape, asked, measured, work: shape
    """`(shape, asked, measured, work)`: converts the shape of rows of the requested kinds to that
    of the measured kinds that stand in for them."""
    gradients: GradientProducts | None = None
    """For products whose gradients are products."""
    complete: Callable[[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray], None] = (
        lambda shape, ops, passes, layout: None
    )
    """`(shape, op names, passes, operand layouts)`: adds columns that follow from others, in
    place."""
    measurement: Measurement | None = None
    """How the family is timed; None if no program can time it."""

    @property
    def name(self) -> str:
        return self.op.family

    def timed(self) -> Measurement:
        """The measurement of the family.

        Raises:
            PerfModelError: for a family that no program times.
        """
        if self.measurement is None:
            raise PerfModelError(f"{self.name!r} cannot be measured; remove it from the plan")
        return self.measurement
