"""Transformers as a sequence of blocks."""

from perfmodel.spec import Job, Transformer
from perfmodel.workload._attention import cross_attention, self_attention
from perfmodel.workload._block import BlockOps, Shard
from perfmodel.workload._embedding_head import embedding_block, head_block
from perfmodel.workload._feed_forward import feed_forward
from perfmodel.workload._local import Local, local_sizes
from perfmodel.workload._piece import Piece, assemble


def transformer_blocks(model: Transformer, job: Job, shard: Shard) -> tuple[tuple[BlockOps, int], ...]:
    """Embedding, layers and head in model order, each with its repeat count."""
    if model.decoder_layers:
        return _encoder_decoder(model, job, shard)
    local = local_sizes(model, job, shard, job.seq_len)
    attention = self_attention(model, local, causal=model.causal)
    dense = _layer("dense_layer", local, [*attention, *feed_forward(model, local)])
    body: tuple[tuple[BlockOps, int], ...] = ((dense, model.layers),)
    return ((embedding_block(model, local), 1), *body, (head_block(model, local), 1))


def _encoder_decoder(model: Transformer, job: Job, shard: Shard) -> tuple[tuple[BlockOps, int], ...]:
    encoder = local_sizes(model, job, shard, job.seq_len)
    decoder = local_sizes(model, job, shard, model.decoder_seq_len or job.seq_len)
    encoder_layer = _layer(
        "encoder_layer", encoder, [*self_attention(model, encoder, causal=False), *feed_forward(model, encoder)]
    )
    decoder_layer = _layer(
        "decoder_layer",
        decoder,
        [
            *self_attention(model, decoder, causal=True),
            *cross_attention(model, decoder, encoder.seq_len),
            *feed_forward(model, decoder),
        ],
        boundary_streams=2,
    )
    return (
        (embedding_block(model, encoder), 1),
        (encoder_layer, model.layers),
        (embedding_block(model, decoder, name="decoder_embedding", owner=False), 1),
        (decoder_layer, model.decoder_layers),
        (head_block(model, decoder), 1),
    )


def _layer(name: str, local: Local, pieces: list[Piece], *, boundary_streams: int = 1) -> BlockOps:
    """A recomputable layer; its workspace holds the gradients of hidden state and widest activation."""
    widest = max(local.ffn, local.hidden)
    workspace = local.hidden_bytes + 2.0 * local.tokens * widest * local.act_bytes
    return assemble(name, local, pieces, input_bytes=local.norm_bytes, workspace_bytes=workspace,
                    boundary_streams=boundary_streams)  # fmt: skip


