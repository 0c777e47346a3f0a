"""Model FLOPs of a step, the numerator of MFU.

Conventions (PaLM, arXiv 2204.02311 appendix B; Megatron, arXiv 2104.04473 equation 3): matrix
products and convolutions only, backward twice forward, nothing recomputed, and attention over the
full score matrix. `attention_causal` is the same attention counting visible pairs only.
"""

from dataclasses import dataclass
from functools import singledispatch

from perfmodel.spec import ConvNet, Job, Mlp, Model, Recompute, Transformer
from perfmodel.workload._mamba import mamba_weights, state_space_products


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """Forward FLOPs of one step over the whole global batch, and what a step makes of them."""

    layers_forward: float
    """Dense products inside layers."""
    head_forward: float
    """Vocabulary projection (and BERT's transform)."""
    attention_forward: float
    """Scores and context over the full score matrix."""
    attention_causal_forward: float
    """The same over visible pairs only; equal without a causal mask or window."""
    train: bool = True

    @property
    def forward(self) -> float:
        """Forward FLOPs, attention in full."""
        return self.layers_forward + self.head_forward + self.attention_forward

    @property
    def total(self) -> float:
        """FLOPs of a step, attention in full: 72 B s l h^2 (1 + s/6h + V/12lh) for a GPT."""
        return self.forward * self._passes

    @property
    def total_causal(self) -> float:
        """FLOPs of a step, only visible attention pairs counted."""
        return (self.forward - self.attention_forward + self.attention_causal_forward) * self._passes

    def hardware(self, recompute: Recompute) -> float:
        """Executed FLOPs of a step with recomputation, attention in full (for HFU).

        Full recompute gives SC21 equation 3, 96 B s l h^2 (1 + s/6h + V/16lh); selective repeats
        the attention core's forward products, 4 B s^2 h per layer.
        """
        again = {
            "none": 0.0,
            "selective": self.attention_forward,
            "full": self.layers_forward + self.attention_forward,
        }[recompute]
        return self.total + (again if self.train else 0.0)

    @property
    def _passes(self) -> int:
        return 3 if self.train else 1


@singledispatch
def step_flops(model: Model, job: Job) -> ModelFlops:
    """FLOPs of one step of `job` (forward only in inference mode)."""
    raise TypeError(f"not a model: {model!r}")


@step_flops.register
def _(model: Mlp, job: Job) -> ModelFlops:
    rows = job.global_batch * job.seq_len
    return _plain(2.0 * rows * model.layers * model.hidden**2, 0.0, job)


@step_flops.register
def _(model: ConvNet, job: Job) -> ModelFlops:
    layers = head = 0.0
    for layer in model.stack:
        if layer.op == "conv":
            out = (layer.size_in + 2 * layer.pad - layer.kernel) // layer.stride + 1
            layers += 2.0 * out**2 * layer.c_out * layer.c_in * layer.kernel**2
        elif layer.op == "linear":
            head += 2.0 * layer.c_out * layer.c_in * layer.size_in**2
    return _plain(layers * job.global_batch, head * job.global_batch, job)


@step_flops.register
def _(model: Transformer, job: Job) -> ModelFlops:
    batch, s, h = float(job.global_batch), job.seq_len, model.hidden
    s_dec = (model.decoder_seq_len or s) if model.decoder_layers else s
    encoder, decoder = model.layers, model.decoder_layers
    experts = model.experts
    ffn = _ffn_weights(model, model.ffn_hidden)
    moe_layers = encoder - experts.first_dense_layers if experts else 0
    moe = 0
    if experts:
        moe = (
            experts.topk * _ffn_weights(model, experts.ffn_hidden, experts.latent)
            + _ffn_weights(model, experts.shared_ffn_hidden)
            + h * (experts.count + 2 * experts.latent)
        )
    attention = _attention_weights(model)
    attending, dense, mixed = encoder, encoder - moe_layers, 0
    if model.mixers:
        attending, dense, moe_layers = (model.mixers.count(letter) for letter in "*-E")
    if model.mamba:
        mixed = model.mixers.count("M") * (mamba_weights(h, model.mamba) + state_space_products(model.mamba))
    per_token = attending * attention + dense * ffn + moe_layers * moe + mixed
    tokens = batch * s
    layers = 2.0 * tokens * per_token
    d_qk, d_v = _head_dims(model)
    width = model.heads * (d_qk + d_v)
    pairs = float(s) * s
    full = causal = attending * pairs * width
    if model.causal and not decoder:
        every = model.full_attention_every
        unbounded = attending // every if every else 0
        causal = width * ((attending - unbounded) * _visible_pairs(s, model.window) + unbounded * _visible_pairs(s, 0))
    if decoder:
        query = h * model.heads * model.head_dim
        key_value = 2 * h * model.kv_heads * model.head_dim
        # cross-attention projects queries and outputs of the decoder, keys and values of the encoder
        layers += 2.0 * batch * decoder * (s_dec * (attention + 2 * query + ffn) + s * key_value)
        full += decoder * (float(s_dec) * s_dec + float(s_dec) * s) * width
        causal += decoder * (_visible_pairs(s_dec, 0) + float(s_dec) * s) * width
    head = 2.0 * batch * s_dec * h * model.vocab
    if model.pooler_and_mlm_head:
        head += 2.0 * batch * (s_dec * h * h + h * h + 2 * h)
    return ModelFlops(
        layers_forward=layers,
        head_forward=head,
        attention_forward=2.0 * batch * full,
        attention_causal_forward=2.0 * batch * causal,
        train=job.mode == "train",
    )


def _plain(layers: float, head: float, job: Job) -> ModelFlops:
    return ModelFlops(layers_forward=layers, head_forward=head, attention_forward=0.0,
                      attention_causal_forward=0.0, train=job.mode == "train")  # fmt: skip


def _head_dims(model: Transformer) -> tuple[int, int]:
    if latent := model.latent_attention:
        return latent.qk_nope_head_dim + latent.qk_rope_head_dim, latent.v_head_dim
    return model.head_dim, model.head_dim


def _ffn_weights(model: Transformer, inner: int, outer: int = 0) -> int:
    return (outer or model.hidden) * inner * (3 if model.gated_ffn else 2)


def _attention_weights(model: Transformer) -> int:
    h, a, d = model.hidden, model.heads, model.head_dim
    if latent := model.latent_attention:
        d_qk = latent.qk_nope_head_dim + latent.qk_rope_head_dim
        q_rank, rank = latent.q_lora_rank, latent.kv_lora_rank
        query = q_rank * (h + a * d_qk) if q_rank else h * a * d_qk
        key_value = h * (rank + latent.qk_rope_head_dim)
        key_value += rank * a * (latent.qk_nope_head_dim + latent.v_head_dim)
        return query + key_value + a * latent.v_head_dim * h
    return h * d * (2 * a + 2 * model.kv_heads)


def _visible_pairs(s: int, window: int) -> float:
    """Query-key pairs under a causal mask, each query seeing at most `window` keys (0: all before it)."""
    if 0 < window < s:
        return window * (window + 1) / 2 + float(s - window) * window
    return s * (s + 1) / 2
