"""Spreading a program over the parts of one parallel dimension.

Every device becomes `parts` devices. The sharding rule of each instruction's op says how the
instruction can be spread, given how its operands are; collectives bring the operands into the form
that it wants. Data parallelism, tensor parallelism (Megatron-LM), expert parallelism and ZeRO
differ in nothing but the shardings of their inputs. They compose, since they go from programs to
programs. From one sharding to another it takes one collective (GSPMD, Xu et al. 2021, section 4.2).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from perfmodel.errors import LayoutError
from perfmodel.ir import (
    OPS,
    UNTAGGED,
    Attributes,
    Function,
    GlobalTensor,
    Instruction,
    Parameter,
    Piece,
    Program,
    Stream,
    Tag,
    Tensor,
    attributes,
)
from perfmodel.ir.op_definition import (
    REPLICATED,
    Partial,
    Replicated,
    Sharded,
    Sharding,
    ShardingDecision,
    ShardingQuery,
)

Names = tuple[str, ...]
"""One value per part."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of one parallel dimension."""

    parts: int
    suffix: str
    """Letter that names the dimension: part 0 of %w is %w.t0."""
    inputs: Mapping[str, Sharding]
    """Sharding of the values that hold an input tensor, by value; replicated by default."""
    outputs: Mapping[str, Sharding] = field(default_factory=dict)
    """Sharding that a returned value must have, by the value; otherwise any but partial sums."""
    stride: int = 1
    """Devices from one part to the next: the product of the dimensions inside this one."""
    stream: Stream = "compute"
    """Stream of the collectives that this dimension adds."""
    sequence_axis: int | None = None
    """Sequence parallelism: axis along which activations are sharded where they would be
    replicated."""
    gathered: frozenset[str] = frozenset()
    """Sharded inputs that forward and backward passes gather for each use (ZeRO 3)."""
    scatter_gradients: bool = False
    """Gradients are sharded as soon as they are accumulated (ZeRO 2 and 3)."""
    representative: bool = False
    """Whether only the first part is written, which is enough for simulation because all parts do
    the same at the same time."""

    @property
    def written(self) -> int:
        """Number of parts that are generated."""
        return 1 if self.representative else self.parts


def spread(program: Program, plan: Plan) -> Program:
    """Distribute the program over `plan.parts` times as many devices.

    Raises:
        LayoutError: a tensor that is to be sliced does not divide.
    """
    return _Spreading(program, plan).run() if plan.parts > 1 else program


def shard_axis(tensor: Tensor, parts: int) -> int | None:
    """First axis divisible by `parts`; None if there is none (the tensor stays replicated)."""
    return next((axis for axis, n in enumerate(tensor.shape) if n % parts == 0), None)


