"""A small transformer in plain jax.numpy: its jaxpr holds the matrix products that the blocks
list."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perfmodel.spec import Job, Transformer
from perfmodel.spec.parts import Experts
from perfmodel.workload import Shard, blocks, matmul_flops

SEQ, BATCH = 32, 2
GPT = Transformer(
    name="gpt",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=4,
    head_dim=16,
    ffn_hidden=256,
    vocab=256,
    seq_len=SEQ,
)
LLAMA = Transformer(
    name="llama",
    layers=3,
    hidden=64,
    heads=8,
    kv_heads=2,
    head_dim=16,
    ffn_hidden=160,
    vocab=384,
    seq_len=SEQ,
    gated_ffn=True,
    activation="silu",
    norm="rms_norm",
    positions="rope",
    tied_embeddings=False,
    bias=False,
    dropout=False,
)
MOE = Transformer(
    name="moe",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=4,
    head_dim=16,
    ffn_hidden=96,
    vocab=256,
    seq_len=SEQ,
    gated_ffn=True,
    activation="silu",
    norm="rms_norm",
    positions="rope",
    tied_embeddings=False,
    bias=False,
    dropout=False,
    experts=Experts(count=4, topk=2, ffn_hidden=48, shared_ffn_hidden=32, first_dense_layers=1),
)


def weights(net):
    h, d, a, g, f = net.hidden, net.head_dim, net.heads, net.kv_heads, net.ffn_hidden
    shapes = {"table": (net.vocab, h), "head": (h, net.vocab)}
    if net.head.tied_embeddings:
        del shapes["head"]
    for i in range(net.layers):
        shapes |= {f"qkv{i}": (h, (a + 2 * g) * d), f"out{i}": (a * d, h)}
        wide = 2 if net.block.gated_ffn else 1
        if net.experts and i >= net.experts.first_dense_layers:
            e, w, shared = net.experts.count, net.experts.ffn_hidden, net.experts.shared_ffn_hidden
            shapes |= {f"route{i}": (h, e), f"eup{i}": (e, h, wide * w), f"edown{i}": (e, w, h)}
            shapes |= {f"up{i}": (h, wide * shared), f"down{i}": (shared, h)}
        else:
            shapes |= {f"up{i}": (h, wide * f), f"down{i}": (f, h)}
    return {k: jnp.zeros(v, jnp.float32) for k, v in shapes.items()}


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def act(net, x):
    if not net.block.gated_ffn:
        return jax.nn.gelu(x)
    gate, value = jnp.split(x, 2, -1)
    return jax.nn.silu(gate) * value


def attention(net, w, i, x):
    a, g, d = net.heads, net.kv_heads, net.head_dim
    qkv = norm(x) @ w[f"qkv{i}"]
    q, k, v = jnp.split(qkv, [a * d, (a + g) * d], -1)
    q = q.reshape(BATCH, SEQ, g, a // g, d)
    k, v = (t.reshape(BATCH, SEQ, g, d) for t in (k, v))
    scores = jnp.einsum("bqgrd,bkgd->bgrqk", q, k) / d**0.5
    scores = jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool)), scores, -1e9)
    context = jnp.einsum("bgrqk,bkgd->bqgrd", jax.nn.softmax(scores), v)
    return context.reshape(BATCH, SEQ, a * d) @ w[f"out{i}"]


def experts(net, w, i, x):
    """Round-robin routing with equal capacity, so that only the products matter."""
    rows = x.reshape(-1, net.hidden)
    copies = jnp.repeat(rows, net.experts.topk, 0).reshape(net.experts.count, -1, net.hidden)
    inner = act(net, jnp.einsum("emh,ehf->emf", copies, w[f"eup{i}"]))
    back = (
        jnp.einsum("emf,efh->emh", inner, w[f"edown{i}"])
        .reshape(-1, net.experts.topk, net.hidden)
        .sum(1)
    )
    gates = jax.nn.softmax(rows @ w[f"route{i}"]).max(-1, keepdims=True)
    return (back * gates).reshape(x.shape)


def loss(net, w, tokens):
    x = w["table"][tokens]
    for i in range(net.layers):
        x = x + attention(net, w, i, x)
        y = norm(x)
        ffn = act(net, y @ w[f"up{i}"]) @ w[f"down{i}"]
        x = x + (ffn + experts(net, w, i, y) if f"route{i}" in w else ffn)
    logits = norm(x) @ (w["table"].T if net.head.tied_embeddings else w["head"])
    return -jax.nn.log_softmax(logits)[..., 0].mean()


def dot_flops(jaxpr):
    """2 x output elements x contracted elements over every dot_general, nested jaxprs included."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            contracted = np.prod([eqn.invars[0].aval.shape[i] for i in contract])
            total += 2 * int(np.prod(eqn.outvars[0].aval.shape)) * int(contracted)
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += dot_flops(inner)
    return total


def block_flops(net, *phases):
    job = Job(global_batch=BATCH, seq_len=SEQ, dtype="fp32", flash_attention=False)
    parts = blocks(net, job, Shard(micro_batch=BATCH))
    return sum(n * matmul_flops(getattr(b, phase)) for b, n in parts for phase in phases)


@pytest.mark.parametrize("net", [GPT, LLAMA, MOE], ids=lambda net: net.name)
def test_forward_products(net):
    tokens = jnp.zeros((BATCH, SEQ), jnp.int32)
    jaxpr = jax.make_jaxpr(partial(loss, net))(weights(net), tokens)
    assert dot_flops(jaxpr.jaxpr) == block_flops(net, "forward")


@pytest.mark.parametrize("net", [GPT, LLAMA, MOE], ids=lambda net: net.name)
def test_forward_and_backward_products(net):
    tokens = jnp.zeros((BATCH, SEQ), jnp.int32)
    jaxpr = jax.make_jaxpr(jax.value_and_grad(partial(loss, net)))(weights(net), tokens)
    assert dot_flops(jaxpr.jaxpr) == block_flops(
        net, "forward", "backward_input", "backward_weight"
    )


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("net", [GPT, LLAMA], ids=lambda net: net.name)
def test_what_the_compiler_counts(net):
    """XLA also counts element-wise work, which is the smaller part."""
    tokens = jnp.zeros((BATCH, SEQ), jnp.int32)
    compiled = jax.jit(partial(loss, net)).lower(weights(net), tokens).compile()
    analysis = compiled.cost_analysis()
    counted = (analysis[0] if isinstance(analysis, list) else analysis)["flops"]
    assert block_flops(net, "forward") <= counted <= 1.25 * block_flops(net, "forward")
