"""A GPT in plain jax.numpy, sharded for tensor and data parallelism by annotations only."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

VOCAB, SEQ, HIDDEN, HEADS, LAYERS, BATCH = 1024, 32, 64, 4, 2, 8
DP, TP = 2, 4


def norm(x, p):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p[0] + p[1]


def parameters(sharding):
    d = HIDDEN // HEADS
    layer = {
        "norm1": (sharding(), (2, HIDDEN)),
        "qkv": (sharding(None, None, "tp", None), (3, HIDDEN, HEADS, d)),
        "qkv_bias": (sharding(None, "tp", None), (3, HEADS, d)),
        "out": (sharding("tp", None, None), (HEADS, d, HIDDEN)),
        "out_bias": (sharding(), (HIDDEN,)),
        "norm2": (sharding(), (2, HIDDEN)),
        "up": (sharding(None, "tp"), (HIDDEN, 4 * HIDDEN)),
        "up_bias": (sharding("tp"), (4 * HIDDEN,)),
        "down": (sharding("tp", None), (4 * HIDDEN, HIDDEN)),
        "down_bias": (sharding(), (HIDDEN,)),
    }
    tree = {
        "tokens": (sharding("tp", None), (VOCAB, HIDDEN)),
        "positions": (sharding(), (SEQ, HIDDEN)),
        "norm": (sharding(), (2, HIDDEN)),
        "head": (sharding(None, "tp"), (HIDDEN, VOCAB)),
        "layers": [layer] * LAYERS,
    }
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf[1], jnp.float32, sharding=leaf[0]),
        tree,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )


def loss(w, tokens, labels, replicated):
    """Mean cross entropy; `replicated` says where activations are whole on every tensor-parallel
    rank."""
    x = replicated(jnp.take(w["tokens"], tokens, axis=0, mode="clip") + w["positions"])
    for layer in w["layers"]:
        q, k, v = (
            jnp.einsum("bsh,chad->cbsad", norm(x, layer["norm1"]), layer["qkv"])
            + layer["qkv_bias"][:, None, None]
        )
        scores = jnp.einsum("bqad,bkad->baqk", q, k) / (HIDDEN // HEADS) ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool)), scores, -1e9)
        context = jnp.einsum("baqk,bkad->bqad", jax.nn.softmax(scores), v)
        x = replicated(
            x + replicated(jnp.einsum("bsad,adh->bsh", context, layer["out"])) + layer["out_bias"]
        )
        inner = jax.nn.gelu(norm(x, layer["norm2"]) @ layer["up"] + layer["up_bias"])
        x = replicated(x + replicated(inner @ layer["down"]) + layer["down_bias"])
    logits = norm(x, w["norm"]) @ w["head"]
    top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    log_sum = jnp.log(jnp.exp(logits - top).sum(-1)) + top[..., 0]
    return (log_sum - jnp.where(jnp.arange(VOCAB) == labels[..., None], logits, 0).sum(-1)).mean()


def compiled_step():
    """One step of gradient descent on a mesh of DP x TP devices, compiled."""
    mesh = jax.make_mesh((DP, TP), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def sharding(*axes):
        return NamedSharding(mesh, P(*axes))

    def replicated(x):
        return jax.lax.with_sharding_constraint(x, sharding("dp", None, None))

    def step(w, tokens, labels):
        value, gradients = jax.value_and_grad(loss)(w, tokens, labels, replicated)
        return value, jax.tree.map(lambda a, b: a - 0.1 * b, w, gradients)

    w = parameters(sharding)
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32, sharding=sharding("dp", None))
    stay = jax.tree.map(lambda leaf: leaf.sharding, w)
    return jax.jit(step, out_shardings=(None, stay)).lower(w, tokens, tokens).compile()
