"""Ops as torch programs on random inputs. Needs the extra `torch`.

Weights are stored [out, in] as torch does. A backward program is the backward pass alone, from what the
forward saved; embeddings get their dense gradient.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, Final

import numpy as np

from perfmodel.measure._programs import Program, random_values
from perfmodel.spec import Attention, Convolution, Embedding, Gemm, KernelOp, MemoryBound, OptimizerStep

TORCH_DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "tf32": "float32"}

Tensor = Any
"""A `torch.Tensor`."""


def torch_program(op: KernelOp, device: str, seed: int = 0) -> Program:
    """The op as a function of tensors on `device`; the op must have passed the backend's check."""
    make = _Tensors(np.random.default_rng(seed), device, op.dtype)
    match op:
        case Gemm(dtype="fp8"):
            return _fp8_gemm(op, make)
        case Gemm():
            return _gemm(op, make)
        case MemoryBound():
            return _memory(op, make)
        case Embedding():
            return _embedding(op, make)
        case Attention():
            return _attention(op, make)
        case OptimizerStep():
            return _optimizer(op, make)
        case Convolution():
            return _convolution(op, make)
    raise AssertionError(op)


def torch_module() -> Any:
    """torch, which is there only with the extra."""
    import torch  # pyright: ignore[reportMissingImports]

    return torch


class _Tensors:
    """Makes random tensors of one element type."""

    def __init__(self, rng: np.random.Generator, device: str, dtype: str) -> None:
        self.rng, self.device, self.dtype = rng, device, dtype

    def __call__(self, *shape: int) -> Tensor:
        torch = torch_module()
        dtype = torch.float8_e4m3fn if self.dtype == "fp8" else getattr(torch, TORCH_DTYPES[self.dtype])
        values = torch.from_numpy(random_values(self.rng, shape)).to(self.device).to(dtype)
        if values.shape == shape:
            return values
        size = prod(shape)
        return values.repeat(-(-size // values.numel()))[:size].clone().view(shape)

    def indices(self, high: int, count: int) -> Tensor:
        return torch_module().from_numpy(self.rng.integers(0, high, count)).to(self.device)


def _differentiated(
    op: KernelOp, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], wanted: dict[str, tuple[int, ...]]
) -> Program:
    """The function itself for `fwd`; else the backward pass to the inputs that `wanted` names for the pass."""
    torch = torch_module()
    if op.pass_ == "fwd":
        return Program(function, inputs)
    chosen = [inputs[i].requires_grad_() for i in wanted[op.pass_]]
    output = function(*inputs)
    gradient = torch.ones_like(output)
    return Program(lambda: torch.autograd.grad(output, chosen, gradient, retain_graph=True), ())


def _gemm(op: Gemm, make: _Tensors) -> Program:
    torch = torch_module()
    leading = tuple(size for size in (op.batch, op.groups) if size > 1)
    match op.pass_:
        case "fwd" | "bwd":
            function = torch.matmul if leading else torch.nn.functional.linear
            weight = (*leading, op.k, op.n) if leading else (op.n, op.k)
            return _differentiated(op, function, (make(*leading, op.m, op.k), make(*weight)), {"bwd": (0, 1)})
        case "dgrad":  # the output's gradient [m, k] times the weight [k, n]
            return Program(torch.matmul, (make(*leading, op.m, op.k), make(*leading, op.k, op.n)))
        case "wgrad":
            a, b = make(*leading, op.k, op.m), make(*leading, op.k, op.n)
            if not op.accumulate:
                return Program(lambda a, b: torch.matmul(a.mT, b), (a, b))
            total = torch.zeros((*leading, op.m, op.n), dtype=torch.float32, device=make.device)
            return Program(lambda a, b: total.add_(torch.matmul(a.mT, b)), (a, b))
    raise AssertionError(op.pass_)


def _fp8_gemm(op: Gemm, make: _Tensors) -> Program:
    """The product alone, its operands quantised already: rows by columns, as the matrix units want them."""
    torch = torch_module()
    one = torch.ones((), device=make.device)
    multiply = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return Program(multiply, (make(op.m, op.k), make(op.n, op.k).t()))


def _memory(op: MemoryBound, make: _Tensors) -> Program:
    torch, f = torch_module(), torch_module().nn.functional
    functions: dict[str, Callable[..., Tensor]] = {
        "add": torch.add, "mul": torch.mul, "silu_mul": lambda x, y: f.silu(x) * y, "relu": f.relu,
        "gelu": partial(f.gelu, approximate="tanh"), "silu": f.silu, "tanh": torch.tanh,
        "softmax": partial(f.softmax, dim=-1),
        "layer_norm": lambda x, scale, shift: f.layer_norm(x, (op.hidden,), scale, shift),
        "rms_norm": lambda x, scale: f.rms_norm(x, (op.hidden,), scale, 1e-5),
    }  # fmt: skip
    inputs = tuple(make(op.rows, op.hidden) for _ in range(op.n_inputs))
    if op.op in ("layer_norm", "rms_norm"):
        inputs += (torch.ones_like(inputs[0][0]),)
    if op.op == "layer_norm":
        inputs += (torch.zeros_like(inputs[0][0]),)
    return _differentiated(op, functions[op.op], inputs, {"bwd": tuple(range(len(inputs)))})


def _embedding(op: Embedding, make: _Tensors) -> Program:
    lookup = torch_module().nn.functional.embedding
    table, tokens = make(op.vocab, op.hidden), make.indices(op.vocab, op.tokens)
    return _differentiated(op, lambda table, ids: lookup(ids, table), (table, tokens), {"bwd": (0,)})


def _attention(op: Attention, make: _Tensors) -> Program:
    """`scaled_dot_product_attention`, which picks the fused kernel; the last query sees every key."""
    from torch.nn.attention.bias import causal_lower_right  # pyright: ignore[reportMissingImports]

    q = make(op.batch, op.heads, op.seq_q, op.head_dim)
    k = make(op.batch, op.kv_heads, op.seq_kv, op.head_dim)
    v = make(op.batch, op.kv_heads, op.seq_kv, op.head_dim_v or op.head_dim)
    square = op.seq_q == op.seq_kv
    masked = op.causal and not square and op.seq_q > 1
    attend = partial(
        torch_module().nn.functional.scaled_dot_product_attention,
        attn_mask=causal_lower_right(op.seq_q, op.seq_kv) if masked else None,
        is_causal=op.causal and square,
        **({"enable_gqa": True} if op.heads != op.kv_heads else {}),
    )
    return _differentiated(op, attend, (q, k, v), {"bwd": (0, 1, 2)})


def _optimizer(op: OptimizerStep, make: _Tensors) -> Program:
    """torch's fused Adam on one flat fp32 tensor: 28 bytes per parameter."""
    torch = torch_module()
    weight = torch.nn.Parameter(make(op.n_params))
    weight.grad = make(op.n_params)
    return Program(torch.optim.Adam([weight], lr=1e-4, fused=True).step, ())


def _convolution(op: Convolution, make: _Tensors) -> Program:
    convolve = partial(
        torch_module().nn.functional.conv2d,
        stride=(op.stride_h, op.stride_w), padding=(op.pad_h, op.pad_w), groups=op.groups,
    )  # fmt: skip
    inputs = (make(op.batch, op.c_in, op.h_in, op.w_in), make(op.c_out, op.c_in // op.groups, op.k_h, op.k_w))
    return _differentiated(op, convolve, inputs, {"bwd": (0, 1), "dgrad": (0,), "wgrad": (1,)})
