"""Chunked linear recurrences: state spaces and delta rules."""

from dataclasses import dataclass
from typing import Any, Final

from perfmodel.ops._op import Axis, Family, KernelOp, Pass, Shape, ShapeColumn, Work
from perfmodel.ops.physics import Machine, Physics, lane_operations, log2

_LANE_OPERATIONS_PER_BYTE: Final = 20.6
"""Slots of vector lanes per byte that passes between kernels of the chain: decay factors, masks,
conversions and waits between small products, which limit these kernels more than memory or tensor
units do. So they move 6.2 bytes per multiprocessor and cycle, the geometric mean of two: 5.3 on
H100 (12.6 M tokens/s forward of 8,192 tokens, 128 heads of 64 by 128 in one group, chunks of 256,
mamba_ssm's kernels: vllm-project/vllm pull request 27299) and 7.2 on B200 (1.02 ms forward of 8
sequences of 1,024 tokens, 48 heads of 128 by 128, flash-linear-attention's kernels:
vllm-project/vllm pull request 43273)."""


def _work(xp: Any, x: Shape) -> Work:
    """Work of a recurrence: both gradients of every product in `bwd`, and the bytes of the pass."""
    return Work(
        2.0 * x["tokens"] * x["products_per_token"] * (1.0 + x["bwd"]),
        1.0 * x["tokens"] * x["bytes_per_token"],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrence(KernelOp):
    """A recurrence over `tokens`, by chunks: matrix products inside a chunk, states from chunk to
    chunk."""

    op: str
    """`state_space` (Mamba-2), `selective_scan` (the first Mamba), `delta_rule` (gated delta nets)
    or `linear_attention`."""
    dtype: str = "bf16"
    tokens: int
    products_per_token: int
    """Multiplications of its matrix products, forward."""
    bytes_per_token: int
    """Bytes that the kernels of this pass read and write; they exchange states and scores through
    memory."""
    pass_: Pass = "fwd"

    family = "recurrence"
    uses_matrix_units = True
    samples_field = "tokens"
    work = staticmethod(_work)

    @property
    def label(self) -> str:
        return f"{self.op} {self.tokens} tokens x{self.bytes_per_token} bytes {self.pass_}"


def _physics(xp: Any, x: Shape, machine: Machine) -> Physics:
    """Products, traffic, and the vector lanes' work for it."""
    flops, traffic = _work(xp, x)
    # the lanes' work goes with the bytes: what holds these kernels back is neither products nor
    # memory
    at = [log2(xp, x[name]) for name in ("tokens", "products_per_token", "bytes_per_token")]
    return Physics(
        flops,
        flops,
        traffic,
        at,
        at,
        lane_operations(xp, machine, _LANE_OPERATIONS_PER_BYTE * traffic),
    )


RECURRENCE: Final = Family(
    op=Recurrence,
    columns={name: ShapeColumn() for name in ("tokens", "products_per_token", "bytes_per_token")},
    axes=(
        Axis("tokens", 6, 20, 2),
        Axis("products_per_token", 8, 26, 2),
        Axis("bytes_per_token", 6, 22, 2),
    ),
    physics=_physics,
    known_op=lambda op: op,
)
