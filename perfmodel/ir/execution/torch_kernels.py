"""PyTorch implementation of every op that runs on one device, as users' training scripts call it.

In the form of the JAX kernels, after the package `torch`. Fused gradients are ATen's own.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from perfmodel.ir import Instruction, Tensor
from perfmodel.ir.execution._kernels import KernelCall, Outputs, jax_dtype


def torch_dtype(tensor: Tensor) -> Any:
    """Torch's dtype of a tensor.

    Raises:
        PerfModelError: a dtype that programs cannot be executed in.
    """
    import torch  # pyright: ignore[reportMissingImports]

    return getattr(torch, jax_dtype(tensor))


def torch_kernel(
    instruction: Instruction, outputs: Outputs, device: Any
) -> Callable[..., tuple[Any, ...]]:
    """The kernel of an instruction; takes and returns tensors on a device."""
    import torch  # pyright: ignore[reportMissingImports]

    # Constants are placed once, not in every run, as a script would keep them.
    kernel = TORCH_KERNELS[instruction.op]
    call = KernelCall(dict(instruction.attributes), outputs)
    if instruction.op == "constant":
        value = torch.tensor(call["value"], dtype=torch_dtype(outputs[0]), device=device)
        return lambda: (value,)

    def run(*tensors: Any) -> tuple[Any, ...]:
        # Programs carry their own gradients; autograd's bookkeeping would cost time in every
        # kernel.
        with torch.no_grad():
            result = kernel(torch, *tensors, call=call)
        return result if isinstance(result, tuple) else (result,)

    return run


def _matmul(torch: Any, x: Any, w: Any, call: KernelCall) -> Any:
    """Multiply matrices, of which either may be transposed."""
    if call.get("transpose_a"):
        x = x.transpose(-1, -2)
    if call.get("transpose_b"):
        w = w.transpose(-1, -2)
    return torch.matmul(x, w)


def _weight_grad(torch: Any, x: Any, dy: Any, call: KernelCall) -> Any:
    rows = x.reshape(-1, x.shape[-1])
    gradient_rows = dy.reshape(-1, dy.shape[-1])
    return rows.T @ gradient_rows


def _approximation(call: KernelCall) -> str:
    """torch's name of how a GELU is computed."""
    return "none" if call.get("exact") else "tanh"


def _gelu(torch: Any, x: Any, call: KernelCall) -> Any:
    return torch.nn.functional.gelu(x, approximate=_approximation(call))


def _gelu_grad(torch: Any, x: Any, dy: Any, call: KernelCall) -> Any:
    return torch.ops.aten.gelu_backward(dy, x, approximate=_approximation(call))


def _layer_norm(torch: Any, x: Any, gain: Any, shift: Any, call: KernelCall) -> Any:
    return torch.nn.functional.layer_norm(x, gain.shape, gain, shift, call.get("epsilon", 1e-5))


def _layer_norm_grad(torch: Any, x: Any, gain: Any, dy: Any, call: KernelCall) -> Any:
    """Gradients of a layer norm's operands, by ATen's own backward kernel."""
    shape = list(gain.shape)
    epsilon = call.get("epsilon", 1e-5)
    # ATen's backward takes the statistics that its forward saves; the program's op has only
    # operands, so they are made anew.
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, shape, gain, None, epsilon)
    return torch.ops.aten.native_layer_norm_backward(
        dy.contiguous(), x, shape, mean, rstd, gain, torch.zeros_like(gain), [True, True, True]
    )


def _heads(qkv: Any, call: KernelCall) -> tuple[Any, Any, Any]:
    batch, seq, width = qkv.shape
    heads = call["heads"]
    return qkv.reshape(batch, seq, heads, 3, width // (3 * heads)).permute(3, 0, 2, 1, 4).unbind(0)


def _attention(torch: Any, *parts: Any, call: KernelCall) -> Any:
    """Queries of the last part of a sequence over the keys and values of all."""
    from torch.nn.attention.bias import causal_lower_right  # pyright: ignore[reportMissingImports]

    causal = bool(call.get("causal"))
    seq = parts[-1].shape[1]
    whole_sequence = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    q, k, v = _heads(whole_sequence, call)
    # Queries of a slice are the last positions of the keys: the causal mask is aligned at the lower
    # right. `is_causal` would let the first query see the first key alone.
    masked = causal and len(parts) > 1
    context = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, -seq:],
        k,
        v,
        is_causal=causal and not masked,
        attn_mask=causal_lower_right(seq, k.shape[2]) if masked else None,
    )
    return context.transpose(1, 2).reshape(call.outputs[0].shape)


