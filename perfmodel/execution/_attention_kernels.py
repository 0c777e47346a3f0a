"""Self-attention with materialised scores (what is computed, not how fast kernels do it)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


def attention(qkv: jax.Array, attributes: Mapping[str, Any], outputs: Any) -> jax.Array:
    """Softmax(Q K^T / sqrt(d)) V by head; `qkv` is [batch, sequence, heads * (query, key, value)]."""
    return _attention(qkv, attributes["heads"], bool(attributes.get("causal")))


def attention_grad(qkv: jax.Array, dy: jax.Array, attributes: Mapping[str, Any], outputs: Any) -> jax.Array:
    """Gradient of `attention` with respect to `qkv`."""
    _, pullback = jax.vjp(lambda x: _attention(x, attributes["heads"], bool(attributes.get("causal"))), qkv)
    return pullback(dy)[0]


def _attention(qkv: jax.Array, heads: int, causal: bool) -> jax.Array:
    batch, seq, width = qkv.shape
    size = width // (3 * heads)
    q, k, v = jnp.moveaxis(qkv.reshape(batch, seq, heads, 3, size), 3, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / size**0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((seq, seq), bool)), scores, -jnp.inf)
    context = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)
    return context.reshape(batch, seq, heads * size)
