"""Parameter counts of a model, in closed form.

Parameters by category (vocabulary not padded), and keys and values of a sequence in the cache of
every layer.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, singledispatch

from perfmodel.spec import ConvNet, Mlp, Model, Transformer
from perfmodel.spec.parts import Patches
from perfmodel.spec.unet import UNet
from perfmodel.workload._attention import has_bias, projected, unbiased_outputs
from perfmodel.workload._compressed_attention import (
    COMPRESSED,
    compressed_cache_bytes,
    hyper_head_parameters,
)
from perfmodel.workload._embedding_head import (
    T5_RELATIVE_BUCKETS,
    position_rows,
    spectrogram_weights,
    table_width,
)
from perfmodel.workload._indexer import indexer_parameters
from perfmodel.workload._layer_embedding import gate_weights, lookup_parameters
from perfmodel.workload._patches import condition_weights
from perfmodel.workload._pointwise import (
    head_norm_params,
    norm_params,
    unconditioned_norm_params,
)
from perfmodel.workload._shared_block import shared_block_parameters
from perfmodel.workload._streams import projection_weights
from perfmodel.workload._text_streams import modulation_vectors, text_input_weights
from perfmodel.workload._weights import (
    attention_weights,
    ffn_weights,
    key_value_weights,
    mixer_weights,
)


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameters by category."""

    embedding: int = 0
    """Token, position and segment tables."""
    attention: int = 0
    """Projections of attention, its sinks and its indexers; blocks of attention and feed-forward
    that layers share."""
    feed_forward: int = 0
    """Dense feed-forwards, shared experts, and convolutions or dense layers of other networks."""
    experts: int = 0
    """Routed experts."""
    router: int = 0
    """Routers, and the projections to and from the experts' latent space, if there is one."""
    mamba: int = 0
    """Mixers other than attention: Mamba, gated delta nets, short convolutions, RWKV's time and
    channel mixing."""
    norms: int = 0
    """Norms, with the scales and shifts of adaLN."""
    further_tokens: int = 0
    """Modules of multi-token prediction, which use embedding and head of the model."""
    head: int = 0
    """Output projection (0 if tied to the embedding), BERT's transform, pooler and biases."""
    active_experts: int = 0
    """The part of `experts` that one token visits."""

    @property
    def total(self) -> int:
        """All parameters (`active_experts` is a part of `experts`)."""
        return (
            self.embedding
            + self.attention
            + self.feed_forward
            + self.experts
            + self.router
            + self.mamba
            + self.norms
            + self.further_tokens
            + self.head
        )

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self.total - self.experts + self.active_experts


def parameter_count(model: Model) -> int:
    """All parameters of `model`; tied tables count once."""
    return parameters(model).total


@lru_cache(maxsize=256)
def parameters(model: Model) -> Parameters:
    """Parameters of `model` by category."""
    return _counted(model)


@singledispatch
def _counted(model: Model) -> Parameters:
    """`parameters`, by kind of model."""
    raise TypeError(f"not a model: {model!r}")


@_counted.register
def _(model: Mlp) -> Parameters:
    return Parameters(feed_forward=model.layers * model.hidden**2)


@_counted.register
def _(model: ConvNet) -> Parameters:
    weights = norms = head = 0
    for layer in model.stack:
        if layer.op == "conv":
            weights += layer.weights + (0 if layer.batch_norm else layer.c_out)
        elif layer.op == "linear":
            head += layer.weights + layer.c_out
        if layer.batch_norm:
            norms += 2 * layer.c_out
    return Parameters(feed_forward=weights, norms=norms, head=head)


