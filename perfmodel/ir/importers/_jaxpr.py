"""Graphs of JAX functions: bodies inlined, loops repeated, collectives placed on their mesh."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any, Final

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from perfmodel.errors import PerfModelError
from perfmodel.ir.importers._graph import Array, Node, Region, Value, rows_of
from perfmodel.ir.importers._jaxpr_rules import leaf
from perfmodel.ir.importers._rows import CollectiveRow, Unmapped, axis_groups
from perfmodel.ir.importers._table import OpTable
from perfmodel.ops import CollectiveKind

_INLINED: Final = frozenset(
    {
        *("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin"),
        *("custom_transpose_call", "shard_map", "xla_call", "run_state", "named_call"),
    }
)
_BODIES: Final = ("jaxpr", "call_jaxpr", "fun_jaxpr", "fwd_jaxpr")
_COLLECTIVES: Final[dict[str, CollectiveKind]] = {
    "psum": "all_reduce",
    "psum2": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "psum_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ppermute": "send_recv",
    "pbroadcast": "broadcast",
}


def trace(
    fn: Callable[..., Any], *args: Any, trip_count: int | None = None, name: str | None = None
) -> OpTable:
    """Kernels, FLOPs and bytes of a JAX function; nothing is computed.

    `jit`, `checkpoint`, custom derivatives and `shard_map` are looked into, `scan` counts its body
    as often as it runs. Where an array is spread over a mesh by `jit` alone, the whole of it is
    counted; `read_sharded` reads what one device does.

        step = jax.value_and_grad(loss)
        pm.trace(step, params, jax.ShapeDtypeStruct((8, 1024), "int32")).predict("h100-sxm")

    Args:
        args: arrays, `jax.ShapeDtypeStruct`s, or trees of them.
        trip_count: iterations to assume for `while` loops, which do not state them; without it they
            stay unmapped.
        name: name of the table (default: the function's).

    Raises:
        PerfModelError: a dimension that is not a number.
    """
    # Tracing runs the function on shapes; nothing is computed.
    closed = jax.make_jaxpr(fn)(*args)
    for var in closed.jaxpr.invars:
        shape = getattr(var.aval, "shape", ())
        if not all(isinstance(n, int) for n in shape):
            raise PerfModelError(
                f"argument of shape {shape} has an unknown size; give every dimension as a number"
            )
    return table_of(closed, trip_count, name or getattr(fn, "__name__", type(fn).__name__))


def table_of(closed: ClosedJaxpr, trip_count: int | None, name: str) -> OpTable:
    """Op table of a jaxpr."""
    rows = rows_of(_Walk(trip_count).region(closed.jaxpr, {}))
    # A jaxpr names no number of devices; its groups reach up to the last rank.
    highest_rank = 0
    for row in rows.collectives:
        highest_rank = max(highest_rank, *chain.from_iterable(row.groups), 0)
    return OpTable(name=name, **rows._asdict(), n_devices=highest_rank + 1)


@dataclass
class _Walk:
    """One pass over a jaxpr and those inside it."""

    trip_count: int | None
    nodes: list[Node] = field(default_factory=list)

    def region(self, jaxpr: Jaxpr, mesh: Mapping[str, int], count: float = 1.0) -> Region:
        """A body as a separate graph."""
        walk = _Walk(self.trip_count)
        values = {var: Value(array_of(var)) for var in (*jaxpr.constvars, *jaxpr.invars)}
        outputs = walk.inline(jaxpr, values, mesh)
        return Region(tuple(walk.nodes), tuple(v for v in outputs if v is not None), count)

    def inline(
        self, jaxpr: Jaxpr, values: dict[Any, Value], mesh: Mapping[str, int]
    ) -> list[Value | None]:
        """Append a jaxpr's nodes for these inputs; return its outputs (None for literals)."""

        def read(atom: Any) -> Value | None:
            if isinstance(atom, Literal):
                return None
            return values.setdefault(atom, Value(array_of(atom)))

        for eqn in jaxpr.eqns:
            # Bodies that run once are inlined, so chains fuse across calls as XLA fuses them.
            name, parameters = eqn.primitive.name, eqn.params
            operands = [read(atom) for atom in eqn.invars]
            body = inlined_body(name, parameters, len(operands))
            if body is not None:
                # Inside, values are what one device holds, and axis names of the mesh become known.
                if name == "shard_map":
                    results = self._on_one_device(
                        body, operands, eqn.outvars, {**mesh, **parameters["mesh"].shape}
                    )
                else:
                    results = self._call(body, operands, mesh)
                values.update(
                    (var, Value(array_of(var)) if value is None else value)
                    for var, value in zip(eqn.outvars, results, strict=True)
                )
                continue
            inputs = tuple(value for value in operands if value is not None)
            outputs = tuple(Value(array_of(var)) for var in eqn.outvars)
            values.update(zip(eqn.outvars, outputs, strict=True))
            self.nodes += self._nodes(name, parameters, inputs, outputs, mesh)
        return [read(atom) for atom in jaxpr.outvars]

    def _call(
        self, body: Jaxpr, operands: Sequence[Value | None], mesh: Mapping[str, int]
    ) -> list[Value | None]:
        """Inline the body of a call; literals become values without a maker."""
        inner = {
            var: Value(array_of(var)) if value is None else value
            for var, value in zip(body.invars, operands, strict=True)
        }
        return self.inline(body, inner, mesh)

    def _on_one_device(
        self,
        body: Jaxpr,
        operands: Sequence[Value | None],
        outvars: Sequence[Any],
        mesh: Mapping[str, int],
    ) -> list[Value | None]:
        """A call whose body sees the parts of its operands that one device holds."""

        def as_seen(value: Value, var: Any) -> Value:
            # A shard is a view: taking a part moves nothing.
            seen = Value(array_of(var))
            self.nodes.append(Node("shard_map", "view", (value,), (seen,)))
            return seen

        parts = [
            None if value is None else as_seen(value, var)
            for value, var in zip(operands, body.invars, strict=True)
        ]
        results = self._call(body, parts, mesh)
        return [
            None if value is None else as_seen(value, var)
            for value, var in zip(results, outvars, strict=True)
        ]

    def _nodes(
        self,
        name: str,
        parameters: Mapping[str, Any],
        inputs: tuple[Value, ...],
        outputs: tuple[Value, ...],
        mesh: Mapping[str, int],
    ) -> list[Node]:
        """Nodes of an equation, by the primitive's name; several if it holds other programs."""
        if name == "scan":
            body = self.region(parameters["jaxpr"].jaxpr, mesh, float(parameters["length"]))
            return [Node(name, "loop", inputs, outputs, work=body)]
        if name == "while":
            return [self._while(parameters, inputs, outputs, mesh)]
        if name == "cond":
            return [self._cond(parameters, inputs, outputs, mesh)]
        if name in _COLLECTIVES:
            return _collective(name, parameters, inputs, outputs, mesh)
        if name == "pallas_call":
            return [_pallas(parameters, inputs, outputs)]
        return [leaf(name, parameters, inputs, outputs)]

    def _while(
        self, parameters: Mapping[str, Any], inputs: Any, outputs: Any, mesh: Mapping[str, int]
    ) -> Node:
        """Append a loop whose number of iterations depends on its data."""
        if self.trip_count is not None:
            body = self.region(parameters["body_jaxpr"].jaxpr, mesh, float(self.trip_count))
            return Node("while", "loop", inputs, outputs, work=body)
        flops = rows_of(self.region(parameters["body_jaxpr"].jaxpr, mesh)).flops
        reason = "its trip count is not known, so one iteration is counted; pass trip_count, or write it as a scan"
        return Node("while", "unmapped", inputs, outputs, work=Unmapped("while", reason, flops))

    def _cond(
        self, parameters: Mapping[str, Any], inputs: Any, outputs: Any, mesh: Mapping[str, int]
    ) -> Node:
        """A choice: its only branch, or unmapped."""
        branches = parameters["branches"]
        if len(branches) == 1:
            return Node("cond", "loop", inputs, outputs, work=self.region(branches[0].jaxpr, mesh))
        flops = max(rows_of(self.region(branch.jaxpr, mesh)).flops for branch in branches)
        reason = "the branch depends on data, so the largest branch is counted"
        return Node("cond", "unmapped", inputs, outputs, work=Unmapped("cond", reason, flops))


def array_of(var: Any) -> Array:
    """Type of a variable or literal."""
    aval = var.aval
    return Array.of(str(getattr(aval, "dtype", "token")), tuple(getattr(aval, "shape", ())))


def inlined_body(name: str, parameters: Mapping[str, Any], n_inputs: int) -> Jaxpr | None:
    """The jaxpr that an equation stands for, executed once on the equation's own operands."""
    if name not in _INLINED:
        return None
    body = next((parameters[key] for key in _BODIES if key in parameters), None)
    jaxpr = getattr(body, "jaxpr", body)
    return jaxpr if jaxpr is not None and len(jaxpr.invars) == n_inputs else None


def _collective(
    name: str,
    parameters: Mapping[str, Any],
    inputs: tuple[Value, ...],
    outputs: tuple[Value, ...],
    mesh: Mapping[str, int],
) -> list[Node]:
    """One collective per operand, or views where no mesh axis is involved (a group of one)."""
    # Reductions call it `axes`, the others `axis_name`; a single name may stand alone.
    axes = parameters.get("axes", parameters.get("axis_name", ()))
    axes = (axes,) if isinstance(axes, str) else axes
    # Axes that are numbers are the operand's own: nothing moves along them.
    axes = tuple(axis for axis in axes if isinstance(axis, str))
    kind = _COLLECTIVES[name]
    if prod(mesh.get(axis, 1) for axis in axes) == 1:
        return [Node(name, "view", (i,), (o,)) for i, o in zip(inputs, outputs, strict=True)]
    groups = axis_groups(mesh, axes)
    # `ppermute` states (source, target) pairs within the axis; groups translate these to ranks.
    if kind == "send_recv":
        pairs = []
        for group in groups:
            pairs += [(group[source], group[target]) for source, target in parameters["perm"]]
        groups = tuple(pairs)
    elif parameters.get("axis_index_groups"):
        parts: list[tuple[int, ...]] = []
        for group in groups:
            for part in parameters["axis_index_groups"]:
                parts.append(tuple(group[i] for i in part))
        groups = tuple(parts)
    nodes = []
    for i, o in zip(inputs, outputs, strict=True):
        # `spec.Collective` sizes an all-gather by its result, everything else by its operand.
        n_bytes = o.array.n_bytes if kind == "all_gather" else i.array.n_bytes
        row = CollectiveRow(kind, n_bytes, groups, i.array.dtype, name)
        nodes.append(Node(name, "collective", (i,), (o,), work=row))
    return nodes


def _pallas(
    parameters: Mapping[str, Any], inputs: tuple[Value, ...], outputs: tuple[Value, ...]
) -> Node:
    """A hand-written kernel, whose cost is known only if its author states it."""
    # Pallas lets authors state the cost, since the compiler cannot see into the kernel.
    stated = parameters.get("cost_estimate")
    flops = float(getattr(stated, "flops", 0)) or float(sum(o.array.n_elements for o in outputs))
    reason = "a hand-written kernel, counted by its cost_estimate or one FLOP per output element"
    return Node(
        "pallas_call", "unmapped", inputs, outputs, work=Unmapped("pallas_call", reason, flops)
    )
