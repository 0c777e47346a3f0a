"""One rank of a real run: executes its own program, instruction by instruction, and notes when."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from perfmodel.execution._communicator import Local, communicator
from perfmodel.execution._kernels import compiled_kernel
from perfmodel.execution._reference import argument
from perfmodel.measure import RankSession
from perfmodel.program.ir import OPS, Instruction, Tensor
from perfmodel.timeline import double_precision


@dataclass(frozen=True)
class RankCode:
    """What one rank runs."""

    instructions: tuple[Instruction, ...]
    groups: tuple[tuple[int, ...], ...]
    """Devices that each instruction runs on."""
    types: Mapping[str, Tensor]
    """Of every value that the instructions name, on whatever device."""
    arguments: Mapping[str, np.ndarray]
    """This rank's parameters."""
    parameters: Mapping[str, Tensor]
    outputs: tuple[str, ...]
    """Returned values that live on this rank."""
    all_groups: tuple[tuple[int, ...], ...]
    """Groups of devices that collectives of any rank run on, in an order that all ranks share."""
    double: bool


class _Step(NamedTuple):
    call: Callable[..., Sequence[Any]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dead: tuple[str, ...]
    """Values that nothing after this step needs."""


class ProgramSession(RankSession):
    """Runs a rank's code when the group asks for it."""

    def load(self, code: RankCode) -> None:
        """Place the arguments and prepare every instruction."""
        with double_precision() if code.double else nullcontext():
            self._arguments = {n: self.place(n, tensor, code.arguments) for n, tensor in code.parameters.items()}
            self._steps = self._prepared(code)
        self._outputs = code.outputs

    def run(self) -> tuple[list[float], list[float]]:
        """Execute once; seconds on this process's clock at which each instruction was reached and done."""
        values = dict(self._arguments)
        reached_s, done_s = [], []
        self._line_up()
        for step in self._steps:
            operands = [values[name] for name in step.inputs]
            reached_s.append(time.perf_counter())
            results = self.finished(step.call(*operands))
            done_s.append(time.perf_counter())
            # a sender is left with nothing to name, and acknowledgements have no name
            values.update(zip(step.outputs, results, strict=False))
            for name in step.dead:
                del values[name]
        self._values = {name: values[name] for name in self._outputs}
        return reached_s, done_s

    def values(self) -> dict[str, np.ndarray]:
        """Returned values of the last run that live here."""
        return {name: self.array(value) for name, value in self._values.items()}

    def clock_s(self) -> float:
        """This process's clock."""
        return time.perf_counter()

    def communicator(self, instruction: Instruction, group: tuple[int, ...], operand: Tensor) -> Local:
        """What this rank calls to take part in a collective."""
        return communicator(instruction, group, operand, self.rank)

    def place(self, name: str, tensor: Tensor, arguments: Mapping[str, np.ndarray]) -> Any:
        """A parameter's value on this rank's device."""
        return argument(name, tensor, arguments)

    def kernel(self, instruction: Instruction, outputs: Sequence[Tensor]) -> Callable[..., Sequence[Any]]:
        """What runs an instruction of this rank alone."""
        return compiled_kernel(instruction, outputs)

    def finished(self, results: Sequence[Any]) -> Sequence[Any]:
        """Results once they are there."""
        return jax.block_until_ready(results)

    def array(self, value: Any) -> np.ndarray:
        """A value of the program for the caller."""
        return np.asarray(value)

    def _line_up(self) -> None:
        multihost_utils.sync_global_devices("start")

    def _prepared(self, code: RankCode) -> list[_Step]:
        needed = set(code.outputs)
        steps: list[_Step] = []
        for instruction, group in zip(reversed(code.instructions), reversed(code.groups), strict=True):
            inputs = tuple(n for n in instruction.inputs if code.types[n].device == self.rank)
            outputs = tuple(n for n in instruction.outputs if code.types[n].device == self.rank)
            dead = tuple({n for n in (*inputs, *outputs) if n not in needed})
            needed.update(inputs)
            call = self._call(instruction, group, code)
            steps.append(_Step(_in_double(call) if code.double else call, inputs, outputs, dead))
        return steps[::-1]

    def _call(self, instruction: Instruction, group: tuple[int, ...], code: RankCode) -> Callable[..., Sequence[Any]]:
        if not OPS[instruction.op].collective or len(group) == 1:
            return self.kernel(instruction, [code.types[n] for n in instruction.outputs])
        local = self.communicator(instruction, group, code.types[instruction.inputs[0]])
        return lambda *operand: local(*operand or (None,))


def _in_double(call: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """The call in 64 bits, whatever its process computes in besides: it may be the user's own."""

    def in_double(*operands: Any) -> Sequence[Any]:
        with double_precision():
            return call(*operands)

    return in_double
