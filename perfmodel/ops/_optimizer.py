"""The update of parameters."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.ops._family import Axis, Family, Measurement, ShapeColumn
from perfmodel.ops._kernel import KernelOp, Pass, Shape, Work
from perfmodel.ops._physics import Machine, Physics, log2
from perfmodel.ops._programs import Program, Tensors, jax_array, torch_module


def _work(xp: Any, x: Shape) -> Work:
    """12 FLOPs per parameter (Adam)."""
    return Work(12.0 * x["n_params"], x["n_params"] * x["bytes_per_param"])


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerStep(KernelOp):
    """One fused optimizer update of `n_params` local parameters."""

    op: str = "adam"
    dtype: str = "fp32"
    n_params: int
    bytes_per_param: float = 30.0
    """Memory traffic per parameter: Adam with fp32 states and a 2-byte copy reads the gradient (4),
    master, momentum, variance (12) and writes them (12) and the 2-byte weight (2) = 30."""
    tensors: int = 1
    pass_: Pass = "optimizer_update"

    family = "optimizer"
    work = staticmethod(_work)

    @property
    def label(self) -> str:
        return f"{self.op} {self.n_params} params"


def _physics(xp: Any, x: Shape, machine: Machine) -> Physics:
    """One update of all local parameters."""
    count, tensors = x["n_params"], x["tensors"]
    flops, traffic = _work(xp, x)
    features = [log2(xp, count), log2(xp, tensors), log2(xp, count / tensors), log2(xp, traffic / machine.l2)]
    return Physics(flops, flops, traffic, features, [log2(xp, count), log2(xp, tensors)])


def _check(op: OptimizerStep) -> None:
    if (op.op, op.dtype, op.bytes_per_param, op.tensors) != ("adam", "fp32", 28.0, 1):
        raise PerfModelError(
            f"the optimizer measured is fp32 adam over one tensor (bytes_per_param = 28, tensors = 1); got {op}"
        )


def _jax_program(op: OptimizerStep, rng: np.random.Generator) -> Program:
    """Adam (arXiv 1412.6980, algorithm 1) on flat arrays updated in place, all fp32: 28 bytes per parameter."""
    import jax
    import jax.numpy as jnp

    def adam(weight: Any, momentum: Any, variance: Any, gradient: Any) -> tuple[Any, Any, Any]:
        momentum = 0.9 * momentum + 0.1 * gradient
        variance = 0.999 * variance + 0.001 * gradient * gradient
        return weight - 1e-4 * momentum / (jnp.sqrt(variance) + 1e-8), momentum, variance

    weight, gradient = (jax_array(rng, op.dtype, op.n_params) for _ in range(2))
    # two arrays, not one twice: a donated buffer may be given up only once
    states = (jnp.zeros_like(weight), jnp.zeros_like(weight))
    return Program(jax.jit(adam, donate_argnums=(0, 1, 2)), (weight, *states, gradient), carried=3)


def _torch_program(op: OptimizerStep, make: Tensors) -> Program:
    """torch's fused Adam on one flat fp32 tensor: 28 bytes per parameter."""
    torch = torch_module()
    weight = torch.nn.Parameter(make(op.n_params))
    weight.grad = make(op.n_params)
    return Program(torch.optim.Adam([weight], lr=1e-4, fused=True).step, ())


OPTIMIZER: Final = Family(
    op=OptimizerStep,
    columns={
        "n_params": ShapeColumn(), "tensors": ShapeColumn(1, column="param_tensors"),
        "bytes_per_param": ShapeColumn(30, low=0),
    },
    axes=(Axis("n_params", 10, 36, 1), Axis("tensors", 0, 12, 1)),
    physics=_physics,
    known_op=lambda op: "sgd" if "sgd" in op else "adam",
    measurement=Measurement(
        passes=("optimizer_update",), jax_program=_jax_program, torch_program=_torch_program, check=_check
    ),
)  # fmt: skip
