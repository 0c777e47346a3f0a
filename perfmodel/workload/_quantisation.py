"""Kernels that quantise operands of products to 8 or 4 bits, by recipe (`Job.fp8_recipe`).

Every product of a layer's weights runs in the narrow type, forward and both gradients (but for one
recipe); router, embedding and head stay in 16 bits, and so does attention unless it is asked for
(`Job.fp8_attention`): Transformer Engine and torchao replace the layers' linear modules alone.

A weight is quantised once a step where its narrow copy is kept over micro-batches (Transformer
Engine's `is_first_microbatch`), which is next to nothing, and maxima are exchanged in one small
reduction a step.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from perfmodel.ops import MemoryBound, Op
from perfmodel.spec import BASE_WEIGHT_BYTES
from perfmodel.units import dtype_bytes
from perfmodel.workload._local import Precision, ShardSizes
from perfmodel.workload._piece import memory

QUANTISING: Final = "quantize_fp8_static"
"""The measured kernel whose time per byte prices all quantising kernels."""
_KERNEL_BYTES: Final = 3.0
"""Bytes that this kernel moves per element: 16 bits read, 8 written."""
_BYTES: Final = {
    "": 3.0,
    "delayed": 4.0,
    "current": 6.0,
    "tensorwise": 5.0,
    "rowwise": 5.0,
    "rowwise_with_gw_hp": 5.0,
    "blockwise": 9.0,
    "mxfp8": 5.2,
    "nvfp4": 7.2,
    "aqt": 5.0,
}
"""Bytes per element of an activation or a gradient, at the rate of `QUANTISING`. All but those of
`_EACH_PRODUCT` write a transposed copy besides for the weight gradient, and some find the maximum
in an earlier pass (`current`, torchao's, AQT, and nvfp4 for its second level of scales):
Transformer Engine 2.0, common/transpose and pytorch/csrc/quantizer.cpp; torchao 0.8,
float8/float8_scaling_utils.py; AQT 0.7, aqt/jax/v2/aqt_dot_general.py. Those of blocks move no more
but take longer: by what a layer's products take more in `autocast` than with operands quantised
before, 1.82 ms with mxfp8 and 2.69 ms with nvfp4 on B300 for 1.49 G elements both ways and 0.99 G
one way (Transformer Engine 2, docs/examples/gemm_profiling; H200 NVL confirms `delayed` and
`current`). `blockwise`, timed there with its products alone, has what it takes more than theirs of
tensor-wise scales."""
_TRANSPOSED_BYTES: Final = {
    "delayed": 1.0,
    "current": 1.0,
    "blockwise": 1.0,
    "mxfp8": 1.0,
    "nvfp4": 0.5,
}
"""Bytes of the transposed copy among these, which is not made if weights are frozen, because it is
only an operand of weight gradients (Transformer Engine 2, pytorch/module/linear.py:
`set_usage(rowwise=True, columnwise=backward_needs_input)`)."""
_FUSED_IN_ACTIVATIONS: Final = ("delayed", "mxfp8")
"""Recipes by which the kernel of an activation writes its result, or its gradient, in 8 bits: those
whose scales are known beforehand or computed per block of 32 (Transformer Engine 2,
pytorch/csrc/extensions/activation.cpp; others need the whole tensor's maximum first and cast in a
separate kernel)."""
_ROUNDED_BYTES: Final = {"aqt": 8.0}
"""Additional bytes per element of a gradient that is rounded stochastically with numbers from
another kernel: 32 bits each, written and read again, for either product (google/aqt
aqt/jax/v2/config.py `config_v3`, whose `vjp_lhs` is the gradient; stochastic_rounding.py
`JaxUniform`). XLA's `rng-bit-generator` gives its state beside the numbers, and so is not fused
with what reads them. Transformer Engine draws the numbers of nvfp4 in its casts."""
_GATHERED_BYTES: Final = {
    "delayed": 1.0,
    "current": 1.0,
    "blockwise": 1 + 4 / 128,
    "mxfp8": 1 + 1 / 32,
    "nvfp4": 9 / 16,
}
"""Bytes per element, with scales, of operands that tensor-parallel ranks gather, which are
quantised before they are sent (Transformer Engine 2, pytorch/distributed.py
`gather_along_first_dim`)."""
_EACH_PRODUCT: Final = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "aqt")
"""Recipes that quantise both operands anew for each of the three products, in every micro-batch:
the weight gradient's from what forward kept in 16 bits (torchao 0.8 float8/float8_linear.py
`matmul_with_hp_or_float8_args.backward`; AQT scales along the contraction, which is another one in
each product)."""


WIDE_WEIGHT_GRADIENTS: Final = ("rowwise_with_gw_hp",)
"""Recipes whose weight gradients are products of 16 bits (torchao 0.8 float8/config.py,
LW_AXISWISE_WITH_GW_HP: input and gradient keep their precision there; read with times in view)."""


def quantised(
    precision: Precision, rows: int, hidden: int, *, gradient: bool = False
) -> tuple[MemoryBound, ...]:
    """The kernel that quantises an operand of [rows, hidden], which may be a gradient.

    None for 16 bits or more, and for integers by no known recipe.
    """
    narrow = precision.dtype in ("fp8", "fp4") or precision.recipe == "aqt"
    if precision.recipe == "fused" or not narrow:
        return ()
    moved_bytes = _BYTES[precision.recipe]
    if gradient:
        moved_bytes += _ROUNDED_BYTES.get(precision.recipe, 0.0)
    if precision.frozen:
        moved_bytes -= _TRANSPOSED_BYTES.get(precision.recipe, 0.0)

    # All recipes are priced as the one kernel that was measured, over as many more rows as they
    # move more bytes.
    equal_rows = max(1, round(rows * moved_bytes / _KERNEL_BYTES))
    return (memory(precision, QUANTISING, equal_rows, hidden),)


def quantised_each(
    precision: Precision, rows: int, widths: Iterable[int]
) -> tuple[MemoryBound, ...]:
    """The kernels that quantise operands of several widths, with as many rows each."""
    kernels: list[MemoryBound] = []
    for width in widths:
        kernels += quantised(precision, rows, width)
    return tuple(kernels)


_RESCALED_GRADIENTS: Final = ("rowwise",)
"""Recipes whose gradients are products of operands without their scales, by which a kernel then
multiplies the result: torch's product with scales of rows is slow where it accumulates in fp32, as
gradients do (torchao 0.8 float8/float8_python_api.py `addmm_float8_unwrapped`:
`post_inverse_scale`; pytorch/ao pull request 1325 and issue 2184; read with times in view)."""
_ONE_GRADIENT_CAST: Final = ("tensorwise",)
"""Recipes of `_EACH_PRODUCT` by which both products of a gradient have the same operand, whose cast
a compiler makes once, with a transposed copy (torchao 0.8 float8/float8_linear.py: the scale does
not depend on the dimension)."""
_TRANSPOSED_AGAIN: Final = 1.0 / 5.0
"""Bytes of that copy, relative to those of the cast."""


class ProductCasts(NamedTuple):
    """Kernels that bring the operands of a product, and of its gradients, to the type in which they
    are multiplied."""

    input: tuple[MemoryBound, ...] = ()
    """Casts before the product, of its input."""
    gradient: tuple[MemoryBound, ...] = ()
    """Casts before the input gradient, of the result's gradient."""
    weight: tuple[MemoryBound, ...] = ()
    """Casts before both, of the weight."""
    weight_gradient: tuple[MemoryBound, ...] = ()
    """Casts before the weight gradient, of input and gradient once more."""
    rescaled_input_gradient: tuple[MemoryBound, ...] = ()
    """Kernels after the input gradient's product, which multiply it by the scales of its
    operands."""
    rescaled_weight_gradient: tuple[MemoryBound, ...] = ()
    """The same after the weight gradient's product."""


