"""JAX implementation of every op that runs on one device.

A kernel takes its operands as arrays and a `KernelCall`, and returns one array or a tuple.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp

from perfmodel.errors import PerfModelError
from perfmodel.ir import INTEGER_DTYPES, Instruction, Tensor
from perfmodel.ops import programs
from perfmodel.session import current_session

Array = jax.Array
Values = Mapping[str, Any]
Outputs = Sequence[Tensor]
Kernel = Callable[..., Any]


@dataclass(frozen=True)
class KernelCall:
    """The settings of a kernel call other than its operands."""

    attributes: Values
    outputs: Outputs
    """Types of the outputs, whose shapes are known beforehand."""

    def __getitem__(self, name: str) -> Any:
        return self.attributes[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or `default` if the call does not have it."""
        return self.attributes.get(name, default)


def conv2d(x: Array, w: Array, call: KernelCall) -> Array:
    """Convolution of [n, c, h, w] with kernels [o, c / groups, k, l]."""
    return jax.lax.conv_general_dilated(
        x,
        w,
        call["stride"],
        [(n, n) for n in call["padding"]],
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
        feature_group_count=call["groups"],
    )


def conv2d_input_grad(w: Array, dy: Array, call: KernelCall) -> Array:
    """Gradient with respect to the image (the convolution is linear in it)."""
    image = jnp.zeros(call.outputs[0].shape, dy.dtype)
    return jax.vjp(lambda x: conv2d(x, w, call), image)[1](dy)[0]


def conv2d_weight_grad(x: Array, dy: Array, call: KernelCall) -> Array:
    """Gradient with respect to the kernel."""
    kernel = jnp.zeros(call.outputs[0].shape, dy.dtype)
    return jax.vjp(lambda w: conv2d(x, w, call), kernel)[1](dy)[0]


def pool2d(x: Array, call: KernelCall) -> Array:
    """Maximum or mean pooling over windows."""
    # Padding counts as zeros of a mean (divided by the whole window), as the op is defined; for a
    # maximum it never wins.
    window = partial(
        jax.lax.reduce_window,
        window_dimensions=(1, 1, *call["kernel"]),
        window_strides=(1, 1, *call["stride"]),
        padding=[(0, 0)] * 2 + [(n, n) for n in call["padding"]],
    )
    if call["kind"] == "max":
        return window(x, -jnp.inf, jax.lax.max)
    return window(x, 0.0, jax.lax.add) / prod(call["kernel"])


def _matmul(a: Array, b: Array, call: KernelCall) -> Array:
    """Multiply matrices, of which either may be transposed."""
    # Only methods of arrays, so that NumPy's arrays can be multiplied too (`PLAIN`).
    if call.get("transpose_a"):
        a = a.swapaxes(-1, -2)
    if call.get("transpose_b"):
        b = b.swapaxes(-1, -2)
    return a @ b


def _weight_grad(x: Array, dy: Array, call: KernelCall) -> Array:
    rows = x.reshape(-1, x.shape[-1])
    gradient_rows = dy.reshape(-1, dy.shape[-1])
    return rows.T @ gradient_rows


def _gelu(x: Array, call: KernelCall) -> Array:
    return jax.nn.gelu(x, approximate=not call.get("exact"))


def _layer_norm(x: Array, gain: Array, shift: Array, epsilon: float) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return centred / jnp.sqrt(variance + epsilon) * gain + shift


def _layer_norm_grad(x: Array, gain: Array, dy: Array, call: KernelCall) -> Any:
    function = partial(_layer_norm, epsilon=call.get("epsilon", 1e-5))
    _, pullback = jax.vjp(function, x, gain, jnp.zeros_like(gain))
    return pullback(dy)


def _softmax_grad(y: Array, dy: Array, call: KernelCall) -> Array:
    return y * (dy - (y * dy).sum(-1, keepdims=True))


