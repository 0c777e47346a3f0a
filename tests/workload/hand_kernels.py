"""A small model with no two sizes alike, and kernels by their names and sizes, for tests that list
them by hand."""

from typing import Any, NamedTuple

from perfmodel.ops import Attention, Embedding, Gemm, KernelOp, MemoryBound, MoE, Recurrence
from perfmodel.spec import Transformer

BATCH, S, H, HEADS, KV, D, FFN, VOCAB = 3, 48, 40, 4, 2, 12, 72, 131
TOKENS = BATCH * S
Kernel = tuple[Any, ...]

PLAIN = Transformer(
    name="plain",
    layers=1,
    hidden=H,
    heads=HEADS,
    kv_heads=KV,
    head_dim=D,
    ffn_hidden=FFN,
    vocab=VOCAB,
    seq_len=S,
    bias=False,
    dropout=False,
    positions="none",
    tied_embeddings=False,
)
"""Without biases, dropout and positions: what these add has tests of its own."""


class Rank(NamedTuple):
    """A rank of tensor parallelism."""

    tp: int = 1
    sequence_parallel: bool = False

    @property
    def rows(self) -> int:
        """Tokens that norms and residual additions of the rank see."""
        return TOKENS // self.tp if self.sequence_parallel else TOKENS

    @property
    def heads(self) -> int:
        return HEADS // self.tp

    @property
    def kv_heads(self) -> int:
        return KV // self.tp


RANKS = [Rank(), Rank(2), Rank(2, sequence_parallel=True)]


def linear(rows: int, columns: int, inner: int) -> Kernel:
    return ("linear", rows, columns, inner)


def pointwise(name: str, rows: int, width: int, inputs: int = 1) -> Kernel:
    return (name, rows, width, inputs)


def named(op: KernelOp) -> Kernel:
    """A kernel by its name and sizes."""
    match op:
        case Gemm(op="linear"):
            return ("linear", op.m, op.n, op.k)
        case Gemm():
            return (op.op, op.batch, op.groups, op.m, op.n, op.k)
        case MemoryBound():
            return (op.op, op.rows, op.hidden, op.n_inputs)
        case Attention():
            values = op.head_dim_v or op.head_dim
            return (
                op.op,
                op.batch,
                op.heads,
                op.kv_heads,
                op.seq_q,
                op.seq_kv,
                op.head_dim,
                values,
            )
        case Recurrence():
            return (op.op, op.tokens, op.products_per_token, op.bytes_per_token)
        case Embedding():
            return (op.op, op.tokens, op.hidden, op.vocab)
        case MoE():
            return (op.op, op.tokens, op.hidden, op.inter)
    raise TypeError(op)


def listed(kernels: Any) -> list[Kernel]:
    return [named(op) for op, count in kernels for _ in range(count)]


def retraced(forward: list[Kernel]) -> list[Kernel]:
    """Gradients of inputs: the kernels in reverse, products with the transposed weight."""
    backward = []
    for kernel in reversed(forward):
        if kernel[0] == "linear":
            _, rows, columns, inner = kernel
            kernel = linear(rows, inner, columns)
        backward.append(kernel)
    return backward


def weight_gradients(forward: list[Kernel]) -> list[Kernel]:
    products = [kernel for kernel in reversed(forward) if kernel[0] == "linear"]
    return [linear(columns, inner, rows) for _, rows, columns, inner in products]
