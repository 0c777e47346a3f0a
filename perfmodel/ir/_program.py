"""Programs: a function with the global tensors that its values are pieces of."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np

from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.ir._function import Function
from perfmodel.ir._instruction import Shape, Tensor

Role = Literal["data", "parameter", "state", "loss", "gradient", "output"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)


@dataclass(frozen=True, slots=True)
class Piece:
    """A value that holds a part of a whole tensor; values with the same part are replicas."""

    value: str
    start: Shape
    """Index of the part's first element along each axis; the value's shape gives the extent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalTensor:
    """A tensor of the undistributed program, and the values that hold pieces of it."""

    name: str
    role: Role
    dtype: str
    shape: Shape
    pieces: tuple[Piece, ...]
    batch_axis: int | None = None
    """For data: the axis of independent samples."""
    tensor_axis: int | None = None
    """For parameters: the axis that tensor parallelism slices (None: replicated)."""
    expert_axis: int | None = None
    """Axis of a parameter along which its experts lie; None for parameters without experts."""


@dataclass(frozen=True)
class Program:
    """A function with its global tensors; the input and output of transforms."""

    function: Function
    inputs: tuple[GlobalTensor, ...]
    outputs: tuple[GlobalTensor, ...]

    @property
    def types(self) -> Mapping[str, Tensor]:
        """Type of every value of the function."""
        return self.function.types

    @property
    def n_devices(self) -> int:
        """Number of devices that the program runs on."""
        return self.function.n_devices

    def inputs_of(self, *roles: Role) -> tuple[GlobalTensor, ...]:
        """Inputs with one of the roles."""
        return tuple(tensor for tensor in self.inputs if tensor.role in roles)

    def values_of(self, *roles: Role) -> frozenset[str]:
        """Values that hold pieces of these inputs."""
        values: set[str] = set()
        for tensor in self.inputs_of(*roles):
            values.update(piece.value for piece in tensor.pieces)
        return frozenset(values)

    @property
    def trains(self) -> bool:
        """Whether it has a backward pass."""
        return any(i.tag.phase == "backward" for i in self.function.instructions)

    def split(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Divide global tensors into values of the function's parameters.

        Raises:
            PerfModelError: a tensor is missing or has another shape.
        """
        # Replicas are pieces of the same region, so each device of a replicated tensor gets the
        # same slice.
        values = {}
        for tensor in self.inputs:
            if tensor.name not in arrays:
                raise UnknownNameError("input tensor", tensor.name, arrays)
            array = np.asarray(arrays[tensor.name])
            if array.shape != tensor.shape:
                raise PerfModelError(
                    f"input {tensor.name} must have shape {tensor.shape}, got {array.shape}"
                )
            for piece in tensor.pieces:
                values[piece.value] = array[_region(piece, self.types[piece.value].shape)]
        return values

    def join(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Assemble global tensors from the values that the function returns.

        Raises:
            PerfModelError: replicas of a piece that differ (by more than rounding of sums in
                another order).
        """
        joined = {}
        for tensor in self.outputs:
            # Pieces may tile the tensor (shards) or repeat a region (replicas). Replicas agree only
            # up to rounding, because collectives of different groups add in another order; a larger
            # difference is an error in the distribution.
            out = np.zeros(tensor.shape, values[tensor.pieces[0].value].dtype)
            covered = np.zeros(tensor.shape, bool)
            for piece in tensor.pieces:
                array = np.asarray(values[piece.value])
                region = _region(piece, array.shape)
                tolerance = _TOLERANCE[array.dtype.itemsize]
                if covered[region].all() and not np.allclose(
                    out[region], array, rtol=tolerance, equal_nan=True
                ):
                    raise PerfModelError(f"%{piece.value}: replicas of {tensor.name} differ")
                out[region] = array
                covered[region] = True
            if not covered.all():
                raise PerfModelError(f"output {tensor.name}: some of its elements are in no value")
            joined[tensor.name] = out
        return joined


_TOLERANCE = {8: 1e-9, 4: 1e-3, 2: 1e-1, 1: 0.0}
"""Relative difference by which replicas may differ, by bytes of an element."""


def _region(piece: Piece, shape: Shape) -> tuple[slice, ...]:
    return tuple(slice(start, start + n) for start, n in zip(piece.start, shape, strict=True))


def global_tensor(value: str, tensor: Tensor, role: Role, **axes: int | None) -> GlobalTensor:
    """The global tensor for a single value, with the same name."""
    # Before any transform a tensor is one piece that begins at its origin.
    piece = Piece(value, (0,) * tensor.rank)
    return GlobalTensor(
        name=value, role=role, dtype=tensor.dtype, shape=tensor.shape, pieces=(piece,), **axes
    )


def undistributed(function: Function, roles: Mapping[str, Role] | None = None) -> Program:
    """Wrap a function as a one-device program; inputs are unbatched data unless given a role.

    Such a program can be executed, simulated and lowered; most transforms need the roles.
    """
    # Text without roles still runs: execution and simulation need none.
    roles = roles or {}
    types = function.types
    return Program(
        function,
        tuple(
            global_tensor(p.name, types[p.name], roles.get(p.name, "data"))
            for p in function.parameters
        ),
        tuple(
            global_tensor(name, types[name], roles.get(name, "output"))
            for name in dict.fromkeys(function.outputs)
        ),
    )
