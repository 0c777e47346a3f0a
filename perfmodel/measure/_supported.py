"""Which ops can be measured: checked for a whole plan before anything runs."""

from collections.abc import Collection
from typing import Final

from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.spec import Attention, Convolution, Embedding, Gemm, KernelOp, MemoryBound, OptimizerStep

MEMORY_OPS: Final[dict[str, int]] = {
    "add": 2, "mul": 2, "silu_mul": 2, "relu": 1, "gelu": 1, "silu": 1, "tanh": 1, "softmax": 1, "layer_norm": 1,
    "rms_norm": 1,
}  # fmt: skip
"""Memory-bound kernels with a program, and their number of inputs."""
PASSES: Final[dict[type[KernelOp], tuple[str, ...]]] = {
    Gemm: ("fwd", "bwd", "dgrad", "wgrad"),
    MemoryBound: ("fwd", "bwd"),
    Embedding: ("fwd", "bwd"),
    Attention: ("fwd", "bwd"),
    OptimizerStep: ("optimizer_update",),
    Convolution: ("fwd", "bwd", "dgrad", "wgrad"),
}
"""Passes with a program."""
MEASURED_FAMILIES: Final[dict[str, type[KernelOp]]] = {op.family: op for op in PASSES}


def check_kernel(op: KernelOp, dtypes: Collection[str] = ("fp32", "bf16", "fp16")) -> None:
    """Raise `PerfModelError` unless backends have a program for the op; by default those of any device."""
    if type(op) not in PASSES:
        raise PerfModelError(f"no program measures {op.family!r}; remove it from the plan")
    if op.dtype not in dtypes:
        raise UnknownNameError("dtype to measure", op.dtype, dtypes)
    if op.pass_ not in PASSES[type(op)]:
        raise UnknownNameError(f"pass of {op.op}", op.pass_, PASSES[type(op)])
    match op:
        case Gemm(dtype="fp8") if op.pass_ == "bwd" or op.accumulate or op.batch * op.groups > 1:
            raise PerfModelError(
                f"fp8 products are measured singly, as fwd, dgrad or wgrad without accumulation; got {op}"
            )
        case MemoryBound() if op.op not in MEMORY_OPS:
            raise UnknownNameError("memory-bound kernel to measure", op.op, MEMORY_OPS)
        case MemoryBound() if op.n_inputs != MEMORY_OPS[op.op]:
            raise PerfModelError(f"{op.op} has n_inputs = {MEMORY_OPS[op.op]}, got {op.n_inputs}")
        case Attention() if op.window:
            raise PerfModelError(f"attention with a sliding window ({op.window}) has no program; use window = 0")
        case Attention() if op.heads % op.kv_heads:
            raise PerfModelError(f"heads = {op.heads} must be a multiple of kv_heads = {op.kv_heads}")
        case OptimizerStep() if (op.op, op.dtype, op.bytes_per_param, op.tensors) != ("adam", "fp32", 28.0, 1):
            raise PerfModelError(
                f"the optimizer measured is fp32 adam over one tensor (bytes_per_param = 28, tensors = 1); got {op}"
            )