@_counted.register
def _(model: UNet) -> Parameters:
    attention = feed_forward = norms = 0
    # Two products for the time step, and two for further conditions where there are any.
    width = model.embedding_width
    for inputs in filter(None, (model.channels[0], model.added_width)):
        feed_forward += (inputs + 1) * width + (width + 1) * width
    for part in model.parts:
        c_in, c, layers = part.c_in, part.c_out, part.layers
        if part.kind != "unit":
            feed_forward += (9 * c_in + 1) * c
            continue
        # Two convolutions, the product of the time step, and the shortcut where channels change.
        feed_forward += (9 * c_in + 1) * c + (9 * c + 1) * c + (width + 1) * c
        if c_in != c:
            feed_forward += (c_in + 1) * c
        norms += 2 * (c_in + c)
        if layers:
            # Of all projections of attention only the output has a bias. The feed-forward is gated.
            text = model.text_width
            attention += layers * ((4 * c + 1) * c + (2 * c + 2 * text + 1) * c)
            feed_forward += layers * ((c + 1) * 8 * c + (4 * c + 1) * c) + 2 * (c + 1) * c
            norms += 2 * c + layers * 3 * 2 * c
    # The norm before the last convolution.
    norms += 2 * model.channels[0]
    return Parameters(attention=attention, feed_forward=feed_forward, norms=norms)


def _embedding(model: Transformer) -> int:
    """Tables of tokens, token types and positions, or the projection of patches."""
    h = model.hidden
    narrow = model.inputs.narrow_embedding
    width = table_width(model)
    small_width = width if narrow and narrow.all_tables else h
    embedding = model.vocab * width + model.inputs.token_types * small_width
    if model.inputs.patches:
        embedding = _patches(model, model.inputs.patches)[0]
    if model.inputs.positions == "learned":
        embedding += position_rows(model) * small_width
        if model.decoder_layers:
            embedding += position_rows(model, decoder=True) * h
    if model.inputs.spectrogram:
        # Both convolutions have biases.
        embedding += spectrogram_weights(h, model.inputs.spectrogram) + 2 * h
    if narrow:
        embedding += width * h + (h if narrow.bias else 0)
    if model.inputs.positions == "relative":
        stacks = 2 if model.decoder_layers else 1
        embedding += stacks * T5_RELATIVE_BUCKETS * model.heads
    return embedding


@_counted.register
def _(model: Transformer) -> Parameters:
    h = model.hidden
    v = model.vocab
    narrow = model.inputs.narrow_embedding
    width = table_width(model)
    small_width = width if narrow and narrow.all_tables else h
    stacks = 2 if model.decoder_layers else 1
    embedding = _embedding(model)
    head = 0 if model.head.tied_embeddings else v * width
    if model.inputs.patches:
        head = _patches(model, model.inputs.patches)[1]

    norms = 0
    if model.hybrid.layer_embedding:
        table, norms = lookup_parameters(model, model.hybrid.layer_embedding)
        embedding += table
    if model.hybrid.streams:
        embedding += projection_weights(h, model.hybrid.streams)
        head += projection_weights(h, model.hybrid.streams)

    if model.hybrid.hyper_connections:
        head += hyper_head_parameters(h, model.hybrid.hyper_connections)

    # Norms at both ends of each stack; BERT's transform with its bias and norm, its pooler and
    # sentence classifier.
    norms += norm_params(model, h) * stacks * model.norms.final_norm
    norms += norm_params(model, small_width) * stacks * model.norms.embedding_norm
    if narrow and not model.head.pooler_and_mlm_head:
        head += h * width + (width if narrow.bias else 0)
    if model.head.pooler_and_mlm_head:
        head += h * width + width + v
        if model.head.pooler:
            head += h * h + h + 2 * h + 2
        norms += norm_params(model, width)

    # A decoder layer has two attentions and a feed-forward. Layers that use weights again add none.
    stack = model.stack[: model.layer_groups or None]
    layers = _sub_layers(model, "".join(stack) + "**-" * model.decoder_layers)

    # A module of multi-token prediction joins two hidden states, each normed, and norms the result
    # of its layer.
    modules = model.mtp_stack[:1] if model.mtp.mtp_repeated else model.mtp_stack
    further_layers = _sub_layers(model, "".join(modules))
    projection = len(modules) * (2 * h * h + 3 * norm_params(model, h))
    feed_forward = layers.feed_forward
    if model.uneven_inner:
        feed_forward += ffn_weights(model, model.uneven_inner)
        feed_forward += model.uneven_inner * model.inner_projections * model.block.bias
    return replace(
        layers,
        feed_forward=feed_forward,
        embedding=embedding + layers.embedding,
        head=head,
        norms=layers.norms + norms,
        further_tokens=further_layers.total + projection,
    )


