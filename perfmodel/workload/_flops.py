"""Model FLOPs of a step, the numerator of MFU.

Conventions (PaLM, arXiv 2204.02311 appendix B; Megatron, arXiv 2104.04473 equation 3): matrix
products and convolutions only, backward twice forward, nothing recomputed, and attention over the
full score matrix. `attention_causal` is the same attention counting visible pairs only.
Backward computes the gradient of a product's input and that of its weight; where the weight is
frozen the second is not computed, and not counted.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import singledispatch

from perfmodel.spec import ConvNet, Job, Mlp, Model, Recompute, Transformer
from perfmodel.spec.parts import STREAM_LAYERS, Experts, Patches
from perfmodel.spec.unet import UNet
from perfmodel.workload._adapter_products import adapter_products, attention_adapters, ffn_adapters
from perfmodel.workload._compressed_attention import COMPRESSED, compressed_products
from perfmodel.workload._embedding_head import LABELS, spectrogram_products, table_width
from perfmodel.workload._indexer import indexer_weights
from perfmodel.workload._layer_embedding import gate_weights
from perfmodel.workload._local import masked_tokens
from perfmodel.workload._patches import condition_weights
from perfmodel.workload._piece import SECOND_PRODUCTS
from perfmodel.workload._shared_block import own_weights, shared_weights
from perfmodel.workload._streams import projection_weights
from perfmodel.workload._text_streams import (
    image_weights,
    modulation_vectors,
    text_input_weights,
    text_weights,
)
from perfmodel.workload._unet import transformer_of
from perfmodel.workload._weights import (
    attention_weights,
    ffn_weights,
    head_dims,
    key_value_weights,
    mixer_weights,
)


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """FLOPs of one step over the whole global batch."""

    layers_forward: float
    """Dense products inside layers."""
    head_forward: float
    """Vocabulary projection (and BERT's transform)."""
    attention_forward: float
    """Scores and context over the full score matrix."""
    attention_causal_forward: float
    """Scores and context over visible pairs only; equal to the full ones without a causal mask or
    window."""
    selective_forward: float = 0.0
    """The part of these FLOPs that selective recompute repeats."""
    adapters_forward: float = 0.0
    """Low-rank products of adapters (LoRA)."""
    frozen_forward: float = 0.0
    """The part of these FLOPs in products with frozen weights, which have no weight gradient."""
    train: bool = True
    """Whether the step has a backward pass."""

    @property
    def forward(self) -> float:
        """Forward FLOPs, with full (non-causal) attention."""
        return (
            self.layers_forward + self.head_forward + self.attention_forward + self.adapters_forward
        )

    @property
    def total(self) -> float:
        """FLOPs of a step, attention in full: 72 B s l h^2 (1 + s/6h + V/12lh) for a GPT."""
        return self._with_backward(self.forward)

    @property
    def total_causal(self) -> float:
        """FLOPs of a step, counting only visible attention pairs."""
        return self._with_backward(
            self.forward - self.attention_forward + self.attention_causal_forward
        )

    def hardware(self, recompute: Recompute) -> float:
        """Executed FLOPs of a step with recomputation, attention in full (for HFU)."""
        if not self.train or recompute == "none":
            return self.total

        # The products of `Job.recompute_modules`; of the attention core 4 B s^2 h per layer.
        if recompute == "selective":
            return self.total + self.selective_forward

        # The layers' forward once more: SC21 equation 3, 96 B s l h^2 (1 + s/6h + V/16lh).
        return self.total + (self.layers_forward + self.attention_forward + self.adapters_forward)

    def _with_backward(self, forward: float) -> float:
        """Forward FLOPs, plus the same number for input gradients, plus those of trained weights
        for weight gradients."""
        if not self.train:
            return forward
        return 3 * forward - self.frozen_forward


@singledispatch
def step_flops(model: Model, job: Job) -> ModelFlops:
    """FLOPs of one step of `job` (forward only in inference mode)."""
    raise TypeError(f"not a model: {model!r}")


@step_flops.register
def _(model: Mlp, job: Job) -> ModelFlops:
    # 2 FLOPs per weight and row.
    rows = job.global_batch * job.seq_len
    return _dense_flops(2.0 * rows * model.layers * model.hidden**2, 0.0, job)


@step_flops.register
def _(model: ConvNet, job: Job) -> ModelFlops:
    # A convolution uses each weight once per pixel of its output, a dense layer once.
    layers = head = 0.0
    for layer in model.stack:
        if layer.op == "conv":
            layers += 2.0 * layer.size_out**2 * layer.weights
        elif layer.op == "linear":
            head += 2.0 * layer.weights
    return _dense_flops(layers * job.global_batch, head * job.global_batch, job)


@step_flops.register
def _(model: UNet, job: Job) -> ModelFlops:
    # Multiply-adds for one image: of convolutions, of other products, and between pixels, or
    # pixels and text. A convolution uses each weight once per pixel of its output.
    width, text = model.embedding_width, model.text_tokens
    convolutions = scores = adapters = 0
    feed_forwards = 0
    products = (model.channels[0] + width) * width
    if model.added_width:
        products += (model.added_width + width) * width
    for part in model.parts:
        c = part.c_out
        pixels = part.size_out**2
        convolutions += 9 * part.c_in * c * pixels
        if part.kind != "unit":
            continue
        convolutions += 9 * c * c * pixels
        if part.c_in != c:
            convolutions += part.c_in * c * pixels
        products += width * c
        if not part.layers:
            continue

        # Of a layer: attention within the image, to the text, and the gated feed-forward.
        layer = transformer_of(model, part)
        products += 2 * c * c * pixels
        products += part.layers * (6 * c * c * pixels + 2 * text * model.text_width * c)
        feed_forwards += part.layers * 12 * c * c * pixels
        scores += part.layers * 2 * pixels * (pixels + text) * c
        before, behind = attention_adapters(layer, job)
        beside_ffn = ffn_adapters(layer, job, layer.ffn_hidden)
        adapters += part.layers * pixels * (before + 2 * behind + beside_ffn)

    modules = job.activations.recompute_modules
    if SECOND_PRODUCTS in modules:
        repeated = convolutions + (products + feed_forwards) / 2
    else:
        repeated = scores * ("core_attn" in modules) + feed_forwards * ("mlp" in modules)
    per_multiply_add = 2.0 * job.global_batch
    weights = per_multiply_add * (convolutions + products + feed_forwards)
    return ModelFlops(
        layers_forward=weights,
        head_forward=0.0,
        attention_forward=per_multiply_add * scores,
        attention_causal_forward=per_multiply_add * scores,
        selective_forward=per_multiply_add * repeated,
        adapters_forward=per_multiply_add * job.fine_tuning.adapter_rank * adapters,
        frozen_forward=weights if job.fine_tuning.frozen else 0.0,
        train=job.mode == "train",
    )


@step_flops.register
def _(model: Transformer, job: Job) -> ModelFlops:
    batch = float(job.global_batch)
    s = job.tokens_per_sequence
    h = model.hidden
    s_out = s if not model.decoder_layers else model.decoder_seq_len or s
    # How often each sub-layer occurs, in multi-token-prediction modules too.
    letters = Counter("".join((*model.stack, *model.mtp_stack)))

    # 2 FLOPs for each weight that a token passes in the layers.
    per_token = _weights_per_token(model, letters)
    layers = 2.0 * batch * s * per_token
    if model.decoder_layers:
        # Cross-attention projects queries and outputs of the decoder, keys and values of the
        # encoder.
        self_attention = attention_weights(model)
        ffn = ffn_weights(model, model.ffn_hidden)
        query = h * model.heads * model.head_dim
        key_value = 2 * h * model.kv_heads * model.head_dim
        layers += (
            2.0
            * batch
            * model.decoder_layers
            * (s_out * (self_attention + 2 * query + ffn) + s * key_value)
        )

    # Tokens of text pass weights of their own. Modulations are computed once per image.
    text_tokens = per_text_token = 0
    if model.inputs.text_condition:
        text_tokens = model.inputs.text_condition.tokens
        per_text_token = text_weights(model, letters)
    layers += 2.0 * batch * text_tokens * per_text_token
    if model.norms.adaln and not model.norms.adaln.shared:
        layers += 2.0 * batch * h * h * modulation_vectors(letters)

    full, causal = _attention_products(model, job, letters, s_out)
    head, vocabulary = _head_flops(model, job, batch, s_out)

    # Products with frozen weights have no weight gradient, nor has the vocabulary projection if its
    # tied table is frozen. Those of an indexer have no gradient of their input instead.
    frozen = 0.0
    if model.hybrid.indexer:
        frozen = 2.0 * batch * s * letters["I"] * indexer_weights(model, model.hybrid.indexer)
    if job.fine_tuning.frozen:
        frozen = layers + head
    elif (
        job.fine_tuning.frozen_embedding and model.head.tied_embeddings and not model.inputs.patches
    ):
        frozen += vocabulary

    # What selective recomputation repeats.
    if SECOND_PRODUCTS in job.activations.recompute_modules:
        # Half of each product, and all of the routed experts' (`assemble`).
        routed = letters["E"] * _routed_weights(model)
        repeated = s * ((per_token - routed) / 2 + routed) + text_tokens * per_text_token / 2
    else:
        repeated = _repeated_products(model, job, letters, full)

    # Mixers with a state, and adapters, multiply in addition to the model's weights.
    state_products = adapters = 0.0
    for letter, mixer in mixer_weights(model, letters).items():
        state_products += letters[letter] * mixer.state_products
    if job.fine_tuning.adapter_rank:
        adapters = adapter_products(model, job, letters, s_out)
    return ModelFlops(
        layers_forward=layers + 2.0 * batch * s * state_products,
        head_forward=head,
        attention_forward=2.0 * batch * full,
        attention_causal_forward=2.0 * batch * causal,
        selective_forward=2.0 * batch * repeated,
        adapters_forward=2.0 * batch * adapters,
        frozen_forward=frozen,
        train=job.mode == "train",
    )


def _repeated_products(
    model: Transformer, job: Job, letters: Mapping[str, int], attention_products: float
) -> float:
    """Multiply-adds of a sequence that recomputation of modules repeats."""
    modules = job.activations.recompute_modules
    repeated = attention_products if "core_attn" in modules else 0.0
    if set(modules) - {"core_attn"}:
        repeated += job.tokens_per_sequence * _repeated(model, job)
    if "mlp" in modules and model.inputs.text_condition:
        per_text_token = letters["D"] * ffn_weights(model, model.ffn_hidden)
        repeated += model.inputs.text_condition.tokens * per_text_token
    return repeated


def _weights_per_token(model: Transformer, letters: Mapping[str, int]) -> int:
    """Number of weights in the layers that one token is multiplied with."""
    h, hybrid = model.hidden, model.hybrid
    # A module of multi-token prediction also joins two hidden states.
    weights = (
        (letters["*"] + letters["Q"]) * attention_weights(model)
        + letters["-"] * ffn_weights(model, model.ffn_hidden)
        + ffn_weights(model, model.uneven_inner)
        + model.mtp.mtp_layers * 2 * h * h
    )
    if letters["W"] or letters["V"]:
        weights += (letters["W"] + letters["V"]) * attention_weights(model.in_window)
    # Keys and values of an earlier layer are not projected again.
    weights -= letters["Q"] * key_value_weights(model) + letters["V"] * key_value_weights(
        model.in_window
    )
    if model.experts:
        weights += letters["E"] * _moe_weights(model, model.experts)
    for letter, mixer in mixer_weights(model, letters).items():
        weights += letters[letter] * mixer.token_weights
    if model.inputs.text_condition:
        weights += image_weights(model, letters)
    if hybrid.indexer:
        weights += letters["I"] * indexer_weights(model, hybrid.indexer)
    if hybrid.shared_block:
        weights += letters["A"] * (shared_weights(model) + own_weights(model, hybrid.shared_block))
    if hybrid.layer_embedding:
        # Rows are made of a projection of the token's embedding too.
        projection = h * hybrid.layer_embedding.width
        weights += letters["P"] * (gate_weights(h, hybrid.layer_embedding) + projection)
    if hybrid.streams:
        # Streams are projected at both ends of the layers.
        weights += 2 * projection_weights(h, hybrid.streams)
    if hybrid.hyper_connections:
        weights += hybrid.hyper_connections.count**2 * h
    return weights


def _attention_products(
    model: Transformer, job: Job, letters: Mapping[str, int], s_out: float
) -> tuple[float, float]:
    """Multiply-adds of a sequence's scores and contexts: over the full score matrix, and over
    visible pairs only."""
    # Documents of varied lengths count as so many equal ones in a sequence.
    s, length = job.tokens_per_sequence, job.attended_tokens
    documents = s / length

    # Scores take d_qk multiplications per head and pair of tokens, the context d_v.
    width = _score_width(model)
    window_width = _score_width(model.in_window)
    attending = letters["*"] + letters["Q"] + letters["A"]
    attending_in_window = letters["W"] + letters["V"]
    parts = model.hybrid.compressed_attention
    if parts:
        attending_in_window += sum(letters[letter] for letter in COMPRESSED)
    seen_width = attending * width
    if model.hybrid.indexer:
        seen_width += letters["I"] * model.hybrid.indexer.heads * model.hybrid.indexer.head_dim
    full = causal = (
        documents * float(length) * length * (seen_width + attending_in_window * window_width)
    )
    decoder = model.decoder_layers
    if model.attention.causal and not decoder:
        window = model.attention.window
        visible = _chunked_pairs if model.attention.chunked_window and window else _visible_pairs
        pairs = seen_width * _visible_pairs(length, 0)
        pairs_in_window = attending_in_window * window_width * visible(length, window)
        causal = documents * (pairs + pairs_in_window)

    if parts:
        for letter in COMPRESSED:
            to_all, to_visible = compressed_products(model, parts, letter, length)
            full += documents * letters[letter] * to_all
            causal += documents * letters[letter] * to_visible

    # Layers of two streams, or of one of both, attend over image and text; cross-attention to text.
    if model.inputs.text_condition:
        text_tokens = model.inputs.text_condition.tokens
        joint = sum(letters[letter] for letter in STREAM_LAYERS)
        added = joint * float(s + text_tokens) ** 2 + letters["X"] * float(s) * text_tokens
        full += added * width
        causal += added * width

    # The decoder attends to itself, causally, and to all of the encoder.
    if decoder:
        full += decoder * (float(s_out) * s_out + float(s_out) * s) * width
        causal += decoder * (_visible_pairs(s_out, 0) + float(s_out) * s) * width
    return full, causal


def _head_flops(model: Transformer, job: Job, batch: float, s_out: float) -> tuple[float, float]:
    """Forward FLOPs of the head, and the vocabulary projection's part of them."""
    s, h = job.tokens_per_sequence, model.hidden

    # The head, on all tokens or on the masked ones, once for every token predicted.
    tokens = (
        masked_tokens(s_out) if model.head.pooler_and_mlm_head and job.loss.masked_head else s_out
    )
    width = table_width(model)
    vocabulary = head = 2.0 * batch * tokens * width * model.vocab * (1 + model.mtp.mtp_layers)
    if model.inputs.patches:
        head = _patch_flops(model, model.inputs.patches, batch, s)
    if job.loss.head != "vocabulary" and not model.inputs.patches:
        vocabulary = 0.0
        head = batch * _label_flops(model, job, s_out)
    elif model.head.pooler_and_mlm_head:
        head += 2.0 * batch * (tokens * h * width + (h * h + 2 * h) * model.head.pooler)
    elif model.inputs.narrow_embedding:
        head += 2.0 * batch * tokens * h * width

    # A product that makes hidden states of embeddings counts with the head.
    if model.inputs.narrow_embedding:
        head += 2.0 * batch * s * h * width

    # Convolutions of an encoder of speech count with the head, as projections of patches do.
    if model.inputs.spectrogram:
        head += 2.0 * batch * s * spectrogram_products(h, model.inputs.spectrogram)
    return head, vocabulary


def _label_flops(model: Transformer, job: Job, tokens: float) -> float:
    """Forward FLOPs of a head of labels for one sequence."""
    if job.loss.head == "token_labels":
        return 2.0 * tokens * model.hidden * LABELS
    return 2.0 * model.hidden * (model.hidden + LABELS)


def _repeated(model: Transformer, job: Job) -> int:
    """Elements of weights that a token passes again when modules of layers are recomputed."""
    letters = Counter("".join(model.stack))
    modules = job.activations.recompute_modules
    repeated = 0
    if "mlp" in modules:
        feed_forwards = letters["-"] + letters["D"] + letters["O"]
        repeated = feed_forwards * ffn_weights(model, model.ffn_hidden)
        repeated += ffn_weights(model, model.uneven_inner)

    # Shared experts are part of the mixture, and repeated with it.
    if model.experts and "moe" in modules:
        repeated += letters["E"] * _moe_weights(model, model.experts)
    elif model.experts and "shared_experts" in modules:
        repeated += letters["E"] * ffn_weights(model, model.experts.shared_ffn_hidden)
    latent = model.latent_attention
    if latent and "mla_up_proj" in modules:
        up_weights = latent.q_lora_rank * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
        up_weights += latent.kv_lora_rank * (latent.qk_nope_head_dim + latent.v_head_dim)
        repeated += (letters["*"] + letters["W"]) * model.heads * up_weights
    return repeated


def _routed_weights(model: Transformer) -> int:
    """Elements of weights that one token visits in routed experts."""
    experts = model.experts
    return experts.topk * ffn_weights(model, experts.ffn_hidden, experts.latent) if experts else 0


def _moe_weights(model: Transformer, experts: Experts) -> int:
    """Elements of weights that one token visits in a mixture of experts."""
    return (
        _routed_weights(model)
        + ffn_weights(model, experts.shared_ffn_hidden)
        + model.hidden * (experts.count + experts.idle + 2 * experts.latent)
    )


def _patch_flops(model: Transformer, patches: Patches, batch: float, s: float) -> float:
    """Forward FLOPs of input and head on patches, counted together."""
    h = model.hidden
    products = s * h * patches.elements + h * (
        s * patches.out_elements if patches.out_elements else model.vocab
    )
    if model.norms.adaln:
        weights, _ = condition_weights(model, model.norms.adaln)
        products += weights + (0 if model.norms.adaln.shared else 2 * h * h)
    if model.inputs.text_condition:
        text = model.inputs.text_condition
        products += text.tokens * text_input_weights(h, text)
    return 2.0 * batch * products


def _dense_flops(layers: float, head: float, job: Job) -> ModelFlops:
    """FLOPs of a model whose products all have weights, which are either all trained or all
    frozen."""
    return ModelFlops(
        layers_forward=layers,
        head_forward=head,
        attention_forward=0.0,
        attention_causal_forward=0.0,
        frozen_forward=layers + head if job.fine_tuning.frozen else 0.0,
        train=job.mode == "train",
    )


def _score_width(model: Transformer) -> int:
    """Multiplications of one attention layer for one pair of query and key, over all heads."""
    d_qk, d_v = head_dims(model)
    return model.heads * (d_qk + d_v)


def _visible_pairs(s: float, window: int) -> float:
    """Query-key pairs under a causal mask, each query seeing at most `window` keys (0: all before
    it)."""
    # The first `window` queries see what is there, all later ones a full window.
    if 0 < window < s:
        return window * (window + 1) / 2 + float(s - window) * window
    return s * (s + 1) / 2


def _chunked_pairs(s: float, chunk: int) -> float:
    """Query-key pairs in chunked attention, where each query sees the earlier keys of its own chunk
    of this size."""
    full_chunks, remainder = divmod(s, chunk)
    return full_chunks * _visible_pairs(chunk, 0) + _visible_pairs(remainder, 0)
