"""PyTorch implementation of every op that runs on one device, as users' training scripts call it.

In the form of the JAX kernels: operands, attributes and the types of the outputs. Fused gradients are ATen's own.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from perfmodel.ir import Instruction, Tensor
from perfmodel.ir.execution._kernels import Outputs, Values, jax_dtype


def torch_dtype(tensor: Tensor) -> Any:
    """Torch's dtype of a tensor.

    Raises:
        PerfModelError: a dtype that programs cannot be executed in.
    """
    import torch  # pyright: ignore[reportMissingImports]

    return getattr(torch, jax_dtype(tensor))


def torch_kernel(instruction: Instruction, outputs: Outputs, device: Any) -> Callable[..., tuple[Any, ...]]:
    """The kernel of an instruction; takes and returns tensors on a device."""
    import torch  # pyright: ignore[reportMissingImports]

    # Constants are placed once, not in every run, as a script would keep them.
    kernel, attributes = TORCH_KERNELS[instruction.op], dict(instruction.attributes)
    if instruction.op == "constant":
        value = torch.tensor(attributes["value"], dtype=torch_dtype(outputs[0]), device=device)
        return lambda: (value,)

    def run(*tensors: Any) -> tuple[Any, ...]:
        # Programs carry their own gradients; autograd's bookkeeping would cost time in every kernel.
        with torch.no_grad():
            result = kernel(torch, *tensors, a=attributes, out=outputs)
        return result if isinstance(result, tuple) else (result,)

    return run


def _matmul(t: Any, x: Any, w: Any, a: Values, out: Outputs) -> Any:
    x = x.transpose(-1, -2) if a.get("transpose_a") else x
    return t.matmul(x, w.transpose(-1, -2) if a.get("transpose_b") else w)


def _weight_grad(t: Any, x: Any, dy: Any, a: Values, out: Outputs) -> Any:
    return x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])


def _gelu_grad(t: Any, x: Any, dy: Any, a: Values, out: Outputs) -> Any:
    return t.ops.aten.gelu_backward(dy, x, approximate="none" if a.get("exact") else "tanh")


def _layer_norm_grad(t: Any, x: Any, gain: Any, dy: Any, a: Values, out: Outputs) -> Any:
    shape, epsilon = list(gain.shape), a.get("epsilon", 1e-5)
    # ATen's backward takes the statistics that its forward saves; the program's op has only operands, so they are
    # made anew.
    _, mean, rstd = t.ops.aten.native_layer_norm(x, shape, gain, None, epsilon)
    return t.ops.aten.native_layer_norm_backward(
        dy.contiguous(), x, shape, mean, rstd, gain, t.zeros_like(gain), [True, True, True]
    )


def _heads(qkv: Any, a: Values) -> tuple[Any, Any, Any]:
    batch, seq, width = qkv.shape
    heads = a["heads"]
    return qkv.reshape(batch, seq, heads, 3, width // (3 * heads)).permute(3, 0, 2, 1, 4).unbind(0)


def _attention(t: Any, *parts: Any, a: Values, out: Outputs) -> Any:
    """Queries of the last part of a sequence over the keys and values of all."""
    from torch.nn.attention.bias import causal_lower_right  # pyright: ignore[reportMissingImports]

    causal, seq = bool(a.get("causal")), parts[-1].shape[1]
    q, k, v = _heads(parts[0] if len(parts) == 1 else t.cat(parts, 1), a)
    # Queries of a slice are the last positions of the keys: the causal mask is aligned at the lower right.
    masked = causal and len(parts) > 1  # `is_causal` would let the first query see the first key alone
    context = t.nn.functional.scaled_dot_product_attention(
        q[:, :, -seq:],
        k,
        v,
        is_causal=causal and not masked,
        attn_mask=causal_lower_right(seq, k.shape[2]) if masked else None,
    )
    return context.transpose(1, 2).reshape(out[0].shape)


def _attention_grad(t: Any, *tensors: Any, a: Values, out: Outputs) -> Any:
    *parts, dy = tensors
    # Autograd runs the backward of the kernel that torch picks, as a training script gets it; the forward is repeated
    # to record it.
    with t.enable_grad():
        leaves = [part.detach().requires_grad_() for part in parts]
        out_of_forward = (Tensor(out[0].dtype, tuple(dy.shape)),)
        return t.autograd.grad(_attention(t, *leaves, a=a, out=out_of_forward), leaves, dy)


def _convolution_grad(name: str) -> Callable[..., Any]:
    """torch's own gradient of a convolution, of its input or its weight."""

    def kernel(t: Any, first: Any, dy: Any, a: Values, out: Outputs) -> Any:
        # torch takes the size of what it is to give: of the input it cannot be known from the output.
        grad = getattr(t.nn.grad, name)
        operands = (out[0].shape, first, dy) if name == "conv2d_input" else (first, out[0].shape, dy)
        return grad(*operands, a["stride"], a["padding"], 1, a["groups"])

    return kernel