def _sub_layers(model: Transformer, letters: str) -> Parameters:
    """Parameters of sub-layers, letters of `MIXERS`, with their norms and conditioning."""
    hybrid = model.hybrid
    counts = Counter(letters)
    attention, norms = _attentions(model, counts)
    norms += _norms_of_sub_layers(model, letters)
    if hybrid.indexer:
        attention += counts["I"] * indexer_parameters(model, hybrid.indexer)
    if hybrid.shared_block:
        attention += shared_block_parameters(model, hybrid.shared_block, counts["A"])
    embedding = 0
    if hybrid.layer_embedding:
        embedding = counts["P"] * gate_weights(model.hidden, hybrid.layer_embedding)
    mixers = mixer_weights(model, counts)
    for letter in COMPRESSED:
        if letter in mixers:
            attention += counts[letter] * mixers.pop(letter).parameters
    layers = Parameters(
        embedding=embedding,
        attention=attention,
        feed_forward=_feed_forwards(model, counts),
        mamba=sum(counts[letter] * mixer.parameters for letter, mixer in mixers.items()),
        norms=norms,
    )
    if not model.experts:
        return layers

    # Experts: routed and shared ones, and the router that chooses among them.
    experts = model.experts
    n_layers = counts["E"]
    routed = _ffn(model, experts.ffn_hidden, experts.latent)
    shared = _ffn(model, experts.shared_ffn_hidden) if experts.shared_ffn_hidden else 0
    if experts.shared_gate:
        shared += model.hidden
    choices = experts.count + experts.idle
    router = model.hidden * (choices + 2 * experts.latent)
    router += choices if experts.router_bias else 0
    router += experts.count if experts.branch_norms else 0
    return replace(
        layers,
        feed_forward=layers.feed_forward + shared * n_layers,
        experts=routed * experts.count * n_layers,
        router=router * n_layers,
        active_experts=routed * experts.topk * n_layers,
    )


def _attentions(model: Transformer, counts: Mapping[str, int]) -> tuple[int, int]:
    """Parameters of the projections of all attentions, and of the norms inside them.

    Args:
        counts: number of sub-layers by letter.
    """
    projections = norms = 0
    for full, borrowing, attention in (("*", "Q", model), ("W", "V", model.in_window)):
        weights, norms_inside = _attention(attention)
        projections += counts[full] * weights
        norms += counts[full] * norms_inside

        # Attention with the keys and values of another layer has neither their projections nor
        # their norms.
        projections += counts[borrowing] * (weights - _keys_and_values_parameters(attention))
        norms += counts[borrowing] * (norms_inside - _key_norm(attention))

        # Layers of two streams have the projections twice, of which the last makes no result of the
        # text; cross-attention, and layers of one stream, once.
        if attention is model and full == "*":
            times = 2 * (counts["D"] + counts["O"]) + counts["N"] + counts["X"]
            projections += times * weights - counts["O"] * _output_parameters(model)
            norms += times * norms_inside

        # Norms of the inputs of the last products.
        if model.norms.sub_norms:
            norms += counts[full] * norm_params(model, attention.heads * attention.value_dim)
    return projections, norms


