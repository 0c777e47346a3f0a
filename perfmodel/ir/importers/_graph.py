"""Graphs of imported programs, with fusion of element-wise chains into kernels."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, Literal, NamedTuple

from perfmodel.ir.importers._rows import CollectiveRow, KernelRow, Unmapped, merged, repeated
from perfmodel.ops import KernelOp, MemoryBound
from perfmodel.units import DTYPE_BYTES, dtype_bytes

_DTYPES: Final[dict[str, str]] = {
    "float64": "fp64",
    "f64": "fp64",
    "float32": "fp32",
    "f32": "fp32",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "f16": "fp16",
    "int8": "int8",
    "s8": "int8",
    "uint8": "int8",
    "u8": "int8",
}
_ITEM_BYTES: Final[dict[str, float]] = {
    "bool": 1,
    "pred": 1,
    "int4": 0.5,
    "s4": 0.5,
    "uint4": 0.5,
    "u4": 0.5,
    "int16": 2,
    "s16": 2,
    "uint16": 2,
    "u16": 2,
    "int32": 4,
    "s32": 4,
    "uint32": 4,
    "u32": 4,
    "int64": 8,
    "s64": 8,
    "uint64": 8,
    "u64": 8,
    "complex64": 8,
    "c64": 8,
    "complex128": 16,
    "c128": 16,
    "token": 0,
    "key<fry>": 8,
    "key<rbg>": 16,
    "float0": 0,
}


@dataclass(frozen=True, slots=True)
class Array:
    """Element type and shape of a value."""

    dtype: str
    """Name in the kernel tables; `fp32` for types that they lack (integers move like it)."""
    shape: tuple[int, ...]
    item_bytes: float

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...]) -> "Array":
        """The array of an element type that NumPy, HLO or ONNX names."""
        # NumPy, HLO and ONNX name float8 types after their exponent and mantissa; all take one byte
        # and one rate.
        if name.startswith(("float8", "f8")):
            return cls("fp8", shape, 1.0)
        known = _DTYPES.get(name)
        if known is not None:
            return cls(known, shape, float(DTYPE_BYTES[known]))
        return cls("fp32", shape, float(_ITEM_BYTES.get(name, 4)))

    @property
    def n_elements(self) -> int:
        return prod(self.shape)

    @property
    def n_bytes(self) -> float:
        return self.n_elements * self.item_bytes


Role = Literal[
    "pointwise", "reduction", "view", "kernel", "collective", "loop", "unmapped", "effect"
]
"""`pointwise` and `reduction` fuse; a `view` (reshape, transpose, broadcast, slice) is read in
place by its users; the others are separate events. An `effect` is unmapped and happens whether its
results are used or not."""


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """A tensor of the program, compared by identity."""

    array: Array


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """An operation of an imported graph."""

    name: str
    role: Role
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    flops: float = 0.0
    work: "KernelOp | CollectiveRow | Unmapped | Region | None" = None
    """Work of a kernel, collective, unmapped op or loop."""
    traffic_bytes: float | None = None
    """Traffic of a kernel that does not read and write all of its inputs and outputs."""


@dataclass(frozen=True, eq=False, slots=True)
class Region:
    """Nodes in topological order, executed `count` times."""

    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]
    count: float = 1.0


def unknown(
    name: str,
    inputs: tuple[Value, ...],
    outputs: tuple[Value, ...],
    flops: float | None = None,
    acts: bool = False,
) -> Node:
    """Add an operation that no kernel family covers, with its FLOPs if known; `acts` states whether
    it runs even if its result is not used."""
    reason = "it has no kernel family" + (
        "" if flops else "; at least one FLOP per output element is assumed"
    )
    least_flops = sum(value.array.n_elements for value in outputs)
    work = Unmapped(name, reason, float(flops or least_flops))
    return Node(name, "effect" if acts else "unmapped", inputs, outputs, work=work)


class Rows(NamedTuple):
    """Rows of a region, by the names of `OpTable`."""

    kernels: tuple[KernelRow, ...]
    collectives: tuple[CollectiveRow, ...]
    unmapped: tuple[Unmapped, ...]

    @property
    def flops(self) -> float:
        """FLOPs of all rows."""
        return sum(row.count * row.flops for row in (*self.kernels, *self.unmapped))


def rows_of(region: Region) -> Rows:
    """Kernels, collectives and unmapped ops of all that the region's outputs depend on.

    Element-wise ops and the reductions at their end run as one kernel if one feeds the other and no
    other event lies between (loop fusion, as XLA does it): such a kernel reads every distinct
    tensor from outside once and writes what is used outside. Arithmetic on single numbers is no
    kernel: what uses it takes it in.
    """
    # Three sources of rows: bodies of loops (counted), kernels and collectives one by one, and
    # fused chains of the rest.
    nodes = _live(region)
    kernels: list[KernelRow] = []
    collectives: list[CollectiveRow] = []
    unmapped: list[Unmapped] = []
    for node in nodes:
        match node.work:
            case Region() as body:
                inner = rows_of(body)
                kernels += repeated(inner.kernels, body.count)
                collectives += repeated(inner.collectives, body.count)
                unmapped += repeated(inner.unmapped, body.count)
            case CollectiveRow() as row:
                collectives.append(row)
            case Unmapped() as row:
                unmapped.append(row)
            case None:
                pass
            case op:
                traffic = node.traffic_bytes
                if traffic is None:
                    traffic = sum(v.array.n_bytes for v in {*node.inputs, *node.outputs})
                kernels.append(KernelRow(op, node.flops, traffic, node.name))
    # Arithmetic on single numbers (steps, scales) launches no kernel of its own.
    for chain, (read, written) in _chains(nodes, region.outputs):
        if any(value.array.n_elements > 1 for value in (*read, *written)):
            kernels.append(_fused(chain, read, written))
    return Rows(merged(kernels), merged(collectives), merged(unmapped))


def _live(region: Region) -> list[Node]:
    """Nodes that an output, or something that communicates or acts, depends on."""
    # Backwards from the outputs; what communicates or acts happens whether its results are used or
    # not.
    needed = set(region.outputs)
    nodes = []
    for node in reversed(region.nodes):
        if needed.intersection(node.outputs) or node.role in ("collective", "effect"):
            needed.update(node.inputs)
            nodes.append(node)
    return nodes[::-1]


class _Origins:
    """Origins of values through views: the tensor that is read, and the node that computed it."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._maker: dict[Value, Node] = {}
        for node in nodes:
            self._maker.update(dict.fromkeys(node.outputs, node))

    def stored(self, value: Value) -> Value | None:
        """The stored tensor that a use of `value` reads: the source of a broadcast, the part of a
        slice; None for constants."""
        # Views are read in place. A slice reads only its part, so the walk ends where the source is
        # larger than the use.
        node = self._maker.get(value)
        while node is not None and node.role == "view":
            if not node.inputs:
                return None
            source = node.inputs[0]
            if source.array.n_elements > value.array.n_elements:
                return value
            value = source
            node = self._maker.get(source)
        return value

    def maker(self, value: Value) -> Node | None:
        """Return the node that computed `value`, or the tensor that it is a view of."""
        node = self._maker.get(value)
        while node is not None and node.role == "view":
            node = self._maker.get(node.inputs[0]) if node.inputs else None
        return node


