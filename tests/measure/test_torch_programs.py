"""torch's programs compute what JAX's do on the same numbers, forward and backward."""

from typing import Any

import jax
import numpy as np
import pytest

from perfmodel.errors import PerfModelError
from perfmodel.measure.backends import jax_program, open_backend
from perfmodel.ops import (
    MEASURED_MEMORY_OPS,
    Attention,
    Convolution,
    Embedding,
    Gemm,
    KernelOp,
    MemoryBound,
    OptimizerStep,
)

torch = pytest.importorskip("torch", reason="torch is not installed (extra: torch)")

from perfmodel.measure.backends import torch_program  # noqa: E402

ATTENTION = {
    "batch": 2,
    "heads": 4,
    "kv_heads": 2,
    "seq_q": 3,
    "seq_kv": 5,
    "head_dim": 8,
    "dtype": "fp32",
}
IMAGE = {
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


def outputs(result: Any) -> list[np.ndarray]:
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(result)]


def both(op: KernelOp) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What torch and JAX compute; both draw the same random numbers in the same order."""
    ours, reference = torch_program(op, "cpu"), jax_program(op)
    result = ours.function(*ours.arguments)
    leaves = result if isinstance(result, tuple | list) else (result,)
    return [leaf.double().numpy() for leaf in leaves], outputs(
        reference.function(*reference.arguments)
    )


def agree(op: KernelOp, reshape: bool = False) -> None:
    mine, reference = both(op)
    assert len(mine) == len(reference)
    for a, b in zip(mine, reference, strict=True):
        np.testing.assert_allclose(a.reshape(b.shape) if reshape else a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize(("op", "n_inputs"), MEASURED_MEMORY_OPS.items())
def test_memory_bound_kernels(op: str, n_inputs: int, pass_: Any):
    if "dropout" not in op:
        agree(MemoryBound(op=op, rows=3, hidden=8, n_inputs=n_inputs, dtype="fp32", pass_=pass_))
        return
    timed = torch_program(
        MemoryBound(op=op, rows=64, hidden=512, n_inputs=n_inputs, dtype="fp32", pass_=pass_), "cpu"
    )
    result = timed.function(*timed.arguments)
    dropped = result[0] if pass_ == "bwd" else result - (timed.arguments[1] if n_inputs == 2 else 0)
    assert float((dropped == 0).double().mean()) == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "wgrad"])
@pytest.mark.parametrize(
    "shape", [{"op": "bmm", "batch": 3}, {"op": "grouped_linear", "groups": 2}]
)
def test_batched_products(shape: dict[str, Any], pass_: Any):
    agree(Gemm(m=5, n=7, k=11, dtype="fp32", pass_=pass_, **shape))


def test_linear_layers_keep_their_weights_as_torch_does():
    timed = torch_program(Gemm(m=5, n=7, k=11, dtype="fp32"), "cpu")
    x, weight = timed.arguments
    assert weight.shape == (7, 11)
    np.testing.assert_allclose(
        timed.function(x, weight), x.numpy() @ weight.numpy().T, rtol=1e-4, atol=1e-5
    )
    backward = torch_program(Gemm(m=5, n=7, k=11, dtype="fp32", pass_="bwd"), "cpu")
    assert [g.shape for g in backward.function()] == [(5, 11), (7, 11)]
    for pass_, shapes in (("dgrad", ((5, 11), (11, 7))), ("wgrad", ((11, 5), (11, 7)))):
        timed = torch_program(Gemm(m=5, n=7, k=11, dtype="fp32", pass_=pass_), "cpu")  # pyright: ignore
        assert tuple(a.shape for a in timed.arguments) == shapes
        assert timed.function(*timed.arguments).shape == (5, 7)


def test_accumulated_weight_gradients_add_in_fp32():
    timed = torch_program(Gemm(m=4, n=6, k=8, dtype="bf16", pass_="wgrad", accumulate=True), "cpu")
    once = timed.function(*timed.arguments).clone()
    assert once.dtype == torch.float32
    torch.testing.assert_close(timed.function(*timed.arguments), 2 * once)


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize(
    "shape",
    [
        {"causal": False},
        {"causal": True},
        {"causal": True, "seq_q": 5},
        {"causal": True, "seq_q": 1},
        {"causal": False, "head_dim_v": 6, "kv_heads": 4},
    ],
    ids=["full", "last query sees all", "square", "decode", "other value size"],
)
def test_attention(shape: dict[str, Any], pass_: Any):
    # JAX's queries are split by key/value heads: the same numbers in the same order
    agree(Attention(**{**ATTENTION, **shape}, pass_=pass_), reshape=True)


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "dgrad", "wgrad"])
def test_convolution(pass_: Any):
    agree(Convolution(**IMAGE, pass_=pass_))


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_embedding(pass_: Any):
    agree(Embedding(tokens=6, hidden=3, vocab=4, dtype="fp32", pass_=pass_))


def test_adam_steps():
    timed = torch_program(OptimizerStep(n_params=10, bytes_per_param=28.0), "cpu")
    optimizer = timed.function.__self__
    (weight,) = optimizer.param_groups[0]["params"]
    before = weight.detach().clone()
    timed.function()
    # torch corrects the first step's bias: it moves by the learning rate against the gradient's
    # sign
    torch.testing.assert_close(
        before - weight.detach(), 1e-4 * weight.grad.sign(), rtol=1e-3, atol=1e-7
    )
    assert optimizer.defaults["fused"] is True


@pytest.mark.parametrize(("bytes_per_param", "tensors"), [(30.0, 1), (42.0, 3), (56.0, 3)])
def test_mixed_precision_adam_updates_masters_and_copies_them(bytes_per_param: float, tensors: int):
    timed = torch_program(
        OptimizerStep(n_params=10, bytes_per_param=bytes_per_param, tensors=tensors), "cpu"
    )
    cells = dict(
        zip(timed.function.__code__.co_freevars, timed.function.__closure__ or (), strict=True)
    )
    masters, copies = (cells[name].cell_contents for name in ("masters", "copies"))
    before = torch.cat(masters).clone()
    timed.function()
    moved = before - torch.cat(masters)
    torch.testing.assert_close(moved.abs(), torch.full_like(moved, 1e-4), rtol=1e-2, atol=1e-6)
    for copy, master in zip(copies, masters, strict=True):
        torch.testing.assert_close(copy.float(), master, rtol=1e-2, atol=1e-3)
    assert sum(len(copy) for copy in copies) == 10
    assert len(copies) == tensors


def test_large_tensors_repeat_their_random_values(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("perfmodel.ops.programs.MOST_RANDOM", 4)
    (values,) = torch_program(
        MemoryBound(op="relu", rows=2, hidden=5, dtype="fp32"), "cpu"
    ).arguments
    assert values.shape == (2, 5)
    assert values.ravel()[4:8].tolist() == values.ravel()[:4].tolist()


def test_a_large_tensor_takes_no_more_than_its_elements(monkeypatch: pytest.MonkeyPatch):
    """However few of them are drawn: repeated once too often for every one drawn, these would fill
    any memory."""
    monkeypatch.setattr("perfmodel.ops.programs.MOST_RANDOM", 1000)
    (values,) = torch_program(
        MemoryBound(op="relu", rows=4096, hidden=1024, dtype="fp32"), "cpu"
    ).arguments
    assert values.shape == (4096, 1024)
    assert values.untyped_storage().nbytes() == 4 * values.numel()


def test_element_types_are_kept():
    for dtype in ("bf16", "fp16"):
        timed = torch_program(Gemm(m=2, n=2, k=2, dtype=dtype), "cpu")
        assert (
            str(timed.function(*timed.arguments).dtype)
            == {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[dtype]
        )


def test_fp8_products_multiply_what_the_operands_hold():
    timed = torch_program(Gemm(m=16, n=32, k=48, dtype="fp8"), "cpu")
    a, b = (x.double() for x in timed.arguments)
    torch.testing.assert_close(
        timed.function(*timed.arguments).double(), a @ b, rtol=0.02, atol=0.02
    )


@pytest.mark.parametrize("name", ["jax", "torch"])
def test_fp8_is_refused_where_no_unit_has_it(name: str):
    with (
        open_backend(name) as backend,
        pytest.raises(PerfModelError, match="fp8 products need an NVIDIA GPU"),
    ):
        backend.check(Gemm(m=16, n=16, k=16, dtype="fp8"))


def test_one_thread_meanwhile():
    before = torch.get_num_threads()
    with open_backend("torch"):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