def _local_rows(ids: Array, rows: int, call: KernelCall) -> tuple[Array, Array]:
    """Row numbers within this shard, and whether each lies in it."""
    # Megatron-LM's vocabulary-parallel look-up: rows of other shards read row 0 and are masked, so
    # shapes stay static.
    local = ids - call.get("offset", 0)
    is_local = (local >= 0) & (local < rows)
    return jnp.where(is_local, local, 0), is_local


def _embedding(table: Array, ids: Array, call: KernelCall) -> Array:
    local, is_local = _local_rows(ids, table.shape[0], call)
    return jnp.where(is_local[..., None], table[local], 0)


def _embedding_grad(table: Array, ids: Array, dy: Array, call: KernelCall) -> Array:
    """Add the gradients of looked-up rows up into a table of zeros."""
    local, is_local = _local_rows(ids, table.shape[0], call)
    # PyTorch's `padding_idx`: its row is looked up and never trained.
    if "padding" in call.attributes:
        is_local &= ids != call["padding"]
    return jnp.zeros_like(table).at[local].add(jnp.where(is_local[..., None], dy, 0))


def _pick(x: Array, labels: Array, call: KernelCall) -> Array:
    local, is_local = _local_rows(labels, x.shape[-1], call)
    return jnp.where(is_local[..., None], jnp.take_along_axis(x, local[..., None], -1), 0)


def _pick_grad(x: Array, labels: Array, dy: Array, call: KernelCall) -> Array:
    local, is_local = _local_rows(labels, x.shape[-1], call)
    hit = (jnp.arange(x.shape[-1]) == local[..., None]) & is_local[..., None]
    return jnp.where(hit, dy, 0)


def _top_k(x: Array, call: KernelCall) -> tuple[Array, Array]:
    values, places = jax.lax.top_k(x, call["k"])
    return values, places.astype(jax_dtype(call.outputs[1]))


def _top_k_grad(x: Array, places: Array, dy: Array, call: KernelCall) -> Array:
    hit = places[..., None] == jnp.arange(x.shape[-1])
    return jnp.where(hit, dy[..., None], 0).sum(-2)


def _places(chosen: Array, experts: int) -> Array:
    """Place of each token among those of its expert, in order of tokens."""
    # A running count over tokens, the way GShard assigns positions in buffers; no sort is needed.
    one_hot = chosen.reshape(-1)[:, None] == jnp.arange(experts)
    return (jnp.cumsum(one_hot, axis=0) * one_hot).sum(-1) - 1


def _dispatch(x: Array, chosen: Array, call: KernelCall) -> Array:
    """Copy each token into the buffer of its expert, up to the buffer's capacity."""
    experts, capacity, hidden = call.outputs[0].shape
    buffers = jnp.zeros((experts, capacity, hidden), x.dtype)
    tokens = x.reshape(-1, hidden)
    # Tokens beyond the capacity are out of bounds and therefore dropped.
    return buffers.at[chosen.reshape(-1), _places(chosen, experts)].set(tokens, mode="drop")


def _collect(buffers: Array, chosen: Array, call: KernelCall) -> Array:
    experts, capacity, hidden = buffers.shape
    places = _places(chosen, experts)
    rows = buffers[chosen.reshape(-1), jnp.minimum(places, capacity - 1)]
    return jnp.where((places < capacity)[:, None], rows, 0).reshape(*chosen.shape, hidden)


def _adam(w: Array, g: Array, m: Array, v: Array, call: KernelCall) -> tuple[Array, ...]:
    """Update weights by Adam, with their gradient and both moments."""
    beta1, beta2, step = call["beta1"], call["beta2"], call["step"]
    # Kingma and Ba 2015, algorithm 1; the root comes from the array's own library, so NumPy and JAX
    # share the code.
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * (g * g)
    root = w.__array_namespace__().sqrt(v / (1 - beta2**step))
    update = (m / (1 - beta1**step)) / (root + call["epsilon"])
    return w - call["rate"] * update, m, v


