"""The reference executor: runs a distributed program in one process, instruction by instruction.

It says what a program computes (DistIR, section 3.1): collectives are plain functions of all their
operands. A program is right if this gives what the undistributed one gives.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import reduce
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.ir import OPS, Function, Instruction, Program, Tensor
from perfmodel.ir.execution._kernels import KERNELS, PLAIN, KernelCall, compiled_kernel, jax_dtype
from perfmodel.timeline import double_precision
from perfmodel.units import require_seed

Arrays = Sequence[Any]
"""Arrays of JAX (from compiled kernels) or NumPy (from collectives and plain kernels), which are
interchangeable."""
_OF_NUMPY: Final = ("fp64", "fp32")
"""Dtypes that NumPy sums as JAX does; in narrower ones NumPy rounds at every step."""


def execute(program: Program, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Execute a program: global outputs by name, from global inputs by name.

    Float64 programs are computed in double precision, whatever JAX's global setting.

    Raises:
        UnknownNameError: an input is missing.
        PerfModelError: an input of another shape, or replicas of a result that differ.
    """
    return program.join(execute_function(program.function, program.split(inputs)))


def execute_function(
    function: Function, arguments: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Execute a function: returned values by name, from the values of all parameters."""
    # JAX computes in 32 bits by default. The setting affects the whole process, so it is changed
    # only here.
    with double_precision() if is_double(function.types.values()) else nullcontext():
        values = {
            p.name: argument(p.name, function.types[p.name], arguments) for p in function.parameters
        }

        # How often each value is still used; one that nothing uses any more is dropped, to save
        # memory.
        remaining = Counter(function.outputs)
        for instruction in function.instructions:
            remaining.update(set(instruction.inputs))
        for instruction in function.instructions:
            outputs = [function.types[name] for name in instruction.outputs]
            results = _evaluate(instruction, outputs, [values[name] for name in instruction.inputs])
            values.update(zip(instruction.outputs, results, strict=True))
            remaining.subtract(set(instruction.inputs))
            used_here = {*instruction.inputs, *instruction.outputs}
            for name in [name for name in used_here if remaining[name] <= 0]:
                del values[name]
        return {name: np.asarray(values[name]) for name in function.outputs}


def is_double(types: Iterable[Tensor]) -> bool:
    """Whether any value needs 64 bits."""
    return any(tensor.dtype in ("fp64", "int64") for tensor in types)


def argument(name: str, tensor: Tensor, arguments: Mapping[str, np.ndarray]) -> jax.Array:
    """The array of a parameter: its known value, or the given one.

    Raises:
        UnknownNameError: none is given.
        PerfModelError: it has another shape.
    """
    if tensor.value is not None:
        return jnp.array(tensor.value, jax_dtype(tensor))
    if name not in arguments:
        raise UnknownNameError("argument", name, arguments)
    array = jnp.asarray(arguments[name], jax_dtype(tensor))
    if array.shape != tensor.shape:
        raise PerfModelError(f"argument %{name} must have shape {tensor.shape}, got {array.shape}")
    return array


def random_inputs(program: Program, seed: int = 0) -> dict[str, np.ndarray]:
    """Random global inputs for a program: normal numbers of scale 0.5 and small indices.

    Adam's second moments, whose root is taken, are positive.

    Raises:
        PerfModelError: a seed that is not a whole number from 0 to 2^31 - 1.
    """
    require_seed(seed)
    rng = np.random.default_rng(seed)
    # Token numbers must be rows of every table that they may reach.
    limit = _smallest_table(program.function)
    moments = {i.inputs[3] for i in program.function.instructions if i.op == "adam"}
    arrays: dict[str, np.ndarray] = {}
    for tensor in program.inputs:
        if tensor.dtype.startswith("int"):
            arrays[tensor.name] = rng.integers(0, limit, tensor.shape)
        else:
            values = 0.5 * rng.standard_normal(tensor.shape)
            positive = any(piece.value in moments for piece in tensor.pieces)
            arrays[tensor.name] = np.abs(values) if positive else values
    return arrays


def rounded_inputs(
    program: Program, inputs: Mapping[str, np.ndarray], seed: int = 0
) -> dict[str, np.ndarray]:
    """Inputs perturbed by less than a unit in the last place, to estimate rounding errors.

    Rounding errors inside a deep program grow towards the outputs as those of its inputs do.
    """
    # A program is right if its outputs differ from the reference by no more than these inputs make
    # them differ.
    rng = np.random.default_rng(seed)
    arrays = dict(inputs)
    for tensor in program.inputs:
        if not tensor.dtype.startswith("int"):
            last_place = float(jnp.finfo(jax_dtype(Tensor(tensor.dtype, tensor.shape))).eps)
            value = np.asarray(arrays[tensor.name], np.float64)
            arrays[tensor.name] = value * (1 + last_place * rng.uniform(-1, 1, value.shape))
    return arrays


def _smallest_table(function: Function) -> int:
    """Rows that every lookup table has: indices below this are valid everywhere."""
    sizes = [
        function.types[i.inputs[0]].shape[0 if i.op == "embedding" else -1]
        for i in function.instructions
        if i.op in ("embedding", "pick")
    ]
    return min(sizes, default=2)


def _evaluate(instruction: Instruction, outputs: list[Tensor], arrays: list[Any]) -> Arrays:
    """Compute the results of one instruction in this process."""
    # In one process a collective is a function of all its operands, so no communication can go
    # wrong here.
    if OPS[instruction.op].collective:
        return _COLLECTIVES[instruction.op](
            [*map(np.asarray, arrays)], dict(instruction.attributes), len(outputs)
        )
    if instruction.op in PLAIN and all(tensor.dtype in _OF_NUMPY for tensor in outputs):
        # A kernel that runs once or twice is sooner done than compiled.
        with np.errstate(all="ignore"):
            operands = [*map(np.asarray, arrays)]
            call = KernelCall(dict(instruction.attributes), outputs)
            results = KERNELS[instruction.op](*operands, call=call)
        return results if isinstance(results, tuple) else (results,)
    return compiled_kernel(instruction, outputs)(*arrays)


def _reduced(arrays: Arrays, attributes: Mapping[str, Any]) -> np.ndarray:
    combine = np.maximum if attributes.get("op", "sum") == "max" else np.add
    return reduce(combine, arrays)


def _all_to_all(arrays: Arrays, attributes: Mapping[str, Any], count: int) -> Arrays:
    """Exchange parts: result j joins the j-th parts of all operands."""
    # Receiver j joins the j-th block of every sender.
    blocks = [np.split(array, count, attributes["split_axis"]) for array in arrays]
    results = []
    for received in zip(*blocks, strict=True):
        results.append(np.concatenate(received, attributes["concat_axis"]))
    return results


_COLLECTIVES: Final[Mapping[str, Callable[[Arrays, Mapping[str, Any], int], Arrays]]] = (
    MappingProxyType(
        {
            "send": lambda x, a, n: x,
            "broadcast": lambda x, a, n: [x[0]] * n,
            "all_reduce": lambda x, a, n: [_reduced(x, a)] * n,
            "reduce": lambda x, a, n: [_reduced(x, a)],
            "all_gather": lambda x, a, n: [np.concatenate(x, a["axis"])] * n,
            "gather": lambda x, a, n: [np.concatenate(x, a["axis"])],
            "scatter": lambda x, a, n: np.split(x[0], n, a["axis"]),
            "reduce_scatter": lambda x, a, n: np.split(_reduced(x, a), n, a["axis"]),
            "all_to_all": _all_to_all,
        }
    )
)