def _pool2d(t: Any, x: Any, a: Values, out: Outputs) -> Any:
    pool = t.nn.functional.max_pool2d if a["kind"] == "max" else t.nn.functional.avg_pool2d
    return pool(x, a["kernel"], a["stride"], a["padding"])


def _pool2d_grad(t: Any, x: Any, dy: Any, a: Values, out: Outputs) -> Any:
    with t.enable_grad():
        leaf = x.detach().requires_grad_()
        return t.autograd.grad(_pool2d(t, leaf, a, out), leaf, dy)[0]


def _local(t: Any, ids: Any, rows: int, a: Values) -> tuple[Any, Any]:
    """Row numbers within this shard, and which of them are here."""
    local = ids.long() - a.get("offset", 0)
    here = (local >= 0) & (local < rows)
    return t.where(here, local, 0), here


def _embedding(t: Any, table: Any, ids: Any, a: Values, out: Outputs) -> Any:
    local, here = _local(t, ids, table.shape[0], a)
    return t.nn.functional.embedding(local, table) * here[..., None]


def _embedding_grad(t: Any, table: Any, ids: Any, dy: Any, a: Values, out: Outputs) -> Any:
    local, here = _local(t, ids, table.shape[0], a)
    if "padding" in a:
        here &= ids != a["padding"]
    hidden = table.shape[1]
    return t.zeros_like(table).index_add_(0, local.reshape(-1), (dy * here[..., None]).reshape(-1, hidden))


def _pick(t: Any, x: Any, labels: Any, a: Values, out: Outputs) -> Any:
    local, here = _local(t, labels, x.shape[-1], a)
    return x.gather(-1, local[..., None]) * here[..., None]


def _pick_grad(t: Any, x: Any, labels: Any, dy: Any, a: Values, out: Outputs) -> Any:
    local, here = _local(t, labels, x.shape[-1], a)
    return t.zeros_like(x).scatter_(-1, local[..., None], dy * here[..., None])


def _places(t: Any, chosen: Any, experts: int) -> Any:
    one_hot = t.nn.functional.one_hot(chosen.reshape(-1).long(), experts)
    return (one_hot.cumsum(0) * one_hot).sum(-1) - 1


def _top_k(t: Any, x: Any, a: Values, out: Outputs) -> Any:
    values, places = x.topk(a["k"], -1)
    return values, places.to(torch_dtype(out[1]))


def _dispatch(t: Any, x: Any, chosen: Any, a: Values, out: Outputs) -> Any:
    experts, capacity, hidden = out[0].shape
    # Tokens beyond an expert's capacity are dropped; torch has no out-of-bounds mode, hence the mask.
    places, tokens = _places(t, chosen, experts), x.reshape(-1, hidden)
    fits = places < capacity
    buffers = t.zeros((experts, capacity, hidden), dtype=x.dtype, device=x.device)
    buffers[chosen.reshape(-1).long()[fits], places[fits]] = tokens[fits]
    return buffers


def _collect(t: Any, buffers: Any, chosen: Any, a: Values, out: Outputs) -> Any:
    experts, capacity, hidden = buffers.shape
    places = _places(t, chosen, experts)
    rows = buffers[chosen.reshape(-1).long(), places.clamp(max=capacity - 1)]
    return (rows * (places < capacity)[:, None]).reshape(*chosen.shape, hidden)


def _adam(t: Any, w: Any, g: Any, m: Any, v: Any, a: Values, out: Outputs) -> Any:
    m = a["beta1"] * m + (1 - a["beta1"]) * g
    v = a["beta2"] * v + (1 - a["beta2"]) * g * g
    step = a["step"]
    update = (m / (1 - a["beta1"] ** step)) / ((v / (1 - a["beta2"] ** step)).sqrt() + a["epsilon"])
    return w - a["rate"] * update, m, v


