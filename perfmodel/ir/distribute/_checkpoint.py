"""Gradient checkpointing: activations inside a layer are computed again in the backward pass (Chen
et al. 2016)."""

from collections.abc import Collection
from dataclasses import replace

from perfmodel.errors import LayoutError
from perfmodel.ir import Function, Instruction, Program


def checkpoint(program: Program, layers: Collection[int] | None = None) -> Program:
    """Save only the values passed between layers; the rest is recomputed before its first use in
    the backward pass.

    Args:
        program: a training step whose instructions are tagged with phase and layer.
        layers: layers to recompute; by default all.

    Raises:
        LayoutError: the program has no backward pass.
    """
    function = program.function
    if not any(i.tag.phase == "backward" for i in function.instructions):
        raise LayoutError(
            "checkpointing needs a training step with instructions tagged as backward"
        )
    # Chen et al. store what crosses layers and recompute the rest on the way back (DistIR, figure
    # 8). The forward pass is left as it is: its inner values die with their last forward use,
    # because the backward reads the copies.
    copies = _Recomputation(function, layers)
    out: list[Instruction] = []
    for instruction in function.instructions:
        if instruction.tag.phase != "forward":
            out += copies.before(instruction)
            instruction = copies.renamed(instruction)
        out.append(instruction)
    return replace(program, function=replace(function, instructions=tuple(out)))


class _Recomputation:
    """Forward values to recompute, and the names of those already recomputed."""

    def __init__(self, function: Function, layers: Collection[int] | None) -> None:
        self._maker: dict[str, Instruction] = {}
        for instruction in function.instructions:
            tag = instruction.tag
            chosen = tag.layer >= 0 if layers is None else tag.layer in layers
            # A transfer is not repeated: what arrived on the other device is stored there.
            if tag.phase == "forward" and chosen and instruction.op != "send":
                self._maker.update(dict.fromkeys(instruction.outputs, instruction))
        # Values that another group of instructions uses too are stored, so they need not be
        # recomputed.
        stored = set(function.outputs)
        for instruction in function.instructions:
            if instruction.tag.phase != "forward":
                continue
            for name in instruction.inputs:
                if name in self._maker and self._group(name) != _key(instruction):
                    stored.add(name)
        for name in stored & set(self._maker):
            # An op of several results (a split) is recomputed as a whole, even where one of them is
            # stored.
            if len(self._maker[name].outputs) == 1:
                del self._maker[name]
        self._names: dict[str, str] = {}

    def _group(self, name: str) -> tuple[int, int]:
        return _key(self._maker[name])

    def before(self, instruction: Instruction) -> list[Instruction]:
        """Instructions that recompute the operands of an instruction, unless already recomputed."""
        copies: list[Instruction] = []
        for name in instruction.inputs:
            copies += self._copies(name, instruction)
        return copies

    def _copies(self, name: str, user: Instruction) -> list[Instruction]:
        """Copy the instructions that recompute a value for a backward pass that uses it."""
        # Stored values end the recursion, and each value is recomputed once, before its first use
        # in the backward pass.
        if name not in self._maker or name in self._names:
            return []
        maker = self._maker[name]
        copies: list[Instruction] = []
        for source in maker.inputs:
            copies += self._copies(source, user)
        self._names.update({output: f"{output}.r" for output in maker.outputs})
        # Copies belong to the pass that needs them, so a pipeline runs them in the backward pass of
        # the stage.
        tag = replace(maker.tag, phase=user.tag.phase)
        outputs = tuple(self._names[output] for output in maker.outputs)
        return [*copies, replace(self.renamed(maker), outputs=outputs, tag=tag)]

    def renamed(self, instruction: Instruction) -> Instruction:
        """The instruction with recomputed operands."""
        if not any(name in self._names for name in instruction.inputs):
            return instruction
        return replace(
            instruction, inputs=tuple(self._names.get(name, name) for name in instruction.inputs)
        )


def _key(instruction: Instruction) -> tuple[int, int]:
    return instruction.tag.layer, instruction.tag.micro_batch
