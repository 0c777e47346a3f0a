"""Graphs of compiled modules: calls and fusions inlined, loops repeated, tuples taken apart.

Fusion is redone by this package's rule: what the laptop's CPU compiler fuses says little of an
accelerator. Copies and layout changes are read in place.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfmodel.errors import PerfModelError
from perfmodel.files import data_limit_bytes, read_text
from perfmodel.ir.importers._graph import Array, Node, Region, Value, rows_of
from perfmodel.ir.importers._hlo_rules import COLLECTIVES, Rules, called, widened
from perfmodel.ir.importers._hlo_text import Computation, HloModule, Instruction, Type, parse_module
from perfmodel.ir.importers._rows import CollectiveRow, Groups, Unmapped, parse_groups
from perfmodel.ir.importers._table import OpTable

Operand = Any
"""A `Value`, or a tuple of operands."""


def read_sharded(
    program: Any, *args: Any, trip_count: int | None = None, name: str | None = None
) -> OpTable:
    """Kernels of one device and every collective, with its groups, of a partitioned program.

    The mesh may be of fake devices: with `--xla_force_host_platform_device_count=256` in
    `XLA_FLAGS` a laptop compiles the step of 256 accelerators, and nothing runs. Where the CPU
    compiler widened 16-bit arithmetic to 32 bits, what was narrow in the program is counted as
    narrow.

        step = jax.jit(train_step, in_shardings=..., out_shardings=...)
        read_sharded(step, params, batch).predict("dgx-h100")

    Args:
        program: a jitted function (with `args` to lower it for), what `lower` or `compile`
            returned, or the text of the compiled module (or the path of a file with it).
        args: arrays or `jax.ShapeDtypeStruct`s (with shardings, unless the function states them).
        trip_count: iterations of loops whose count the compiler did not find; otherwise these are
            unmapped.
        name: name of the table (default: the module's).

    Raises:
        PerfModelError: something else than such a program, text that is not an HLO module, a
            dynamic dimension, or replica groups in an unknown notation.
    """
    # A compiled module is the program of one device: sharding is done, collectives are explicit.
    text, memory_bytes = _module_text(program, args)
    module = parse_module(text)
    entry = module.computations[module.entry]
    walk = _Walk(module, trip_count, Rules(module.computations, widened(module)))
    root = walk.inline(entry, _parameters(entry))
    rows = rows_of(Region(tuple(walk.nodes), tuple(_values(root))))
    return OpTable(
        name=name or module.name,
        **rows._asdict(),
        n_devices=module.n_devices,
        memory_bytes=memory_bytes,
    )


def _module_text(program: Any, args: tuple[Any, ...]) -> tuple[str, float | None]:
    """The optimised HLO of a program, and XLA's memory in bytes if it was compiled here."""
    if isinstance(program, Path):
        return read_text(program, data_limit_bytes()), None
    if isinstance(program, str):
        return program, None
    lowered = program.lower(*args) if hasattr(program, "lower") else program
    compiled = lowered.compile() if hasattr(lowered, "compile") else lowered
    if not hasattr(compiled, "as_text"):
        raise PerfModelError(
            f"{type(program).__name__} is not a sharded program; pass a jitted function, its lowered or compiled form, "
            "or the text of the compiled module"
        )
    # Donated arguments share memory with outputs, which the aliased size takes off.
    memory = compiled.memory_analysis()
    if memory is None:
        return compiled.as_text(), None
    sizes = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes)
    return compiled.as_text(), float(sum(sizes) - memory.alias_size_in_bytes)


