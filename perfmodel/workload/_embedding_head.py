"""First and last block: vocabulary-parallel embedding, and head with cross entropy."""

from dataclasses import replace
from typing import Final

from perfmodel.spec import Transformer
from perfmodel.spec.parts import Spectrogram
from perfmodel.workload._block import BlockOps, Comm
from perfmodel.workload._compressed_attention import hyper_head
from perfmodel.workload._layer_block import sent_on
from perfmodel.workload._layer_embedding import lookup_of_layers
from perfmodel.workload._linear import column_linear, linear
from perfmodel.workload._local import ShardSizes, masked_tokens
from perfmodel.workload._lookup import added_table, token_lookup
from perfmodel.workload._patches import patch_head, patch_pieces
from perfmodel.workload._piece import Piece, assemble, memory, pointwise
from perfmodel.workload._pointwise import norm, small_norm
from perfmodel.workload._streams import stream_projections
from perfmodel.workload._text_streams import text_pieces, text_sizes

T5_RELATIVE_BUCKETS = 32
"""Buckets of T5's relative position bias (arXiv 1910.10683, section 2.1), one value per head
each."""


def position_rows(model: Transformer, *, decoder: bool = False) -> int:
    """Rows of the table of learned positions, for a single stack, an encoder or a decoder."""
    longest = max(model.seq_len, model.inputs.longest_seq_len)
    if decoder and model.decoder_seq_len:
        longest = model.decoder_seq_len
    return longest + model.inputs.position_offset


def table_width(model: Transformer) -> int:
    """Elements of a row of the token table."""
    return model.inputs.narrow_embedding.width if model.inputs.narrow_embedding else model.hidden


