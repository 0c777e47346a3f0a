"""The update of parameters."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.ops._op import Axis, Family, KernelOp, Measurement, Pass, Shape, ShapeColumn, Work
from perfmodel.ops.physics import Machine, Physics, log2
from perfmodel.ops.programs import (
    JAX_DTYPES,
    TORCH_DTYPES,
    Program,
    Tensors,
    jax_array,
    torch_module,
)


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
    features = [
        log2(xp, count),
        log2(xp, tensors),
        log2(xp, count / tensors),
        log2(xp, traffic / machine.l2),
    ]
    return Physics(flops, flops, traffic, features, [log2(xp, count), log2(xp, tensors)])


class AdamPasses(NamedTuple):
    """Passes of an Adam update in addition to the update of fp32 weights and states."""

    copy_dtype: str = ""
    """16-bit type of the copy of weights; empty: no copy."""
    clips: bool = False
    """Gradients are read for their norm and rescaled to clip it."""
    unscales: bool = False
    """16-bit gradients are copied to fp32 and divided by the loss scale."""


MEASURED_ADAM: Final = {
    28.0: AdamPasses(),
    30.0: AdamPasses("bf16"),
    42.0: AdamPasses("bf16", clips=True),
    56.0: AdamPasses("fp16", clips=True, unscales=True),
}
"""Updates of Adam that can be measured, by their traffic per parameter."""


def _check(op: OptimizerStep) -> None:
    """Raise `PerfModelError` for a step that no program measures."""
    if (op.op, op.dtype) != ("adam", "fp32") or op.bytes_per_param not in MEASURED_ADAM:
        raise PerfModelError(
            "only adam with fp32 states can be measured, with bytes_per_param = "
            f"{', '.join(f'{n:g}' for n in MEASURED_ADAM)}; got {op}"
        )
    if op.n_params < op.tensors:
        raise PerfModelError(
            f"{op.n_params} parameters cannot be divided into {op.tensors} tensors"
        )


def _sizes(op: OptimizerStep) -> list[int]:
    """Parameters of each tensor, as equal as possible."""
    return [op.n_params // op.tensors + (i < op.n_params % op.tensors) for i in range(op.tensors)]


def _jax_program(op: OptimizerStep, rng: np.random.Generator) -> Program:
    """Adam (arXiv 1412.6980, algorithm 1) on flat arrays updated in place."""
    import jax
    import jax.numpy as jnp

    passes = MEASURED_ADAM[op.bytes_per_param]
    copy_dtype = JAX_DTYPES[passes.copy_dtype] if passes.copy_dtype else ""

    def adam(
        weights: Any, momenta: Any, variances: Any, gradients: Any
    ) -> tuple[Any, Any, Any, Any]:
        momenta = [0.9 * m + 0.1 * g for m, g in zip(momenta, gradients, strict=True)]
        variances = [0.999 * v + 0.001 * g * g for v, g in zip(variances, gradients, strict=True)]
        states = zip(weights, momenta, variances, strict=True)
        weights = [w - 1e-4 * m / (jnp.sqrt(v) + 1e-8) for w, m, v in states]
        copies = [w.astype(copy_dtype) for w in weights] if copy_dtype else []
        return weights, momenta, variances, copies

    # Each a program of its own, as frameworks launch them: compiled as one they would share their
    # reads.
    norm = jax.jit(lambda gs: jnp.sqrt(sum(jnp.vdot(g, g) for g in gs)))
    clip = jax.jit(lambda gs, n: [g * jnp.minimum(1.0, 1.0 / n) for g in gs], donate_argnums=0)
    widen = jax.jit(lambda gs: [g.astype(jnp.float32) for g in gs])
    # The traffic does not depend on the loss scale, as that of clipping does not depend on the
    # threshold.
    unscale = jax.jit(lambda gs: [g / 1024 for g in gs], donate_argnums=0)
    update = jax.jit(adam, donate_argnums=(0, 1, 2))

    # Gradients of 16 bits are given anew in every step; those that were clipped take the place of
    # the others.
    keeps_gradients = passes.clips and not passes.unscales

    # All arrays of a step in one row, as a program's arguments are: weights, momenta, variances,
    # gradients.
    def step(*arrays: Any) -> tuple[Any, ...]:
        n = op.tensors
        weights = arrays[:n]
        momenta = arrays[n : 2 * n]
        variances = arrays[2 * n : 3 * n]
        gradients = arrays[3 * n :]
        if passes.unscales:
            gradients = unscale(widen(gradients))
        if passes.clips:
            gradients = clip(gradients, norm(gradients))
        weights, momenta, variances, copies = update(weights, momenta, variances, gradients)
        carried_gradients = gradients if keeps_gradients else ()
        return (*weights, *momenta, *variances, *carried_gradients, *copies)

    gradient_dtype = passes.copy_dtype if passes.unscales else op.dtype
    weights = [jax_array(rng, op.dtype, n) for n in _sizes(op)]
    gradients = [jax_array(rng, gradient_dtype, n) for n in _sizes(op)]

    # Momenta and variances are arrays of their own: a donated buffer may be given up only once.
    states = [jnp.zeros_like(w) for w in (*weights, *weights)]
    carried = op.tensors * (4 if keeps_gradients else 3)
    return Program(step, (*weights, *states, *gradients), carried=carried)


def _torch_program(op: OptimizerStep, make: Tensors) -> Program:
    """torch's fused Adam on fp32 tensors; the 16-bit weights are copied after it, which reads the
    fp32 ones again."""
    torch = torch_module()
    passes = MEASURED_ADAM[op.bytes_per_param]
    weights = [torch.nn.Parameter(make(n)) for n in _sizes(op)]
    for weight in weights:
        weight.grad = make(weight.numel())
    update = torch.optim.Adam(weights, lr=1e-4, fused=True).step
    if not passes.copy_dtype:
        return Program(update, ())

    # The buffers are made before anything is timed: a step only copies into them.
    copy_dtype = getattr(torch, TORCH_DTYPES[passes.copy_dtype])
    gradients = [w.grad for w in weights]
    masters = [w.data for w in weights]
    copies = [torch.Tensor.to(master, copy_dtype) for master in masters]
    half_gradients = [torch.Tensor.to(gradient, copy_dtype) for gradient in gradients]

    def step() -> None:
        if passes.unscales:
            torch._foreach_copy_(gradients, half_gradients)
            torch._foreach_mul_(gradients, 1 / 1024)
        if passes.clips:
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
        update()
        torch._foreach_copy_(copies, masters)

    return Program(step, ())


OPTIMIZER: Final = Family(
    op=OptimizerStep,
    columns={
        "n_params": ShapeColumn(),
        "tensors": ShapeColumn(1, column="param_tensors"),
        "bytes_per_param": ShapeColumn(30, low=0),
    },
    axes=(Axis("n_params", 10, 36, 1), Axis("tensors", 0, 12, 1)),
    physics=_physics,
    known_op=lambda op: "sgd" if "sgd" in op else "adam",
    measurement=Measurement(
        passes=("optimizer_update",),
        jax_program=_jax_program,
        torch_program=_torch_program,
        check=_check,
    ),
)