def _norms_of_sub_layers(model: Transformer, letters: str) -> int:
    """Parameters of the norms around sub-layers, and of their conditioning."""
    h = model.hidden
    hybrid = model.hybrid
    counts = Counter(letters)
    text = model.inputs.text_condition

    # Norms before or after each sub-layer, or both; one for two where attention and feed-forward
    # stand side by side.
    normed = len(letters) - sum(counts[letter] for letter in "IAPUH")
    if model.block.parallel_blocks == "one_norm":
        normed = counts["*"] + counts["W"]
    if hybrid.parallel_mixers:
        normed -= counts["M"]
    if hybrid.shortcut_experts:
        normed -= counts["E"]
    norms = norm_params(model, h) * (2 if model.norms.norm_at == "both" else 1) * normed

    # Norms of some kinds of sub-layers.
    if hybrid.layer_embedding:
        norms += counts["P"] * norm_params(model, h)
    if model.norms.sub_norms:
        norms += counts["-"] * norm_params(model, model.ffn_hidden)
    if model.experts and model.experts.branch_norms:
        norms += counts["E"] * 4 * norm_params(model, h)

    if text and text.cross_norm:
        norms += counts["X"] * unconditioned_norm_params(model, h)

    # Scale, shift and gate of each sub-layer are made of the condition by one product, or learned
    # where all layers share that.
    if model.norms.adaln:
        shared = model.norms.adaln.shared
        norms += modulation_vectors(counts) * (h if shared else h * h + h)
    return norms


def _patches(model: Transformer, patches: Patches) -> tuple[int, int]:
    """Parameters of input and head of a transformer on patches, each with its bias."""
    h = model.hidden
    width = patches.out_elements or model.vocab
    embedding = (patches.elements + 1 + patches.class_tokens) * h
    head = (h + 1) * width
    if model.norms.adaln:
        weights, others = condition_weights(model, model.norms.adaln)
        embedding += weights + others
        head += 2 * h if model.norms.adaln.shared else 2 * (h * h + h)
    text = model.inputs.text_condition
    if text:
        embedding += text_input_weights(h, text) + text.projections * h
        embedding += text.width * text.input_norm
    return embedding, head


def _feed_forwards(model: Transformer, counts: Mapping[str, int]) -> int:
    """Parameters of all dense feed-forwards of the usual size."""
    # One for each stream that leaves a layer. A single stream's last product has the bias that
    # attention's output counts.
    number = counts["-"] + 2 * counts["D"] + counts["O"] + counts["N"]
    shared_biases = counts["N"] * model.hidden * model.block.bias
    return number * _ffn(model, model.ffn_hidden) - shared_biases


def _ffn(model: Transformer, inner: int, outer: int = 0) -> int:
    """One feed-forward with inner size `inner`, on `outer` elements or the hidden size."""
    biases = inner * model.inner_projections + (outer or model.hidden)
    return ffn_weights(model, inner, outer) + (biases if model.block.bias else 0)


def _attention(model: Transformer) -> tuple[int, int]:
    """Projections of one attention (and its sinks), and the parameters of the norms inside it."""
    h, a, d, kv = model.hidden, model.heads, model.head_dim, model.kv_heads
    sinks = a if model.attention.attention_sinks else 0
    latent = model.latent_attention
    if latent:
        q_rank, rank = latent.q_lora_rank, latent.kv_lora_rank
        norms = norm_params(model, q_rank) + norm_params(model, rank)
        return attention_weights(model) + sinks, norms
    biases = 0
    if model.block.bias or model.attention.qkv_bias:
        biases += sum(projected(model, heads=a, kv_heads=kv))
    if model.block.bias or model.attention.output_bias:
        biases += h

    # Norms of queries and of keys have the size of a head, unless they go over all heads at once.
    normed = 0
    if model.attention.qk_norm:
        normed = ((a + kv) if model.attention.qk_norm_of_all_heads else 2) * d
    biases -= unbiased_outputs(model, heads=a, kv_heads=kv)
    distance_biases = 0
    if model.attention.distances is not None:
        for name in model.attention.distances.projections:
            distance_biases += a * d * (h + has_bias(model, name))
    weights = attention_weights(model) + biases + sinks + distance_biases
    return weights, head_norm_params(model, normed)


def _output_parameters(model: Transformer) -> int:
    """Parameters of attention's output projection, without latent attention."""
    biased = model.block.bias or model.attention.output_bias
    return model.hidden * (model.heads * model.value_dim + biased)


