"""Definitions of ops as records of rules, and helpers for rules.

A rule raises `RuleError` (without line or value, which the interpreter adds). The JAX
implementation of an op is registered under the same name in `perfmodel.ir.execution`; this package
knows no JAX.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np

from perfmodel.display import shorten_reprs
from perfmodel.ir._instruction import ITEM_BYTES, Attributes, Instruction, RuleError, Tag, Tensor
from perfmodel.ops import MemoryBound, Op
from perfmodel.units import DTYPE_BYTES, plural

Tensors = tuple[Tensor, ...]
"""Types of an op's operands or results, in order."""
Values = Mapping[str, Any]
"""Attributes of an instruction by name."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """Sharding: every part holds the whole tensor."""


@dataclass(frozen=True, slots=True)
class Sharded:
    """Sharding: part j holds the j-th of equal slices along an axis (counted from 0)."""

    axis: int


@dataclass(frozen=True, slots=True)
class Partial:
    """Sharding: the tensor is the sum (with `op="max"`, the maximum) of the parts."""

    op: str = "sum"


Sharding = Replicated | Sharded | Partial
"""Sharding of a tensor over the parts of one parallel dimension (GSPMD, Xu et al. 2021, section
3)."""
REPLICATED: Final = Replicated()


@dataclass(frozen=True, slots=True)
class ShardingQuery:
    """The input of a sharding rule: an instruction, and how its operands are spread."""

    operands: Tensors
    """Whole operands, as the instruction had them before it was spread."""
    outputs: Tensors
    attributes: Values
    shardings: tuple[Sharding, ...]
    parts: int
    sequence_axis: int | None = None
    """Axis along which partial sums of three-dimensional activations are scattered, if requested
    (sequence parallelism, Korthikanti et al. 2022); otherwise they are all-reduced."""

    @classmethod
    def of(
        cls,
        instruction: Instruction,
        types: Mapping[str, Tensor],
        shardings: Sequence[Sharding],
        parts: int,
        sequence_axis: int | None = None,
    ) -> "ShardingQuery":
        """Return an instruction's query, from its values' types and operands' shardings."""
        inputs = tuple([types[name] for name in instruction.inputs])
        outputs = tuple([types[name] for name in instruction.outputs])
        return cls(
            inputs, outputs, dict(instruction.attributes), tuple(shardings), parts, sequence_axis
        )

    def with_complete_sums(self) -> "ShardingQuery":
        """Return the query with partial sums completed."""
        return replace(self, shardings=tuple(map(self._completed, self.operands, self.shardings)))

    def _completed(self, tensor: Tensor, spread: Sharding) -> Sharding:
        """Return the sharding that a value gets once its partial sums are completed."""
        if not isinstance(spread, Partial):
            return spread
        # A partial sum is completed by an all-reduce. Sequence parallelism splits it into a
        # reduce-scatter here and an all-gather later, between which each part works on its share of
        # the sequence; this takes an activation [batch, sequence, hidden] whose sequence divides.
        axis = self.sequence_axis
        scatters = axis is not None and tensor.rank == 3 and tensor.shape[axis] % self.parts == 0
        return Sharded(axis) if scatters and axis is not None else REPLICATED

    def sharded_axis(self, operand: int) -> int | None:
        """Axis along which an operand is sharded, None where it is not."""
        spread = self.shardings[operand]
        return spread.axis if isinstance(spread, Sharded) else None

    def replicated(self) -> "ShardingDecision":
        """Return the decision to replicate the whole work on every part."""
        return self._all(REPLICATED)

    def all_along_one_axis(
        self, allowed: Callable[[int], bool] = lambda axis: True
    ) -> "ShardingDecision":
        """Decide to shard all operands and results along one axis, the first allowed one."""
        # The first sharded operand decides; whoever is sharded otherwise is converted to it.
        axes = map(self.sharded_axis, range(len(self.operands)))
        axis = next((a for a in axes if a is not None and allowed(a)), None)
        return self.replicated() if axis is None else self._all(Sharded(axis))

    def _all(self, spread: Sharding) -> "ShardingDecision":
        return ShardingDecision((spread,) * len(self.operands), (spread,) * len(self.outputs))


@dataclass(frozen=True, slots=True)
class ShardingDecision:
    """A sharding rule's result: how an instruction and its operands are sharded."""

    inputs: tuple[Sharding, ...]
    """Sharding that each operand must be converted to; `Partial` only for operands that are partial
    already."""
    outputs: tuple[Sharding, ...]
    attributes: tuple[tuple[str, Any], ...] = ()
    """Attributes of every part that replace the instruction's own."""
    offset_step: int = 0
    """Step by which attribute `offset` rises from one part to the next."""


InferRule = Callable[[Tensors, Values], Tensors]
FoldRule = Callable[[Sequence[np.ndarray], Values], np.ndarray]
WorkRule = Callable[[Tensors, Tensors, Values], tuple[Op, ...]]


class Emitter(Protocol):
    """Interface through which a gradient rule writes instructions: a `Builder`."""

    types: dict[str, Tensor]
    """Types of the values so far."""

    def op(self, op: str, *inputs: str, name: str = "", **values: Any) -> str:
        """Append an instruction of one output; returns the output's name."""
        ...

    def emit(
        self,
        op: str,
        inputs: Sequence[str],
        hints: Sequence[str],
        values: Attributes = (),
        tag: Tag | None = None,
    ) -> tuple[str, ...]:
        """Append an instruction; returns the names of its outputs."""
        ...


