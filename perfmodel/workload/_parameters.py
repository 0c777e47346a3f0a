"""Parameter counts in closed form, from the architecture alone (vocabulary not padded)."""

from dataclasses import dataclass
from functools import singledispatch

from perfmodel.spec import ConvNet, Mlp, Model, Transformer
from perfmodel.workload._embedding_head import T5_RELATIVE_BUCKETS
from perfmodel.workload._mamba import mamba_parameters


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameters by category."""

    embedding: int = 0
    """Token, position and segment tables."""
    attention: int = 0
    feed_forward: int = 0
    """Dense feed-forwards, shared experts, and convolutions or dense layers of other networks."""
    experts: int = 0
    """Routed experts."""
    router: int = 0
    """And the projections to and from what experts work on, where that is not the hidden size."""
    mamba: int = 0
    """Mamba-2 mixers of hybrids."""
    norms: int = 0
    head: int = 0
    """Output projection (0 if tied to the embedding), BERT's transform, pooler and biases."""
    active_experts: int = 0
    """The part of `experts` that one token visits."""

    @property
    def total(self) -> int:
        return (
            self.embedding + self.attention + self.feed_forward + self.experts + self.router + self.mamba
            + self.norms + self.head
        )  # fmt: skip

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self.total - self.experts + self.active_experts


def parameter_count(model: Model) -> int:
    """All parameters of `model`; tied tables count once."""
    return parameters(model).total


@singledispatch
def parameters(model: Model) -> Parameters:
    """Parameters of `model` by category."""
    raise TypeError(f"not a model: {model!r}")


@parameters.register
def _(model: Mlp) -> Parameters:
    return Parameters(feed_forward=model.layers * model.hidden**2)


@parameters.register
def _(model: ConvNet) -> Parameters:
    weights = norms = head = 0
    for layer in model.stack:
        if layer.op == "conv":
            weights += layer.c_out * (layer.c_in * layer.kernel**2 + (0 if layer.batch_norm else 1))
        elif layer.op == "linear":
            head += layer.c_out * (layer.c_in * layer.size_in**2 + 1)
        norms += 2 * layer.c_out if layer.batch_norm else 0
    return Parameters(feed_forward=weights, norms=norms, head=head)


@parameters.register
def _(model: Transformer) -> Parameters:
    h, v = model.hidden, model.vocab
    layers = model.layers + model.decoder_layers
    embedding = v * h + model.token_types * h
    if model.positions == "learned":
        embedding += max(model.seq_len, model.longest_seq_len) * h
    stacks = 2 if model.decoder_layers else 1
    if model.positions == "relative":
        embedding += stacks * T5_RELATIVE_BUCKETS * model.heads
    experts = model.experts
    moe_layers = layers - experts.first_dense_layers if experts else 0
    attending, dense, norms_of_a_layer, mixed = layers, layers - moe_layers, 2, 0
    if model.mixers:
        attending, dense, moe_layers = (model.mixers.count(letter) for letter in "*-E")
        norms_of_a_layer = 1
        mixed = mamba_parameters(h, model.mamba) * model.mixers.count("M") if model.mamba else 0
    norm = h * (2 if model.norm == "layer_norm" and model.bias else 1)
    head = 0 if model.tied_embeddings else v * h
    norms = norm * (norms_of_a_layer * layers + model.decoder_layers + stacks)
    if model.pooler_and_mlm_head:
        head += 2 * (h * h + h) + 2 * h + 2 + v
        norms += norm
    per_layer, small_norms = _attention(model)
    expert = _ffn(model, experts.ffn_hidden, experts.latent) if experts else 0
    return Parameters(
        embedding=embedding,
        attention=per_layer * (attending + model.decoder_layers),
        feed_forward=_ffn(model, model.ffn_hidden) * dense
        + (_ffn(model, experts.shared_ffn_hidden) * moe_layers if experts and experts.shared_ffn_hidden else 0),
        experts=expert * experts.count * moe_layers if experts else 0,
        router=h * (experts.count + 2 * experts.latent) * moe_layers if experts else 0,
        mamba=mixed,
        norms=norms + small_norms * attending,
        head=head,
        active_experts=expert * experts.topk * moe_layers if experts else 0,
    )


def _ffn(model: Transformer, inner: int, outer: int = 0) -> int:
    """One feed-forward with inner size `inner`, on `outer` elements or the hidden size."""
    wide = inner * (2 if model.gated_ffn else 1)
    outer = outer or model.hidden
    return outer * (wide + inner) + (wide + outer if model.bias else 0)


def _attention(model: Transformer) -> tuple[int, int]:
    """Projections of one attention, and the parameters of the norms inside it."""
    h, a, d, kv = model.hidden, model.heads, model.head_dim, model.kv_heads
    scale = 2 if model.norm == "layer_norm" and model.bias else 1
    if latent := model.latent_attention:
        d_qk = latent.qk_nope_head_dim + latent.qk_rope_head_dim
        rank, q_rank = latent.kv_lora_rank, latent.q_lora_rank
        query = q_rank * (h + a * d_qk) if q_rank else h * a * d_qk
        key_value = h * (rank + latent.qk_rope_head_dim) + rank * a * (latent.qk_nope_head_dim + latent.v_head_dim)
        return query + key_value + a * latent.v_head_dim * h, scale * (q_rank + rank)
    width = (a + 2 * kv) * d
    biases = (width if model.bias or model.qkv_bias else 0) + (h if model.bias else 0)
    return h * width + a * d * h + biases, 2 * d if model.qk_norm else 0
