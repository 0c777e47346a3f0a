"""A GPT as a flax user writes one, and its training step."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Block(nnx.Module):
    def __init__(self, hidden, heads, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(hidden, rngs=rngs), nnx.LayerNorm(hidden, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, hidden, rngs=rngs, decode=False)
        self.up, self.down = (
            nnx.Linear(hidden, 4 * hidden, rngs=rngs),
            nnx.Linear(4 * hidden, hidden, rngs=rngs),
        )

    def __call__(self, x, mask):
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class Gpt(nnx.Module):
    def __init__(self, vocab, seq, hidden, heads, layers, rngs):
        self.tokens, self.positions = (
            nnx.Embed(vocab, hidden, rngs=rngs),
            nnx.Embed(seq, hidden, rngs=rngs),
        )
        self.blocks = nnx.List([Block(hidden, heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(hidden, rngs=rngs)
        self.head = nnx.Linear(hidden, vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def training_step(vocab=512, seq=64, hidden=128, heads=4, layers=2, batch=4):
    """The step (weights, AdamW states, tokens) -> (new weights, new states, loss) and its abstract
    arguments."""
    graph, weights = nnx.split(
        nnx.eval_shape(lambda: Gpt(vocab, seq, hidden, heads, layers, nnx.Rngs(0)))
    )
    optimizer = optax.adamw(1e-3)

    def loss(weights, tokens):
        logits = nnx.merge(graph, weights)(tokens)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, jnp.roll(tokens, -1, axis=1)
        ).mean()

    def step(weights, states, tokens):
        value, gradients = jax.value_and_grad(loss)(weights, tokens)
        updates, states = optimizer.update(gradients, states, weights)
        return optax.apply_updates(weights, updates), states, value

    states = jax.eval_shape(optimizer.init, weights)
    return step, (weights, states, jax.ShapeDtypeStruct((batch, seq), jnp.int32))
