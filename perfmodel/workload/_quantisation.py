"""Kernels that bring operands of products to 8 or 4 bits, by recipe.

Every product of a layer's weights runs in the narrow type, forward and both gradients; attention, router, embedding and
head stay in 16 bits (Transformer Engine and torchao replace the layers' linear modules alone). A weight is quantised
once a step where its narrow copy is kept over micro-batches (Transformer Engine's `is_first_microbatch`), which is next
to nothing, and maxima are exchanged in one small reduction a step.
"""

from typing import Final

from perfmodel.ops import MemoryBound
from perfmodel.workload._local import Precision
from perfmodel.workload._piece import memory

_KERNEL: Final = "quantize_fp8_static"
_KERNEL_BYTES: Final = 3.0
"""Per element: 16 bits read, 8 written."""
_BYTES: Final = {
    "": 3.0,
    "delayed": 4.0,
    "current": 6.0,
    "tensorwise": 5.0,
    "rowwise": 5.0,
    "blockwise": 4.0,
    "mxfp8": 4.0,
    "nvfp4": 5.0,
}
"""Per element of an activation or a gradient. All but torchao's (`tensorwise`, `rowwise`), which quantise again for
each product, write a transposed copy besides for the weight gradient, and some find the maximum in an earlier pass
(`current`, torchao's, and nvfp4 for its second level of scales): Transformer Engine 2.0, common/transpose and
pytorch/csrc/quantizer.cpp; torchao 0.8, float8/float8_scaling_utils.py. Scales of blocks, a byte in 16 to 128, are left
out."""
_WEIGHT_EACH_TIME: Final = ("tensorwise", "rowwise")
"""Recipes that keep no narrow copy of weights: both ways quantise them for each micro-batch."""


def quantised(precision: Precision, rows: int, hidden: int) -> tuple[MemoryBound, ...]:
    """The kernel that quantises an operand of [rows, hidden]; none where products run in 16 bits or more."""
    if precision.dtype not in ("fp8", "fp4"):
        return ()
    moved = _BYTES[precision.recipe] / _KERNEL_BYTES
    return (memory(precision, _KERNEL, max(1, round(rows * moved)), hidden),)


def quantised_weight(precision: Precision, rows: int, hidden: int) -> tuple[MemoryBound, ...]:
    """The same of a weight, for each micro-batch; none where its narrow copy is kept."""
    return quantised(precision, rows, hidden) if precision.recipe in _WEIGHT_EACH_TIME else ()