def _keys_and_values_parameters(model: Transformer) -> int:
    """Parameters of the projections to keys and values."""
    biases = 0
    if model.block.bias or model.attention.qkv_bias:
        biases = sum(projected(model, heads=0, kv_heads=model.kv_heads))
        biases -= unbiased_outputs(model, heads=0, kv_heads=model.kv_heads)
    return key_value_weights(model) + biases


def _key_norm(model: Transformer) -> int:
    """Parameters of the norm of keys."""
    if not model.attention.qk_norm:
        return 0
    heads = model.kv_heads if model.attention.qk_norm_of_all_heads else 1
    return head_norm_params(model, heads * model.head_dim)


def _keys_and_values(model: Transformer, tp: int) -> float:
    """Elements of a token's keys and values in one layer, on one rank of tensor parallelism."""
    return float(max(1, model.kv_heads // tp) * (model.head_dim + model.value_dim))


MAMBA_STATE_BYTES = 4
"""Bytes of an element of a Mamba layer's state, which servers keep in fp32."""


def layer_cache_bytes(
    model: Transformer, tp: int, tokens: int, element_bytes: float
) -> tuple[float, ...]:
    """Bytes of a sequence in the cache of each layer, in model order, on one rank of tensor
    parallelism."""
    # Keys and values of the rank's heads, which are copied where there are fewer heads than ranks;
    # or under latent attention one compressed vector for all heads, which every rank holds
    # (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).
    latent, mamba = model.latent_attention, model.hybrid.mamba
    if latent:
        token_bytes = window_token_bytes = (
            latent.kv_lora_rank + latent.qk_rope_head_dim
        ) * element_bytes
    else:
        token_bytes = _keys_and_values(model, tp) * element_bytes
        window_token_bytes = _keys_and_values(model.in_window, tp) * element_bytes

    # All tokens, or the last ones where attention slides.
    full = tokens * token_bytes
    windowed = min(tokens, model.attention.window or tokens) * window_token_bytes
    bytes_by_mixer = {"*": full, "W": windowed, "A": full}
    if model.hybrid.indexer:
        bytes_by_mixer["I"] = tokens * model.hybrid.indexer.head_dim * element_bytes
    mix = model.hybrid.time_mix
    if mix:
        # Numerator, denominator and largest exponent of every channel, or a matrix of every head;
        # and the last token's inputs of both mixings.
        state = mix.key_channels * mix.inner // mix.heads if mix.heads else 3 * mix.inner
        bytes_by_mixer["R"] = bytes_by_mixer["T"] = (
            MAMBA_STATE_BYTES * state / tp + model.hidden * element_bytes
        )
        bytes_by_mixer["K"] = model.hidden * element_bytes

    for letter in COMPRESSED:
        bytes_by_mixer[letter] = compressed_cache_bytes(model, letter, tokens, element_bytes)

    # Other mixers have a state that does not grow, and the last inputs of their convolution.
    if mamba:
        elements = mamba.inner * mamba.state + mamba.convolved * (mamba.conv_kernel - 1)
        bytes_by_mixer["M"] = MAMBA_STATE_BYTES * elements / tp
    scan = model.hybrid.selective_scan
    if scan:
        elements = scan.inner * (scan.state + scan.conv_kernel - 1)
        bytes_by_mixer["S"] = MAMBA_STATE_BYTES * elements / tp
    net = model.hybrid.delta_net
    if net:
        elements = net.values * net.key_dim + net.convolved * max(0, net.conv_kernel - 1)
        bytes_by_mixer["L"] = MAMBA_STATE_BYTES * elements / tp
    conv = model.hybrid.short_conv
    if conv:
        bytes_by_mixer["C"] = element_bytes * model.hidden * (conv.kernel - 1) / tp
    cache_bytes = []
    for sublayers in model.stack:
        cache_bytes.append(sum(bytes_by_mixer.get(letter, 0.0) for letter in sublayers))
    return tuple(cache_bytes)
