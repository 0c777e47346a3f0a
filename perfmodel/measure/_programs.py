"""Ops as programs to be timed, checked for a whole plan before anything runs."""

from collections.abc import Collection
from typing import Final

import numpy as np

from perfmodel.errors import UnknownNameError
from perfmodel.ops import FAMILIES, JAX_DTYPES, KernelOp, Program, Tensors

MEASURED_FAMILIES: Final[dict[str, type[KernelOp]]] = {
    name: family.op for name, family in FAMILIES.items() if family.measurement is not None
}


def check_kernel(op: KernelOp, dtypes: Collection[str] = ("fp32", "bf16", "fp16")) -> None:
    """Raise `PerfModelError` unless backends have a program for the op; by default those of any device."""
    measurement = FAMILIES[op.family].timed()
    if op.dtype not in dtypes:
        raise UnknownNameError("dtype to measure", op.dtype, dtypes)
    if op.pass_ not in measurement.passes:
        raise UnknownNameError(f"pass of {op.op}", op.pass_, measurement.passes)
    measurement.check(op)


def jax_dtypes(op: KernelOp) -> tuple[str, ...]:
    """Element types in which JAX can time the op's family."""
    return (*FAMILIES[op.family].timed().jax_dtypes, *JAX_DTYPES)


def torch_dtypes(op: KernelOp) -> tuple[str, ...]:
    """Element types in which torch can time the op's family."""
    return (*FAMILIES[op.family].timed().torch_dtypes, "fp32", "bf16", "fp16")


def jax_program(op: KernelOp, seed: int = 0) -> Program:
    """The op as a jitted JAX function with its inputs on the default device; fp8 products give bf16.

    Raises:
        PerfModelError: for a family, pass, element type or kernel without a program.
    """
    check_kernel(op, jax_dtypes(op))
    return FAMILIES[op.family].timed().jax_program(op, np.random.default_rng(seed))


def torch_program(op: KernelOp, device: str, seed: int = 0) -> Program:
    """The op as a function of tensors on `device`; the op must have passed the backend's check."""
    return FAMILIES[op.family].timed().torch_program(op, Tensors(np.random.default_rng(seed), device, op.dtype))
