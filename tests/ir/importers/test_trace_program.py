"""JAX losses as IR programs: equal to JAX in value and gradient, whole and distributed."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from thinned import one_in

from perfmodel.errors import PerfModelError
from perfmodel.ir.distribute import Degrees, distribute
from perfmodel.ir.execution import execute
from perfmodel.ir.importers import trace_program
from perfmodel.ir.models import Sgd, training_step

BATCH, SEQ, HIDDEN, HEADS, VOCAB = 4, 6, 8, 2, 16


def norm(x, p):
    centred = x - x.mean(-1, keepdims=True)
    return (
        centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["gain"]
        + p["shift"]
    )


def gpt_loss(w, tokens, labels):
    """Pre-norm transformer with a causal mask and cross entropy, as one writes it by hand."""
    x = w["table"][tokens] + w["positions"]
    for p in w["layers"]:
        q, k, v = (
            (norm(x, p["norm1"]) @ p[name]).reshape(len(x), SEQ, HEADS, -1).transpose(0, 2, 1, 3)
            for name in ("q", "k", "v")
        )
        scores = q @ k.swapaxes(-1, -2) / jnp.sqrt(HIDDEN / HEADS)
        scores = jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool)), scores, -1e9)
        context = jax.nn.softmax(scores, axis=-1) @ v
        x = x + context.transpose(0, 2, 1, 3).reshape(x.shape) @ p["out"]
        x = x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"] + p["bias"]) @ p["down"]
    logits = norm(x, w["norm"]) @ w["table"].T
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), labels[..., None], axis=-1)
    return -picked.mean()


def gpt_weights(layers=2):
    shapes = {"gain": (HIDDEN,), "shift": (HIDDEN,)}
    square = (HIDDEN, HIDDEN)
    layer = {
        "norm1": shapes,
        "norm2": shapes,
        "q": square,
        "k": square,
        "v": square,
        "out": square,
        "up": (HIDDEN, 4 * HIDDEN),
        "bias": (4 * HIDDEN,),
        "down": (4 * HIDDEN, HIDDEN),
    }
    tree = {
        "table": (VOCAB, HIDDEN),
        "positions": (SEQ, HIDDEN),
        "norm": shapes,
        "layers": [layer] * layers,
    }
    keys = iter(np.random.default_rng(0).spawn(100))
    return jax.tree.map(
        lambda s: next(keys).normal(size=s) * 0.3, tree, is_leaf=lambda s: isinstance(s, tuple)
    )


def mlp_loss(w, x, y):
    h, _ = jax.lax.scan(lambda h, p: (jnp.tanh(h @ p["a"] + p["b"]), None), x, w)
    return jnp.mean((h - y) ** 2)


def mlp_weights(layers=4):
    rng = np.random.default_rng(1)
    return {"a": rng.normal(size=(layers, HIDDEN, HIDDEN)), "b": rng.normal(size=(layers, HIDDEN))}


def cases():
    rng = np.random.default_rng(2)
    tokens, labels = rng.integers(0, VOCAB, (2, BATCH, SEQ)).astype(np.int32)
    x, y = rng.normal(size=(2, BATCH, HIDDEN))
    return {
        "gpt": (gpt_loss, gpt_weights(), tokens, labels),
        "mlp": (mlp_loss, mlp_weights(), x, y),
    }


def named(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        ".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path): np.asarray(v)
        for path, v in leaves
    }


@cache
def of_jax(name):
    """A loss as a program, what it is called with, and its value and gradients by JAX; once for all
    degrees."""
    loss, weights, *data = cases()[name]
    with jax.enable_x64(True):
        program = training_step(trace_program(loss, weights, *data), Sgd(rate=0.1))
        value, gradients = jax.jit(jax.value_and_grad(loss))(weights, *data)
        inputs = named(weights) | {f"data{i}": a for i, a in enumerate(data)}
        return (
            program,
            inputs,
            np.asarray(value),
            {f"d_{n}": g for n, g in named(gradients).items()},
        )


@pytest.mark.parametrize("name", ["gpt", "mlp"])
@pytest.mark.parametrize(
    "degrees",
    one_in(
        2,
        [
            Degrees(),
            Degrees(data=2),
            Degrees(pipeline=2, micro_batches=2),
            Degrees(data=2, pipeline=2, micro_batches=2),
        ],
    ),
    ids=["whole", "data", "pipeline", "both"],
)
def test_equal_to_jax(name, degrees):
    program, inputs, value, expected = of_jax(name)
    results = execute(distribute(program, degrees), inputs)
    found_loss = next(results[w.name] for w in program.outputs if w.role == "loss")
    np.testing.assert_allclose(found_loss, value, rtol=1e-12)
    for key, gradient in expected.items():
        np.testing.assert_allclose(results[key], gradient, rtol=1e-9, atol=1e-12, err_msg=key)


def test_layers_follow_the_names_of_weights():
    loss, weights, *data = cases()["gpt"]
    with jax.enable_x64(True):
        program = trace_program(loss, weights, *data)
    layer = {}
    for instruction in program.function.instructions:
        for name in instruction.inputs:
            layer.setdefault(name, instruction.tag.layer)
    assert {
        name: layer[name]
        for name in ("layers.0.norm2.gain", "layers.1.norm1.gain", "norm.gain", "table")
    } == {
        "layers.0.norm2.gain": 0,
        "layers.1.norm1.gain": 1,
        "norm.gain": 1,
        "table": 0,
    }


def test_tensor_parallel_by_named_axes():
    """Megatron's pairing: columns, then rows; one reduction each way and layer."""

    def loss(w, x, y):
        for p in w:
            x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        return ((x - y) ** 2).mean()

    rng = np.random.default_rng(3)
    weights = [
        {"up": rng.normal(size=(8, 16)) / 4, "down": rng.normal(size=(16, 8)) / 4} for _ in range(2)
    ]
    x, y = rng.normal(size=(2, 4, 8))
    axes = {f"{i}.{name}": axis for i in range(2) for name, axis in (("up", 1), ("down", 0))}
    with jax.enable_x64(True):
        program = distribute(
            training_step(trace_program(loss, weights, x, y, tensor_axis=axes)), Degrees(tensor=2)
        )
        results = execute(program, named(weights) | {"data0": x, "data1": y})
        gradients = named(jax.jit(jax.grad(loss))(weights, x, y))
    for key, gradient in gradients.items():
        np.testing.assert_allclose(
            results[f"d_{key}"], gradient, rtol=1e-10, atol=1e-13, err_msg=key
        )
    reductions = [
        i for i in program.function.instructions if i.op == "all_reduce" and i.tag.phase != "update"
    ]
    assert len(reductions) == 2 + 1  # backward of the first layer's input is not wanted