NO_CASTS: Final = ProductCasts()
"""Products of operands as they are stored have no casts."""


def casts_operands(precision: Precision) -> bool:
    """Whether kernels bring operands of products to another type than the one they are stored
    in."""
    return precision.dtype in ("fp8", "fp4") or precision.recipe == "aqt" or bool(precision.base)


def product_casts(precision: Precision, m: int, n: int, k: int) -> ProductCasts:
    """The casts around Y[m, n] = X[m, k] W[k, n] and its gradients, where operands are cast
    (`casts_operands`)."""
    # Operands of the weight gradient come transposed from the other products, are quantised again,
    # or stay wide.
    weight_gradient: tuple[MemoryBound, ...] = ()
    if precision.recipe not in WIDE_WEIGHT_GRADIENTS:
        again = (
            max(1, round(m * _TRANSPOSED_AGAIN)) if precision.recipe in _ONE_GRADIENT_CAST else m
        )
        gradient_again = quantised_again(precision, again, n, gradient=True)
        weight_gradient = (*quantised_again(precision, m, k), *gradient_again)
    is_rescaled = precision.recipe in _RESCALED_GRADIENTS
    return ProductCasts(
        input=quantised(precision, m, k),
        gradient=quantised(precision, m, n, gradient=True),
        weight=(*widened(precision, n, k), *quantised_again(precision, n, k)),
        weight_gradient=weight_gradient,
        rescaled_input_gradient=(memory(precision, "mul_scalar", m, k),) if is_rescaled else (),
        rescaled_weight_gradient=(memory(precision, "mul_scalar", n, k),) if is_rescaled else (),
    )


