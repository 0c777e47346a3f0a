"""The programs compute what their ops say: numbers against NumPy, FLOPs against the compiler's
count."""

from typing import Any

import jax
import numpy as np
import pytest

from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.measure.backends import jax_program
from perfmodel.ops import (
    MEASURED_MEMORY_OPS,
    Attention,
    Convolution,
    Embedding,
    Gemm,
    KernelOp,
    MemoryBound,
    MoE,
    OptimizerStep,
)
from perfmodel.ops.programs import JAX_DTYPES


def run(op: KernelOp) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Inputs and outputs as float64."""
    timed = jax_program(op)
    inputs = [np.asarray(a, np.float64) for a in timed.arguments]
    return inputs, [
        np.asarray(o, np.float64) for o in jax.tree.leaves(timed.function(*timed.arguments))
    ]


def close(actual: Any, expected: Any, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "shape", [{}, {"op": "bmm", "batch": 3}, {"op": "grouped_linear", "groups": 2}]
)
def test_gemm_passes(shape: dict[str, Any]):
    gemm = {"m": 5, "n": 7, "k": 11, "dtype": "fp32", **shape}
    (a, b), (c,) = run(Gemm(**gemm))
    assert a.ndim == b.ndim == 2 + bool(shape)  # one product has no axis of batches
    close(c, a @ b)
    (a, b), (c,) = run(Gemm(**gemm, pass_="dgrad"))
    close(c, a @ b.swapaxes(-1, -2))
    (a, b), (c,) = run(Gemm(**gemm, pass_="wgrad"))
    close(c, a.swapaxes(-1, -2) @ b)
    assert c.shape[-2:] == (5, 7)
    (g, a, b), (da, db) = run(Gemm(**gemm, pass_="bwd"))
    close(da, g @ b.swapaxes(-1, -2))
    close(db, a.swapaxes(-1, -2) @ g)


def test_accumulated_weight_gradient_adds_in_fp32():
    timed = jax_program(Gemm(m=4, n=6, k=8, dtype="bf16", pass_="wgrad", accumulate=True))
    _, a, b = timed.arguments
    product = np.asarray(a, np.float64).T @ np.asarray(b, np.float64)
    (once,) = timed.function(*timed.arguments)
    assert once.dtype == np.float32
    (twice,) = timed.function(once, a, b)
    close(twice, 2 * product)
    assert timed.carried == 1


def without_chance() -> list[tuple[str, int]]:
    return [item for item in MEASURED_MEMORY_OPS.items() if "dropout" not in item[0]]


@pytest.mark.parametrize(("op", "n_inputs"), without_chance())
def test_memory_bound_kernels_have_a_gradient_by_finite_differences(op: str, n_inputs: int):
    shape = {"op": op, "rows": 3, "hidden": 8, "n_inputs": n_inputs, "dtype": "fp32"}
    forward = jax_program(MemoryBound(**shape))
    _, gradients = run(MemoryBound(**shape, pass_="bwd"))
    step = 1e-2
    for index, argument in enumerate(forward.arguments[: len(gradients)]):
        direction = np.random.default_rng(index).standard_normal(argument.shape).astype(np.float32)
        sides = []
        for sign in (1, -1):
            moved = list(forward.arguments)
            moved[index] = argument + sign * step * direction
            sides.append(np.asarray(forward.function(*moved), np.float64).sum())
        assert (sides[0] - sides[1]) / (2 * step) == pytest.approx(
            (gradients[index] * direction).sum(), abs=2e-2
        )


@pytest.mark.parametrize("op", ["dropout", "bias_dropout_add"])
def test_dropout_keeps_nine_of_ten_and_its_mean(op: str):
    shape = {
        "op": op,
        "rows": 64,
        "hidden": 512,
        "n_inputs": MEASURED_MEMORY_OPS[op],
        "dtype": "fp32",
    }
    timed = jax_program(MemoryBound(**shape))
    x, *rest = (np.asarray(a, np.float64) for a in timed.arguments[:-1])
    out = np.asarray(timed.function(*timed.arguments), np.float64) - (rest[0] if rest else 0)
    given = x + (rest[1] if rest else 0)
    kept = np.abs(out) > 1e-5
    assert kept.mean() == pytest.approx(0.9, abs=0.01)
    np.testing.assert_allclose(out[kept], given[kept] / 0.9, rtol=1e-3, atol=1e-4)
    (gradient, *_, mask), (dx, *others) = run(MemoryBound(**shape, pass_="bwd"))
    close(dx, gradient * mask.astype(bool) / 0.9)
    assert [o.shape for o in others] == [r.shape for r in rest]


def test_rms_norm_against_numpy():
    (x, _), (y,) = run(MemoryBound(op="rms_norm", rows=4, hidden=9, dtype="fp32"))
    close(y, x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5))


def test_fp8_products_multiply_what_the_operands_hold():
    for pass_ in ("fwd", "dgrad", "wgrad"):
        timed = jax_program(Gemm(m=16, n=16, k=32, dtype="fp8", pass_=pass_))
        a, b = (np.asarray(x, np.float64) for x in timed.arguments)
        product = (a.T if pass_ == "wgrad" else a) @ (b.T if pass_ == "dgrad" else b)
        result = timed.function(*timed.arguments)
        assert result.dtype == "bfloat16"
        close(np.asarray(result, np.float64), product, 0.02)


def test_large_arrays_repeat_their_random_values(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("perfmodel.ops.programs.MOST_RANDOM", 4)
    values = np.asarray(
        jax_program(MemoryBound(op="relu", rows=2, hidden=5, dtype="fp32")).arguments[0]
    )
    assert values.shape == (2, 5)
    assert values.ravel()[4:8].tolist() == values.ravel()[:4].tolist()


def test_softmax_and_layer_norm_against_numpy():
    (x,), (y,) = run(MemoryBound(op="softmax", rows=4, hidden=9, dtype="fp32"))
    close(y, np.exp(x) / np.exp(x).sum(-1, keepdims=True))
    (x, *_), (y,) = run(MemoryBound(op="layer_norm", rows=4, hidden=9, dtype="fp32"))
    close(y, (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5))


def test_embedding_gathers_and_scatters():
    shape = {"tokens": 6, "hidden": 3, "vocab": 4, "dtype": "fp32"}
    (table, ids), (rows,) = run(Embedding(**shape))
    close(rows, table[ids.astype(int)])
    (_, table, ids), (gradient,) = run(Embedding(**shape, pass_="bwd"))
    close(gradient, np.bincount(ids.astype(int), minlength=4)[:, None] * np.ones((4, 3)))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_against_a_loop(causal: bool):
    op = Attention(
        batch=2,
        heads=4,
        kv_heads=2,
        seq_q=3,
        seq_kv=5,
        head_dim=8,
        head_dim_v=6,
        causal=causal,
        dtype="fp32",
    )
    (q, k, v), (out,) = run(op)
    assert out.shape == (2, 2, 2, 3, 6)
    for b, h, g, i in np.ndindex(2, 2, 2, 3):
        seen = i + 3 if causal else 5  # the last of 3 queries sees all 5 keys
        scores = k[b, h, :seen] @ q[b, h, g, i] / np.sqrt(8)
        weights = np.exp(scores) / np.exp(scores).sum()
        close(out[b, h, g, i], weights @ v[b, h, :seen])


def test_adam_moves_against_the_gradient_and_keeps_its_states():
    timed = jax_program(OptimizerStep(n_params=10, bytes_per_param=28.0))
    weight, _, _, gradient = (np.array(a, np.float64) for a in timed.arguments)
    new, momentum, variance = (np.array(a, np.float64) for a in timed.function(*timed.arguments))
    close(momentum, 0.1 * gradient)
    close(variance, 0.001 * gradient**2)
    close(new, weight - 1e-4 * momentum / (np.sqrt(variance) + 1e-8))
    assert timed.carried == 3


@pytest.mark.parametrize("bytes_per_param", [28.0, 30.0, 42.0, 56.0])
@pytest.mark.parametrize("tensors", [1, 3])
def test_mixed_precision_adam_clips_its_gradients_and_copies_its_weights(
    bytes_per_param: float, tensors: int
):
    timed = jax_program(
        OptimizerStep(n_params=10, bytes_per_param=bytes_per_param, tensors=tensors)
    )
    given = [
        np.concatenate(timed.arguments[i * tensors : (i + 1) * tensors]).astype(np.float64)
        for i in (0, 3)
    ]
    weight, gradient = given[0], given[1] / (1024 if bytes_per_param == 56 else 1)
    if bytes_per_param >= 42:
        gradient = gradient * min(1.0, 1 / np.linalg.norm(gradient))
    made = timed.function(*timed.arguments)
    new = np.concatenate(made[:tensors]).astype(np.float64)
    close(new, weight - 1e-4 * 0.1 * gradient / (np.sqrt(0.001 * gradient**2) + 1e-8))
    if bytes_per_param > 28:
        assert {str(a.dtype) for a in made[-tensors:]} == {
            "float16" if bytes_per_param == 56 else "bfloat16"
        }
        np.testing.assert_allclose(
            np.concatenate(made[-tensors:]).astype(np.float64), new, rtol=1e-2
        )
    again = (*made[: timed.carried], *timed.arguments[timed.carried :])
    assert len(timed.function(*again)) == len(made)


def test_convolution_and_its_gradients():
    shape = {
        "batch": 2,
        "c_in": 4,
        "h_in": 6,
        "w_in": 5,
        "c_out": 6,
        "k_h": 3,
        "k_w": 3,
        "pad_h": 1,
        "groups": 2,
    }
    op = Convolution(**shape)
    (x, w), (y,) = run(op)
    assert y.shape == (2, 6, op.h_out, op.w_out)
    close(
        y[1, 4, 2, 1], (np.pad(x, ((0, 0), (0, 0), (1, 1), (0, 0)))[1, 2:, 2:5, 1:4] * w[4]).sum()
    )
    # the sum of the output is linear in each input: <input, gradient> gives it back
    for pass_, operand in (("dgrad", 1), ("wgrad", 2)):
        inputs, (gradient,) = run(Convolution(**shape, pass_=pass_))
        assert (gradient * inputs[operand]).sum() == pytest.approx(y.sum(), rel=1e-3)
    _, both = run(Convolution(**shape, pass_="bwd"))
    assert [g.shape for g in both] == [x.shape, w.shape]


@pytest.mark.parametrize("dtype", JAX_DTYPES)
def test_element_types_are_kept(dtype: str):
    timed = jax_program(Gemm(m=2, n=2, k=2, dtype=dtype))
    assert timed.function(*timed.arguments).dtype == JAX_DTYPES[dtype]


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (MoE(tokens=4, hidden=4, inter=4, topk=1, experts=2), "moe"),
        (MemoryBound(op="avg_pool", rows=2, hidden=2), "avg_pool"),
        (MemoryBound(op="rope", rows=2, hidden=3), "must be even"),
        (MemoryBound(op="mul", rows=2, hidden=2, n_inputs=1), "n_inputs"),
        (
            Attention(batch=1, heads=2, kv_heads=2, seq_q=2, seq_kv=2, head_dim=2, window=1),
            "window",
        ),
        (Attention(batch=1, heads=3, kv_heads=2, seq_q=2, seq_kv=2, head_dim=2), "multiple"),
        (OptimizerStep(n_params=3, bytes_per_param=29.0), "bytes_per_param"),
        (OptimizerStep(n_params=3, tensors=4), "cannot be divided into 4 tensors"),
        (
            Gemm(m=16, n=16, k=16, dtype="fp8", pass_="bwd"),
            "fp8 products can be measured only one at a time",
        ),
    ],
)
def test_refuses_what_it_cannot_measure(op: KernelOp, message: str):
    with pytest.raises(PerfModelError, match=message):
        jax_program(op)


def test_unknown_types_and_passes_are_named():
    with pytest.raises(UnknownNameError, match="fp8"):
        jax_program(MemoryBound(op="relu", rows=2, hidden=2, dtype="fp8"))
    with pytest.raises(UnknownNameError, match="grad_accum"):
        jax_program(Gemm(m=2, n=2, k=2, dtype="fp32", pass_="grad_accum"))
    with pytest.raises(UnknownNameError, match="wgrad"):
        jax_program(Embedding(tokens=2, hidden=2, vocab=2, dtype="fp32", pass_="wgrad"))
