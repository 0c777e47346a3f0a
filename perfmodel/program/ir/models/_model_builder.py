"""Writing a model: a builder that also notes what each parameter and input is."""

from collections.abc import Sequence

from perfmodel.program.ir._builder import Builder
from perfmodel.program.ir._program import Piece, Program, Role, Whole
from perfmodel.program.ir._types import Shape, Tensor


class ModelBuilder(Builder):
    """A builder of programs on one device."""

    def __init__(self, name: str, dtype: str) -> None:
        super().__init__(name)
        self.dtype = dtype
        self._inputs: list[Whole] = []

    @property
    def inputs(self) -> tuple[Whole, ...]:
        """Parameters and data so far."""
        return tuple(self._inputs)

    def data(self, name: str, shape: Shape, dtype: str | None = None, batch_axis: int | None = 0) -> str:
        """An input whose first axis are independent samples (`batch_axis=None`: the same for all)."""
        return self._input(name, "data", shape, dtype or self.dtype, batch_axis=batch_axis)

    def weight(self, name: str, shape: Shape, tensor_axis: int | None = None, expert_axis: int | None = None) -> str:
        """A trained parameter."""
        return self._input(name, "parameter", shape, self.dtype, tensor_axis=tensor_axis, expert_axis=expert_axis)

    def program(self, outputs: Sequence[tuple[str, Role]]) -> Program:
        """The program that returns the given values in the given roles, under their own names."""
        wholes = []
        for value, role in outputs:
            tensor = self.types[value]
            wholes.append(_whole(value, role, tensor, value))
        return Program(self.build([value for value, _ in outputs]), tuple(self._inputs), tuple(wholes))

    def _input(self, name: str, role: Role, shape: Shape, dtype: str, **axes: int | None) -> str:
        tensor = Tensor(dtype, shape)
        self.parameter(name, tensor)
        self._inputs.append(_whole(name, role, tensor, name, **axes))
        return name


def _whole(name: str, role: Role, tensor: Tensor, value: str, **axes: int | None) -> Whole:
    piece = Piece(value, (0,) * tensor.rank)
    return Whole(name=name, role=role, dtype=tensor.dtype, shape=tensor.shape, pieces=(piece,), **axes)
