"""A kernel as something to be timed: programs of JAX and of torch on random inputs.

JAX stores weights [in, out] as Flax does, and a backward program starts from the saved inputs and
the output's gradient and recomputes what it needs inside the same kernel. torch stores them [out,
in], and a backward program is the backward pass alone, from what the forward saved; embeddings get
their dense gradient. Both are imported on use only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from perfmodel.display import shorten_reprs

if TYPE_CHECKING:
    from perfmodel.ops._op import KernelOp

JAX_DTYPES: Final[dict[str, str]] = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
}
TORCH_DTYPES: Final = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "tf32": "float32",
}
FP8: Final = "float8_e4m3fn"
MOST_RANDOM: Final = 1 << 22
"""Most distinct random elements of an array; larger arrays repeat them, because drawing them would
take longer than timing."""


Tensor = Any
"""A `torch.Tensor`."""


@dataclass(frozen=True)
class Program:
    """A compiled function and its arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    carried: int = 0
    """Leading arguments that each call gives up and returns anew (updated in place)."""


def random_values(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal float32 values of the shape. Larger shapes get `MOST_RANDOM` values, which
    the caller repeats."""
    size = prod(shape)
    drawn_shape = shape if size <= MOST_RANDOM else MOST_RANDOM
    return rng.standard_normal(drawn_shape, np.float32)


def jax_array(rng: np.random.Generator, dtype: str, *shape: int) -> Any:
    """Random array of the element type on the default device."""
    import jax.numpy as jnp

    # random rather than zeros, as the power that a kernel draws, and so its clock, follows from its
    # operands
    element_type = FP8 if dtype == "fp8" else JAX_DTYPES[dtype]
    values = jnp.asarray(random_values(rng, shape), element_type)
    return values if values.shape == shape else jnp.resize(values, shape)


def jax_pass(
    op: "KernelOp",
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    wanted: dict[str, tuple[int, ...]],
) -> Program:
    """Return the function itself for the forward pass; for another pass, its gradients with respect
    to the inputs that `wanted` lists for this pass."""
    import jax
    import jax.numpy as jnp

    if op.pass_ == "fwd":
        return Program(jax.jit(function), inputs)
    chosen = wanted[op.pass_]

    # Compute only the gradients of this pass: all other inputs are constants and cost no work.
    def backward(gradient: Any, *values: Any) -> tuple[Any, ...]:
        def of_chosen(*parts: Any) -> Any:
            full = list(values)
            for index, part in zip(chosen, parts, strict=True):
                full[index] = part
            return function(*full)

        return jax.vjp(of_chosen, *(values[i] for i in chosen))[1](gradient)

    # the shape alone, without running the forward
    output = jax.eval_shape(function, *inputs)
    return Program(jax.jit(backward), (jnp.ones(output.shape, output.dtype), *inputs))


def torch_module() -> Any:
    """Import torch, which is installed only with the extra."""
    import torch  # pyright: ignore[reportMissingImports]

    return torch


class Tensors:
    """Makes random tensors of one element type."""

    def __init__(self, rng: np.random.Generator, device: str, dtype: str) -> None:
        self.rng = rng
        self.device = device
        self.dtype = dtype

    def __call__(self, *shape: int) -> Tensor:
        torch = torch_module()
        dtype = (
            torch.float8_e4m3fn if self.dtype == "fp8" else getattr(torch, TORCH_DTYPES[self.dtype])
        )
        values = torch.from_numpy(random_values(self.rng, shape)).to(self.device).to(dtype)
        if values.shape == shape:
            return values
        size = prod(shape)
        return values.repeat(-(-size // values.numel()))[:size].clone().view(shape)

    def indices(self, high: int, count: int) -> Tensor:
        return torch_module().from_numpy(self.rng.integers(0, high, count)).to(self.device)


def torch_pass(
    op: "KernelOp",
    function: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    wanted: dict[str, tuple[int, ...]],
) -> Program:
    """The function itself for `fwd`; else the backward pass to the inputs that `wanted` names for
    the pass."""
    torch = torch_module()
    if op.pass_ == "fwd":
        return Program(function, inputs)
    # the forward runs once, before anything is timed; its graph is kept for every repetition of the
    # backward
    chosen = [inputs[i].requires_grad_() for i in wanted[op.pass_]]
    output = function(*inputs)
    gradient = torch.ones_like(output)
    return Program(lambda: torch.autograd.grad(output, chosen, gradient, retain_graph=True), ())


shorten_reprs(__name__)
