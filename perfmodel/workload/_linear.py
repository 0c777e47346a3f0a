"""Dense products with gradients (plain, column-parallel, row-parallel) and low-rank adapters.

Collectives are Megatron's operators f and f-bar (arXiv 1909.08053, section 3) and, with sequence
parallelism, g and g-bar (arXiv 2205.05198, section 4.2.2).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from perfmodel.ops import Gemm, KernelOp
from perfmodel.spec import AdapterModule
from perfmodel.workload._block import Comm
from perfmodel.workload._local import Precision, ShardSizes
from perfmodel.workload._piece import Piece, memory
from perfmodel.workload._quantisation import (
    NO_CASTS,
    WIDE_WEIGHT_GRADIENTS,
    casts_operands,
    gathered_bytes,
    kept_bytes,
    product_casts,
)


def linear(
    precision: Precision,
    m: int,
    n: int,
    k: int,
    *,
    bias: int = 0,
    kept_input: float = 1.0,
    kept_output: float = 0.0,
    narrow_input: bool = False,
    narrow_gradient: bool = False,
    forward_comm: tuple[Comm, ...] = (),
    backward_comm: tuple[Comm, ...] = (),
) -> Piece:
    """Y[m, n] = X[m, k] W[k, n] with input gradient dX = dY W' and weight gradient dW' = dY' X.

    Args:
        bias: bias parameters held by this device.
        kept_input: share of X kept for the weight gradient, if there is one (0 if another piece
            keeps it).
        kept_output: share of Y's bytes that is kept too, for a later piece that needs it.
        narrow_input, narrow_gradient: whatever makes X, or dY, already writes it in the type of the
            products.
    """
    # Kept for the weight gradient, which needs only the quantised input where it is not quantised
    # again.
    dtype = precision.dtype
    input_bytes = float(m) * k * kept_bytes(precision) * kept_input * (not precision.frozen)

    # Kernels around the products: a weight that is stored narrow is widened, operands are
    # quantised.
    casts = product_casts(precision, m, n, k) if casts_operands(precision) else NO_CASTS
    input_casts = () if narrow_input else casts.input
    gradient_casts = () if narrow_gradient else casts.gradient
    return Piece(
        forward=(*input_casts, *casts.weight, Gemm(dtype=dtype, m=m, n=n, k=k)),
        backward_input=(
            *gradient_casts,
            *casts.weight,
            Gemm(dtype=dtype, m=m, n=k, k=n, pass_="dgrad"),
            *casts.rescaled_input_gradient,
        ),
        backward_weight=(
            *casts.weight_gradient,
            Gemm(
                dtype=precision.wide_dtype if precision.recipe in WIDE_WEIGHT_GRADIENTS else dtype,
                m=n,
                n=k,
                k=m,
                pass_="wgrad",
                accumulate=precision.accumulate,
            ),
            *casts.rescaled_weight_gradient,
        ),
        forward_comm=forward_comm,
        backward_comm=backward_comm,
        params=n * k + bias,
        saved_bytes=input_bytes + float(m) * n * precision.act_bytes * kept_output,
        input_bytes=input_bytes,
    )


def column_linear(
    local: ShardSizes,
    n: int,
    k: int,
    *,
    bias: bool = False,
    tokens: int | None = None,
    kept_input: bool = True,
    kept_output: float = 0.0,
    shares_input: bool = False,
    narrow_gradient: bool = False,
    communicates: bool = True,
) -> Piece:
    """Column-parallel product of `n` local columns over `tokens` rows (default: the shard's).

    Backward reduces the input gradient. With sequence parallelism forward gathers the input, only
    the rank's part of it is kept (unless `Job.keep_gathered`), and backward gathers it again behind
    the input gradient and scatters the reduction behind the weight gradient.

    Args:
        shares_input: an adapter beside it takes the same input, which is gathered in 16 bits for
            both (Transformer Engine `return_layernorm_output_gathered`, which NeMo's `LoRA` sets).
        narrow_gradient: as for `linear`.
        communicates: False where another product of the same input gathers it, and reduces the sum
            of both gradients.
    """
    rows = local.tokens if tokens is None else tokens
    forward: tuple[Comm, ...] = ()
    backward: tuple[Comm, ...] = ()
    if local.tp > 1 and communicates:
        forward, backward = _input_collectives(local, rows, k, in_16_bits=shares_input)
    share = (
        1 / local.tp if local.sequence_parallel and not local.job.activations.keep_gathered else 1.0
    )
    product = linear(
        local.precision,
        rows,
        n,
        k,
        bias=n if bias else 0,
        kept_input=share if kept_input else 0.0,
        kept_output=kept_output,
        narrow_gradient=narrow_gradient,
        forward_comm=forward,
        backward_comm=backward,
    )
    if not communicates or "sequence_copy" not in local.job.kernels.eager_kernels:
        return product
    return replace(
        product,
        forward=(*gather_copy(local, rows, k), *product.forward),
        backward_input=(*product.backward_input, *scatter_copy(local, rows, k)),
    )


def _input_collectives(
    local: ShardSizes, rows: int, k: int, *, in_16_bits: bool
) -> tuple[tuple[Comm, ...], tuple[Comm, ...]]:
    """Collectives of a column-parallel product's input in the forward pass, and of its gradient in
    the backward pass.

    Args:
        in_16_bits: whether the input is gathered before it is quantised.
    """
    # Gradients are reduced in 16 bits.
    n_bytes = float(rows) * k * local.act_bytes
    if not local.sequence_parallel:
        return (), (Comm(collective="all_reduce", bytes=n_bytes, group="tp", overlappable=True),)

    # The input may be quantised before it is gathered. Backward gathers it only for the weight
    # gradient, which a frozen weight does not have.
    gathered = n_bytes if in_16_bits else float(rows) * k * gathered_bytes(local.precision)
    forward = Comm(collective="all_gather", bytes=gathered, group="tp")
    regather = Comm(collective="all_gather", bytes=gathered, group="tp", overlappable=True)
    scatter = Comm(collective="reduce_scatter", bytes=n_bytes, group="tp", overlappable=True)
    if local.job.activations.keep_gathered or local.job.fine_tuning.frozen:
        return (forward,), (scatter,)
    return (forward,), (regather, scatter)


def row_linear(
    local: ShardSizes,
    n: int,
    k: int,
    *,
    bias: bool = False,
    narrow_input: bool = False,
    communicates: bool = True,
) -> Piece:
    """Row-parallel product of `k` local rows of the weight: the output is a sum over ranks.

    Forward reduces it (scattered along the sequence with sequence parallelism, whose backward
    gathers the output gradient).

    Args:
        narrow_input: as for `linear`.
        communicates: False where the output is added to another's, which is reduced for both.
    """
    # Sums are made in 16 bits; what backward gathers may be quantised before.
    n_bytes = float(local.tokens) * n * local.act_bytes
    forward: tuple[Comm, ...] = ()
    backward: tuple[Comm, ...] = ()
    if local.sequence_parallel and communicates:
        forward = (Comm(collective="reduce_scatter", bytes=n_bytes, group="tp"),)
        gathered = float(local.tokens) * n * gathered_bytes(local.precision)
        backward = (Comm(collective="all_gather", bytes=gathered, group="tp"),)
    elif local.tp > 1 and communicates:
        forward = (Comm(collective="all_reduce", bytes=n_bytes, group="tp"),)
    product = linear(
        local.precision,
        local.tokens,
        n,
        k,
        bias=n if bias else 0,
        narrow_input=narrow_input,
        forward_comm=forward,
        backward_comm=backward,
    )
    if not communicates or "sequence_copy" not in local.job.kernels.eager_kernels:
        return product
    return replace(
        product,
        forward=(*product.forward, *scatter_copy(local, local.tokens, n)),
        backward_input=(*gather_copy(local, local.tokens, n), *product.backward_input),
    )


def gather_copy(local: ShardSizes, rows: int, hidden: int) -> tuple[KernelOp, ...]:
    """The copy of tensors gathered over tensor-parallel ranks into the order of sequences.

    A collective stacks what ranks send, so that parts of several sequences alternate; one sequence
    lies in order (PyTorch torch/_utils.py `_maybe_view_chunk_cat`, in `all_gather_tensor` of
    distributed/_functional_collectives.py).
    """
    if local.shard.micro_batch == 1:
        return ()
    return scatter_copy(local, rows, hidden)


def scatter_copy(local: ShardSizes, rows: int, hidden: int) -> tuple[KernelOp, ...]:
    """The copy of tensors to be scattered over tensor-parallel ranks into the order of ranks
    (`sequence_copy`).

    PyTorch distributed/_functional_collectives.py `reduce_scatter_tensor`: chunks of any dimension
    but the first are concatenated, one sequence's too. Activations are [batch, sequence, hidden].
    Megatron's are [sequence, batch, hidden], of which neither direction copies anything.
    """
    if not local.sequence_parallel:
        return ()
    return (memory(local.precision, "add", rows, hidden),)


def adapters(
    local: ShardSizes,
    products: Sequence[tuple[AdapterModule, int]],
    k: int,
    *,
    row_parallel: bool = False,
) -> list[Piece]:
    """The requested adapters of a frozen product with `k` columns, or of its parts.

    Args:
        products: names of the product and its parts, with their outputs on this device.
        row_parallel: the frozen product is.
    """
    adapted_outputs = [n for name, n in products if local.adapts(name)]
    pieces = [_adapter(local, n, k, row_parallel=row_parallel) for n in adapted_outputs]
    if local.job.fine_tuning.adapter_dropout:
        return pieces

    # Without dropout they share their input, which the first of them keeps.
    return [*pieces[:1], *(replace(piece, saved_bytes=0.0) for piece in pieces[1:])]


def _adapter(local: ShardSizes, n: int, k: int, *, row_parallel: bool) -> Piece:
    """A low-rank adapter of a frozen product [tokens, k] x [k, n].

    y = W x + (alpha / r) B A dropout(x) (LoRA, Hu et al., arXiv 2106.09685, section 4.1), each step
    a kernel of its own (NeMo 2.0
    nemo/collections/nlp/modules/common/megatron/adapters/parallel_adapters.py
    `ParallelLinearAdapter`; Hugging Face peft 0.10 tuners/lora/layer.py `Linear.forward`). They
    compute next to nothing, but pass over whole activations time and again: two fifths of what a
    layer's products read and write.

    Args:
        n, k: outputs and inputs of the frozen product on this device.
        row_parallel: whether the frozen product is row-parallel.
    """
    rank = local.job.fine_tuning.adapter_rank
    rows = local.tokens
    tp = local.tp
    precision = local.precision
    drops = local.job.fine_tuning.adapter_dropout

    # Tensor-parallel ranks (the same `ParallelLinearAdapter`; no ring steps hide what it sends)
    # hold columns of B. Beside a column-parallel product they hold columns of A too, whose results
    # are gathered; beside a row-parallel one rows of A, whose results are summed. Backward sums
    # what comes out of B.
    rows_out = local.norm_tokens if row_parallel else rows
    columns = n // tp if row_parallel else n
    inner = rank if row_parallel else -(-rank // tp)

    def product(m: int, n: int, k: int, pass_: str) -> Gemm:
        return Gemm(dtype=precision.wide_dtype, m=m, n=n, k=k, pass_=pass_)  # pyright: ignore[reportArgumentType]

    # The operation fuser has the second product scale its result and add it to the frozen
    # product's, and the frozen product's input gradient added to the adapter's (Transformer Engine
    # 2.7 pytorch/ops/fused: forward_linear_scale_add.py, backward_linear_scale.py,
    # backward_linear_add.py; none of tensor-parallel products).
    fused = local.job.kernels.operation_fuser and tp == 1
    scaled = () if fused else (memory(precision, "mul_scalar", rows_out, n),)
    added = () if fused else (memory(precision, "add", rows_out, n, 2),)
    gradients_added = () if fused else (memory(precision, "add", rows, k, 2),)

    # Results of a row-parallel product are gathered whole, of which sequence parallelism keeps a
    # part of the rows and gathers their gradient, or are exchanged, columns for rows
    # (`Job.adapter_all_to_all`).
    result = _adapter_result(local, n) if row_parallel else AdapterResult()
    inner_comm, inner_backward_comm = _adapter_sums(local, k, row_parallel=row_parallel)

    dropout = (memory(precision, "dropout", rows, k),) if drops else ()
    dropout_backward = (memory(precision, "dropout", rows, k, backward=True),) if drops else ()
    forward = (
        *dropout,
        product(rows, inner, k, "fwd"),
        product(rows, columns, rank, "fwd"),
        *result.forward,
        *scaled,
        *added,
    )
    backward = (
        *scaled,
        *result.backward,
        product(rows, rank, columns, "dgrad"),
        product(columns, rank, rows, "wgrad"),
        product(rows, k, inner, "dgrad"),
        product(inner, k, rows, "wgrad"),
        *dropout_backward,
        *gradients_added,
    )

    # Backward needs the input after dropout, and the dropout mask of one byte per element.
    saved_bytes = float(rows) * k * (local.act_bytes + drops)
    return Piece(
        forward=forward,
        backward_input=backward,
        forward_comm=(*inner_comm, *result.forward_comm),
        backward_comm=(*result.backward_comm, *inner_backward_comm),
        saved_bytes=saved_bytes,
        params=inner * k + rank * columns,
    )


def _adapter_sums(
    local: ShardSizes, k: int, *, row_parallel: bool
) -> tuple[tuple[Comm, ...], tuple[Comm, ...]]:
    """Collectives of the tensor between an adapter's two products, forward and backward."""
    if local.tp == 1:
        return (), ()
    n_bytes = float(local.tokens) * local.job.fine_tuning.adapter_rank * local.act_bytes
    kind = "all_reduce" if row_parallel else "all_gather"
    sent = Comm(collective=kind, bytes=n_bytes, group="tp", follows=True)

    # Beside the gradient of B (Megatron-Core tensor_parallel/layers.py
    # LinearWithGradAccumulationAndAsyncCommunication).
    summed = Comm(collective="all_reduce", bytes=n_bytes, group="tp", overlappable=True)
    if row_parallel or local.sequence_parallel:
        return (sent,), (summed,)

    # Without sequence parallelism the gradient of the whole input is summed as that of the frozen
    # product.
    summed_input = Comm(
        collective="all_reduce",
        bytes=float(local.tokens) * k * local.act_bytes,
        group="tp",
        overlappable=True,
    )
    return (sent,), (summed, summed_input)


class AdapterResult(NamedTuple):
    """Collectives and kernels that bring an adapter's result to the place of its addition."""

    forward_comm: tuple[Comm, ...] = ()
    backward_comm: tuple[Comm, ...] = ()
    forward: tuple[KernelOp, ...] = ()
    backward: tuple[KernelOp, ...] = ()


def _adapter_result(local: ShardSizes, n: int) -> AdapterResult:
    """The collectives and kernels that the adapter of a row-parallel product with `n` columns
    needs."""
    if local.tp == 1:
        return AdapterResult()

    def copy(rows: int, columns: int) -> KernelOp:
        return memory(local.precision, "add", rows, columns)

    # An exchange of columns for rows leaves each rank its rows whole, which come in tp parts to be
    # joined.
    n_bytes = float(local.tokens) * n * local.act_bytes
    columns = n // local.tp
    if local.job.fine_tuning.adapter_all_to_all and local.sequence_parallel:
        exchanged = Comm(
            collective="all_to_all", bytes=n_bytes / local.tp, group="tp", follows=True
        )
        parts = copy(local.norm_tokens, n)
        return AdapterResult(
            forward_comm=(exchanged,),
            backward_comm=(exchanged,),
            forward=(parts,),
            backward=(parts, parts),
        )

    # A gather leaves all of them on every rank; backward cuts a rank's columns out of the gradient.
    gathered = Comm(collective="all_gather", bytes=n_bytes, group="tp", follows=True)
    back = (gathered,) if local.sequence_parallel else ()
    return AdapterResult(
        forward_comm=(gathered,),
        backward_comm=back,
        forward=(copy(local.tokens, n),),
        backward=(copy(local.tokens, columns),),
    )