Edges = tuple[set[Value], set[Value]]


def _chains(nodes: Sequence[Node], outputs: Sequence[Value]) -> list[tuple[list[Node], Edges]]:
    """Fused chains, each with the tensors that it reads from and writes to memory."""
    # A node joins the chains of the element-wise nodes that feed it, unless an event lies between
    # (other depth). Reductions end a chain: what follows needs the whole result.
    origins = _Origins(nodes)
    depth = _depths(nodes, origins)
    chain: dict[Node, int] = {}
    members: dict[int, list[Node]] = {}
    for node in nodes:
        if node.role not in ("pointwise", "reduction"):
            continue
        makers = [
            maker_node for maker_node in map(origins.maker, node.inputs) if maker_node is not None
        ]
        joined = {
            chain[maker_node]
            for maker_node in makers
            if maker_node.role == "pointwise" and depth[maker_node] == depth[node]
        }
        key = min(joined, default=len(chain))
        chain[node] = key
        members.setdefault(key, []).append(node)
        # A node that several chains feed makes them one.
        for absorbed in joined - {key}:
            for member in members.pop(absorbed):
                chain[member] = key
                members[key].append(member)

    # A chain reads tensors from outside, and writes those that are used outside.
    read: dict[int, set[Value]] = {key: set() for key in members}
    written: dict[int, set[Value]] = {key: set() for key in members}
    for node in nodes:
        if node.role == "view":
            continue
        for value in node.inputs:
            maker = origins.maker(value)
            inside = maker is not None and chain.get(maker, -1) == chain.get(node, -2)
            if inside:
                continue
            stored = origins.stored(value)
            if node in chain and stored is not None:
                read[chain[node]].add(stored)
            if maker in chain:
                written[chain[maker]].update(maker.outputs)
    for value in outputs:
        maker = origins.maker(value)
        if maker in chain:
            written[chain[maker]].update(maker.outputs)
    return [(members[key], (read[key], written[key])) for key in members]