@dataclass
class _Walk:
    """One pass over a computation and those that it calls."""

    module: HloModule
    trip_count: int | None
    rules: Rules
    nodes: list[Node] = field(default_factory=list)

    def inline(self, computation: Computation, parameters: dict[str, Operand]) -> Operand:
        """Append the nodes of a computation with these arguments; return its root's value."""
        known = dict(parameters)
        for instruction in computation.instructions:
            # Parameters are bound before.
            if instruction.name not in known:
                operands = [known[name] for name in instruction.operands]
                known[instruction.name] = self._instruction(instruction, operands)
        return known[computation.root]

    def _instruction(self, instruction: Instruction, operands: list[Operand]) -> Operand:
        """Translate an instruction, by its opcode."""
        match instruction.opcode:
            case "tuple":
                return tuple(operands)
            case "get-tuple-element":
                return operands[0][int(instruction.attributes["index"])]
            case "optimization-barrier" | "async-update" | "async-done":
                return operands[0]
            case "fusion" | "call" | "async-start":
                return self._call(instruction, operands)
            case "while":
                return self._while(instruction, operands[0])
            case "conditional":
                return self._conditional(instruction, operands)
        # Asynchronous collectives are a start (counted) and a done (the same value).
        base = instruction.opcode.removesuffix("-start")
        if base in COLLECTIVES:
            return self._collective(instruction, base, operands)
        if instruction.opcode.removesuffix("-done") in COLLECTIVES:
            return operands[0]
        return self._leaf(instruction, operands)

    # --- calls and control flow -------------------------------------------------------------------

    def _computation(self, instruction: Instruction, attribute: str) -> Computation:
        return called(instruction, attribute, self.module.computations)

    def _call(self, instruction: Instruction, operands: list[Operand]) -> Operand:
        attribute = "calls" if "calls" in instruction.attributes else "to_apply"
        body = self._computation(instruction, attribute)
        return self.inline(body, _parameters(body, operands))

    def _while(self, instruction: Instruction, state: Operand) -> Operand:
        """A loop with its count, if the compiler found it."""
        # XLA's loop analysis leaves the count in the backend's settings.
        match = re.search(
            r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes.get("backend_config", "")
        )
        count = int(match.group(1)) if match else self.trip_count
        body = self._region(
            self._computation(instruction, "body"),
            [state],
            float(count if count is not None else 1),
        )
        out = _fresh(state)
        inputs = tuple(_values(state))
        outputs = tuple(_values(out))
        if count is not None:
            self.nodes.append(Node("while", "loop", inputs, outputs, work=body))
            return out
        reason = "its trip count is not known, so one iteration is counted; pass trip_count"
        self._unmapped("while", reason, [body], inputs, outputs)
        return out

    def _conditional(self, instruction: Instruction, operands: list[Operand]) -> Operand:
        """A choice that depends on data: unmapped, with its largest branch."""
        # Two notations: a list of branches, or one for true and one for false.
        attributes = instruction.attributes
        names = re.findall(r"%?([\w.\-]+)", attributes.get("branch_computations", ""))
        if not names:
            names = [
                attributes["true_computation"].lstrip("%"),
                attributes["false_computation"].lstrip("%"),
            ]
        branches = []
        for name, operand in zip(names, operands[1:], strict=True):
            branches.append(self._region(self.module.computations[name], [operand]))
        out = _values_of_type(instruction.type)
        reason = "the branch depends on data, so the largest branch is counted"
        self._unmapped(
            instruction.opcode,
            reason,
            branches,
            tuple(_values(tuple(operands))),
            tuple(_values(out)),
        )
        return out

    def _region(self, body: Computation, operands: Sequence[Operand], count: float = 1.0) -> Region:
        walk = _Walk(self.module, self.trip_count, self.rules)
        root = walk.inline(body, _parameters(body, [_fresh(o) for o in operands]))
        return Region(tuple(walk.nodes), tuple(_values(root)), count)

    def _unmapped(
        self,
        name: str,
        reason: str,
        bodies: Sequence[Region],
        inputs: tuple[Value, ...],
        outputs: tuple[Value, ...],
    ) -> None:
        """Record operations and collectives of unknown number of runs as unmapped."""
        # The largest branch, so that what is left out is not understated.
        flops = moved_bytes = 0.0
        for body in bodies:
            rows = rows_of(body)
            flops = max(flops, rows.flops)
            moved_bytes = max(moved_bytes, sum(row.count * row.bytes for row in rows.collectives))
        if moved_bytes:
            reason += f", with collectives of {moved_bytes:.0f} bytes"
        self.nodes.append(
            Node(name, "unmapped", inputs, outputs, work=Unmapped(name, reason, flops))
        )

    # --- single instructions ----------------------------------------------------------------------

    def _collective(self, instruction: Instruction, base: str, operands: list[Operand]) -> Operand:
        """Record a collective's row, and return its result."""
        values = _values(tuple(operands))
        kind = COLLECTIVES[base]
        groups = self._groups(instruction, kind)
        n_bytes = sum(value.array.n_bytes for value in values)
        # HLO states the operand, a shard; `spec.Collective` sizes an all-gather by its result.
        if kind == "all_gather":
            n_bytes *= len(groups[0])
        dtype = max(values, key=lambda v: v.array.n_bytes).array.dtype if values else "fp32"
        row = CollectiveRow(kind, n_bytes, groups, dtype, instruction.opcode)
        out = _values_of_type(_result_type(instruction, base))
        if base in ("all-reduce", "collective-permute") and len(values) == len(_values(out)):
            # The result is as wide as what went in, which the compiler may have widened.
            results = [Value(value.array) for value in values]
            out = tuple(results) if isinstance(out, tuple) else results[0]
        self.nodes.append(
            Node(instruction.opcode, "collective", tuple(values), tuple(_values(out)), work=row)
        )
        return out

    def _groups(self, instruction: Instruction, kind: str) -> Groups:
        """Groups of ranks of a collective, or (source, target) pairs of a permutation."""
        try:
            if kind == "send_recv":
                return parse_groups(
                    instruction.attributes.get("source_target_pairs", ""), self.module.n_devices
                )
            groups = instruction.attributes.get("replica_groups", "")
            # The order of a mesh's devices stands after a comma, so it was read as an attribute of
            # its own.
            if "device_ids" in instruction.attributes:
                groups += f", device_ids={instruction.attributes['device_ids']}"
            return parse_groups(groups, self.module.n_devices)
        except PerfModelError as error:
            raise PerfModelError(f"HLO %{instruction.name}: {error}") from None

    def _leaf(self, instruction: Instruction, operands: list[Operand]) -> Operand:
        inputs = tuple(_values(tuple(operands)))
        out = _values_of_type(instruction.type)
        node = self.rules.node(instruction, inputs, tuple(_values(out)))
        self.nodes.append(node)
        return node.outputs[0] if isinstance(out, Value) else out


