"""Kernels of element-wise and row-wise ops, shared by the op tables."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from perfmodel.ops import MemoryBound, Op
from perfmodel.program.ir._instruction import Tensor
from perfmodel.units import DTYPE_BYTES


def kernel_dtype(tensor: Tensor) -> str:
    """Element type under which a kernel is timed; integers move like fp32."""
    return tensor.dtype if tensor.dtype in DTYPE_BYTES else "fp32"


def free(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], attributes: Mapping[str, Any]) -> tuple[Op, ...]:
    """No kernel: only names, shapes or small constants change."""
    return ()


def memory_bound(op: str, backward: bool = False) -> Callable[..., tuple[MemoryBound]]:
    """Work rule: one kernel that streams over the largest tensor of the instruction."""

    def work(
        inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], attributes: Mapping[str, Any]
    ) -> tuple[MemoryBound]:
        largest = max((*inputs, *outputs), key=lambda tensor: tensor.n_elements)
        streamed = sum(tensor.n_elements * 2 >= largest.n_elements for tensor in inputs)
        hidden = largest.shape[-1] if largest.shape else 1
        kernel = MemoryBound(
            op=op,
            dtype=kernel_dtype(largest),
            rows=max(1, prod(largest.shape[:-1])),
            hidden=hidden,
            n_inputs=max(1, streamed - backward),
            pass_="bwd" if backward else "fwd",
        )
        return (kernel,)

    return work
