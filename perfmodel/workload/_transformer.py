"""Transformers as a sequence of blocks."""

from itertools import groupby

from perfmodel.errors import LayoutError, Reason
from perfmodel.spec import Experts, Job, Transformer
from perfmodel.workload._attention import cross_attention, self_attention
from perfmodel.workload._block import BlockOps, Comm, Shard
from perfmodel.workload._embedding_head import embedding_pieces, head_pieces, head_workspace_bytes
from perfmodel.workload._experts import expert_feed_forward, route
from perfmodel.workload._feed_forward import feed_forward
from perfmodel.workload._local import Local, Precision, local_sizes
from perfmodel.workload._mamba import mamba_mixer
from perfmodel.workload._piece import Piece, accumulated, assemble
from perfmodel.workload._pointwise import norm

Blocks = tuple[tuple[BlockOps, int], ...]


WEIGHTS_OF_A_LAYER = 6
"""Tensors of a layer whose gradients are added up apart: four products and two norms."""


def transformer_blocks(model: Transformer, job: Job, shard: Shard) -> Blocks:
    """Embedding, layers and head in model order, each with its repeat count.

    Raises:
        LayoutError: if the shard does not divide heads, sizes, experts or the sequence.
    """
    found = _blocks(model, job, shard)
    if not (job.half_gradients and job.mode == "train"):
        return found

    def weights(block: BlockOps) -> int:
        return 1 if block.name.endswith(("embedding", "head")) else WEIGHTS_OF_A_LAYER

    return tuple((accumulated(block, Precision.of(job), model.hidden, weights(block)), n) for block, n in found)


def _blocks(model: Transformer, job: Job, shard: Shard) -> Blocks:
    if model.experts is None and (shard.ep > 1 or shard.expert_tp != shard.tp):
        raise LayoutError(f"{model.name} has no experts; use ep=1 and leave etp out", Reason.UNSPLIT, "ep")
    if model.decoder_layers:
        return _encoder_decoder(model, job, shard)
    local = local_sizes(model, job, shard, job.seq_len)
    if model.mixers:
        body = _hybrid(model, local)
    else:
        body = _alternating(model, local) if model.window and model.full_attention_every else _uniform(model, local)
    return ((_embedding("embedding", model, local), 1), *body, (_head(model, local), 1))


def _uniform(model: Transformer, local: Local) -> Blocks:
    """Leading dense layers, then mixture-of-experts layers; one of the two for most models."""
    attention = self_attention(model, local, causal=model.causal, window=model.window)
    experts = model.experts
    dense = experts.first_dense_layers if experts else model.layers
    body: list[tuple[BlockOps, int]] = []
    if dense:
        body.append((_feed_forward_layer(model, local, attention, None), dense))
    if experts:
        body.append((_feed_forward_layer(model, local, attention, experts), model.layers - dense))
    return tuple(body)


def _hybrid(model: Transformer, local: Local) -> Blocks:
    """Layers of one mixer each, neighbours alike joined."""
    return tuple((_mixer(model, local, letter), len(list(alike))) for letter, alike in groupby(model.mixers))


def _mixer(model: Transformer, local: Local, letter: str) -> BlockOps:
    if letter == "M" and model.mamba:
        width = 3 * model.mamba.heads * model.mamba.head_dim // local.tp
        return _layer("mamba_layer", local, mamba_mixer(model, local, model.mamba), widest=local.tokens * width)
    if letter == "E" and model.experts:
        routing = route(model, local, model.experts)
        pieces = expert_feed_forward(model, local, model.experts)
        return _layer("moe_layer", local, pieces, widest=routing.processed * routing.inner)
    if letter == "*":
        return _layer("attention_layer", local, self_attention(model, local, causal=model.causal, window=model.window))
    return _layer("dense_layer", local, feed_forward(model, local))


def _alternating(model: Transformer, local: Local) -> Blocks:
    """Windowed layers, every n-th in full; leading dense layers are not distinguished."""
    windowed, full = (
        _feed_forward_layer(
            model, local, self_attention(model, local, causal=model.causal, window=window), model.experts
        )
        for window in (model.window, 0)
    )
    every = model.full_attention_every
    return tuple((windowed if i % every else full, 1) for i in range(1, model.layers + 1))