def embedding_pieces(
    model: Transformer, local: ShardSizes, *, decoder: bool = False
) -> list[Piece]:
    """Token, position and segment embeddings with their norm and dropout.

    Each rank looks up its part of the vocabulary for all tokens; the sum over ranks is reduced
    (scattered along the sequence with sequence parallelism).

    Args:
        decoder: whether this is the input of a decoder behind an encoder. The table of tokens is
            the encoder's where that reads words too (T5).
    """
    if model.inputs.patches:
        return patch_pieces(model, local, model.inputs.patches)
    narrow = model.inputs.narrow_embedding
    projection: list[Piece] = []
    hidden_sizes = local
    if narrow:
        bias = local.hidden if narrow.bias else 0
        projection = [
            linear(local.precision, local.norm_tokens, local.hidden, narrow.width, bias=bias)
        ]
        local = replace(local, hidden=narrow.width)
    if model.inputs.spectrogram and not decoder:
        pieces = _spectrogram_pieces(local, model.inputs.spectrogram)
    else:
        has_table = not decoder or model.inputs.spectrogram is not None
        pieces = [token_lookup(local, params=local.vocab * local.hidden if has_table else 0)]

    # Tokens alone may be narrow: the other tables are then added behind the product.
    if narrow and not narrow.all_tables:
        pieces += projection
        local = hidden_sizes
        projection = []

    # A table of learned positions has a row for every position that the model, or the job, may
    # have.
    if model.inputs.positions == "learned":
        job_rows = local.seq_len + model.inputs.position_offset
        rows = max(position_rows(model, decoder=decoder), job_rows)
        if local.job.kernels.split_positions and local.sequence_parallel:
            rows = -(-rows // local.tp)
        pieces += added_table(local, rows)
    if model.inputs.positions == "relative":
        pieces.append(Piece(params=T5_RELATIVE_BUCKETS * local.heads))
    if model.inputs.token_types:
        pieces += added_table(local, model.inputs.token_types)
    if model.norms.embedding_norm:
        pieces.append(norm(model, local))
    if model.block.dropout:
        mask = float(local.norm_tokens * local.hidden)
        pieces.append(
            pointwise(
                local.precision,
                [("dropout", 1)],
                local.norm_tokens,
                local.hidden,
                saved_bytes=mask,
            )
        )
    return [*pieces, *projection]


def head_pieces(model: Transformer, local: ShardSizes, *, owner: bool = True) -> list[Piece]:
    """Final norm, vocabulary projection and cross entropy (with BERT's transform and pooler
    before).

    Keeps the fp32 logits, 4 s b v / t bytes (Korthikanti section 4.3), or those of 16 bits alone
    (`Job.narrow_logits`, `Job.saves_narrow_logits`).

    Args:
        owner: False where the projection belongs to another block (further tokens).
    """
    # In 16 bits also where the layers' products are narrower.
    local = local.unquantised
    pieces = [norm(model, local)] if model.norms.final_norm else []
    if model.inputs.patches:
        return [*pieces, *patch_head(model, local, model.inputs.patches)]
    if local.job.loss.head != "vocabulary":
        return [*pieces, *_label_head(local)]
    local = _seen_by_head(model, local)
    if model.head.pooler_and_mlm_head:
        pieces += _bert_transform(model, local)
    elif model.inputs.narrow_embedding:
        bias = model.inputs.narrow_embedding.width if model.inputs.narrow_embedding.bias else 0
        pieces.append(
            linear(local.precision, local.norm_tokens, table_width(model), local.hidden, bias=bias)
        )
    local = replace(local, hidden=table_width(model))

    # The projection. Tied to a frozen embedding, its weight has no gradient though the layers'
    # weights have.
    frozen = model.head.tied_embeddings and local.job.fine_tuning.frozen_embedding
    head_sizes = local
    if frozen:
        head_sizes = replace(local, precision=replace(local.precision, frozen=True))
    projection = column_linear(head_sizes, local.vocab, local.hidden)
    if frozen:
        projection = replace(projection, backward_weight=())

    # A tied projection has no weights of its own, but BERT's still has a bias.
    params = projection.params if owner and not model.head.tied_embeddings else 0
    if model.head.pooler_and_mlm_head:
        params += local.vocab
    pieces.append(replace(projection, params=params))
    if _gathers_logits(local):
        # Each rank takes its part of a gradient that all ranks have, so nothing is sent in
        # backward.
        local = _with_whole_vocabulary(local)
        logits_bytes = float(local.tokens) * local.vocab * local.act_bytes
        pieces.append(
            Piece(forward_comm=(Comm(collective="all_gather", bytes=logits_bytes, group="tp"),))
        )

    # Capped logits keep the tanh of each, of which its gradient is made.
    if model.head.logit_softcap:
        logits_bytes = _logits_at_once(local) * local.act_bytes
        capped = pointwise(
            local.precision, [("tanh", 1)], local.tokens, local.vocab, saved_bytes=logits_bytes
        )
        pieces.append(capped)
    if local.job.mode == "train":
        pieces.append(_cross_entropy(local))
    return pieces


def _spectrogram_pieces(local: ShardSizes, spectrogram: Spectrogram) -> list[Piece]:
    """Two convolutions over time as matrix products, each with GELU (transformers
    models/whisper/modeling_whisper.py `WhisperEncoder`)."""
    # The first keeps the length, the second leaves one token of `stride` instants. Spectra need no
    # gradient.
    h, kernel, rows = local.hidden, spectrogram.kernel, local.norm_tokens
    instants = rows * spectrogram.stride
    first = linear(local.precision, instants, h, kernel * spectrogram.channels, bias=h)
    second = linear(local.precision, rows, h, kernel * h, bias=h)

    def gelu(tokens: int) -> Piece:
        return pointwise(
            local.precision,
            [("gelu", 1)],
            tokens,
            h,
            saved_bytes=float(tokens * h * local.act_bytes),
        )

    return [replace(first, backward_input=()), gelu(instants), second, gelu(rows)]


def spectrogram_weights(hidden: int, spectrogram: Spectrogram) -> int:
    """Elements of the weights of both convolutions."""
    return spectrogram.kernel * (spectrogram.channels + hidden) * hidden


def spectrogram_products(hidden: int, spectrogram: Spectrogram) -> int:
    """Multiplications per token of both convolutions."""
    # The first is applied to all the instants that become one token.
    return spectrogram.kernel * (spectrogram.stride * spectrogram.channels + hidden) * hidden


LABELS: Final = 2
"""Outputs of a head of labels: start and end of an answer, or two classes. Further outputs would
cost almost nothing."""


def _label_head(local: ShardSizes) -> list[Piece]:
    """Labels of every token, or of every sequence from its pooled first token, with the loss on
    them (Hugging Face `BertForQuestionAnswering`, `BertForSequenceClassification`)."""
    rows = local.norm_tokens
    hidden = local.hidden
    pieces = []
    if local.job.loss.head == "sequence_label":
        rows = local.shard.micro_batch
        pieces += _pooler(local)
    made = linear(local.precision, rows, LABELS, hidden, bias=LABELS)
    loss = pointwise(
        local.precision, [("softmax", 1)], rows, LABELS, saved_bytes=4.0 * rows * LABELS
    )
    return [*pieces, made, loss]


def head_workspace_bytes(model: Transformer, local: ShardSizes) -> float:
    """Transient bytes of the head, besides the saved logits."""
    if local.job.loss.head != "vocabulary":
        return 0.0
    seen_by_head = _seen_by_head(model, local)
    if _gathers_logits(local):
        local = _with_whole_vocabulary(local)
        seen_by_head = _with_whole_vocabulary(seen_by_head)
    if local.job.loss.chunked_loss:
        return _logits_at_once(seen_by_head) * local.act_bytes + _chunk_gradient_bytes(local)

    # A gradient that is written over the logits needs no further tensor.
    if local.job.loss.loss_with_gradient or local.job.loss.narrow_logits:
        return 0.0

    # Else there are 16-bit logits, or their gradient; eager cross entropy also holds a second fp32
    # copy.
    bytes_per_logit, read_bytes = local.act_bytes, local.act_bytes
    if not local.job.kernels.fuses("cross_entropy"):
        bytes_per_logit = local.act_bytes + 4
        read_bytes = 4
    if "loss_gradient" in local.job.kernels.eager_kernels:
        bytes_per_logit = max(bytes_per_logit, _gradient_bytes_per_logit(local, read_bytes))
    return _logits_at_once(seen_by_head) * bytes_per_logit


def _chunk_gradient_bytes(local: ShardSizes) -> float:
    """Bytes of the head's gradient from one chunk of tokens, in the type of the weights and in
    fp32.

    Liger adds it up as `grad_weight += torch.mm(grad_logits_chunk.t(), _input_chunk).float()`
    (Liger-Kernel 0.5 to 0.7 src/liger_kernel/ops/fused_linear_cross_entropy.py), in tensors as
    large as the head's weight. A compiler (`narrow_logits`) adds products up where the sum lies.
    """
    if local.job.mode != "train" or local.job.fine_tuning.frozen or local.job.loss.narrow_logits:
        return 0.0
    return float(local.vocab) * local.hidden * (local.act_bytes + 4)


def _gathers_logits(local: ShardSizes) -> bool:
    """Whether tensor-parallel ranks gather whole logits (`Job.gathered_logits`)."""
    return local.job.loss.gathered_logits and local.tp > 1


def _with_whole_vocabulary(local: ShardSizes) -> ShardSizes:
    """Sizes of the loss on a rank that has the logits of the whole vocabulary."""
    return replace(local, vocab=local.vocab * local.tp, shard=replace(local.shard, tp=1))


def _gradient_bytes_per_logit(local: ShardSizes, element_bytes: int) -> int:
    """Bytes per logit that a loss of eager kernels holds beside the log-probabilities while it
    computes their gradient.

    Args:
        element_bytes: size of fp32, or of the logits' type where the loss reads them uncast.

    torch's autograd makes a whole tensor of the gradient of the chosen log-probabilities, and from
    it that of the logits (PyTorch tools/autograd/derivatives.yaml, `nll_loss_backward` and
    `_log_softmax_backward_data`). Where ranks have parts of the vocabulary, it is a sum with
    exponentials and a product, each of which is written while the first is still held
    (torch/distributed/tensor/parallel/loss.py, `_nll_loss_and_log_softmax_backward`). The logits
    themselves are gone.
    """
    tensors = 3 if local.tp > 1 else 2
    return element_bytes * tensors


def _logits_at_once(local: ShardSizes) -> float:
    """Elements of the logits that exist at once: all, or those of one chunk of tokens in a chunked
    loss."""
    logits = float(local.tokens) * local.vocab
    if not local.job.loss.chunked_loss:
        return logits

    # As many parts as the vocabulary has hidden sizes (Liger, fused_linear_cross_entropy.py).
    # A head without one has no parts either.
    parts = max(1, -(-local.vocab * local.tp // local.hidden))
    return logits / parts


def _seen_by_head(model: Transformer, local: ShardSizes) -> ShardSizes:
    """Sizes of the head, whose tokens are all tokens, or only the masked ones in masked language
    models."""
    if not (model.head.pooler_and_mlm_head and local.job.loss.masked_head):
        return local
    return replace(
        local,
        tokens=masked_tokens(local.tokens),
        norm_tokens=masked_tokens(local.norm_tokens),
    )


def _cross_entropy(local: ShardSizes) -> Piece:
    """Vocabulary-parallel cross entropy, which keeps fp32 logits; or the loss together with its
    gradient.

    Where it is not a kernel of its own, logits are made fp32 before (Megatron-LM v2.5
    megatron/model/gpt_model.py, `vocab_parallel_cross_entropy(output.float(), labels)`;
    Transformers 4 modeling_llama.py, `logits.float()`; PyTorch documentation, autocast:
    `cross_entropy` runs in fp32). A cast between 16 and 32 bits moves the 6 bytes of a 16-bit sum.
    """
    if local.job.loss.loss_with_gradient or local.job.loss.chunked_loss:
        return _loss_with_gradient(local)
    fused = local.job.kernels.fuses("cross_entropy")
    name, dtype = ("cross_entropy", "fp32") if fused else ("cross_entropy_unfused", None)
    forward = memory(local.precision, name, local.tokens, local.vocab, dtype=dtype)
    # Losses of several operators take fp32 logits, which are made from those of the product, and
    # their gradient is brought back. A fused loss reads the product's.
    widens = not fused and local.act_bytes == 2
    cast = (memory(local.precision, "add", local.tokens, local.vocab, 2),) if widens else ()
    keeps_narrow = local.job.loss.narrow_logits or local.job.loss.saves_narrow_logits
    return Piece(
        forward=(*cast, forward),
        backward_input=(replace(forward, pass_="bwd"), *cast),
        forward_comm=_loss_reductions(local),
        saved_bytes=float(local.tokens) * local.vocab * (local.act_bytes if keeps_narrow else 4.0),
    )


def _loss_with_gradient(local: ShardSizes) -> Piece:
    """The loss with the gradient of the logits, in one kernel that streams the logits.

    It reads them for the maximum and the sum, reads them again and writes the gradient. That these
    three passes take as long as the four of a sum of three tensors is what Liger-Kernel's benchmark
    of it shows on an H100 (8,192 tokens of 16 bits: 0.42, 0.81, 1.53 and 2.97 ms at 16,384 to
    131,072 words; the sum 0.35 to 2.8).
    """
    # The gradient is the softmax less one at the target, and takes the logits' place. A chunked
    # loss keeps the gradient of the hidden states instead, which it makes before the next part.
    saved_columns = local.hidden if local.job.loss.chunked_loss else local.vocab
    return Piece(
        forward=(memory(local.precision, "add", local.tokens, local.vocab, 3),),
        forward_comm=_loss_reductions(local),
        saved_bytes=float(local.tokens) * saved_columns * local.act_bytes,
    )


def _loss_reductions(local: ShardSizes) -> tuple[Comm, ...]:
    """Reductions over tensor-parallel ranks, each with a part of the vocabulary.

    Maximum, target logit and sum of exponentials, one fp32 value per token each (Megatron-LM's
    `_VocabParallelCrossEntropy`).
    """
    if local.tp == 1:
        return ()
    return (Comm(collective="all_reduce", bytes=4.0 * local.tokens, group="tp", count=3),)


def _bert_transform(model: Transformer, local: ShardSizes) -> list[Piece]:
    """The replicated transform before the vocabulary projection, after pooler and next-sentence
    classifier if present."""
    h, rows, precision = local.hidden, local.norm_tokens, local.precision
    pooler = [*_pooler(local), linear(precision, local.shard.micro_batch, 2, h, bias=2)]
    width = table_width(model)
    transform = [
        linear(precision, rows, width, h, bias=width),
        pointwise(precision, [("gelu", 1)], rows, width, saved_bytes=local.norm_bytes * width / h),
        small_norm(model, local, rows, width),
    ]
    return [*pooler, *transform] if model.head.pooler else transform


def _pooler(local: ShardSizes) -> list[Piece]:
    """A dense layer with tanh over the first token of every sequence."""
    h, pooled = local.hidden, local.shard.micro_batch
    return [
        linear(local.precision, pooled, h, h, bias=h),
        pointwise(
            local.precision,
            [("tanh", 1)],
            pooled,
            h,
            saved_bytes=float(pooled * h * local.act_bytes),
        ),
    ]


def embedding_block(
    name: str, model: Transformer, local: ShardSizes, encoder: ShardSizes | None = None
) -> BlockOps:
    """The input block; T5's decoder input also normalises the output of `encoder` and passes it
    on."""
    pieces = embedding_pieces(model, local, decoder=encoder is not None)
    if encoder:
        encoder_norm = [norm(model, encoder)] if model.norms.final_norm else []
        pieces = [*encoder_norm, Piece(saved_bytes=encoder.norm_bytes), *pieces]
    encoder_bytes = encoder.hidden_bytes if encoder else 0.0
    text = model.inputs.text_condition
    if text:
        stream = text_sizes(model, local, text)
        pieces += text_pieces(model, stream, text)
        encoder_bytes = stream.hidden_bytes
    if model.hybrid.layer_embedding:
        pieces += lookup_of_layers(model, local, model.hybrid.layer_embedding)
    if model.hybrid.streams:
        pieces += stream_projections(local, model.hybrid.streams)
    if model.hybrid.hyper_connections:
        # Every stream begins with the embedding.
        encoder_bytes += (model.hybrid.hyper_connections.count - 1) * local.hidden_bytes
    boundary_bytes, boundary_comm = sent_on(local, encoder_bytes)

    # A frozen table has no gradient, though the layers after it have.
    frozen = local.job.fine_tuning.frozen_embedding
    if frozen:
        pieces = [replace(piece, backward_weight=()) for piece in pieces]
    block = assemble(
        name,
        pieces,
        train=local.job.mode == "train",
        is_layer=False,
        workspace_bytes=local.hidden_bytes,
        boundary_bytes=boundary_bytes,
        boundary_comm=boundary_comm,
        tied_params=local.vocab * local.hidden if encoder and not model.inputs.spectrogram else 0,
    )
    return replace(block, frozen_params=block.params) if frozen else block


def head_block(model: Transformer, local: ShardSizes) -> BlockOps:
    """The output block, which is not recomputed."""
    # A tied table is held again on the last stage; heads of labels have a small projection of their
    # own.
    joined = stream_projections(local, model.hybrid.streams) if model.hybrid.streams else []
    if model.hybrid.hyper_connections:
        joined = hyper_head(local, model.hybrid.hyper_connections)
    is_tied = model.head.tied_embeddings and local.job.loss.head == "vocabulary"
    return assemble(
        "head",
        [*joined, *head_pieces(model, local)],
        train=local.job.mode == "train",
        is_layer=False,
        workspace_bytes=head_workspace_bytes(model, local),
        tied_params=local.vocab * table_width(model) if is_tied else 0,
    )
