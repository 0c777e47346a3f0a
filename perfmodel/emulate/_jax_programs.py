"""Emulates IR programs: one rank runs on JAX kernels, collectives take modelled times."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from perfmodel.emulate._clock import fine_timers, sleep_until
from perfmodel.emulate._prices import Prices
from perfmodel.errors import PerfModelError
from perfmodel.ir import OPS, Instruction, Program, Tensor
from perfmodel.ir.execution import ProgramSession, RankCode, jax_dtype, rank_codes


@dataclass(frozen=True, eq=False)
class EmulatedProgram:
    """Times of the repeated runs of one rank."""

    rank: int
    instructions: tuple[str, ...]
    """Ops that the rank ran, in order."""
    spans_s: Float[np.ndarray, "repeats instructions"]
    """Seconds of each instruction in each run; for collectives, the wait for their answer."""
    collective: tuple[bool, ...]

    @property
    def step_s(self) -> float:
        """Seconds of a step, the median over the repeats."""
        return float(np.median(self.spans_s.sum(axis=1)))

    @property
    def communication_s(self) -> float:
        """Seconds of a step in collectives, the median over the repeats."""
        return float(np.median(self.spans_s[:, np.array(self.collective, bool)].sum(axis=1)))


def emulate_program(
    program: Program,
    inputs: Mapping[str, np.ndarray],
    prices: Prices,
    rank: int = 0,
    repeats: int = 10,
) -> EmulatedProgram:
    """Run one rank of a program in this process, with the other ranks emulated.

    Args:
        program: distributed over at least two devices.
        inputs: whole inputs by name, as for `perfmodel.ir.execution.run`.
        prices: collective prices of the emulated cluster.
        rank: the real rank.
        repeats: timed runs after one that compiles.

    Raises:
        PerfModelError: no such rank, no repeats, or an input of another shape.
    """
    if not 0 <= rank < program.n_devices:
        raise PerfModelError(
            f"emulate: rank {rank} does not exist; the program has {program.n_devices} devices"
        )
    if repeats < 1:
        raise PerfModelError(f"emulate: repeats must be at least 1, got {repeats}")
    code = rank_codes(program, inputs)[rank]
    session = _Session(rank, prices)
    session.load(code)
    fine_timers()
    # The first run compiles.
    session.run()
    spans_s = []
    for _ in range(repeats):
        reached, done = session.run()
        spans_s.append(np.subtract(done, reached))
    across = [
        OPS[i.op].collective and len(g) > 1
        for i, g in zip(code.instructions, code.groups, strict=True)
    ]
    return EmulatedProgram(
        rank, tuple(i.op for i in code.instructions), np.array(spans_s), tuple(across)
    )


class _Session(ProgramSession):
    """A rank's session without a process group to join."""

    def __init__(self, rank: int, prices: Prices) -> None:
        self.rank = rank
        self._prices = prices

    def _line_up(self) -> None:
        """Synchronise with other ranks: nothing to do, because there are none."""

    def _call(
        self, instruction: Instruction, group: tuple[int, ...], code: RankCode
    ) -> Callable[..., Sequence[Any]]:
        """Return the function that runs an instruction; a collective only waits as long as it is
        emulated to take."""
        if not OPS[instruction.op].collective or len(group) == 1:
            return super()._call(instruction, group, code)
        # Contents do not change how long kernels take, so results are zeros, made once.
        results = [
            _zeros_like(code.types[name])
            for name in instruction.outputs
            if code.types[name].device == self.rank
        ]
        operand = code.types[instruction.inputs[0]]
        # Prices size a gather by its result.
        gathered = len(group) if instruction.op in ("all_gather", "gather") else 1
        time_s, _ = self._prices(instruction.op, operand.n_bytes * gathered, group)

        def answer(*_: Any) -> Sequence[Any]:
            sleep_until(time.perf_counter() + time_s, watch=True)
            return results

        return answer


def _zeros_like(tensor: Tensor) -> Any:
    return jnp.zeros(tensor.shape, jax_dtype(tensor))
