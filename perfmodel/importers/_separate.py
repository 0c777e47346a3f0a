"""Joint projections taken apart: queries, keys and values of one product become three, as Megatron-LM slices them."""

from collections import Counter
from dataclasses import dataclass, replace

from perfmodel.program.ir import Instruction, Parameter, Piece, Program, attributes


def separate_projections(program: Program) -> Program:
    """Split the weights of a product instead of its result, where the result is only split.

    Slicing the columns of a joint weight would deal out queries to some ranks and keys to others; of separate ones
    each rank takes its heads of each. The weight stays one tensor of several pieces.
    """
    function = program.function
    maker = {name: i for i in function.instructions for name in i.outputs}
    uses = Counter(name for i in function.instructions for name in i.inputs) + Counter(function.outputs)
    weights = {piece.value for whole in program.inputs_of("parameter") for piece in whole.pieces}
    gone: set[str] = set()
    cuts: dict[str, tuple[int, tuple[str, ...]]] = {}
    written: dict[str, list[Instruction]] = {}
    for instruction in function.instructions:
        chain = _chain(instruction, maker, uses, weights, program)
        if chain is None:
            continue
        parts = [f".{j}" for j in range(len(instruction.outputs))]
        for value, axis in chain.cut.items():
            cuts[value] = axis, tuple(f"{value}{part}" for part in parts)
        gone.update(name for step in chain.steps for name in step.outputs)
        written[instruction.outputs[0]] = [
            made for part, output in zip(parts, instruction.outputs, strict=True) for made in chain.part(part, output)
        ]
    kept: list[Instruction] = []
    for instruction in function.instructions:
        kept += written.get(instruction.outputs[0], [] if instruction.outputs[0] in gone else [instruction])
    types = program.types
    parameters: list[Parameter] = []
    pieces: dict[str, tuple[Piece, ...]] = {}
    for p in function.parameters:
        if p.name not in cuts:
            parameters.append(p)
            continue
        axis, names = cuts[p.name]
        tensor = types[p.name]
        size = tensor.shape[axis] // len(names)
        small = tensor.with_shape([size if k == axis else n for k, n in enumerate(tensor.shape)])
        parameters += [Parameter(name, small) for name in names]
        pieces[p.name] = tuple(
            Piece(name, tuple(j * size if k == axis else 0 for k in range(tensor.rank))) for j, name in enumerate(names)
        )
    inputs = tuple(replace(w, pieces=pieces.get(w.pieces[0].value, w.pieces)) for w in program.inputs)
    return Program(replace(function, parameters=tuple(parameters), instructions=tuple(kept)), inputs, program.outputs)


@dataclass(frozen=True)
class _Chain:
    """A product, what follows it up to a split, and which parameters are cut along which axis."""

    steps: tuple[Instruction, ...]
    cut: dict[str, int]
    parts: int

    def part(self, suffix: str, output: str) -> list[Instruction]:
        """The steps for one part, ending in the split's output."""
        own = {name for step in self.steps for name in step.outputs} | set(self.cut)
        made = []
        for step in self.steps:
            values = dict(step.attributes)
            if step.op == "reshape":
                *rest, last = values["shape"]
                values["shape"] = (*rest, last // self.parts)
            last_step = step is self.steps[-1]
            made.append(
                replace(
                    step,
                    inputs=tuple(f"{n}{suffix}" if n in own else n for n in step.inputs),
                    outputs=(output,) if last_step else tuple(f"{n}{suffix}" for n in step.outputs),
                    attributes=attributes(**values),
                )
            )
        return made


def _chain(
    split: Instruction, maker: dict[str, Instruction], uses: Counter[str], weights: set[str], program: Program
) -> _Chain | None:
    """What leads from a product with a weight to a split of its last axis and to nothing else."""
    types = program.types
    if split.op != "split" or split.attribute("axis") != types[split.inputs[0]].rank - 1:
        return None
    value, steps = split.inputs[0], list[Instruction]()
    cut: dict[str, int] = {}
    width = types[value].shape[-1]
    while uses[value] == 1 and value in maker:
        step = maker[value]
        steps.append(step)
        if step.op == "matmul":
            w = step.inputs[1]
            if w not in weights or uses[w] > 1 or types[w].rank != 2:
                return None
            cut[w] = 0 if step.attribute("transpose_b") else 1
            return _Chain(tuple(steps[::-1]), cut, len(split.outputs))
        if step.op == "add":
            bias = next((n for n in step.inputs if n in weights and types[n].shape == (width,) and uses[n] == 1), None)
            if bias is None:
                return None
            cut[bias] = 0
            value = next(n for n in step.inputs if n != bias)
        elif step.op == "reshape" and types[step.inputs[0]].shape[-1] == width and step.attribute("shape"):
            value = step.inputs[0]
        else:
            return None
    return None