def _slice(x: Array, call: KernelCall) -> Array:
    axis = call["axis"] % x.ndim
    return x[(slice(None),) * axis + (slice(call["start"], call["stop"]),)]


def _pad(x: Array, call: KernelCall) -> Array:
    sizes = [(0, 0)] * x.ndim
    sizes[call["axis"]] = (call["before"], call["after"])
    return jnp.pad(x, sizes, constant_values=call.get("value", 0))


def _constant(call: KernelCall) -> Array:
    return jnp.array(call["value"], jax_dtype(call.outputs[0]))


def _from_operands(function: Callable[..., Array]) -> Kernel:
    """A kernel that needs only its operands."""
    return lambda *arrays, call: function(*arrays)


def _gradient(kernel: Kernel) -> Kernel:
    """The gradient of a kernel of one operand."""

    def gradient(x: Array, dy: Array, call: KernelCall) -> Array:
        return jax.vjp(partial(kernel, call=call), x)[1](dy)[0]

    return gradient


def attention(*parts: Array, call: KernelCall) -> Array:
    """Softmax(Q K^T / sqrt(d)) V by head: queries of the last part over keys and values of all; a
    part is [batch, its share of the sequence, heads * (query, key, value)]."""
    (batch, seq, width), heads = parts[-1].shape, call["heads"]
    size = width // (3 * heads)
    qkv = jnp.concatenate(parts, 1).reshape(batch, -1, heads, 3, size)
    q = qkv[:, -seq:, :, 0]
    k = qkv[:, :, :, 1]
    v = qkv[:, :, :, 2]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / size**0.5
    # The last query sees every key, whatever part of the sequence the queries are.
    if call.get("causal"):
        scores = jnp.where(jnp.tri(seq, k.shape[1], k.shape[1] - seq, dtype=bool), scores, -jnp.inf)
    context = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)
    return context.reshape(batch, seq, heads * size)


def attention_grad(*arrays: Array, call: KernelCall) -> tuple[Array, ...]:
    """Gradients of `attention` with respect to every part."""
    *parts, dy = arrays
    return jax.vjp(partial(attention, call=call), *parts)[1](dy)


