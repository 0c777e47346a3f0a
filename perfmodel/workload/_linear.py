"""Dense products with their gradients, plain, column-parallel and row-parallel, and low-rank adapters beside them.

Collectives are Megatron's operators f and f-bar (arXiv 1909.08053, section 3) and, with sequence
parallelism, g and g-bar (arXiv 2205.05198, section 4.2.2).
"""

from perfmodel.ops import Gemm
from perfmodel.workload._block import Comm
from perfmodel.workload._local import Local, Precision
from perfmodel.workload._piece import Piece, memory
from perfmodel.workload._quantisation import gathered_bytes, kept_bytes, quantised, quantised_again


def linear(
    precision: Precision,
    m: int,
    n: int,
    k: int,
    *,
    bias: int = 0,
    kept_input: float = 1.0,
    kept_output: float = 0.0,
    forward_comm: tuple[Comm, ...] = (),
    backward_comm: tuple[Comm, ...] = (),
) -> Piece:
    """Y[m, n] = X[m, k] W[k, n] with input gradient dX = dY W' and weight gradient dW' = dY' X.

    Args:
        bias: bias parameters held by this device.
        kept_input: share of X kept for the weight gradient, if there is one (0 if another piece keeps it).
        kept_output: share of Y's bytes that is kept too, for a later piece that needs it.
    """
    dtype = precision.dtype
    # the weight gradient needs only the quantised input, where it is not quantised again
    input_bytes = float(m) * k * kept_bytes(precision) * kept_input * (not precision.frozen)
    weight = quantised_again(precision, n, k)
    return Piece(
        forward=(*quantised(precision, m, k), *weight, Gemm(dtype=dtype, m=m, n=n, k=k)),
        backward_input=(
            *quantised(precision, m, n, gradient=True),
            *weight,
            Gemm(dtype=dtype, m=m, n=k, k=n, pass_="dgrad"),
        ),
        backward_weight=(
            *quantised_again(precision, m, k),
            *quantised_again(precision, m, n, gradient=True),
            Gemm(dtype=dtype, m=n, n=k, k=m, pass_="wgrad", accumulate=precision.accumulate),
        ),
        forward_comm=forward_comm,
        backward_comm=backward_comm,
        params=n * k + bias,
        saved_bytes=input_bytes + float(m) * n * precision.act_bytes * kept_output,
        input_bytes=input_bytes,
    )


def column_linear(
    local: Local,
    n: int,
    k: int,
    *,
    bias: bool = False,
    tokens: int | None = None,
    kept_input: bool = True,
    kept_output: float = 0.0,
    shares_input: bool = False,
    communicates: bool = True,
) -> Piece:
    """Column-parallel product of `n` local columns over `tokens` rows (default: the shard's).

    Backward reduces the input gradient. With sequence parallelism forward gathers the input, only
    the rank's part of it is kept (unless `Job.keep_gathered`), and backward gathers it again behind the
    input gradient and scatters the reduction behind the weight gradient.

    Args:
        shares_input: an adapter beside it takes the same input, which is gathered in 16 bits for both (Transformer
            Engine `return_layernorm_output_gathered`, which NeMo's `LoRA` sets).
        communicates: False where another product of the same input gathers it, and reduces the sum of both gradients.
    """
    rows = local.tokens if tokens is None else tokens
    n_bytes = float(rows) * k * local.act_bytes
    gathered = n_bytes if shares_input else float(rows) * k * gathered_bytes(local.precision)
    forward: tuple[Comm, ...] = ()
    backward: tuple[Comm, ...] = ()
    if local.tp > 1 and communicates:
        if local.sequence_parallel:
            forward = (Comm(collective="all_gather", bytes=gathered, group="tp"),)
            again = Comm(collective="all_gather", bytes=gathered, group="tp", overlappable=True)
            scatter = Comm(collective="reduce_scatter", bytes=n_bytes, group="tp", overlappable=True)
            # a frozen weight's gradient, which the input is gathered for, is not computed
            backward = (scatter,) if local.job.keep_gathered or local.job.frozen else (again, scatter)
        else:
            backward = (Comm(collective="all_reduce", bytes=n_bytes, group="tp", overlappable=True),)
    share = 1 / local.tp if local.sequence_parallel and not local.job.keep_gathered else 1.0
    return linear(
        local.precision, rows, n, k, bias=n if bias else 0, kept_input=share if kept_input else 0.0,
        kept_output=kept_output, forward_comm=forward, backward_comm=backward,
    )  # fmt: skip


def row_linear(local: Local, n: int, k: int, *, bias: bool = False, communicates: bool = True) -> Piece:
    """Row-parallel product of `k` local rows of the weight: the output is a sum over ranks.

    Forward reduces it (scattered along the sequence with sequence parallelism, whose backward
    gathers the output gradient).

    Args:
        communicates: False where the output is added to another's, which is reduced for both.
    """
    n_bytes = float(local.tokens) * n * local.act_bytes
    forward: tuple[Comm, ...] = ()
    backward: tuple[Comm, ...] = ()
    if local.sequence_parallel and communicates:
        forward = (Comm(collective="reduce_scatter", bytes=n_bytes, group="tp"),)
        gathered = float(local.tokens) * n * gathered_bytes(local.precision)
        backward = (Comm(collective="all_gather", bytes=gathered, group="tp"),)
    elif local.tp > 1 and communicates:
        forward = (Comm(collective="all_reduce", bytes=n_bytes, group="tp"),)
    return linear(
        local.precision, local.tokens, n, k, bias=n if bias else 0, forward_comm=forward, backward_comm=backward
    )


def adapter(local: Local, rows: int, n: int, k: int, *, out_rows: int | None = None) -> tuple[Piece, ...]:
    """The low-rank adapter beside a frozen product of [rows, k] by [k, n]; none where the job has no rank for it.

    y = W x + (alpha / r) B A dropout(x) (LoRA, Hu et al., arXiv 2106.09685, section 4.1), each step a kernel of its own
    (NeMo 2.0 nemo/collections/nlp/modules/common/megatron/adapters/parallel_adapters.py `ParallelLinearAdapter`;
    Hugging Face peft 0.10 tuners/lora/layer.py `Linear.forward`). They compute next to nothing, but pass over whole
    activations time and again: two fifths of what a layer's products read and write.

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