Names = tuple[str | None, ...]
"""Names of gradients; None for values without one."""
GradientRule = Callable[..., Names]
"""Function (emitter, instruction, gradient of each output) that returns the gradients of the
operands. Some of several outputs may have no gradient, but not all."""
ShardRule = Callable[[ShardingQuery], ShardingDecision]
PartialRule = Callable[[ShardingQuery], ShardingDecision | None]


def sums_pass(query: ShardingQuery) -> ShardingDecision | None:
    """Sharding rule of linear ops: partial sums in, partial sums out."""
    if any(spread != Partial("sum") for spread in query.shardings):
        return None
    return ShardingDecision(query.shardings, (Partial("sum"),) * len(query.outputs))


@dataclass(frozen=True, kw_only=True)
class OpDefinition:
    """The rules of one op."""

    name: str
    infer: InferRule
    """Types of the outputs from those of the operands and the attributes; checks both."""
    work: WorkRule
    """Kernels or collectives of one execution, which determine its FLOPs, bytes and time."""
    fold: FoldRule | None = None
    """Value of the only output from known operand values."""
    gradient: GradientRule | None = None
    """Emits the gradients of the operands from those of the outputs; None: the op is constant."""
    shard: ShardRule = ShardingQuery.replicated
    """Rule by which the op is spread over the parts of a parallel dimension, given operands without
    partial sums."""
    partial: PartialRule | None = None
    """Rule for operands that are partial sums; without it, or if it returns None, the sums are
    completed first."""
    collective: bool = False
    """Whether the op runs on several devices at once."""

    def spread(self, query: ShardingQuery) -> ShardingDecision:
        """Decide the shardings of operands and results."""
        # Leaving a sum partial postpones its all-reduce, possibly past an op that makes it smaller,
        # so that goes first.
        decision = self.partial(query) if self.partial is not None else None
        return self.shard(query.with_complete_sums()) if decision is None else decision


def operands(count: int, inputs: Tensors) -> None:
    """Raise `RuleError` unless `count` operands are given."""
    if len(inputs) != count:
        raise RuleError(f"{count} {plural('operand', count)} needed, {len(inputs)} given")


def required(attributes: Values, name: str, kind: type | tuple[type, ...]) -> Any:
    """Return an attribute; raise `RuleError` unless it is present and of the given type."""
    value = attributes.get(name)
    # In Python `True` is an integer; in an attribute it is a slip.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        names = kind.__name__ if isinstance(kind, type) else " or ".join(k.__name__ for k in kind)
        raise RuleError(f"attribute {name} must have type {names}, got {value!r}")
    return value


def required_dtype(attributes: Values) -> str:
    """Return the attribute `dtype`; raise `RuleError` unless it is a known type."""
    dtype = required(attributes, "dtype", str)
    if dtype not in ITEM_BYTES:
        raise RuleError(f"unknown dtype {dtype!r}; known: {', '.join(ITEM_BYTES)}")
    return dtype


def require_gradient_of(out: Tensor, gradient: Tensor) -> None:
    """Raise `RuleError` unless a gradient has the shape of the value that it belongs to."""
    if gradient.shape != out.shape:
        raise RuleError(
            f"the gradient must have the shape {out.shape} of the output, got {gradient.shape}"
        )


def axis_of(attributes: Values, name: str, rank: int) -> int:
    """An axis attribute as a number from 0; negative ones count from the end."""
    axis = required(attributes, name, int)
    if not -rank <= axis < rank:
        raise RuleError(f"{name}={axis} is not an axis of a tensor with {rank} dimensions")
    return axis % rank


def table(*definitions: OpDefinition) -> Mapping[str, OpDefinition]:
    """Definitions by name."""
    return MappingProxyType({d.name: d for d in definitions})


def kernel_dtype(tensor: Tensor) -> str:
    """Element type under which a kernel is timed; integers move like fp32."""
    return tensor.dtype if tensor.dtype in DTYPE_BYTES else "fp32"


def free(inputs: Tensors, outputs: Tensors, attributes: Values) -> tuple[Op, ...]:
    """Work rule of ops without a kernel (reshapes, constants)."""
    return ()


def memory_bound(op: str, backward: bool = False) -> Callable[..., tuple[MemoryBound]]:
    """Work rule of one memory-bound kernel over the largest tensor of the instruction."""

    def work(inputs: Tensors, outputs: Tensors, attributes: Values) -> tuple[MemoryBound]:
        # Its time is traffic. Broadcast biases and scalars are negligible beside the largest
        # tensor, so only operands of at least half its size count as streams.
        largest = max((*inputs, *outputs), key=lambda tensor: tensor.n_elements)
        streamed = sum(tensor.n_elements * 2 >= largest.n_elements for tensor in inputs)
        hidden = largest.shape[-1] if largest.shape else 1
        kernel = MemoryBound(
            op=op,
            dtype=kernel_dtype(largest),
            rows=max(1, prod(largest.shape[:-1])),
            hidden=hidden,
            # `MemoryBound` adds the saved value that a backward kernel reads.
            n_inputs=max(1, streamed - backward),
            pass_="bwd" if backward else "fwd",
        )
        return (kernel,)

    return work


shorten_reprs(__name__)