def _feed_forward_layer(model: Transformer, local: Local, attention: list[Piece], experts: Experts | None) -> BlockOps:
    if experts is None:
        return _layer("dense_layer", local, [*attention, *feed_forward(model, local)])
    routing = route(model, local, experts)
    pieces = [*attention, *expert_feed_forward(model, local, experts)]
    return _layer("moe_layer", local, pieces, widest=routing.processed * routing.inner)


def _encoder_decoder(model: Transformer, job: Job, shard: Shard) -> Blocks:
    """Encoder, then decoder with cross-attention; the final encoder norm rides with the decoder's input."""
    encoder = local_sizes(model, job, shard, job.seq_len)
    decoder = local_sizes(model, job, shard, model.decoder_seq_len or job.seq_len)
    encoder_layer = [*self_attention(model, encoder, causal=False), *feed_forward(model, encoder)]
    decoder_layer = [
        *self_attention(model, decoder, causal=True),
        *cross_attention(model, decoder, encoder.seq_len),
        *feed_forward(model, decoder),
    ]
    passed_on = encoder.hidden_bytes
    return (
        (_embedding("embedding", model, encoder), 1),
        (_layer("encoder_layer", encoder, encoder_layer), model.layers),
        (_embedding("decoder_embedding", model, decoder, encoder), 1),
        (_layer("decoder_layer", decoder, decoder_layer, passed_on_bytes=passed_on), model.decoder_layers),
        (_head(model, decoder), 1),
    )


def _embedding(name: str, model: Transformer, local: Local, encoder: Local | None = None) -> BlockOps:
    """The input block; T5's decoder input also normalises the output of `encoder` and passes it on."""
    pieces = embedding_pieces(model, local, owner=encoder is None)
    if encoder:
        pieces = [norm(model, encoder), Piece(saved_bytes=encoder.norm_bytes), *pieces]
    boundary_bytes, boundary_comm = _boundary(local, encoder.hidden_bytes if encoder else 0.0)
    return assemble(
        name,
        pieces,
        train=local.job.mode == "train",
        workspace_bytes=local.hidden_bytes,
        boundary_bytes=boundary_bytes,
        boundary_comm=boundary_comm,
        tied_params=local.vocab * local.hidden if encoder else 0,
    )


def _head(model: Transformer, local: Local) -> BlockOps:
    return assemble(
        "head",
        head_pieces(model, local),
        train=local.job.mode == "train",
        workspace_bytes=head_workspace_bytes(local),
        tied_params=local.vocab * local.hidden if model.tied_embeddings else 0,
    )


def _layer(name: str, local: Local, pieces: list[Piece], *, passed_on_bytes: float = 0.0, widest: int = 0) -> BlockOps:
    """A recomputable layer; its workspace holds gradients of the hidden state, and of input and output
    of the widest activation (`widest` elements, or the dense feed-forward's)."""
    boundary_bytes, boundary_comm = _boundary(local, passed_on_bytes)
    elements = widest or local.tokens * max(local.ffn, local.hidden)
    return assemble(
        name,
        pieces,
        train=local.job.mode == "train",
        input_bytes=local.norm_bytes,
        workspace_bytes=local.hidden_bytes + 2.0 * elements * local.act_bytes,
        boundary_bytes=boundary_bytes,
        boundary_comm=boundary_comm,
        stops_recompute=local.job.stops_recompute,
    )


def _boundary(local: Local, passed_on_bytes: float) -> tuple[float, tuple[Comm, ...]]:
    """Bytes each device sends to the next stage, and how the receivers complete them.

    With sequence parallelism a rank sends its own part of the sequence. Without it, ranks of a
    tensor-parallel group hold equal activations: each sends a tp-th and the receivers gather
    (scatter/gather optimisation, SC21 arXiv 2104.04473 section 4.1).
    """
    whole = local.hidden_bytes + passed_on_bytes
    if local.tp == 1 or local.sequence_parallel:
        return whole / local.tp, ()
    return whole / local.tp, (Comm(collective="all_gather", bytes=whole, group="tp"),)
