"""Matrix products."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float64

from perfmodel.errors import PerfModelError
from perfmodel.ops._op import (
    Axis,
    Family,
    GradientProducts,
    KernelOp,
    KindColumns,
    Measurement,
    Pass,
    Shape,
    ShapeColumn,
)
from perfmodel.ops.physics import Machine, Physics, divides, log2, tiled
from perfmodel.ops.programs import (
    Program,
    Tensors,
    jax_array,
    jax_pass,
    torch_module,
    torch_pass,
)


class GemmWork(NamedTuple):
    """Work of equal matrix products C[m, n] = A[m, k] B[k, n]."""

    flops: Any
    bytes: Any
    products: Any
    """How many there are."""
    a: Any
    """Elements of one product's left operand."""
    b: Any
    """Elements of its right operand, the weights of a layer."""
    c: Any
    """Elements of its result."""


def _work(xp: Any, x: Shape) -> GemmWork:
    """2mnk per product; both inputs read, the output written (and read and written in fp32 if
    accumulated).

    `bwd` stands for both gradient products of the forward m, n, k, of which the weight gradient
    accumulates.
    """
    m, n, k, size = x["m"], x["n"], x["k"], x["element_bytes"]
    products = x["batch"] * x["groups"]
    # `bwd` stands for both gradients, each a product as large as the forward's.
    repeats = 1.0 + x["bwd"]
    a, b, c = m * k, k * n, m * n

    # the result is written and read again in fp32 (8 bytes) where it would have been written once
    # in the element type
    extra = x["accumulate"] * xp.where(x["bwd"] > 0, b, c) * (8.0 - size)
    return GemmWork(
        2.0 * products * m * n * k * repeats,
        products * (repeats * (a + b + c) * size + extra),
        products,
        a,
        b,
        c,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemm(KernelOp):
    """`batch` products C[m, n] = A[m, k] B[k, n] (for `grouped_linear`, `groups` products of m
    rows).

    `dgrad` and `wgrad` rows carry the m, n, k of the gradient product itself; `bwd` carries the
    forward's m, n, k and stands for both gradient products.
    """

    op: str = "linear"
    dtype: str = "bf16"
    m: int
    n: int
    k: int
    batch: int = 1
    groups: int = 1
    pass_: Pass = "fwd"
    accumulate: bool = False
    """Weight gradient accumulated into an fp32 buffer."""

    family = "gemm"
    uses_matrix_units = is_matmul = True
    work = staticmethod(_work)

    @property
    def grouped(self) -> bool:
        """Whether it is a product of experts, with one group per expert, whose rows depend on the
        routing."""
        return self.op == "grouped_linear"

    @property
    def samples(self) -> str:
        if self.op == "bmm":
            return "batch"
        return "k" if self.pass_ == "wgrad" and not self.grouped else "m"

    @property
    def label(self) -> str:
        many = f"{self.batch * self.groups}x" if self.batch * self.groups > 1 else ""
        return f"{self.op} {many}{self.m}x{self.n}x{self.k} {self.pass_}"


def _physics(xp: Any, x: Shape, machine: Machine) -> Physics:
    """Physics of `batch * groups` products C[m, n] = A[m, k] B[k, n]; `bwd` stands for both
    gradients."""
    m = x["m"]
    n = x["n"]
    k = x["k"]
    size = x["element_bytes"]
    # `bwd` stands for both gradients, each a product as large as the forward's.
    repeats = 1.0 + x["bwd"]
    work = _work(xp, x)
    flops = work.flops
    products = work.products
    operands = work.a + work.b
    area, tiles, waves = tiled(xp, m, n, products, machine.units)

    # Few tiles and a long k: kernels split k over the idle multiprocessors. So no product is slower
    # for waste of tiles than four times its own area.
    quantised = xp.minimum(area, 1.0 * xp.maximum(products * work.c, 1.0) * 4.0) * 2.0 * k * repeats

    # weights that stay in the cache from the repetition before make a product of few rows faster
    resident = products * work.b * size / machine.l2
    features = [
        log2(xp, m),
        log2(xp, n),
        log2(xp, k),
        log2(xp, x["batch"]),
        log2(xp, x["groups"]),
        log2(xp, waves),
        # weights, operands, and all that is moved, relative to the cache
        log2(xp, resident),
        log2(xp, products * operands * size / machine.l2),
        log2(xp, products * (operands + work.c) * size / machine.l2),
        x["accumulate"],
        x["trans_a"],
        x["trans_b"],
        *tiles,
    ]

    # alignment, and how much of a tile the last rows and columns fill
    features += [divides(xp, m, d) for d in (2, 8, 16, 32, 64, 128, 256)]
    features += [divides(xp, n, d) for d in (2, 8, 16, 64, 128, 256)]
    features += [divides(xp, k, d) for d in (2, 8, 16, 64, 128)]
    features += [xp.mod(m, 128) / 128.0, xp.mod(n, 128) / 128.0]
    # large tiles have a relative rate above 1, but no product does less than its FLOPs
    axes = [log2(xp, v) for v in (m, n, k, products, resident, waves)]
    return Physics(flops, xp.maximum(flops, quantised), work.bytes, features, axes)


_LAYOUT: Final = {"dgrad": "NN", "wgrad": "NT"}
"""Operands of the gradients of a linear layer, transposed (T) or not (N)."""


def _product_layout(
    op_names: np.ndarray, passes: np.ndarray, layout: np.ndarray | None = None
) -> dict[str, Float64[np.ndarray, "n"]]:
    """Whether the operands of products are transposed: as in `layout` (`TN`, ...), else as usual
    for the pass."""
    # A forward of `linear` multiplies by a weight that is stored transposed (TN, as BLAS counts), a
    # batched product by operands as they are; the gradients follow from that.
    base = np.array([_LAYOUT.get(p, "") for p in passes], object)
    notation = base if layout is None else np.where(layout != "", layout, base)
    default = np.where(op_names == "bmm", "NN", "TN")
    notation = np.where(notation == "", default, notation).astype(str)
    return {
        "trans_a": (np.char.find(notation, "T") == 0).astype(np.float64),
        "trans_b": (np.char.rfind(notation, "T") == 1).astype(np.float64),
    }


def _complete(
    shape: dict[str, np.ndarray], ops: np.ndarray, passes: np.ndarray, layout: np.ndarray
) -> None:
    shape.update(_product_layout(ops, passes, layout))


def _as_measured(
    shape: dict[str, np.ndarray],
    requested: KindColumns,
    measured: KindColumns,
    work: KindColumns,
) -> dict[str, np.ndarray]:
    """Shapes with the operand layout in which the measured kind was timed; forward products do not
    accumulate.

    Args:
        requested: kinds of the rows.
        measured: the kinds whose measurements stand for them.
        work: kinds whose work the rows have.
    """
    # Rows that are answered by their own kind keep the layout that they state.
    same = requested.same_op_and_pass(measured)
    layout = _product_layout(measured.op, measured.pass_)
    flags = {name: np.where(same, shape[name], flag) for name, flag in layout.items()}
    flags["accumulate"] = np.where((work.pass_ != "fwd") | same, shape["accumulate"], 0.0)
    return shape | flags


def _same_shape(kinds: KindColumns) -> np.ndarray:
    """Gradients with the shape of the forward product, as in measured tables."""
    return kinds.op == "grouped_linear"


def _gradient_products(
    shape: Mapping[str, np.ndarray], kinds: KindColumns
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """dX[m, k] = dY[m, n] W'[n, k]; dW'[n, k] = dY'[n, m] X[m, k]."""
    m = shape["m"]
    n = shape["n"]
    k = shape["k"]
    same = _same_shape(kinds)

    # tables of grouped products state the forward's shape for every pass
    def unless_same(name: str, value: np.ndarray) -> np.ndarray:
        return np.where(same, shape[name], value)

    of_inputs = {
        "n": unless_same("n", k),
        "k": unless_same("k", n),
        "accumulate": np.zeros(len(m)),
    }
    of_weights = {
        "m": unless_same("m", n),
        "n": unless_same("n", k),
        "k": unless_same("k", m),
    }
    return of_inputs | _layout_of_pass(kinds, "dgrad"), of_weights | _layout_of_pass(kinds, "wgrad")


def _joined_gradients(shape: Mapping[str, np.ndarray], kinds: KindColumns) -> dict[str, np.ndarray]:
    """Inverse of `_gradient_products`, without accumulation."""
    m = shape["m"]
    n = shape["n"]
    k = shape["k"]
    same = _same_shape(kinds)
    weight = kinds.pass_ == "wgrad"
    return {
        "m": np.where(weight & ~same, k, m),
        "n": np.where(same, n, np.where(weight, m, k)),
        "k": np.where(same, k, n),
        "accumulate": np.zeros(len(m)),
    } | _layout_of_pass(kinds, "bwd")


def _layout_of_pass(kinds: KindColumns, pass_: str) -> dict[str, np.ndarray]:
    return _product_layout(kinds.op, np.full(len(kinds.op), pass_, object))


def _check(op: Gemm) -> None:
    if op.dtype == "fp8" and (op.pass_ == "bwd" or op.accumulate or op.batch * op.groups > 1):
        raise PerfModelError(
            f"fp8 products can be measured only one at a time, as fwd, dgrad or wgrad without accumulation; got {op}"
        )


def _jax_program(op: Gemm, rng: np.random.Generator) -> Program:
    import jax
    import jax.numpy as jnp

    leading = tuple(size for size in (op.batch, op.groups) if size > 1)
    array = partial(jax_array, rng, op.dtype)
    matmul = partial(jnp.matmul, preferred_element_type=jnp.bfloat16 if op.dtype == "fp8" else None)
    match op.pass_:
        case "fwd" | "bwd":
            inputs = (array(*leading, op.m, op.k), array(*leading, op.k, op.n))
            return jax_pass(op, matmul, inputs, {"bwd": (0, 1)})
        case "dgrad":
            # weights lie as [in, out], so that the input's gradient multiplies by their transpose
            function = lambda a, b: matmul(a, jnp.swapaxes(b, -1, -2))  # noqa: E731
            return Program(
                jax.jit(function),
                (array(*leading, op.m, op.k), array(*leading, op.n, op.k)),
            )
        case "wgrad":
            a = array(*leading, op.k, op.m)
            b = array(*leading, op.k, op.n)
            if not op.accumulate:
                return Program(jax.jit(lambda a, b: matmul(jnp.swapaxes(a, -1, -2), b)), (a, b))
            # the sum is handed over and returned, so that it is updated in place as a framework
            # does
            product = partial(jnp.matmul, preferred_element_type=jnp.float32)
            function = lambda c, a, b: (c + product(jnp.swapaxes(a, -1, -2), b),)  # noqa: E731
            total = jnp.zeros((*leading, op.m, op.n), jnp.float32)
            return Program(jax.jit(function, donate_argnums=0), (total, a, b), carried=1)
    raise AssertionError(op.pass_)


def _torch_program(op: Gemm, make: Tensors) -> Program:
    if op.dtype == "fp8":
        return _torch_fp8_program(op, make)
    torch = torch_module()
    leading = tuple(size for size in (op.batch, op.groups) if size > 1)
    match op.pass_:
        case "fwd" | "bwd":
            # a linear layer has its weight as [out, in]; many products at once are a batched one
            function = torch.matmul if leading else torch.nn.functional.linear
            weight = (*leading, op.k, op.n) if leading else (op.n, op.k)
            return torch_pass(
                op, function, (make(*leading, op.m, op.k), make(*weight)), {"bwd": (0, 1)}
            )
        case "dgrad":  # the output's gradient [m, k] times the weight [k, n]
            return Program(torch.matmul, (make(*leading, op.m, op.k), make(*leading, op.k, op.n)))
        case "wgrad":
            a = make(*leading, op.k, op.m)
            b = make(*leading, op.k, op.n)
            if not op.accumulate:
                return Program(lambda a, b: torch.matmul(a.mT, b), (a, b))
            # a product, then an addition to the buffer: two kernels, as torch runs them
            total = torch.zeros((*leading, op.m, op.n), dtype=torch.float32, device=make.device)
            return Program(lambda a, b: total.add_(torch.matmul(a.mT, b)), (a, b))
    raise AssertionError(op.pass_)


def _torch_fp8_program(op: Gemm, make: Tensors) -> Program:
    """The product alone, with operands quantised beforehand, in the row-by-column layout of matrix
    units."""
    torch = torch_module()
    unit_scale = torch.ones((), device=make.device)
    multiply = partial(
        torch._scaled_mm, scale_a=unit_scale, scale_b=unit_scale, out_dtype=torch.bfloat16
    )
    return Program(multiply, (make(op.m, op.k), make(op.n, op.k).t()))


GEMM: Final = Family(
    op=Gemm,
    columns={
        "m": ShapeColumn(),
        "n": ShapeColumn(),
        "k": ShapeColumn(),
        "batch": ShapeColumn(1),
        "groups": ShapeColumn(1),
        "accumulate": ShapeColumn(0, low=0),
    },
    axes=(
        Axis("m", 0, 17, 4),
        Axis("n", 3, 18, 4),
        Axis("k", 3, 18, 4),
        Axis("products", 0, 14, 1),
        Axis("weights_in_l2", -10, 6, 8),
        Axis("waves", -8, 12, 3),
    ),
    physics=_physics,
    known_op=lambda op: op if op in ("bmm", "grouped_linear") else "linear",
    complete=_complete,
    as_measured=_as_measured,
    gradients=GradientProducts(split=_gradient_products, join=_joined_gradients),
    measurement=Measurement(
        passes=("fwd", "bwd", "dgrad", "wgrad"),
        jax_program=_jax_program,
        torch_program=_torch_program,
        jax_dtypes=("fp8",),
        torch_dtypes=("fp8", "tf32"),
        check=_check,
    ),
)
