"""A JAX loss as a program of the IR, which can be distributed, executed and simulated."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal

from perfmodel.errors import PerfModelError
from perfmodel.ir import Program, Tensor
from perfmodel.ir.importers._emitter import (
    CannotMapError,
    Emitter,
    IndexCheck,
    Item,
    Known,
    Missing,
    Ref,
)
from perfmodel.ir.importers._graph import Array, Value
from perfmodel.ir.importers._jaxpr import array_of, inlined_body, table_of
from perfmodel.ir.importers._jaxpr_rules import leaf
from perfmodel.ir.importers._program_rules import mapped
from perfmodel.ir.models import ModelBuilder


def trace_program(
    loss: Callable[..., Any],
    weights: Any,
    *data: Any,
    name: str | None = None,
    tensor_axis: Mapping[str, int] | None = None,
) -> Program:
    """Convert a JAX function of weights and data to an IR program, primitive by primitive.

    Weights are the program's parameters, named by their place in the tree (`layers.0.up`), data its
    inputs, with samples along the first axis. If the result is a scalar, the loss,
    `perfmodel.ir.models.training_step` turns it into a training step with the IR's own derivatives.
    Pipelines cut between layers: a weight's layer is the number in its name (`layers.0.up`,
    `block_0.up`), and an instruction's is the highest of the weights that it depends on. `scan` is
    unrolled, each iteration a layer.

        program = pm.trace_program(loss, weights, tokens, labels)
        step = training_step(program)
        distribute(step, Degrees(data=2, pipeline=2, micro_batches=4))

    Args:
        loss: called as `loss(weights, *data)`; differentiable, so without `jax.grad`.
        weights, data: arrays or `jax.ShapeDtypeStruct`s, or trees of them.
        tensor_axis: axis that tensor parallelism slices, by weight (others are replicated).

    Raises:
        PerfModelError: primitives that no op of the IR stands for, all named with their shares of
            the FLOPs (`trace` costs them nevertheless).
    """
    # The loss is traced before differentiation: the IR has its own derivatives, which transforms
    # understand.
    closed, out = jax.make_jaxpr(loss, return_shape=True)(weights, *data)
    is_loss = _is_loss(jax.tree.leaves(out))
    title = name or re.sub(r"\W", "_", getattr(loss, "__name__", "program"))
    model = ModelBuilder(title, "fp32")
    emitter = Emitter(model, is_loss)

    # Weights, then data, in the order of the jaxpr's variables.
    variables = iter(closed.jaxpr.invars)
    inputs: list[Item] = []
    for label in _labels(weights, "w"):
        inputs.append(_weight(model, label, next(variables), (tensor_axis or {}).get(label)))
    for i, tree in enumerate(data):
        for label in _labels(tree, f"data{i}"):
            tensor = _tensor(next(variables))
            inputs.append(Ref(model.data(label, tensor.shape, tensor.dtype)))

    walk = _Walk(emitter)
    items = walk.inline(closed.jaxpr, _environment(closed.jaxpr, closed.consts, inputs))
    if walk.missing:
        # All unmapped primitives at once, with what they matter: users decide whether to rewrite
        # them.
        total = table_of(closed, None, title).flops or 1.0
        names = ", ".join(
            f"{n} ({flops / total:.2%} of FLOPs: {why})" for n, (why, flops) in walk.missing.items()
        )
        raise PerfModelError(
            f"{title}: the IR cannot express {names}; use trace for a table of its costs"
        )

    role = "loss" if is_loss else "output"
    results = []
    for item, variable in zip(items, closed.jaxpr.outvars, strict=True):
        if not isinstance(item, Ref):
            raise PerfModelError(
                f"{title}: an output does not depend on weights or data; return only outputs that do"
            )
        results.append((emitter.materialised(item, array_of(variable)).name, role))
    emitter.settle_layers()
    return model.program(results)


def _is_loss(outputs: Sequence[Any]) -> bool:
    """Whether a function's outputs are one real number, which can be differentiated."""
    if len(outputs) != 1:
        return False
    return outputs[0].shape == () and jax.numpy.issubdtype(outputs[0].dtype, np.floating)