class _Spreading:
    """State of one walk over a program's instructions."""

    def __init__(self, program: Program, plan: Plan) -> None:
        self._program = program
        self._plan = plan
        self._types = program.types
        self._sharding: dict[str, Sharding] = {}
        self._names: dict[str, Names] = {}
        self._converted: dict[tuple[Any, ...], Names] = {}
        self._decisions: dict[tuple[Any, ...], ShardingDecision] = {}
        self._attributes: dict[tuple[Attributes, Attributes, int, int], tuple[Attributes, ...]] = {}
        self._out: list[Instruction] = []

    def run(self) -> Program:
        """The program spread over the parts."""
        function = self._program.function
        parameters: list[Parameter] = []
        for parameter in function.parameters:
            parameters += self._parameter(parameter.name)
        for instruction in function.instructions:
            self._instruction(instruction)
        # A result may be returned in several places; it is completed once.
        final = {name: self._returned(name) for name in dict.fromkeys(function.outputs)}
        returned: list[str] = []
        for name in function.outputs:
            parts, _ = final[name]
            returned += parts

        inputs = []
        for tensor in self._program.inputs:
            spreads = {}
            for piece in tensor.pieces:
                spreads[piece.value] = self._names[piece.value], self._sharding[piece.value]
            inputs.append(self._pieces(tensor, spreads))
        return Program(
            Function(function.name, tuple(parameters), tuple(self._out), tuple(returned)),
            tuple(inputs),
            tuple(self._pieces(tensor, final) for tensor in self._program.outputs),
        )

    def _device(self, device: int, part: int) -> int:
        # Mixed-radix numbering: the new coordinate goes in just above the dimensions inside this
        # one.
        outer, inner = divmod(device, self._plan.stride)
        return (outer * self._plan.parts + part) * self._plan.stride + inner

    def _parameter(self, name: str) -> list[Parameter]:
        """Return the parameters of all parts that stand for one parameter."""
        tensor = self._types[name]
        sharding = self._plan.inputs.get(name, REPLICATED)
        if isinstance(sharding, Sharded):
            self._divides(name, sharding.axis)
            tensor = tensor.with_size(
                sharding.axis, tensor.shape[sharding.axis] // self._plan.parts
            )
        names = self._define(name, sharding)
        return [
            Parameter(part, tensor.on(self._device(tensor.device, j)))
            for j, part in enumerate(names)
        ]

    def _divides(self, name: str, axis: int) -> None:
        n = self._types[name].shape[axis]
        parts = self._plan.parts
        if n % parts:
            raise LayoutError(
                f"%{name}: its axis {axis} of {n} is not divisible by {parts} devices; use a divisor, or pad it "
                "with --pad-vocab if it is the vocabulary"
            )

    def _define(self, name: str, sharding: Sharding) -> Names:
        names = tuple([f"{name}.{self._plan.suffix}{j}" for j in range(self._plan.written)])
        self._names[name], self._sharding[name] = names, sharding
        return names

    def _instruction(self, instruction: Instruction) -> None:
        """Write an instruction on all devices, with the communication that its operands need."""
        decision = self._decision(instruction)
        # The rule says how it wants its operands; converting them is where all communication of a
        # dimension comes from.
        operands = []
        for name, sharding in zip(instruction.inputs, decision.inputs, strict=True):
            operands.append(self._convert(name, sharding, instruction.tag))
        outputs = []
        for name, sharding in zip(instruction.outputs, decision.outputs, strict=True):
            outputs.append(self._define(name, sharding))
        # An instruction without operands needs an explicit device.
        device = -1 if instruction.inputs else self._types[instruction.outputs[0]].device
        key = (instruction.attributes, decision.attributes, decision.offset_step, device)
        # Layers repeat the same attributes; each distinct set is rewritten for the parts once.
        by_part = self._attributes.get(key)
        if by_part is None:
            by_part = self._attributes[key] = self._by_part(*key)
        for j in range(self._plan.written):
            inputs_of_part = tuple([names[j] for names in operands])
            outputs_of_part = tuple([names[j] for names in outputs])
            self._out.append(
                Instruction(
                    instruction.op, inputs_of_part, outputs_of_part, by_part[j], instruction.tag
                )
            )

    def _by_part(
        self, stated: Attributes, changed: Attributes, offset_step: int, device: int
    ) -> tuple[Attributes, ...]:
        """Attributes of each part of an instruction."""
        parts = []
        for j in range(self._plan.written):
            values = dict(stated) | dict(changed)
            if offset_step:
                # Part j of a sharded table begins at row j * step of the whole.
                values |= {"offset": values.get("offset", 0) + j * offset_step}
            if not values.keys().isdisjoint(("to", "device")):
                values = dict(self._attributes_of_part(tuple(values.items()), j))
            elif device >= 0:
                values |= {"device": self._device(device, j)}
            parts.append(attributes(**values))
        return tuple(parts)

    def _attributes_of_part(self, values: Attributes, part: int) -> Attributes:
        """Attributes with the devices of a part."""

        def moved(value: Any) -> Any:
            return (
                tuple(map(moved, value)) if isinstance(value, tuple) else self._device(value, part)
            )

        return tuple(
            (name, moved(value) if name in ("to", "device") else value) for name, value in values
        )

    def _decision(self, instruction: Instruction) -> ShardingDecision:
        """Ask the op's rule how operands and results are sharded."""
        plan = self._plan
        is_update = instruction.tag.phase == "update"
        scatters = plan.scatter_gradients and (is_update or instruction.op == "accumulate")
        shardings: list[Sharding] = []
        for name in instruction.inputs:
            sharding = self._sharding[name]
            # ZeRO: weights are gathered for each use, gradients reduced to their shard before they
            # are added up.
            if name in plan.gathered and not is_update:
                sharding = REPLICATED
            elif scatters and isinstance(sharding, Partial):
                axis = shard_axis(self._types[name], plan.parts)
                sharding = sharding if axis is None else Sharded(axis)
            shardings.append(sharding)
        # Layers repeat the same query; equal types are one object, so `id` serves as a key.
        operands = tuple([id(self._types[name]) for name in instruction.inputs])
        key = (instruction.op, instruction.attributes, operands, tuple(shardings))
        decision = self._decisions.get(key)
        if decision is None:
            query = ShardingQuery.of(
                instruction, self._types, shardings, plan.parts, plan.sequence_axis
            )
            decision = self._decisions[key] = OPS[instruction.op].spread(query)
        return decision

    def _convert(self, name: str, target: Sharding, tag: Tag) -> Names:
        """The parts of a value, spread as `target` says."""
        # A conversion is shared by all its users, as frameworks all-reduce an activation once.
        current = self._sharding[name]
        if current == target:
            return self._names[name]
        # A gathered value is larger than the stored shard, so it is not kept from forward to
        # backward.
        gathers = isinstance(current, Sharded) and isinstance(target, Replicated)
        key = (name, target, (tag.phase, tag.micro_batch) if gathers else None)
        if key not in self._converted:
            if isinstance(target, Sharded):
                self._divides(name, target.axis)
            tag = replace(tag, stream=self._plan.stream)
            hint = f"{name}.{len(self._converted)}.{self._plan.suffix}"
            replicas = (self._plan.parts, self._plan.stride) if self._plan.representative else None
            new, names = conversion(
                self._names[name], self._types[name], current, target, hint, tag, replicas
            )
            self._out += new
            self._converted[key] = names
        return self._converted[key]

    def _returned(self, name: str) -> tuple[Names, Sharding]:
        current = self._sharding[name]
        # Partial sums would not be the tensor that the program promises, so they are completed;
        # slices may stay slices.
        complete = REPLICATED if isinstance(current, Partial) else current
        target = self._plan.outputs.get(name, complete)
        return self._convert(name, target, replace(UNTAGGED, phase="update")), target

    def _pieces(
        self, tensor: GlobalTensor, spreads: Mapping[str, tuple[Names, Sharding]]
    ) -> GlobalTensor:
        """Replace each piece of a whole tensor by its parts."""
        pieces: list[Piece] = []
        for piece in tensor.pieces:
            names, sharding = spreads[piece.value]
            for j, name in enumerate(names):
                start = list(piece.start)
                if isinstance(sharding, Sharded):
                    size = self._types[piece.value].shape[sharding.axis] // self._plan.parts
                    start[sharding.axis] += j * size
                pieces.append(Piece(name, tuple(start)))
        return replace(tensor, pieces=tuple(pieces))


