"""Instructions of compiled XLA modules as rows of the measurement tables.

A profile carries its modules as `HloProto` messages (xla/service/hlo.proto, whose field numbers
these are); the names of its events are those of the instructions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from perfmodel.ingest._rows import Row
from perfmodel.ingest.profiles._wire import Field, fields, integer, integers, submessages, text
from perfmodel.ops import CollectiveKind
from perfmodel.units import DTYPE_BYTES

_DTYPES: Final = {
    10: "fp16",
    11: "fp32",
    12: "fp64",
    16: "bf16",
    19: "fp8",
    20: "fp8",
    23: "fp8",
    24: "fp8",
    25: "fp8",
    2: "int8",
    6: "int8",
}
"""`xla.PrimitiveType` -> element type of the tables."""
HLO_COLLECTIVES: Final[dict[str, CollectiveKind]] = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "send_recv",
}


@dataclass(frozen=True)
class _Shape:
    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.dims) * DTYPE_BYTES.get(self.dtype, 0)


@dataclass(frozen=True)
class _Instruction:
    opcode: str
    shapes: tuple[_Shape, ...]
    """The shape, or all shapes of a tuple."""
    operands: tuple[int, ...]
    called: tuple[int, ...]
    message: Mapping[int, list[Field]]


class HloModule:
    """The instructions of one compiled module, by name."""

    def __init__(self, proto: bytes, place: object) -> None:
        """Parse an `HloProto` (raises `TableError` for damaged bytes)."""
        self._place = place
        self._by_id: dict[int, _Instruction] = {}
        self._by_name: dict[str, _Instruction] = {}
        self._computations: dict[int, list[_Instruction]] = {}
        # Events name instructions; operands and called computations refer to
        # them by number. Both indices are made at once.
        for module_data in submessages(fields(proto, place), 1):
            module = fields(module_data, place)
            for data in submessages(module, 3):
                computation = fields(data, place)
                members = self._computations.setdefault(integer(computation, 5), [])
                for instruction_data in submessages(computation, 2):
                    message = fields(instruction_data, place)
                    instruction = self._instruction(message)
                    members.append(instruction)
                    self._by_id[integer(message, 35)] = instruction
                    self._by_name[text(message, 1)] = instruction

    def row(self, name: str, n_devices: int) -> "Row | str":
        """The instruction's columns of a measurement row, or the reason why it has none."""
        instruction = self._by_name.get(name)
        if instruction is None:
            return "instruction whose module the profile lacks"
        # Asynchronous collectives are two instructions: one begins, the other waits.
        opcode = instruction.opcode.removesuffix("-start").removesuffix("-done")
        if opcode in HLO_COLLECTIVES:
            return self._collective(instruction, opcode, n_devices)
        if instruction.opcode == "fusion":
            return self._fusion(instruction)
        if instruction.opcode == "dot":
            return self._dot(instruction)
        return f"no row for {instruction.opcode}"

    def _fusion(self, fusion: _Instruction) -> "Row | str":
        """The row of a fusion with exactly one product, which counts as that product."""
        # Element-wise work around a product runs in its epilogue and costs little; two products
        # have no single shape.
        products: list[_Instruction] = []
        for computation in fusion.called:
            instructions = self._computations.get(computation, ())
            products += [i for i in instructions if i.opcode in ("dot", "convolution")]
        if len(products) != 1 or products[0].opcode != "dot":
            return "fusion without exactly one matrix product"
        return self._dot(products[0])

    def _dot(self, dot: _Instruction) -> "Row | str":
        """Dimensions of lhs and rhs that are batched, contracted and free (xla_data.proto,
        DotDimensionNumbers)."""
        numbers = submessages(dict(dot.message), 30)
        operands = [self._by_id.get(number) for number in dot.operands]
        if not numbers or len(operands) < 2 or not all(o and o.shapes for o in operands[:2]):
            return "product without the shapes of its inputs"
        lhs, rhs = (o.shapes[0] for o in operands[:2] if o)
        kinds = fields(numbers[-1], self._place)
        contracted = integers(kinds, 1, self._place)
        rhs_contracted = integers(kinds, 2, self._place)
        batched = integers(kinds, 3, self._place)
        rhs_batched = integers(kinds, 4, self._place)
        lhs_shared = (*contracted, *batched)
        rhs_shared = (*rhs_contracted, *rhs_batched)
        lhs_fits = all(0 <= d < len(lhs.dims) for d in lhs_shared)
        rhs_fits = all(0 <= d < len(rhs.dims) for d in rhs_shared)
        if not (lhs_fits and rhs_fits):
            return "product whose dimensions do not fit its inputs"
        # Dimensions that are neither contracted nor batched are free: together they are rows and
        # columns of the result.
        batch = prod(lhs.dims[d] for d in batched)
        k = prod(lhs.dims[d] for d in contracted)
        m = prod(size for d, size in enumerate(lhs.dims) if d not in lhs_shared)
        n = prod(size for d, size in enumerate(rhs.dims) if d not in rhs_shared)
        if min(batch, m, n, k) < 1:
            return "product of no elements"
        op = "linear" if batch == 1 else "bmm"
        sizes = {"m": m, "n": n, "k": k, "batch": batch}
        return {"op_family": "gemm", "op": op, "dtype": lhs.dtype, "pass": ""} | sizes

    def _collective(self, instruction: _Instruction, opcode: str, n_devices: int) -> "Row | str":
        """The table's row of a collective; a text says why there is none."""
        if opcode == "all-gather":  # its size is that of its result
            shapes = instruction.shapes[-1:]
        else:
            # All others are measured by their input: the instruction may combine several tensors in
            # one call.
            shapes = ()
            for number in instruction.operands:
                if number in self._by_id:
                    shapes += self._by_id[number].shapes
        if not shapes or not all(s.bytes for s in shapes):
            return "collective whose element type or size the tables do not have"
        # Without groups a collective takes in all devices of the program.
        groups = submessages(dict(instruction.message), 49)
        members = [integers(fields(group, self._place), 1, self._place) for group in groups]
        ranks = (
            2 if opcode == "collective-permute" else max(map(len, members), default=0) or n_devices
        )
        size = sum(s.bytes for s in shapes)
        return {
            "collective": HLO_COLLECTIVES[opcode],
            "num_ranks": ranks,
            "bytes": size,
            "dtype": shapes[0].dtype,
        }

    def _instruction(self, message: dict[int, list[Field]]) -> _Instruction:
        shapes: list[_Shape] = []
        for data in submessages(message, 3):
            shapes += self._shapes(data)
        operands = tuple(integers(message, 36, self._place))
        called = tuple(integers(message, 38, self._place))
        return _Instruction(text(message, 2), tuple(shapes), operands, called, message)

    def _shapes(self, data: bytes, depth: int = 0) -> list[_Shape]:
        message = fields(data, self._place)
        parts = submessages(message, 4)
        # Tuples hold tuples; the limit stops a damaged file from exhausting the stack.
        if parts and depth < 8:
            shapes: list[_Shape] = []
            for part in parts:
                shapes += self._shapes(part, depth + 1)
            return shapes
        dims = tuple(max(size, 0) for size in integers(message, 3, self._place))
        return [_Shape(_DTYPES.get(integer(message, 2), ""), dims)]


def modules(facts: Mapping[str, Mapping[str, Any]], place: object) -> dict[str, HloModule]:
    """Modules of a profile's metadata plane, by the names that its events give them."""
    by_event_name = {}
    for kind, stats in facts.items():
        proto = stats.get("Hlo Proto")
        if isinstance(proto, bytes) and proto:
            module = HloModule(proto, place)
            # Events give the name with or without the program's number: "jit_step(12)" or
            # "jit_step".
            by_event_name[kind] = module
            by_event_name[kind.partition("(")[0]] = module
    return by_event_name