def activation_quantises(local: ShardSizes) -> bool:
    """Whether the activation of a dense feed-forward writes the 8-bit operands of the adjacent
    products.

    Transformer Engine's operation fuser (`Job.operation_fuser`) does, as far as the recipe lets it
    (`_FUSED_IN_ACTIVATIONS`) and no adapter takes the same operands in 16 bits (Megatron-Core
    core/extensions/transformer_engine.py `TEFusedMLP`).
    """
    adapted = local.adapts("linear_fc1", "linear_fc2", "up_proj", "gate_proj")
    return local.precision.recipe in _FUSED_IN_ACTIVATIONS and not adapted


def cast_for_attention(local: ShardSizes, rows: int, hidden: int) -> MemoryBound:
    """The kernel that casts operands or results of 8-bit attention."""
    # Tensors between attention and the layers around it stay in 16 bits (Transformer Engine 2,
    # pytorch/attention/dot_product_attention/backends.py `FusedAttnFunc`, without `fp8_mha`).
    # Nothing is transposed.
    return memory(local.precision, QUANTISING, rows, hidden)


def widened(precision: Precision, rows: int, hidden: int) -> tuple[MemoryBound, ...]:
    """The kernel that converts a stored weight of [rows, hidden] to 16 bits before a product.

    bitsandbytes `dequantize_4bit` in `MatMul4Bit`, forward and backward.
    """
    if not precision.base:
        return ()

    # It reads the narrow weight and writes the wide one, priced as a pass that reads and writes 16
    # bits.
    share = (BASE_WEIGHT_BYTES[precision.base] + precision.act_bytes) / (2 * precision.act_bytes)
    return (memory(precision, "mul_scalar", max(1, round(rows * share)), hidden),)


def is_cast(op: Op) -> bool:
    """Whether an op quantises an operand to 8 or 4 bits."""
    return isinstance(op, MemoryBound) and op.op == QUANTISING


def quantised_again(
    precision: Precision, rows: int, hidden: int, *, gradient: bool = False
) -> tuple[MemoryBound, ...]:
    """The kernel that requantises an operand, which most recipes already have in narrow form.

    These are a weight, which has a narrow copy, and operands of the weight gradient, which have a
    transposed one.
    """
    if precision.recipe not in _EACH_PRODUCT:
        return ()
    return quantised(precision, rows, hidden, gradient=gradient)


def gathered_bytes(precision: Precision) -> float:
    """Bytes per element of an operand gathered over tensor-parallel ranks."""
    if precision.dtype not in ("fp8", "fp4"):
        return precision.act_bytes
    return _GATHERED_BYTES.get(precision.recipe, precision.act_bytes)


def kept_bytes(precision: Precision) -> int:
    """Bytes per element of a product's input saved for the weight gradient."""
    return (
        precision.act_bytes if precision.recipe in _EACH_PRODUCT else dtype_bytes(precision.dtype)
    )