def conversion(
    parts: Sequence[str],
    tensor: Tensor,
    current: Sharding,
    target: Sharding,
    hint: str,
    tag: Tag,
    replicas: tuple[int, int] | None = None,
) -> tuple[list[Instruction], Names]:
    """Append instructions that convert a value's sharding; returns the new parts.

    Args:
        parts: the value's parts, in the order of the slices.
        tensor: type of the whole value.
        current: present sharding.
        target: wanted sharding; never `Partial`, which nothing needs.
        hint: new part j is named hint + str(j).
        tag: tag of the instructions.
        replicas: number of parts and their distance in devices, where only the first part is
            written down.
    """
    n = replicas[0] if replicas else len(parts)
    names = tuple([f"{hint}{j}" for j in range(len(parts))])

    def together(collective: str, **values: object) -> tuple[list[Instruction], Names]:
        """One collective over all parts, with its results."""
        if replicas:
            values |= {"replicas": replicas}
        return [Instruction(collective, tuple(parts), names, attributes(**values), tag)], names

    # One collective per change of sharding (GSPMD, section 4.2); only a partial maximum needs two
    # steps, because reduce-scatter sums. Cutting a replicated value is a local slice on the compute
    # stream.
    match current, target:
        case Partial(op), Replicated():
            return together("all_reduce", op=op)
        case Partial("sum"), Sharded(axis):
            return together("reduce_scatter", axis=axis)
        case Partial(), Sharded():
            reduced, whole_parts = conversion(
                parts, tensor, current, Replicated(), f"{hint}whole", tag, replicas
            )
            cut, names = conversion(whole_parts, tensor, Replicated(), target, hint, tag, replicas)
            return reduced + cut, names
        case Sharded(axis), Replicated():
            return together("all_gather", axis=axis)
        case Sharded(old), Sharded(new):
            return together("all_to_all", concat_axis=old, split_axis=new)
        case Replicated(), Sharded(axis):
            size = tensor.shape[axis] // n
            compute_tag = Tag(tag.phase, tag.layer, tag.micro_batch)
            cuts = []
            for j, (part, name) in enumerate(zip(parts, names, strict=True)):
                own_slice = attributes(axis=axis, start=j * size, stop=(j + 1) * size)
                cuts.append(Instruction("slice", (part,), (name,), own_slice, compute_tag))
            return cuts, names
    raise ValueError(f"the sharding {current} cannot be converted to {target}")
