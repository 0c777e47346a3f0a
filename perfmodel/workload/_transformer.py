"""Transformers as a sequence of blocks."""

from dataclasses import replace
from itertools import groupby
from typing import Final, NamedTuple

from perfmodel.errors import LayoutError, Reason
from perfmodel.spec import Job, Transformer
from perfmodel.spec.parts import STREAM_LAYERS
from perfmodel.workload._attention import cross_attention, self_attention
from perfmodel.workload._block import BlockOps, Blocks, Shard
from perfmodel.workload._compressed_attention import (
    COMPRESSED,
    compressed_attention,
    hyper_connection,
)
from perfmodel.workload._embedding_head import (
    embedding_block,
    head_block,
    head_pieces,
    head_workspace_bytes,
)
from perfmodel.workload._experts import expert_feed_forward
from perfmodel.workload._indexer import indexer_pieces
from perfmodel.workload._layer_block import layer_block
from perfmodel.workload._layer_embedding import gated_embedding, layers_with_rows
from perfmodel.workload._linear import column_linear
from perfmodel.workload._linear_attention import delta_net_mixer
from perfmodel.workload._local import Precision, ShardSizes, local_sizes
from perfmodel.workload._lookup import token_lookup
from perfmodel.workload._piece import Piece, accumulated, assemble
from perfmodel.workload._pointwise import (
    beside_experts,
    feed_forward,
    norm,
    residual,
    side_by_side,
    sub_layer,
)
from perfmodel.workload._recurrent import (
    mamba_mixer,
    selective_scan_mixer,
    short_conv_mixer,
)
from perfmodel.workload._routing import route
from perfmodel.workload._shared_block import owners, shared_block
from perfmodel.workload._streams import updates
from perfmodel.workload._text_streams import (
    cross_attention_to_text,
    stream_block,
    text_sizes,
)
from perfmodel.workload._time_mix import channel_mixing, time_mixing

WEIGHTS_OF_A_LAYER = 6
"""Tensors of a layer whose gradients are accumulated separately: four products and two norms (or a
shared one)."""


def transformer_blocks(model: Transformer, job: Job, shard: Shard) -> Blocks:
    """Embedding, layers and head in model order, each with its repeat count.

    Raises:
        LayoutError: if the shard does not divide heads, sizes, experts or the sequence.
    """
    blocks = _blocks(model, job, shard)
    if not (job.adds_half_gradients and job.mode == "train"):
        return blocks

    # 16-bit gradients are added to fp32 ones by kernels of their own, one for each weight. An
    # embedding or a head is a single weight.
    precision = Precision.of(job)
    weights_of_layer = WEIGHTS_OF_A_LAYER - (model.block.parallel_blocks == "one_norm")
    with_additions = []
    for block, repeats in blocks:
        tensors = weights_of_layer if block.is_layer else 1
        with_additions.append((accumulated(block, precision, model.hidden, tensors), repeats))
    return tuple(with_additions)


