"""Elements of the weights of attentions and feed-forwards, without biases."""

from perfmodel.spec import Transformer
from perfmodel.workload._attention import projected


def attention_weights(model: Transformer) -> int:
    """Elements of the projections of one attention."""
    h, a = model.hidden, model.heads

    # Latent attention: down and up projections of queries, then of keys and values, then the
    # output's.
    latent = model.latent_attention
    if latent:
        d_qk = latent.qk_nope_head_dim + latent.qk_rope_head_dim
        q_rank, rank = latent.q_lora_rank, latent.kv_lora_rank
        query = q_rank * (h + a * d_qk) if q_rank else h * a * d_qk
        key_value = h * (rank + latent.qk_rope_head_dim)
        key_value += rank * a * (latent.qk_nope_head_dim + latent.v_head_dim)
        gates = h * a if model.attention.head_gate else 0
        return query + key_value + gates + a * latent.v_head_dim * h

    # Queries, output and where there is one the gate have all heads; keys and values fewer.
    return h * (sum(projected(model, heads=a, kv_heads=model.kv_heads)) + a * model.value_dim)


def key_value_weights(model: Transformer) -> int:
    """Elements of the projections to keys and values, without latent attention."""
    return model.hidden * sum(projected(model, heads=0, kv_heads=model.kv_heads))


def ffn_weights(model: Transformer, inner: int, outer: int = 0) -> int:
    """Elements of one feed-forward's weights with inner size `inner`, on `outer` elements or the
    hidden size."""
    return (outer or model.hidden) * inner * (model.inner_projections + 1)