def _result_type(instruction: Instruction, base: str) -> Type:
    """Type of a collective's result: the start form of some also returns its operands."""
    if (
        instruction.opcode == base
        or base == "all-reduce"
        or not isinstance(instruction.type, tuple)
        or len(instruction.type) < 2
    ):
        return instruction.type
    return instruction.type[1]


def _parameters(
    computation: Computation, operands: Sequence[Operand] | None = None
) -> dict[str, Operand]:
    """Operands of a computation by the names of its parameters; new values if none are given."""
    # `parameter(2)`: the literal is the position.
    parameters = [i for i in computation.instructions if i.opcode == "parameter"]
    if operands is None:
        return {i.name: _values_of_type(i.type) for i in parameters}
    return {i.name: operands[int(i.literal)] for i in parameters}


def _values_of_type(kind: Type) -> Operand:
    if isinstance(kind, Array):
        return Value(kind)
    return tuple(_values_of_type(part) for part in kind)


def _fresh(operand: Operand) -> Operand:
    if isinstance(operand, Value):
        return Value(operand.array)
    return tuple(_fresh(part) for part in operand)


def _values(operand: Operand) -> list[Value]:
    """The values in an operand, tuples taken apart."""
    if isinstance(operand, Value):
        return [operand]
    values = []
    for part in operand:
        values += _values(part)
    return values
