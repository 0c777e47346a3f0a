"""First and last block: vocabulary-parallel embedding, and head with cross entropy."""

from perfmodel.spec import Embedding, Transformer
from perfmodel.workload._block import BlockOps, Comm
from perfmodel.workload._linear import column_linear, linear
from perfmodel.workload._local import Local
from perfmodel.workload._piece import Piece, assemble, memory, pointwise
from perfmodel.workload._pointwise import norm, small_norm


def embedding_block(model: Transformer, local: Local, *, name: str = "embedding", owner: bool = True) -> BlockOps:
    """Token, position and segment embeddings with their dropout.

    Each rank looks up its part of the vocabulary for all tokens; the sum over ranks is reduced
    (scattered with sequence parallelism).

    Args:
        owner: False where the table belongs to another block (T5's decoder input).
    """
    table = local.vocab * local.hidden
    pieces = [_lookup(local, local.vocab, params=table if owner else 0, parallel=True)]
    if model.positions == "learned":
        positions = max(model.seq_len, local.seq_len)
        pieces += [_lookup(local, positions, params=positions * local.hidden), _sum(local)]
    if model.token_types:
        pieces += [_lookup(local, model.token_types, params=model.token_types * local.hidden), _sum(local)]
    if model.dropout:
        mask = float(local.norm_tokens * local.hidden)
        pieces.append(pointwise(local, [("dropout", 1)], local.norm_tokens, local.hidden, saved_bytes=mask))
    return assemble(name, local, pieces, input_bytes=None, workspace_bytes=local.hidden_bytes,
                    tied_params=0 if owner else table)  # fmt: skip


def head_block(model: Transformer, local: Local) -> BlockOps:
    """Final norm, vocabulary projection and cross entropy (with BERT's transform and pooler before).

    Keeps the fp32 logits, 4 s b v / t bytes (Korthikanti section 4.3); the workspace holds their
    16-bit copy and gradient.
    """
    pieces = [norm(model, local)]
    bias = 0
    if model.pooler_and_mlm_head:
        pieces += _bert_transform(model, local)
        bias = local.vocab
    projection = column_linear(local, local.vocab, local.hidden)
    weight = local.vocab * local.hidden
    logits = float(local.tokens * local.vocab)
    pieces += [
        _replace_params(projection, (0 if model.tied_embeddings else weight) + bias),
        *(_cross_entropy(local),) * (local.job.mode == "train"),
    ]
    return assemble(
        "head", local, pieces, input_bytes=None,
        workspace_bytes=logits * (local.act_bytes if local.job.fused_kernels else local.act_bytes + 4),
        tied_params=weight if model.tied_embeddings else 0,
    )  # fmt: skip


def _lookup(local: Local, rows: int, *, params: int, parallel: bool = False) -> Piece:
    tokens = local.tokens if parallel else local.norm_tokens

    def op(backward: bool) -> Embedding:
        return Embedding(dtype=local.act_dtype, tokens=tokens, hidden=local.hidden, vocab=rows,
                         pass_="bwd" if backward else "fwd")  # fmt: skip

    forward: tuple[Comm, ...] = ()
    backward: tuple[Comm, ...] = ()
    if parallel and local.sequence_parallel:
        forward = (Comm(collective="reduce_scatter", bytes=local.hidden_bytes, group="tp"),)
        backward = (Comm(collective="all_gather", bytes=local.hidden_bytes, group="tp"),)
    elif parallel and local.tp > 1:
        forward = (Comm(collective="all_reduce", bytes=local.hidden_bytes, group="tp"),)
    return Piece(forward=(op(False),), backward_weight=(op(True),), forward_comm=forward,
                 backward_comm=backward, params=params)  # fmt: skip


def _sum(local: Local) -> Piece:
    return Piece(forward=(memory(local, "add", local.norm_tokens, local.hidden, 2),))


def _cross_entropy(local: Local) -> Piece:
    """Vocabulary-parallel cross entropy: maximum, target logit and sum of exponentials are each
    reduced over the tensor-parallel ranks, one fp32 value per token."""
    name, dtype = ("cross_entropy", "fp32") if local.job.fused_kernels else ("cross_entropy_unfused", None)
    small = Comm(collective="all_reduce", bytes=4.0 * local.tokens, group="tp", count=3)
    return Piece(
        forward=(memory(local, name, local.tokens, local.vocab, dtype=dtype),),
        backward_input=(memory(local, name, local.tokens, local.vocab, backward=True, dtype=dtype),),
        forward_comm=(small,) if local.tp > 1 else (),
        saved_bytes=4.0 * local.tokens * local.vocab,
    )


def _bert_transform(model: Transformer, local: Local) -> list[Piece]:
    """Replicated dense product, activation and norm before the vocabulary, and the pooler."""
    h, rows = local.hidden, local.norm_tokens
    pooled = local.shard.micro_batch
    return [
        linear(local, pooled, h, h, bias=h),
        pointwise(local, [("tanh", 1)], pooled, h, saved_bytes=float(pooled * h * local.act_bytes)),
        linear(local, pooled, 2, h, bias=2),
        linear(local, rows, h, h, bias=h),
        pointwise(local, [("gelu", 1)], rows, h, saved_bytes=local.norm_bytes),
        small_norm(model, local, rows, h),
    ]


def _replace_params(piece: Piece, params: int) -> Piece:
    from dataclasses import replace

    return replace(piece, params=params)