def _reshaped(t: Any, x: Any, *shape: Any, a: Values, out: Outputs) -> Any:
    return x.reshape(out[0].shape)


def _pad(t: Any, x: Any, a: Values, out: Outputs) -> Any:
    """torch counts axes from the last."""
    sizes = [0, 0] * (x.dim() - 1 - a["axis"] % x.dim()) + [a["before"], a["after"]]
    return t.nn.functional.pad(x, sizes, value=a.get("value", 0))


def _plain(name: str) -> Callable[..., Any]:
    """The function of torch that takes just the operands."""
    return lambda t, *tensors, a, out: getattr(t, name)(*tensors)


TORCH_KERNELS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        **{
            op: _plain(op)
            for op in ("add", "sub", "mul", "div", "exp", "log", "sqrt", "tanh", "sigmoid", "erf", "relu")
        },
        "accumulate": _plain("add"),
        "scale": lambda t, x, a, out: x * a["factor"],
        "relu_grad": lambda t, x, dy, a, out: t.ops.aten.threshold_backward(dy, x, 0),
        "gelu": lambda t, x, a, out: t.nn.functional.gelu(x, approximate="none" if a.get("exact") else "tanh"),
        "gelu_grad": _gelu_grad,
        "sum": lambda t, x, a, out: (x.sum(a["axes"]) if a["axes"] else x).reshape(out[0].shape),
        "broadcast_like": lambda t, x, like, a, out: x.expand(like.shape),
        "cast": lambda t, x, a, out: x.to(torch_dtype(out[0])),
        "matmul": _matmul,
        "matmul_weight_grad": _weight_grad,
        "constant": lambda t, a, out: None,  # made once, by `torch_kernel`
        "shape": lambda t, x, a, out: t.tensor(x.shape, dtype=torch_dtype(out[0])),
        "reshape": _reshaped,
        "unsqueeze": _reshaped,
        "transpose": lambda t, x, a, out: x.permute(a["permutation"]).contiguous(),
        "split": lambda t, x, a, out: tuple(x.chunk(a["parts"], a["axis"])),
        "concat": lambda t, *xs, a, out: t.cat(xs, a["axis"]),
        "slice": lambda t, x, a, out: x.narrow(a["axis"], a["start"], a["stop"] - a["start"]),
        "pad": _pad,
        "take": lambda t, x, index, a, out: x.index_select(a["axis"], index.reshape(-1).long()).reshape(out[0].shape),
        "layer_norm": lambda t, x, g, s, a, out: t.nn.functional.layer_norm(x, g.shape, g, s, a.get("epsilon", 1e-5)),
        "layer_norm_grad": _layer_norm_grad,
        "softmax": lambda t, x, a, out: t.softmax(x, -1),
        "softmax_grad": lambda t, y, dy, a, out: t.ops.aten._softmax_backward_data(dy, y, -1, y.dtype),
        "attention": _attention,
        "attention_grad": _attention_grad,
        "conv2d": lambda t, x, w, a, out: t.nn.functional.conv2d(x, w, None, a["stride"], a["padding"], 1, a["groups"]),
        "conv2d_input_grad": _convolution_grad("conv2d_input"),
        "conv2d_weight_grad": _convolution_grad("conv2d_weight"),
        "pool2d": _pool2d,
        "pool2d_grad": _pool2d_grad,
        "embedding": _embedding,
        "embedding_grad": _embedding_grad,
        "row_max": lambda t, x, a, out: x.amax(-1, keepdim=True),
        "pick": _pick,
        "pick_grad": _pick_grad,
        "argmax": lambda t, x, a, out: x.argmax(-1).to(torch_dtype(out[0])),
        "top_k": _top_k,
        "top_k_grad": lambda t, x, places, dy, a, out: t.zeros_like(x).scatter_add(-1, places.long(), dy),
        "dispatch": _dispatch,
        "collect": _collect,
        "sgd": lambda t, w, g, a, out: w - a["rate"] * g,
        "adam": _adam,
    }
)
"""Kernels by name of the op. Each takes torch, the operands, `a` (attributes) and `out` (types of the outputs)."""
