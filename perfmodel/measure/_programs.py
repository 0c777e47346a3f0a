"""Ops as JAX programs on random inputs.

Weights are stored [in, out] as Flax does. A backward program starts from the saved inputs and the
output's gradient and recomputes what it needs inside the same kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Final

import numpy as np

from perfmodel.measure._supported import check_kernel
from perfmodel.spec import Attention, Convolution, Embedding, Gemm, KernelOp, MemoryBound, OptimizerStep

JAX_DTYPES: Final[dict[str, str]] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
FP8: Final = "float8_e4m3fn"
MOST_RANDOM: Final = 1 << 22
"""Distinct random elements of an array; a larger one repeats them, as drawing them takes longer than timing."""


@dataclass(frozen=True)
class Program:
    """A compiled function and what to call it with."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    carried: int = 0
    """Leading arguments that each call gives up and returns anew (updated in place)."""


def program(op: KernelOp, seed: int = 0) -> Program:
    """The op as a jitted JAX function with its inputs on the default device; fp8 products give bf16.

    Raises:
        PerfModelError: for a family, pass, element type or kernel without a program.
    """
    check_kernel(op, ("fp8", *JAX_DTYPES) if isinstance(op, Gemm) else JAX_DTYPES)
    rng = np.random.default_rng(seed)
    match op:
        case Gemm():
            return _gemm(op, rng)
        case MemoryBound():
            return _memory(op, rng)
        case Embedding():
            return _embedding(op, rng)
        case Attention():
            return _attention(op, rng)
        case OptimizerStep():
            return _optimizer(op, rng)
        case Convolution():
            return _convolution(op, rng)
    raise AssertionError(op)


