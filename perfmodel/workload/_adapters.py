"""Low-rank adapters beside frozen products: y = W x + (alpha / r) B A dropout(x) (LoRA, Hu et al., arXiv 2106.09685,
section 4.1), each step a kernel of its own (NeMo 2.0 nemo/collections/nlp/modules/common/megatron/adapters/
parallel_adapters.py `ParallelLinearAdapter`; Hugging Face peft 0.10 tuners/lora/layer.py `Linear.forward`).

They compute next to nothing, but pass over whole activations time and again: two fifths of what a layer's products
read and write.
"""

from perfmodel.ops import Gemm
from perfmodel.workload._local import Local
from perfmodel.workload._piece import Piece, memory


def adapter(local: Local, rows: int, n: int, k: int, *, out_rows: int | None = None) -> tuple[Piece, ...]:
    """The adapter of a product of [rows, k] by [k, n]; none where the job has no rank for it.

    Args:
        out_rows: rows of the product's result, where tensor parallelism scatters it.
    """
    rank = local.job.adapter_rank
    if not rank:
        return ()
    precision, out = local.precision, rows if out_rows is None else out_rows

    def product(m: int, n: int, k: int, pass_: str) -> Gemm:
        return Gemm(dtype=precision.act_dtype, m=m, n=n, k=k, pass_=pass_)  # pyright: ignore[reportArgumentType]

    forward = (
        memory(precision, "dropout", rows, k),
        product(rows, rank, k, "fwd"),
        product(out, n, rank, "fwd"),
        memory(precision, "mul_scalar", out, n),
        memory(precision, "add", out, n, 2),
    )
    backward = (
        memory(precision, "mul_scalar", out, n),
        product(out, rank, n, "dgrad"),
        product(n, rank, out, "wgrad"),
        product(rows, k, rank, "dgrad"),
        product(rank, k, rows, "wgrad"),
        memory(precision, "dropout", rows, k, backward=True),
        memory(precision, "add", rows, k, 2),
    )
    kept_bytes = float(rows) * k * (local.act_bytes + 1)  # the input as it was dropped from, and the mask
    return (Piece(forward=forward, backward_input=backward, saved_bytes=kept_bytes, params=rank * (n + k)),)