def _attention_grad(torch: Any, *tensors: Any, call: KernelCall) -> Any:
    """Gradients of an attention's operands, by the backward kernel that torch picks."""
    *parts, dy = tensors
    # Autograd runs the backward of the kernel that torch picks, as a training script gets it; the
    # forward is repeated to record it.
    with torch.enable_grad():
        leaves = [part.detach().requires_grad_() for part in parts]
        forward_call = replace(call, outputs=(Tensor(call.outputs[0].dtype, tuple(dy.shape)),))
        return torch.autograd.grad(_attention(torch, *leaves, call=forward_call), leaves, dy)


def _conv2d(torch: Any, x: Any, w: Any, call: KernelCall) -> Any:
    dilation = 1
    return torch.nn.functional.conv2d(
        x, w, None, call["stride"], call["padding"], dilation, call["groups"]
    )


def _convolution_grad(name: str) -> Callable[..., Any]:
    """torch's own gradient of a convolution, of its input or its weight."""

    def kernel(torch: Any, first: Any, dy: Any, call: KernelCall) -> Any:
        # torch takes the size of what it is to give: of the input it cannot be known from the
        # output.
        grad = getattr(torch.nn.grad, name)
        shape = call.outputs[0].shape
        operands = (shape, first, dy) if name == "conv2d_input" else (first, shape, dy)
        return grad(*operands, call["stride"], call["padding"], 1, call["groups"])

    return kernel


def _pool2d(torch: Any, x: Any, call: KernelCall) -> Any:
    pool = torch.nn.functional.avg_pool2d
    if call["kind"] == "max":
        pool = torch.nn.functional.max_pool2d
    return pool(x, call["kernel"], call["stride"], call["padding"])


def _pool2d_grad(torch: Any, x: Any, dy: Any, call: KernelCall) -> Any:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(_pool2d(torch, leaf, call), leaf, dy)[0]


def _local(torch: Any, ids: Any, rows: int, call: KernelCall) -> tuple[Any, Any]:
    """Row numbers within this shard, and whether each lies in it."""
    local = ids.long() - call.get("offset", 0)
    is_local = (local >= 0) & (local < rows)
    return torch.where(is_local, local, 0), is_local


def _embedding(torch: Any, table: Any, ids: Any, call: KernelCall) -> Any:
    local, is_local = _local(torch, ids, table.shape[0], call)
    return torch.nn.functional.embedding(local, table) * is_local[..., None]


def _embedding_grad(torch: Any, table: Any, ids: Any, dy: Any, call: KernelCall) -> Any:
    """Add the gradients of looked-up rows up into a table of zeros."""
    local, is_local = _local(torch, ids, table.shape[0], call)
    if "padding" in call.attributes:
        is_local &= ids != call["padding"]
    hidden = table.shape[1]
    rows = (dy * is_local[..., None]).reshape(-1, hidden)
    return torch.zeros_like(table).index_add_(0, local.reshape(-1), rows)


def _pick(torch: Any, x: Any, labels: Any, call: KernelCall) -> Any:
    local, is_local = _local(torch, labels, x.shape[-1], call)
    return x.gather(-1, local[..., None]) * is_local[..., None]


def _pick_grad(torch: Any, x: Any, labels: Any, dy: Any, call: KernelCall) -> Any:
    local, is_local = _local(torch, labels, x.shape[-1], call)
    return torch.zeros_like(x).scatter_(-1, local[..., None], dy * is_local[..., None])


def _places(torch: Any, chosen: Any, experts: int) -> Any:
    one_hot = torch.nn.functional.one_hot(chosen.reshape(-1).long(), experts)
    return (one_hot.cumsum(0) * one_hot).sum(-1) - 1


def _top_k(torch: Any, x: Any, call: KernelCall) -> Any:
    values, places = x.topk(call["k"], -1)
    return values, places.to(torch_dtype(call.outputs[1]))


def _dispatch(torch: Any, x: Any, chosen: Any, call: KernelCall) -> Any:
    """Copy each token into the buffer of its expert, up to the buffer's capacity."""
    experts, capacity, hidden = call.outputs[0].shape
    # Tokens beyond an expert's capacity are dropped; torch has no out-of-bounds mode, hence the
    # mask.
    places = _places(torch, chosen, experts)
    tokens = x.reshape(-1, hidden)
    fits = places < capacity
    buffers = torch.zeros((experts, capacity, hidden), dtype=x.dtype, device=x.device)
    buffers[chosen.reshape(-1).long()[fits], places[fits]] = tokens[fits]
    return buffers


def _collect(torch: Any, buffers: Any, chosen: Any, call: KernelCall) -> Any:
    experts, capacity, hidden = buffers.shape
    places = _places(torch, chosen, experts)
    rows = buffers[chosen.reshape(-1).long(), places.clamp(max=capacity - 1)]
    return (rows * (places < capacity)[:, None]).reshape(*chosen.shape, hidden)