@pytest.mark.parametrize(
    "f",
    [
        jnp.tanh,
        jax.nn.sigmoid,
        jnp.sqrt,
        jax.lax.rsqrt,
        jnp.log1p,
        jnp.expm1,
        jnp.abs,
        jnp.square,
        jnp.exp2,
        jax.nn.silu,
        jax.nn.relu,
        lambda x: x**3,
        lambda x: x**-2,
        lambda x: jnp.maximum(x, 0.7),
        lambda x: jnp.minimum(x, 0.7),
        lambda x: 1 / x - x,
        lambda x: x.sum(0) * x.mean(1, keepdims=True),
        lambda x: jax.nn.logsumexp(x, axis=-1),
        lambda x: jnp.concatenate([x, 2 * x], axis=1),
        lambda x: jnp.split(x, 3, axis=1)[1],
        lambda x: jnp.where(np.eye(4, 6) > 0, x, -x),
        lambda x: jax.lax.top_k(x, 3)[0],
        lambda x: jnp.take_along_axis(x, jnp.argmin(x, axis=-1)[:, None], -1),
    ],
)
def test_functions_and_their_gradients(f):
    x = np.random.default_rng(4).uniform(0.1, 2.0, (4, 6))

    def loss(w):
        return (f(w["x"]) ** 2).sum()

    with jax.enable_x64(True):
        program = training_step(trace_program(loss, {"x": x}))
        results = execute(program, {"x": x})
        value, gradient = jax.jit(jax.value_and_grad(loss))({"x": x})
    name = next(w.name for w in program.outputs if w.role == "loss")
    np.testing.assert_allclose(results[name], value, rtol=1e-12)
    np.testing.assert_allclose(results["d_x"], gradient["x"], rtol=1e-10)


def refused(f, *data, message):
    weights = {"x": jax.ShapeDtypeStruct((4, 6), jnp.float32)}
    with pytest.raises(PerfModelError, match=message):
        trace_program(lambda w, *rest: f(w["x"], *rest).sum(), weights, *data)


def test_what_has_no_op_is_named_with_its_share():
    def f(x):
        return jax.lax.lgamma(x @ x.T) + jnp.sort(x @ x.T, axis=0)

    refused(
        f,
        message=r"the IR cannot express lgamma \(0.00% of FLOPs.*sort \(\d+\.\d+% of FLOPs.*use trace",
    )


