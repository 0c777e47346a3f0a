"""Kernels bound by memory: element-wise and row-wise."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import numpy as np

from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.ops._op import Axis, Family, KernelOp, Measurement, Pass, Shape, ShapeColumn, Work
from perfmodel.ops.physics import (
    Machine,
    Physics,
    cached_share,
    divides,
    flag,
    lane_operations,
    log2,
)
from perfmodel.ops.programs import (
    Program,
    Tensor,
    Tensors,
    jax_array,
    jax_pass,
    torch_module,
    torch_pass,
)


def _work(xp: Any, x: Shape) -> Work:
    """One operation per element; (inputs + 1 output) x elements moved, `bwd` reads one more (the
    saved value)."""
    elements = x["rows"] * x["hidden"]
    return Work(elements, elements * (x["n_inputs"] + 1.0 + x["bwd"]) * x["element_bytes"])


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBound(KernelOp):
    """Element-wise and row-wise kernels over a rows x hidden tensor."""

    op: str
    dtype: str = "bf16"
    rows: int
    hidden: int
    n_inputs: int = 1
    pass_: Pass = "fwd"

    family = "memory"
    work = staticmethod(_work)

    @property
    def label(self) -> str:
        return f"{self.op} {self.rows}x{self.hidden} {self.pass_}"


_OPS_PER_ELEMENT: Final = 4.0
"""Operations of the vector lanes per element: addresses, load, conversion, arithmetic, store."""


def _physics(xp: Any, x: Shape, machine: Machine) -> Physics:
    """Element-wise and row-wise kernels."""
    rows, hidden = x["rows"], x["hidden"]
    elements, traffic = _work(xp, x)

    # Waves of blocks of 4096 elements, and of rows, over the multiprocessors.
    blocks = elements / (machine.units * 4096.0)
    per_unit = rows / machine.units
    resident = traffic / machine.l2
    features = [
        log2(xp, rows),
        log2(xp, hidden),
        log2(xp, elements),
        x["n_inputs"],
        log2(xp, resident),
        log2(xp, blocks),
        # Filled share of the last wave: of blocks, then of rows.
        blocks / xp.ceil(blocks),
        log2(xp, per_unit),
        per_unit / xp.ceil(per_unit),
        log2(xp, hidden * x["element_bytes"]),
    ]
    features += [divides(xp, hidden, d) for d in (2, 4, 8, 128, 1024)]
    features += [divides(xp, elements, d) for d in (4, 512)]

    # Fused softmax kernels (Megatron) want batch x heads = rows / hidden to be a multiple of four.
    features += [
        divides(xp, rows, 4),
        flag(xp, xp.mod(rows, 4 * hidden) == 0),
        flag(xp, hidden > 2048),
    ]
    axes = [log2(xp, v) for v in (rows, hidden, resident)]
    vector = lane_operations(xp, machine, _OPS_PER_ELEMENT * elements)
    return Physics(
        elements, elements, traffic, features, axes, vector, cached_share(traffic, machine)
    )


# Names of tables under which regressors know an op: those that move the same tensors share one, as
# they run alike.
_ALIASES: Final = {
    "rms_norm": "rms_or_layer_norm",
    "norm": "norm",
    "swiglu": "silu_mul",
    "geglu": "silu_mul",
    "bias_swiglu": "silu_mul",
    "residual_add": "add",
    "cross_entropy": "cross_entropy_unfused",
    "max_pool3x3s2": "max_pool",
    "rope_fused": "rope",
    "scale_causal_softmax": "scaled_causal_softmax_fused",
    "fill_cache": "mul_scalar",
}
_TABLE_NAMES: Final = """
add add_scalar avg_pool batch_norm bias_dropout_add bias_gelu cross_entropy_unfused div div_scalar dropout gelu
layer_norm masked_fill max_pool mul mul_scalar norm norm_unfused pow pow_scalar qk_norm quantize_fp8_static relu
rms_norm_unfused rms_or_layer_norm rope rope_unfused scale_mask_softmax scaled_causal_softmax_fused silu silu_mul
silu_mul_or_gelu softmax sub tanh where
"""
_KNOWN: Final = frozenset(_TABLE_NAMES.split())


def _known_op(op: str) -> str:
    op = _ALIASES.get(op, op)
    return op if op in _KNOWN else ""


def _op_by_inputs(shape: Mapping[str, np.ndarray]) -> np.ndarray:
    """Treat an unknown kernel as an element-wise one with the same number of inputs."""
    return np.where(shape["n_inputs"] >= 2, "add", "relu")


MEASURED_MEMORY_OPS: Final[dict[str, int]] = {
    "add": 2,
    "mul": 2,
    "silu_mul": 2,
    "relu": 1,
    "gelu": 1,
    "silu": 1,
    "tanh": 1,
    "softmax": 1,
    "layer_norm": 1,
    "rms_norm": 1,
    "bias_gelu": 1,
    "batch_norm": 1,
    "cross_entropy": 1,
    "rope": 1,
    "dropout": 1,
    "bias_dropout_add": 2,
}
"""Memory-bound kernels with a program, and their number of inputs.