def _labels(tree: Any, root: str) -> list[str]:
    """Names of a tree's leaves, in JAX's order: their places in the tree."""
    return [_name(path, root) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _weight(model: ModelBuilder, label: str, variable: Any, tensor_axis: int | None) -> Ref:
    """A parameter of the program, whose layer is the first separate number in its name."""
    tensor = _tensor(variable)
    # Weights may differ in type, which the builder has for all that follow.
    model.dtype = tensor.dtype
    value = model.weight(label, tensor.shape, tensor_axis=tensor_axis)
    number = re.search(r"(?:^|[._])(\d+)(?:\.|$)", label)
    return Ref(value, int(number.group(1)) if number else -1)


class _Walk:
    """Walks through a jaxpr, computes known values and writes instructions for the rest."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.missing: dict[str, tuple[str, float]] = {}
        """Primitives without an op: the reason, and their FLOPs."""

    def inline(self, jaxpr: Jaxpr, values: dict[Any, Item]) -> list[Item]:
        """Values of a jaxpr's outputs."""

        def read(atom: Any) -> Item:
            return Known.of(atom.val) if isinstance(atom, Literal) else values[atom]

        # Tracing leaves equations behind that nothing uses; they may well be ones that cannot be
        # mapped.
        for eqn in _needed(jaxpr):
            items = [read(atom) for atom in eqn.invars]
            values.update(zip(eqn.outvars, self._equation(eqn, items), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Any, items: list[Item]) -> Sequence[Item]:
        """Write the instructions of an equation, and return its results."""
        name = eqn.primitive.name
        if any(isinstance(item, Missing) for item in items):
            return [Missing()] * len(eqn.outvars)
        # Calls are inlined; whatever is known is computed by JAX; the rest needs a rule.
        body = inlined_body(name, eqn.params, len(items))
        # Custom derivatives would be lost inside their body, and a mesh's ranks are not the
        # program's.
        if body is not None and not name.startswith(("custom_vjp", "shard_map")):
            closed = next((v for v in eqn.params.values() if hasattr(v, "consts")), None)
            return self.inline(body, _environment(body, getattr(closed, "consts", ()), items))
        # Shapes, masks and positions depend on no input, so they are computed here.
        if all(isinstance(item, Known) for item in items) and name not in ("scan", "while", "cond"):
            return _computed(eqn, items)
        try:
            if name == "scan":
                return self._scan(eqn, items)
            if name == "split":
                return self._split(eqn, items)
            if name == "top_k":
                return self._top_k(eqn, items)
            return [self._mapped(eqn, items)]
        except CannotMapError as reason:
            self._miss(eqn, str(reason))
            return [Missing()] * len(eqn.outvars)

    def _mapped(self, eqn: Any, items: list[Item]) -> Item:
        """The result of an equation of one output, by the rule of its primitive."""
        name = eqn.primitive.name
        if len(eqn.outvars) != 1:
            raise CannotMapError("the IR has no such op")
        out = eqn.outvars[0]
        if name == "convert_element_type":
            x = items[0]
            return self.emitter.cast(x, _dtype(out)) if isinstance(x, Ref) else x
        integer = False
        for item, atom in zip(items, eqn.invars, strict=True):
            if isinstance(item, Ref) and np.issubdtype(atom.aval.dtype, np.integer):
                integer = True
        arrays = [array_of(atom) for atom in eqn.invars]
        return mapped(name, self.emitter, eqn.params, items, arrays, array_of(out), integer=integer)

    def _miss(self, eqn: Any, reason: str) -> None:
        """Record an unmapped primitive, with the first reason and the FLOPs of all its calls."""
        # The op table knows the FLOPs even of what has no op in the IR.
        inputs = tuple(Value(array_of(variable)) for variable in eqn.invars)
        outputs = tuple(Value(array_of(variable)) for variable in eqn.outvars)
        node = leaf(eqn.primitive.name, eqn.params, inputs, outputs)
        flops = getattr(node.work, "flops", 0.0) or node.flops
        first_reason, flops_before = self.missing.get(eqn.primitive.name, (reason, 0.0))
        self.missing[eqn.primitive.name] = (first_reason, flops_before + flops)

    def _split(self, eqn: Any, items: list[Item]) -> list[Item]:
        """Equal parts along an axis."""
        sizes, axis = eqn.params["sizes"], eqn.params["axis"]
        x = items[0]
        if len(set(sizes)) > 1 or not isinstance(x, Ref):
            raise CannotMapError("parts of different sizes")
        x = self.emitter.materialised(x, array_of(eqn.invars[0]))
        return list(self.emitter.parts(x, axis, len(sizes)))

    def _top_k(self, eqn: Any, items: list[Item]) -> list[Item]:
        """The largest entries of every row and their places."""
        x = items[0]
        array = array_of(eqn.invars[0])
        last = len(array.shape) - 1
        if not isinstance(x, Ref) or eqn.params.get("axis", last) not in (-1, last):
            raise CannotMapError("the largest entries along an axis other than the last")
        rows = self.emitter.materialised(x, array)
        return list(self.emitter.ops("top_k", (rows,), 2, k=int(eqn.params["k"])))

    def _scan(self, eqn: Any, items: list[Item]) -> list[Item]:
        """Write every iteration of a scan; scanned operands are split, collected results joined."""
        # Unrolled, because programs are straight-line code (DistIR, section 2) and pipelines cut
        # between iterations.
        n, is_reversed = eqn.params["length"], eqn.params["reverse"]
        n_consts, n_carry = eqn.params["num_consts"], eqn.params["num_carry"]
        n_unscanned = n_consts + n_carry
        constants = items[:n_consts]
        carry = items[n_consts:n_unscanned]
        slices = []
        for item, atom in zip(items[n_unscanned:], eqn.invars[n_unscanned:], strict=True):
            slices.append(self._slices(item, atom, n))

        body = eqn.params["jaxpr"]
        order = range(n)[::-1] if is_reversed else range(n)
        collected: list[list[Item]] = []
        for i in order:
            operands = [*constants, *carry, *(part[i] for part in slices)]
            results = self.inline(body.jaxpr, _environment(body.jaxpr, body.consts, operands))
            carry = results[:n_carry]
            collected.append(results[n_carry:])
        if is_reversed:
            collected.reverse()

        outputs = list(carry)
        for parts, variable in zip(
            zip(*collected, strict=True), eqn.outvars[n_carry:], strict=True
        ):
            outputs.append(self._joined(parts, variable))
        return outputs

    def _slices(self, item: Item, atom: Any, n: int) -> Sequence[Item]:
        """Cut a scanned operand into its value in each of the `n` iterations."""
        if isinstance(item, Known):
            return [Known(part) for part in item.array]
        if not isinstance(item, Ref):
            raise CannotMapError("the IR cannot compute integers")
        x = self.emitter.materialised(item, array_of(atom))
        # Weights stacked along the scanned axis are those of one layer each.
        parts = self.emitter.parts(x, 0, n)
        layers = range(n) if item.layer < 0 else [item.layer] * n
        shape = array_of(atom).shape[1:]
        return [
            self.emitter.reshape(Ref(part.name, layer), shape)
            for part, layer in zip(parts, layers, strict=True)
        ]

    def _joined(self, parts: Sequence[Item], var: Any) -> Item:
        """Results of all iterations of a scan as one value."""
        shape = array_of(var).shape
        if all(isinstance(part, Known) for part in parts):
            return Known(np.stack([part.array for part in parts]))  # pyright: ignore[reportAttributeAccessIssue]
        if any(isinstance(part, (Missing, IndexCheck)) for part in parts):
            return Missing()
        # Iterations stand along a new first axis.
        part_array = Array(array_of(var).dtype, shape[1:], 4)
        rows = []
        for part in parts:
            if isinstance(part, Ref):
                row = self.emitter.materialised(part, part_array)
                rows.append(self.emitter.reshape(row, (1, *shape[1:])))
            else:
                array = part.array[None]  # pyright: ignore[reportAttributeAccessIssue]
                rows.append(self.emitter.constant(array, part_array.dtype))
        return self.emitter.op("concat", *rows, axis=0)


def _environment(jaxpr: Jaxpr, constants: Sequence[Any], inputs: Sequence[Item]) -> dict[Any, Item]:
    """Items of a jaxpr's variables before its first equation."""
    values: dict[Any, Item] = {
        v: Known.of(c) for v, c in zip(jaxpr.constvars, constants, strict=True)
    }
    return values | dict(zip(jaxpr.invars, inputs, strict=True))


def _needed(jaxpr: Jaxpr) -> list[Any]:
    """Equations that an output depends on."""
    # Backwards, as whether an equation is needed depends on those after it.
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    equations = []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
            equations.append(eqn)
    return equations[::-1]


def _computed(eqn: Any, items: Sequence[Item]) -> list[Item]:
    """An equation without unknown operands, evaluated."""
    # `bind` evaluates a primitive on concrete arrays.
    arrays = [item.array for item in items if isinstance(item, Known)]
    results = eqn.primitive.bind(*map(jax.numpy.asarray, arrays), **eqn.params)
    if not eqn.primitive.multiple_results:
        results = [results]
    return [Known.of(value) for value in results]


def _dtype(var: Any) -> str:
    kind = var.aval.dtype
    return str(kind) if kind.kind in "iub" else Array.of(str(kind), ()).dtype


def _tensor(var: Any) -> Tensor:
    return Tensor(_dtype(var), tuple(var.aval.shape))


def _name(path: tuple[Any, ...], root: str) -> str:
    """Place in a tree as a name: `layers.0.up`."""
    parts = []
    for entry in path:
        # JAX's entries are keys of dictionaries, indices of sequences or names of attributes.
        key = getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", entry)))
        parts.append(re.sub(r"\W", "_", str(key)))
    return ".".join(parts) or root