def test_wrong_gradients_are_refused():
    @jax.custom_vjp
    def straight_through(x):
        return 0 * x

    straight_through.defvjp(lambda x: (0 * x, None), lambda _, g: (g,))
    refused(straight_through, message="custom_vjp_call")
    refused(
        lambda x: x.max(-1),
        message="reduce_sum .* a maximum has no gradient in the IR; wrap it in stop_gradient",
    )
    refused(jax.lax.stop_gradient, message="stop_gradient .* only for maxima")


def test_choices_by_data_and_integer_arithmetic_are_refused():
    refused(lambda x: jnp.where(x > 1, x, 0 * x), message="gt .* no comparisons")
    refused(
        lambda x, i: x[i + 1],
        jax.ShapeDtypeStruct((3,), jnp.int32),
        message="cannot compute integers",
    )
    refused(lambda x: x.astype(jnp.int32) + 0.5, message="cannot convert floats")
    refused(
        lambda x: jax.lax.while_loop(lambda a: a.sum() < 9, lambda a: a * 2, x),
        message="while .* no such op",
    )


def in_bf16(w, tokens, labels):
    """Weights in fp32, of which the forward pass computes with copies in bf16; the loss is fp32
    again."""
    short = jax.tree.map(lambda value: value.astype(jnp.bfloat16), w)
    return gpt_loss(short, tokens, labels).astype(jnp.float32)


def flax_in_bf16():
    """A flax model that computes in bf16 with weights in fp32, as `dtype=` asks for, and what it is
    called with."""
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            short = {"rngs": rngs, "dtype": jnp.bfloat16}
            self.tokens, self.positions = (
                nnx.Embed(VOCAB, HIDDEN, **short),
                nnx.Embed(2 * SEQ, HIDDEN, **short),
            )
            self.norm, self.up = (
                nnx.LayerNorm(HIDDEN, **short),
                nnx.Linear(HIDDEN, 2 * HIDDEN, **short),
            )
            self.attention = nnx.MultiHeadAttention(HEADS, HIDDEN, decode=False, **short)
            self.head = nnx.Linear(2 * HIDDEN, VOCAB, use_bias=False, **short)

        def __call__(self, tokens):
            x = self.tokens(tokens) + self.positions(jnp.arange(SEQ))
            x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(jnp.ones((1, SEQ))))
            return self.head(jax.nn.gelu(self.up(x)))

    graph, weights = nnx.split(Net(nnx.Rngs(0)))

    def loss(w, tokens, labels):
        logits = nnx.merge(graph, w)(tokens).astype(jnp.float32)
        return -jnp.take_along_axis(
            jax.nn.log_softmax(logits, axis=-1), labels[..., None], axis=-1
        ).mean()

    _, _, tokens, labels = cases()["gpt"]
    return loss, weights, tokens, labels


def plain_in_bf16():
    _, _, tokens, labels = cases()["gpt"]
    return in_bf16, jax.tree.map(np.float32, gpt_weights(layers=1)), tokens, labels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "degrees"),
    [(plain_in_bf16, Degrees(data=2, micro_batches=2)), (flax_in_bf16, Degrees())],
)
def test_mixed_precision_is_jax_s(made, degrees):
    """By hand, distributed; and by flax, whole: what is short is executed kernel by kernel, which
    takes long."""
    loss, weights, *data = made()
    step = training_step(trace_program(loss, weights, *data), Sgd(rate=0.5))
    names = [w.name for w in step.inputs_of("parameter")]
    arrays = dict(zip(names, map(np.asarray, jax.tree.leaves(weights)), strict=True))
    arrays |= dict(zip((w.name for w in step.inputs_of("data")), data, strict=True))
    value, gradients = jax.jit(jax.value_and_grad(loss))(weights, *data)
    scale = max(float(np.abs(g).max()) for g in jax.tree.leaves(gradients))
    assert any(i.op == "cast" for i in step.function.instructions)
    program = distribute(step, degrees)
    results = execute(program, arrays)
    losses = [results[w.name] for w in program.outputs if w.role == "loss"]
    np.testing.assert_allclose(losses, [value], rtol=5e-3)
    # bf16 has 8 bits, and sums are rounded in another order.
    for name, gradient in zip(names, jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(results[f"d_{name}"], gradient, atol=0.05 * scale, err_msg=name)