Operators of several steps are compiled in JAX, and run as a sequence of kernels in torch, as users
call them. JAX's dropout draws its mask in the forward pass and reuses it in the backward pass, as
torch's does.
"""
_VECTORS: Final[Mapping[str, tuple[Literal["ones", "zeros", "drawn"], ...]]] = {
    "layer_norm": ("ones", "zeros"),
    "batch_norm": ("ones", "zeros"),
    "rms_norm": ("ones",),
    "bias_gelu": ("drawn",),
    "bias_dropout_add": ("drawn",),
}
"""Number of vectors of `hidden` elements that a kernel reads in addition to its tensors: scales,
shifts, and random biases."""
KEPT: Final = 0.9
"""Share of the elements that dropout keeps."""
_OF_NINE_TENTHS: Final = 1.2816
"""90 % quantile of the standard normal distribution."""


def _check(op: MemoryBound) -> None:
    """Raise `PerfModelError` for a kernel that no program measures."""
    if op.op not in MEASURED_MEMORY_OPS:
        raise UnknownNameError("memory-bound kernel to measure", op.op, MEASURED_MEMORY_OPS)
    n_inputs = MEASURED_MEMORY_OPS[op.op]
    # An addition of one input is rows moved, with themselves added.
    if op.n_inputs != n_inputs and (op.op, op.n_inputs) != ("add", 1):
        raise PerfModelError(f"{op.op} needs n_inputs = {n_inputs}, got {op.n_inputs}")
    if op.op == "rope" and op.hidden % 2:
        raise PerfModelError(f"rope rotates pairs, so hidden must be even, got {op.hidden}")


def _head_size(op: MemoryBound) -> int:
    """Size of the heads that rope turns."""
    return 128 if op.hidden % 128 == 0 else op.hidden


def _jax_program(op: MemoryBound, rng: np.random.Generator) -> Program:
    import jax
    import jax.numpy as jnp

    # Norms compute in fp32 whatever the tensors are, as torch's kernels do.
    def layer_norm(x: Any, scale: Any, shift: Any) -> Any:
        wide = x.astype(jnp.float32)
        normal = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(
            wide.var(-1, keepdims=True) + 1e-5
        )
        return (normal * scale + shift).astype(x.dtype)

    def rms_norm(x: Any, scale: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5) * scale).astype(
            x.dtype
        )

    def dropped(x: Any, chance: Any) -> Any:
        """Drop elements by a mask, or by a key to draw one."""
        # Divided by the share that is kept, so that the mean stays.
        keep_mask = chance if op.pass_ == "bwd" else jax.random.bernoulli(chance, KEPT, x.shape)
        return jnp.where(keep_mask, x / KEPT, 0)

    def rope(x: Any, cos: Any, sin: Any) -> Any:
        # Pairs are an element of the first half of a head and one of the second.
        first, second = jnp.split(x.reshape(op.rows, -1, _head_size(op)), 2, -1)
        return jnp.concatenate(
            [first * cos - second * sin, second * cos + first * sin], -1
        ).reshape(x.shape)

    def batch_norm(x: Any, scale: Any, shift: Any) -> Any:
        wide = x.astype(jnp.float32)
        return ((wide - wide.mean(0)) * jax.lax.rsqrt(wide.var(0) + 1e-5) * scale + shift).astype(
            x.dtype
        )

    functions: dict[str, Callable[..., Any]] = {
        # With one input it is added to itself, one stream to read.
        "add": lambda x, *y: jnp.add(x, y[0] if y else x),
        "mul": jnp.multiply,
        "silu_mul": lambda x, y: jax.nn.silu(x) * y,
        "relu": jax.nn.relu,
        "gelu": jax.nn.gelu,
        "silu": jax.nn.silu,
        "tanh": jnp.tanh,
        "softmax": jax.nn.softmax,
        "layer_norm": layer_norm,
        "rms_norm": rms_norm,
        "batch_norm": batch_norm,
        "rope": rope,
        "dropout": dropped,
        "bias_gelu": lambda x, bias: jax.nn.gelu(x + bias),
        "bias_dropout_add": lambda x, residual, bias, chance: residual + dropped(x + bias, chance),
        "cross_entropy": lambda x, label: (
            jax.nn.logsumexp(x, -1) - jnp.take_along_axis(x, label[:, None], -1)[:, 0]
        ),
    }

    inputs, differentiable = _jax_inputs(op, rng)
    return jax_pass(op, functions[op.op], inputs, {"bwd": tuple(range(differentiable))})


def _jax_inputs(op: MemoryBound, rng: np.random.Generator) -> tuple[tuple[Any, ...], int]:
    """Inputs in the order of the functions' parameters, and how many of them, the first, have
    gradients."""
    import jax
    import jax.numpy as jnp

    inputs: tuple[Any, ...] = tuple(
        jax_array(rng, op.dtype, op.rows, op.hidden) for _ in range(op.n_inputs)
    )
    vectors = {
        "ones": lambda: jnp.ones(op.hidden, jnp.float32),
        "zeros": lambda: jnp.zeros(op.hidden, jnp.float32),
        "drawn": lambda: jax_array(rng, op.dtype, op.hidden),
    }
    inputs += tuple(vectors[content]() for content in _VECTORS.get(op.op, ()))

    # Further operands have no gradient: tables of angles, labels, masks.
    differentiable = len(inputs)
    if op.op == "rope":
        inputs += tuple(jax_array(rng, op.dtype, op.rows, 1, _head_size(op) // 2) for _ in range(2))
    if op.op == "cross_entropy":
        inputs += (jnp.asarray(rng.integers(0, op.hidden, op.rows)),)

    # Forward draws the mask by a key; backward has it from the forward.
    if op.op in ("dropout", "bias_dropout_add"):
        if op.pass_ == "bwd":
            mask = jax_array(rng, "fp32", op.rows, op.hidden) < _OF_NINE_TENTHS
        else:
            mask = None
        inputs += (jax.random.key(0) if mask is None else mask,)
    return inputs, differentiable


def _torch_program(op: MemoryBound, make: Tensors) -> Program:
    torch = torch_module()
    f = torch_module().nn.functional

    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.view(op.rows, -1, _head_size(op)).chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).view(x.shape)

    functions: dict[str, Callable[..., Tensor]] = {
        "add": lambda x, *y: torch.add(x, y[0] if y else x),
        "mul": torch.mul,
        "silu_mul": lambda x, y: f.silu(x) * y,
        "relu": f.relu,
        "gelu": partial(f.gelu, approximate="tanh"),
        "silu": f.silu,
        "tanh": torch.tanh,
        "softmax": partial(f.softmax, dim=-1),
        "layer_norm": lambda x, scale, shift: f.layer_norm(x, (op.hidden,), scale, shift),
        "rms_norm": lambda x, scale: f.rms_norm(x, (op.hidden,), scale, 1e-5),
        "batch_norm": lambda x, scale, shift: f.batch_norm(x, None, None, scale, shift, True),
        "rope": rope,
        "dropout": lambda x: f.dropout(x, 1 - KEPT),
        "bias_gelu": lambda x, bias: f.gelu(x + bias, approximate="tanh"),
        "bias_dropout_add": lambda x, residual, bias: residual + f.dropout(x + bias, 1 - KEPT),
        "cross_entropy": lambda x, label: f.cross_entropy(x, label, reduction="none"),
    }

    # Inputs in the order of the functions' parameters: those that a gradient is asked for first.
    inputs = tuple(make(op.rows, op.hidden) for _ in range(op.n_inputs))
    first_row = inputs[0][0]
    vectors = {
        "ones": lambda: torch.ones_like(first_row),
        "zeros": lambda: torch.zeros_like(first_row),
        "drawn": lambda: make(op.hidden),
    }
    inputs += tuple(vectors[content]() for content in _VECTORS.get(op.op, ()))

    # Further operands have no gradient: tables of angles, and labels. torch draws masks by itself.
    differentiable = len(inputs)
    if op.op == "rope":
        inputs += tuple(make(op.rows, 1, _head_size(op) // 2) for _ in range(2))
    if op.op == "cross_entropy":
        inputs += (make.indices(op.hidden, op.rows),)
    return torch_pass(op, functions[op.op], inputs, {"bwd": tuple(range(differentiable))})


MEMORY: Final = Family(
    op=MemoryBound,
    columns={
        "rows": ShapeColumn(),
        "hidden": ShapeColumn(),
        "n_inputs": ShapeColumn(1, low=0),
    },
    axes=(Axis("rows", 0, 23, 2), Axis("hidden", 0, 20, 2), Axis("in_l2", -14, 12, 4)),
    physics=_physics,
    known_op=_known_op,
    op_by_shape=_op_by_inputs,
    measurement=Measurement(
        passes=("fwd", "bwd"),
        jax_program=_jax_program,
        torch_program=_torch_program,
        check=_check,
    ),
)