KERNELS: Final[Mapping[str, Kernel]] = MappingProxyType(
    {
        "add": _from_operands(operator.add),
        "accumulate": _from_operands(operator.add),
        "sub": _from_operands(operator.sub),
        "mul": _from_operands(operator.mul),
        "div": _from_operands(operator.truediv),
        "scale": lambda x, call: x * call["factor"],
        "exp": _from_operands(jnp.exp),
        "log": _from_operands(jnp.log),
        "relu": _from_operands(lambda x: jnp.maximum(x, 0)),
        "relu_grad": _from_operands(lambda x, dy: jnp.where(x > 0, dy, 0)),
        "sqrt": _from_operands(jnp.sqrt),
        "tanh": _from_operands(jnp.tanh),
        "sigmoid": _from_operands(jax.nn.sigmoid),
        "erf": _from_operands(jax.lax.erf),
        "gelu": _gelu,
        "gelu_grad": _gradient(_gelu),
        "sum": lambda x, call: x.sum(call["axes"]).reshape(call.outputs[0].shape),
        "broadcast_like": lambda x, like, call: jnp.broadcast_to(x, like.shape),
        "unequal": lambda x, call: (x != call["value"]).astype(jax_dtype(call.outputs[0])),
        "running_sum": lambda x, call: jnp.cumsum(x, call["axis"]).astype(
            jax_dtype(call.outputs[0])
        ),
        "cast": lambda x, call: x.astype(jax_dtype(call.outputs[0])),
        "matmul": _matmul,
        "matmul_weight_grad": _weight_grad,
        "constant": _constant,
        "shape": lambda x, call: jnp.array(x.shape, jax_dtype(call.outputs[0])),
        "reshape": lambda x, *shape, call: x.reshape(call.outputs[0].shape),
        "transpose": lambda x, call: x.transpose(call["permutation"]),
        "split": lambda x, call: tuple(jnp.split(x, call["parts"], call["axis"])),
        "concat": lambda *arrays, call: jnp.concatenate(arrays, call["axis"]),
        "slice": _slice,
        "pad": _pad,
        "take": lambda x, index, call: jnp.take(x, index, axis=call["axis"]),
        "unsqueeze": lambda x, call: x.reshape(call.outputs[0].shape),
        "layer_norm": lambda x, g, s, call: _layer_norm(x, g, s, call.get("epsilon", 1e-5)),
        "layer_norm_grad": _layer_norm_grad,
        "softmax": _from_operands(lambda x: jax.nn.softmax(x, axis=-1)),
        "softmax_grad": _softmax_grad,
        "attention": attention,
        "attention_grad": attention_grad,
        "conv2d": conv2d,
        "conv2d_input_grad": conv2d_input_grad,
        "conv2d_weight_grad": conv2d_weight_grad,
        "pool2d": pool2d,
        "pool2d_grad": _gradient(pool2d),
        "embedding": _embedding,
        "embedding_grad": _embedding_grad,
        "row_max": _from_operands(lambda x: x.max(-1, keepdims=True)),
        "pick": _pick,
        "pick_grad": _pick_grad,
        "argmax": lambda x, call: jnp.argmax(x, -1).astype(jax_dtype(call.outputs[0])),
        "top_k": _top_k,
        "top_k_grad": _top_k_grad,
        "dispatch": _dispatch,
        "collect": _collect,
        "sgd": lambda w, g, call: w - call["rate"] * g,
        "adam": _adam,
    }
)
"""Kernels by name of the op."""
# For arrays that are touched once, dispatch to NumPy takes less time than compiling.
PLAIN: Final = frozenset(
    {
        *("add", "accumulate", "sub", "mul", "div", "scale", "sum", "matmul"),
        *("matmul_weight_grad", "reshape", "transpose", "slice", "unsqueeze", "sgd", "adam"),
    }
)
"""Kernels made of array methods, so that they accept NumPy arrays as well as JAX arrays."""


JAX_DTYPES: Final = {
    "fp64": "float64",
    **programs.JAX_DTYPES,
    **{name: name for name in INTEGER_DTYPES},
}
"""JAX's and torch's name of each dtype that programs can be executed in."""


def jax_dtype(tensor: Tensor) -> str:
    """JAX's name of a tensor's dtype, which is also torch's.

    Raises:
        PerfModelError: a dtype that programs cannot be executed in.
    """
    if tensor.dtype not in JAX_DTYPES:
        raise PerfModelError(
            f"programs with dtype {tensor.dtype} can only be simulated; use another dtype to execute them"
        )
    return JAX_DTYPES[tensor.dtype]


def compiled_kernel(
    instruction: Instruction, outputs: Sequence[Tensor]
) -> Callable[..., tuple[Array, ...]]:
    """An instruction's kernel, which returns a tuple; compiled per op, attributes and shapes."""
    # placement does not matter to a kernel; attributes that are equal but written differently, as
    # 1, 1.0 and true, are other kernels
    attributes = tuple((name, value) for name, value in instruction.attributes if name != "device")
    shapes = tuple(t.on(0) for t in outputs)
    key = instruction.op, attributes, shapes, repr(attributes)
    return current_session().kernels.get_or_compute(
        key, lambda: _compiled(instruction.op, dict(attributes), shapes)
    )


def _compiled(
    op: str, attributes: dict[str, Any], outputs: Outputs
) -> Callable[..., tuple[Array, ...]]:
    """Compile the kernel of an op for given attributes and output shapes."""
    # Attributes and output shapes are closed over, so they are static to the compiler.
    kernel = KERNELS[op]
    call = KernelCall(attributes, outputs)

    def run(*arrays: Array) -> tuple[Array, ...]:
        result = kernel(*arrays, call=call)
        return result if isinstance(result, tuple) else (result,)

    return jax.jit(run)