def random_values(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal float32 values of the shape; of `MOST_RANDOM` elements, to be repeated, if that is smaller."""
    size = prod(shape)
    return rng.standard_normal(shape if size <= MOST_RANDOM else MOST_RANDOM, np.float32)


def _array(rng: np.random.Generator, dtype: str, *shape: int) -> Any:
    import jax.numpy as jnp

    values = jnp.asarray(random_values(rng, shape), FP8 if dtype == "fp8" else JAX_DTYPES[dtype])
    return values if values.shape == shape else jnp.resize(values, shape)


def _differentiated(
    op: KernelOp, function: Callable[..., Any], inputs: tuple[Any, ...], wanted: dict[str, tuple[int, ...]]
) -> Program:
    """The function itself for `fwd`; else its gradients by the inputs that `wanted` names for the pass."""
    import jax
    import jax.numpy as jnp

    if op.pass_ == "fwd":
        return Program(jax.jit(function), inputs)
    chosen = wanted[op.pass_]

    def backward(gradient: Any, *values: Any) -> tuple[Any, ...]:
        def of_chosen(*parts: Any) -> Any:
            full = list(values)
            for index, part in zip(chosen, parts, strict=True):
                full[index] = part
            return function(*full)

        return jax.vjp(of_chosen, *(values[i] for i in chosen))[1](gradient)

    output = jax.eval_shape(function, *inputs)
    return Program(jax.jit(backward), (jnp.ones(output.shape, output.dtype), *inputs))


def _gemm(op: Gemm, rng: np.random.Generator) -> Program:
    import jax
    import jax.numpy as jnp

    leading = tuple(size for size in (op.batch, op.groups) if size > 1)
    array = partial(_array, rng, op.dtype)
    matmul = partial(jnp.matmul, preferred_element_type=jnp.bfloat16 if op.dtype == "fp8" else None)
    match op.pass_:
        case "fwd" | "bwd":
            inputs = (array(*leading, op.m, op.k), array(*leading, op.k, op.n))
            return _differentiated(op, matmul, inputs, {"bwd": (0, 1)})
        case "dgrad":
            function = lambda a, b: matmul(a, jnp.swapaxes(b, -1, -2))  # noqa: E731
            return Program(jax.jit(function), (array(*leading, op.m, op.k), array(*leading, op.n, op.k)))
        case "wgrad":
            a, b = array(*leading, op.k, op.m), array(*leading, op.k, op.n)
            if not op.accumulate:
                return Program(jax.jit(lambda a, b: matmul(jnp.swapaxes(a, -1, -2), b)), (a, b))
            product = partial(jnp.matmul, preferred_element_type=jnp.float32)
            function = lambda c, a, b: (c + product(jnp.swapaxes(a, -1, -2), b),)  # noqa: E731
            total = jnp.zeros((*leading, op.m, op.n), jnp.float32)
            return Program(jax.jit(function, donate_argnums=0), (total, a, b), carried=1)
    raise AssertionError(op.pass_)


def _memory(op: MemoryBound, rng: np.random.Generator) -> Program:
    import jax
    import jax.numpy as jnp

    def layer_norm(x: Any, scale: Any, shift: Any) -> Any:
        wide = x.astype(jnp.float32)
        normal = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
        return (normal * scale + shift).astype(x.dtype)

    def rms_norm(x: Any, scale: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5) * scale).astype(x.dtype)

    functions: dict[str, Callable[..., Any]] = {
        "add": jnp.add, "mul": jnp.multiply, "silu_mul": lambda x, y: jax.nn.silu(x) * y, "relu": jax.nn.relu,
        "gelu": jax.nn.gelu, "silu": jax.nn.silu, "tanh": jnp.tanh, "softmax": jax.nn.softmax,
        "layer_norm": layer_norm, "rms_norm": rms_norm,
    }  # fmt: skip
    inputs = tuple(_array(rng, op.dtype, op.rows, op.hidden) for _ in range(op.n_inputs))
    if op.op in ("layer_norm", "rms_norm"):
        inputs += (jnp.ones(op.hidden, jnp.float32),)
    if op.op == "layer_norm":
        inputs += (jnp.zeros(op.hidden, jnp.float32),)
    return _differentiated(op, functions[op.op], inputs, {"bwd": tuple(range(len(inputs)))})


def _embedding(op: Embedding, rng: np.random.Generator) -> Program:
    import jax.numpy as jnp

    table = _array(rng, op.dtype, op.vocab, op.hidden)
    tokens = jnp.asarray(rng.integers(0, op.vocab, op.tokens), jnp.int32)
    # the gradient is dense: zeros of the table's size, then a scatter-add
    return _differentiated(op, lambda t, ids: t[ids], (table, tokens), {"bwd": (0,)})


def _attention(op: Attention, rng: np.random.Generator) -> Program:
    """Textbook attention with scores in memory: softmax(q k^T / sqrt(d)) v, grouped key/value heads."""
    import jax
    import jax.numpy as jnp

    group, dv = op.heads // op.kv_heads, op.head_dim_v or op.head_dim
    q = _array(rng, op.dtype, op.batch, op.kv_heads, group, op.seq_q, op.head_dim)
    k = _array(rng, op.dtype, op.batch, op.kv_heads, op.seq_kv, op.head_dim)
    v = _array(rng, op.dtype, op.batch, op.kv_heads, op.seq_kv, dv)
    # the last query sees every key
    visible = np.tril(np.ones((op.seq_q, op.seq_kv), bool), op.seq_kv - op.seq_q)

    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bhgqd,bhkd->bhgqk", q, k, preferred_element_type=jnp.float32) * op.head_dim**-0.5
        if op.causal:
            scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
        return jnp.einsum("bhgqk,bhkd->bhgqd", jax.nn.softmax(scores).astype(v.dtype), v)

    return _differentiated(op, attend, (q, k, v), {"bwd": (0, 1, 2)})


def _optimizer(op: OptimizerStep, rng: np.random.Generator) -> Program:
    """Adam (arXiv 1412.6980, algorithm 1) on flat arrays updated in place, all fp32: 28 bytes per parameter."""
    import jax
    import jax.numpy as jnp

    def adam(weight: Any, momentum: Any, variance: Any, gradient: Any) -> tuple[Any, Any, Any]:
        momentum = 0.9 * momentum + 0.1 * gradient
        variance = 0.999 * variance + 0.001 * gradient * gradient
        return weight - 1e-4 * momentum / (jnp.sqrt(variance) + 1e-8), momentum, variance

    weight, gradient = (_array(rng, op.dtype, op.n_params) for _ in range(2))
    # two arrays, not one twice: a donated buffer may be given up only once
    states = (jnp.zeros_like(weight), jnp.zeros_like(weight))
    return Program(jax.jit(adam, donate_argnums=(0, 1, 2)), (weight, *states, gradient), carried=3)


def _convolution(op: Convolution, rng: np.random.Generator) -> Program:
    import jax

    image = _array(rng, op.dtype, op.batch, op.c_in, op.h_in, op.w_in)
    kernel = _array(rng, op.dtype, op.c_out, op.c_in // op.groups, op.k_h, op.k_w)

    def convolve(image: Any, kernel: Any) -> Any:
        return jax.lax.conv_general_dilated(
            image,
            kernel,
            window_strides=(op.stride_h, op.stride_w),
            padding=((op.pad_h, op.pad_h), (op.pad_w, op.pad_w)),
            feature_group_count=op.groups,
            dimension_numbers=("NCHW", "OIHW", "NCHW"),
        )

    return _differentiated(op, convolve, (image, kernel), {"bwd": (0, 1), "dgrad": (0,), "wgrad": (1,)})