def _blocks(model: Transformer, job: Job, shard: Shard) -> Blocks:
    """Blocks of the model, without the later processing of their gradients."""
    if model.experts is None and (shard.ep > 1 or shard.expert_tp != shard.tp):
        raise LayoutError(
            f"{model.name} has no experts; use ep=1 and leave etp out", Reason.UNSPLIT, "ep"
        )
    if model.decoder_layers:
        return _encoder_decoder(model, job, shard)

    # Recipes of narrow types may leave the last layers in 16 bits; in a job of 16 bits all are
    # alike.
    local = local_sizes(model, job, shard, job.seq_len)
    n_wide = job.narrow.wide_last_layers if local != local.unquantised else 0
    first_wide = len(model.stack) - n_wide
    stack = []
    # A layer may use the weights of an earlier one.
    shares_weights = model.layer_groups or model.hybrid.shared_block
    owner_of = owners(model) if shares_weights else range(len(model.stack))
    for i, word in enumerate(model.stack):
        owner = None if owner_of[i] == i else owner_of[i]
        stack.append(_LayerKind(word, i >= first_wide, model.inner_sizes[i], owner))

    # Each kind of layer is worked out once, however often it stands in the stack.
    layers = {}
    for kind in set(stack):
        sizes = local.unquantised if kind.is_wide else local
        sizes = replace(sizes, ffn=kind.ffn // local.tp)
        layers[kind] = _layer_of(model, sizes, kind.word)
        if kind.owner is not None:
            layers[kind] = _sharing(model, sizes, kind, layers[kind])
    body = []
    place_of_layer = {}
    n_layers = 0
    for kind, equal_layers in groupby(stack):
        repeats = len(list(equal_layers))
        # The embedding is the block before them.
        place_of_layer |= dict.fromkeys(range(n_layers, n_layers + repeats), 1 + len(body))
        n_layers += repeats
        shares_with = 0 if kind.owner is None else place_of_layer[kind.owner]
        body.append((replace(layers[kind], shares_with=shares_with), repeats))
    further_tokens = _further_tokens(model, local) if model.mtp.mtp_layers else ()
    return (
        (embedding_block("embedding", model, local), 1),
        *body,
        *further_tokens,
        (head_block(model, local), 1),
    )


class _LayerKind(NamedTuple):
    """What distinguishes layers of a stack."""

    word: str
    """Sub-layers, letters of `MIXERS`."""
    is_wide: bool
    """Whether its products keep 16 bits in a job of narrower ones."""
    ffn: int
    """Inner size of the dense feed-forward, on all ranks."""
    owner: int | None
    """Number of the layer whose weights it uses, from 0; None if it has its own."""


def _sharing(model: Transformer, local: ShardSizes, kind: _LayerKind, layer: BlockOps) -> BlockOps:
    """The layer with parameters that an earlier layer holds for it."""
    own_params = 0
    if "A" in kind.word:
        own_params = _layer_of(model, local, kind.word, owner=False).params
    return replace(layer, params=own_params, shared_params=layer.params - own_params)


def _layer_of(model: Transformer, local: ShardSizes, word: str, *, owner: bool = True) -> BlockOps:
    """A layer of the sub-layers that a word of `MIXERS` stands for.

    Args:
        owner: False leaves out the parameters of a block that an earlier layer shares with it.
    """
    text = model.inputs.text_condition
    if text and word in STREAM_LAYERS:
        return stream_block(model, local, text, word, f"{_NAMES[word]}_layer")

    names = [name for letter, name in _NAMES.items() if letter in word]
    # Later stages need the rows of their layers, which the first one looks up, all residual
    # streams, the values of RWKV's first layer, and the text.
    passed_on_bytes = 0.0
    residual_streams = model.hybrid.streams or model.hybrid.hyper_connections
    streams = residual_streams.count if residual_streams else 1
    if model.hybrid.layer_embedding:
        width = layers_with_rows(model) * model.hybrid.layer_embedding.width
        passed_on_bytes = float(local.tokens * width * local.act_bytes)
    passed_on_bytes += (streams - 1) * local.hidden_bytes
    if model.hybrid.time_mix and model.hybrid.time_mix.value_rank:
        passed_on_bytes += float(
            local.tokens * model.hybrid.time_mix.inner // local.tp * local.act_bytes
        )
    if model.inputs.text_condition:
        passed_on_bytes += text_sizes(model, local, model.inputs.text_condition).hidden_bytes
    gradients = _activation_gradients(model, local) if set(word) & set("-E") else 2
    pieces = _sub_layers(model, local, word, owner=owner)
    name = f"{names[0]}_layer"
    return layer_block(
        name,
        local,
        pieces,
        passed_on_bytes=passed_on_bytes,
        widest=_widest_activation(model, local, word),
        gradients=gradients,
        streams=streams,
    )


def _widest_activation(model: Transformer, local: ShardSizes, word: str) -> int:
    """Elements of the widest activation inside a layer, of which backward holds the gradients of
    its input and of its result at once.

    Args:
        word: the layer's sub-layers, letters of `MIXERS`.
    """
    # Experts work on the tokens that reach them.
    if "E" in word and model.experts:
        routing = route(model, local, model.experts)
        return routing.processed * routing.inner

    widths = [local.hidden]
    if set(word) & _AS_WIDE_AS_FEED_FORWARD:
        widths.append(local.ffn)

    # Other mixers project to several tensors of their inner size at once.
    hybrid = model.hybrid
    inner = 0
    if "M" in word and hybrid.mamba:
        inner = 3 * hybrid.mamba.inner
    elif "S" in word and hybrid.selective_scan:
        inner = 2 * hybrid.selective_scan.inner
    elif "L" in word and hybrid.delta_net:
        inner = 2 * hybrid.delta_net.values
    elif "C" in word:
        inner = 3 * local.hidden
    elif set(word) & set(COMPRESSED):
        inner = model.heads * model.head_dim
    elif set(word) & {"R", "T"} and hybrid.time_mix:
        inner = hybrid.time_mix.inner
    return max(local.tokens * max(widths), local.tokens * inner // local.tp)


def _activation_gradients(model: Transformer, local: ShardSizes) -> int:
    """Number of new tensors for the gradients of a feed-forward's activation: of its input and of
    its result, or only the latter where the former overwrites gate and value
    (`Job.in_place_activation`)."""
    return 1 if local.job.activations.in_place_activation and model.block.gated_ffn else 2


_NAMES: Final = {
    "A": "shared_attention",
    "E": "moe",
    "-": "dense",
    "R": "time_mix",
    "T": "time_mix",
    "K": "channel_mix",
    "M": "mamba",
    "S": "selective_scan",
    "L": "delta",
    "C": "short_conv",
    "*": "attention",
    "W": "attention",
    "Q": "attention",
    "V": "attention",
    "Y": "attention",
    "F": "attention",
    "G": "attention",
    "I": "indexer",
    "P": "layer_embedding",
    "U": "updates",
    "H": "hyper_connections",
    "D": "double_stream",
    "O": "double_stream",
    "N": "single_stream",
    "X": "cross_attention",
}
"""Names of layers. A layer is named after the first of these that it has."""
_AS_WIDE_AS_FEED_FORWARD: Final = frozenset("-*WQVKAX")
"""Sub-layers that are taken to be as wide inside as a dense feed-forward."""


def _sub_layers(
    model: Transformer, local: ShardSizes, letters: str, *, owner: bool = True
) -> list[Piece]:
    """Sub-layers of one layer, in series or (`parallel_blocks`) side by side."""
    if model.block.parallel_blocks == "none":
        pieces: list[Piece] = []
        if model.hybrid.parallel_mixers and model.hybrid.mamba and letters.startswith("*M"):
            attention = _attention(model, local, letters[0], reduced=False)
            mixer = mamba_mixer(model, local, model.hybrid.mamba, own_input=False)
            pieces += side_by_side(model, local, attention, mixer, one_norm=True)
            letters = letters[2:]
        while letters:
            sub_layer_letters = (
                "-E" if model.hybrid.shortcut_experts and letters.startswith("-E") else letters[0]
            )
            pieces += _sub_layer(model, local, sub_layer_letters, owner=owner)
            letters = letters.removeprefix(sub_layer_letters)
        return pieces

    if "E" in letters and model.experts:
        attention = _attention(model, local, letters[0])
        return beside_experts(
            model,
            local,
            attention,
            expert_feed_forward(model, local, model.experts, own_input=False),
        )

    # With two norms, the feed-forward gathers and saves a separate input.
    return side_by_side(
        model,
        local,
        _attention(model, local, letters[0], reduced=False),
        feed_forward(model, local, own_input=model.block.parallel_blocks == "two_norms"),
        one_norm=model.block.parallel_blocks == "one_norm",
    )


def _sub_layer(model: Transformer, local: ShardSizes, letters: str, *, owner: bool) -> list[Piece]:
    """One sub-layer with its norms and residual addition, or two that share these."""
    hybrid = model.hybrid
    if letters == "-E" and model.experts:
        experts = expert_feed_forward(model, local, model.experts, own_input=False)
        return beside_experts(model, local, feed_forward(model, local), experts)

    # Parts that stand in no residual branch of the usual form.
    if letters == "I" and hybrid.indexer:
        return indexer_pieces(model, local, hybrid.indexer)
    if letters == "A" and hybrid.shared_block:
        return shared_block(
            model, local, hybrid.shared_block, feed_forward(model, local), owner=owner
        )
    if letters == "H" and hybrid.hyper_connections:
        return hyper_connection(local, hybrid.hyper_connections)
    if letters == "U" and hybrid.streams:
        return updates(model, local, hybrid.streams)
    if letters == "X" and model.inputs.text_condition:
        return cross_attention_to_text(model, local, model.inputs.text_condition)
    if letters == "P" and hybrid.layer_embedding:
        return [*gated_embedding(model, local, hybrid.layer_embedding), residual(model, local)]
    return sub_layer(model, local, _mixer(model, local, letters))


def _mixer(model: Transformer, local: ShardSizes, letter: str) -> list[Piece]:
    """The mixer of a letter of `MIXERS`, without norms and residual addition."""
    if letter == "M" and model.hybrid.mamba:
        return mamba_mixer(model, local, model.hybrid.mamba)
    if letter == "S" and model.hybrid.selective_scan:
        return selective_scan_mixer(model, local, model.hybrid.selective_scan)
    if letter == "L" and model.hybrid.delta_net:
        return delta_net_mixer(model, local, model.hybrid.delta_net)
    if letter == "C" and model.hybrid.short_conv:
        return short_conv_mixer(model, local, model.hybrid.short_conv)
    if letter in "RT" and model.hybrid.time_mix:
        return time_mixing(model, local, model.hybrid.time_mix, adds_values=letter == "T")
    if letter in COMPRESSED and model.hybrid.compressed_attention:
        parts = model.hybrid.compressed_attention
        return compressed_attention(model, local.for_module("attention"), parts, letter)
    if letter == "K":
        return channel_mixing(model, local)
    if letter == "E" and model.experts:
        return expert_feed_forward(model, local, model.experts)
    if letter == "-":
        return feed_forward(model, local)
    return _attention(model, local, letter)


def _attention(
    model: Transformer, local: ShardSizes, letter: str, *, reduced: bool = True
) -> list[Piece]:
    """Self-attention, under a sliding window where the letter says so."""
    window = 0
    if letter in "WV":
        window = model.attention.window
        model = model.in_window
        local = local.with_heads(model)
    return self_attention(
        model,
        local.for_module("attention"),
        causal=model.attention.causal,
        window=window,
        reduced=reduced,
        own_keys=letter in "*W",
    )


def _further_tokens(model: Transformer, local: ShardSizes) -> Blocks:
    """Modules of multi-token prediction."""
    module = _further_token(model, local)
    if not model.mtp.mtp_repeated or model.mtp.mtp_layers == 1:
        return ((module, model.mtp.mtp_layers),)

    # Where all have the weights of the first, these count once.
    repeated = replace(module, params=0, expert_params=0, tied_params=0)
    return ((module, 1), (repeated, model.mtp.mtp_layers - 1))


def _further_token(model: Transformer, local: ShardSizes) -> BlockOps:
    """A module that predicts one token further (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    The token's embedding and the layers' output, each normalised, are made one by a product; a
    layer and the head follow. It stands with the head, whose table and the embedding's it uses.
    """
    # Embedding and head are counted where they stand. On another stage than the embedding's the
    # table is held again, unless it is the head's own.
    local = local.for_module("further_tokens")
    layer = _sub_layers(model, local, model.mtp_stack[0])
    joined = column_linear(local, local.hidden // local.tp, 2 * local.hidden)
    return assemble(
        "further_token_head",
        [
            token_lookup(local, params=0),
            norm(model, local),
            norm(model, local),
            joined,
            *layer,
            *head_pieces(model, local, owner=False),
        ],
        train=local.job.mode == "train",
        is_layer=False,
        workspace_bytes=head_workspace_bytes(model, local),
        tied_params=0 if model.head.tied_embeddings else local.vocab * local.hidden,
    )


def _encoder_decoder(model: Transformer, job: Job, shard: Shard) -> Blocks:
    """Encoder, then decoder with cross-attention; the final encoder norm belongs to the decoder's
    input block."""
    if job.varied_lengths:
        raise LayoutError(
            f"{model.name}: varied lengths are not supported for encoder-decoder models; leave mean_tokens out"
        )
    encoder = local_sizes(model, job, shard, job.seq_len)
    decoder = local_sizes(model, job, shard, model.decoder_seq_len or job.seq_len)

    def layer(local: ShardSizes, *mixers: list[Piece]) -> list[Piece]:
        pieces: list[Piece] = []
        for mixer in mixers:
            pieces += sub_layer(model, local, mixer)
        return pieces

    encoder_layer = layer(
        encoder, self_attention(model, encoder, causal=False), feed_forward(model, encoder)
    )
    decoder_layer = layer(
        decoder,
        self_attention(model, decoder, causal=True),
        cross_attention(model, decoder, encoder.seq_len),
        feed_forward(model, decoder),
    )

    gradients = _activation_gradients(model, encoder)

    # Cross-attention of every decoder layer reads the encoder's output, so that each stage passes
    # it on to the next.
    passed_on = encoder.hidden_bytes
    return (
        (embedding_block("embedding", model, encoder), 1),
        (layer_block("encoder_layer", encoder, encoder_layer, gradients=gradients), model.layers),
        (embedding_block("decoder_embedding", model, decoder, encoder), 1),
        (
            layer_block(
                "decoder_layer",
                decoder,
                decoder_layer,
                passed_on_bytes=passed_on,
                gradients=gradients,
            ),
            model.decoder_layers,
        ),
        (head_block(model, decoder), 1),
    )