def _adam(torch: Any, w: Any, g: Any, m: Any, v: Any, call: KernelCall) -> Any:
    """Update weights by Adam, with their gradient and both moments."""
    beta1, beta2, step = call["beta1"], call["beta2"], call["step"]
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    root = (v / (1 - beta2**step)).sqrt()
    update = (m / (1 - beta1**step)) / (root + call["epsilon"])
    return w - call["rate"] * update, m, v


def _reshaped(torch: Any, x: Any, *shape: Any, call: KernelCall) -> Any:
    return x.reshape(call.outputs[0].shape)


def _take(torch: Any, x: Any, index: Any, call: KernelCall) -> Any:
    rows = x.index_select(call["axis"], index.reshape(-1).long())
    return rows.reshape(call.outputs[0].shape)


def _pad(torch: Any, x: Any, call: KernelCall) -> Any:
    """Pad a tensor; torch counts axes from the last."""
    sizes = [0, 0] * (x.dim() - 1 - call["axis"] % x.dim()) + [call["before"], call["after"]]
    return torch.nn.functional.pad(x, sizes, value=call.get("value", 0))


def _from_operands(name: str) -> Callable[..., Any]:
    """A kernel that calls a torch function with only the operands."""
    return lambda torch, *tensors, call: getattr(torch, name)(*tensors)


TORCH_KERNELS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        **{
            op: _from_operands(op)
            for op in (
                "add",
                "sub",
                "mul",
                "div",
                "exp",
                "log",
                "sqrt",
                "tanh",
                "sigmoid",
                "erf",
                "relu",
            )
        },
        "accumulate": _from_operands("add"),
        "scale": lambda torch, x, call: x * call["factor"],
        "relu_grad": lambda torch, x, dy, call: torch.ops.aten.threshold_backward(dy, x, 0),
        "gelu": _gelu,
        "gelu_grad": _gelu_grad,
        "sum": lambda torch, x, call: (x.sum(call["axes"]) if call["axes"] else x).reshape(
            call.outputs[0].shape
        ),
        "broadcast_like": lambda torch, x, like, call: x.expand(like.shape),
        "unequal": lambda torch, x, call: (x != call["value"]).to(torch_dtype(call.outputs[0])),
        "running_sum": lambda torch, x, call: x.cumsum(call["axis"]).to(
            torch_dtype(call.outputs[0])
        ),
        "cast": lambda torch, x, call: x.to(torch_dtype(call.outputs[0])),
        "matmul": _matmul,
        "matmul_weight_grad": _weight_grad,
        "constant": lambda torch, call: None,  # made once, by `torch_kernel`
        "shape": lambda torch, x, call: torch.tensor(x.shape, dtype=torch_dtype(call.outputs[0])),
        "reshape": _reshaped,
        "unsqueeze": _reshaped,
        "transpose": lambda torch, x, call: x.permute(call["permutation"]).contiguous(),
        "split": lambda torch, x, call: tuple(x.chunk(call["parts"], call["axis"])),
        "concat": lambda torch, *xs, call: torch.cat(xs, call["axis"]),
        "slice": lambda torch, x, call: x.narrow(
            call["axis"], call["start"], call["stop"] - call["start"]
        ),
        "pad": _pad,
        "take": _take,
        "layer_norm": _layer_norm,
        "layer_norm_grad": _layer_norm_grad,
        "softmax": lambda torch, x, call: torch.softmax(x, -1),
        "softmax_grad": lambda torch, y, dy, call: torch.ops.aten._softmax_backward_data(
            dy, y, -1, y.dtype
        ),
        "attention": _attention,
        "attention_grad": _attention_grad,
        "conv2d": _conv2d,
        "conv2d_input_grad": _convolution_grad("conv2d_input"),
        "conv2d_weight_grad": _convolution_grad("conv2d_weight"),
        "pool2d": _pool2d,
        "pool2d_grad": _pool2d_grad,
        "embedding": _embedding,
        "embedding_grad": _embedding_grad,
        "row_max": lambda torch, x, call: x.amax(-1, keepdim=True),
        "pick": _pick,
        "pick_grad": _pick_grad,
        "argmax": lambda torch, x, call: x.argmax(-1).to(torch_dtype(call.outputs[0])),
        "top_k": _top_k,
        "top_k_grad": lambda torch, x, places, dy, call: torch.zeros_like(x).scatter_add(
            -1, places.long(), dy
        ),
        "dispatch": _dispatch,
        "collect": _collect,
        "sgd": lambda torch, w, g, call: w - call["rate"] * g,
        "adam": _adam,
    }
)
"""Kernels by name of the op. Each takes torch, the operands, a `KernelCall`."""
