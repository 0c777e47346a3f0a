"""Lookups of rows in tables, and the gradients of these tables."""

from dataclasses import replace

from perfmodel.ops import Embedding
from perfmodel.workload._block import Comm
from perfmodel.workload._linear import gather_copy, linear, scatter_copy
from perfmodel.workload._local import ShardSizes
from perfmodel.workload._piece import Piece, memory


def token_lookup(local: ShardSizes, *, params: int) -> Piece:
    """Vocabulary-parallel lookup of all tokens, and the sum over ranks, where only one rank has a
    nonzero result for each token."""
    n_bytes = local.hidden_bytes
    forward: tuple[Comm, ...] = ()
    backward: tuple[Comm, ...] = ()
    if local.sequence_parallel:
        forward = (Comm(collective="reduce_scatter", bytes=n_bytes, group="tp"),)
        backward = (Comm(collective="all_gather", bytes=n_bytes, group="tp"),)
    elif local.tp > 1:
        forward = (Comm(collective="all_reduce", bytes=n_bytes, group="tp"),)
    piece = replace(
        lookup(local, local.tokens, local.vocab),
        forward_comm=forward,
        backward_comm=backward,
        params=params,
    )
    if "sequence_copy" not in local.job.kernels.eager_kernels:
        return piece
    return replace(
        piece,
        forward=(*piece.forward, *scatter_copy(local, local.tokens, local.hidden)),
        backward_input=(*gather_copy(local, local.tokens, local.hidden), *piece.backward_input),
    )


def added_table(local: ShardSizes, rows: int) -> list[Piece]:
    """A small replicated table, looked up and added."""
    added = memory(local.precision, "add", local.norm_tokens, local.hidden, 2)
    table = replace(lookup(local, local.norm_tokens, rows), params=rows * local.hidden)
    return [table, Piece(forward=(added,))]


def lookup(local: ShardSizes, tokens: int, rows: int) -> Piece:
    """Rows of a table by their indices; indices have no gradient."""
    # The lookup is a product of the table with one-hot rows, which are written first.
    if "one_hot_lookup" in local.job.kernels.eager_kernels:
        precision = local.unquantised.precision
        product = linear(precision, tokens, local.hidden, rows, kept_input=0.0)
        one_hot = memory(precision, "relu", tokens, rows)
        return replace(product, forward=(one_hot, *product.forward), backward_input=(), params=0)
    forward = Embedding(
        dtype=local.precision.act_dtype, tokens=tokens, hidden=local.hidden, vocab=rows
    )
    return Piece(forward=(forward,), backward_weight=(replace(forward, pass_="bwd"),))