def _depths(nodes: Sequence[Node], origins: _Origins) -> dict[Node, int]:
    """Number of events on the longest path to each node; a chain has one depth, so that no path
    leaves and re-enters it.

    Element-wise nodes are then moved to the depth of the first node that uses them, as what they
    compute is not wanted before (XLA fuses producers into consumers).
    """
    # Depth counts the kernels that must have run before. Two nodes of a chain share a depth, or a
    # kernel in between would have to run both after and before the fused one.
    depth: dict[Node, int] = {}
    users: dict[Node, list[Node]] = {}
    acting = [node for node in nodes if node.role != "view"]
    for node in acting:
        makers = [m for m in map(origins.maker, node.inputs) if m is not None]
        depth[node] = max((depth[m] + (m.role != "pointwise") for m in makers), default=0)
        for maker in makers:
            users.setdefault(maker, []).append(node)
    # Backwards, so that the depths of all users are settled first.
    for node in reversed(acting):
        if node.role == "pointwise" and node in users:
            depth[node] = min(depth[user] for user in users[node])
    return depth


def _fused(nodes: Sequence[Node], read: set[Value], written: set[Value]) -> KernelRow:
    """Make a chain one kernel, a stream over its largest tensor with the chain's traffic."""
    sizes = [value.array for value in (*read, *written)]
    traffic = sum(array.n_bytes for array in sizes)
    # A second operand of about the widest tensor's size makes the kernel one of two inputs.
    widest = max(sizes, key=lambda array: array.n_bytes)
    wide_inputs = [value for value in read if 2 * value.array.n_bytes >= widest.n_bytes]
    n_inputs = 2 if len(wide_inputs) > 1 else 1
    # A readable label: the ops with most arithmetic, four at most.
    names = list(dict.fromkeys(node.name for node in sorted(nodes, key=lambda n: -n.flops)))
    source = "+".join(names if len(names) <= 4 else [*names[:4], "..."])
    name = "fusion" if len(nodes) > 1 else nodes[0].name
    op = streamed(name, widest, traffic, n_inputs)
    return KernelRow(op, sum(node.flops for node in nodes), traffic, source)


def streamed(name: str, array: Array, traffic_bytes: float, n_inputs: int = 1) -> MemoryBound:
    """A memory-bound kernel with the row length of a tensor and enough rows for the traffic."""
    # The regressor of streaming kernels takes rows and row length; as many rows are stated as give
    # the chain's traffic.
    hidden = max(1, array.shape[-1] if array.shape else 1)
    per_row = (n_inputs + 1) * hidden * dtype_bytes(array.dtype)
    rows = max(1, round(traffic_bytes / per_row))
    return MemoryBound(op=name, dtype=array.dtype, rows=rows, hidden=hidden, n_inputs=n_inputs)
