"""`validate kernels` and `predict` speak of the same kernel model: to the bit."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.catalog import device, devices
from perfmodel.cost import KernelModel
from perfmodel.ops import (
    Attention,
    Convolution,
    Embedding,
    Gemm,
    KernelOp,
    MemoryBound,
    MoE,
    OptimizerStep,
)
from perfmodel.validation import validate_kernels

SIDE = st.integers(1, 8192)
PASS = st.sampled_from(["fwd", "bwd"])
DTYPE = st.sampled_from(["bf16", "fp16", "fp32", "fp8"])
kernels = st.one_of(
    st.builds(
        Gemm,
        op=st.sampled_from(["linear", "bmm", "grouped_linear"]),
        m=SIDE,
        n=SIDE,
        k=SIDE,
        dtype=DTYPE,
        batch=st.integers(1, 8),
        pass_=st.sampled_from(["fwd", "dgrad", "wgrad", "bwd"]),
        accumulate=st.booleans(),
    ),
    st.builds(
        Attention,
        batch=st.integers(1, 64),
        heads=st.just(32),
        kv_heads=st.sampled_from([8, 32]),
        seq_q=SIDE,
        seq_kv=SIDE,
        head_dim=st.sampled_from([64, 128]),
        causal=st.booleans(),
        window=st.sampled_from([0, 1024]),
        pass_=PASS,
        dtype=DTYPE,
    ),
    st.builds(
        MemoryBound,
        op=st.sampled_from(["gelu", "layer_norm", "rms_norm", "swiglu", "unheard_of"]),
        rows=SIDE,
        hidden=SIDE,
        n_inputs=st.integers(1, 3),
        pass_=PASS,
        dtype=DTYPE,
    ),
    st.builds(Embedding, tokens=SIDE, hidden=SIDE, vocab=SIDE, pass_=PASS, dtype=DTYPE),
    st.builds(OptimizerStep, n_params=st.integers(10, 10**9), tensors=st.integers(1, 500)),
    st.builds(
        Convolution,
        batch=st.integers(1, 64),
        c_in=SIDE,
        h_in=st.integers(8, 64),
        w_in=st.integers(8, 64),
        c_out=SIDE,
        k_h=st.integers(1, 7),
        k_w=st.integers(1, 7),
        pass_=st.sampled_from(["fwd", "dgrad", "wgrad", "bwd"]),
        dtype=DTYPE,
    ),
    st.builds(
        MoE,
        op=st.sampled_from(["moe", "moe_ffn"]),
        tokens=SIDE,
        hidden=SIDE,
        inter=SIDE,
        topk=st.integers(1, 4),
        experts=st.sampled_from([8, 64]),
        moe_ep=st.sampled_from([1, 4]),
        pass_=PASS,
        dtype=DTYPE,
        distribution=st.sampled_from(["balanced", "power_law_1.2"]),
    ),
)


@pytest.fixture(scope="module")
def model() -> KernelModel:
    return KernelModel.load()


def row_of(op: KernelOp, name: str, **more: Any) -> dict[str, Any]:
    """The op as a row of a measurement table."""
    fields = {f.name: getattr(op, f.name) for f in dataclasses.fields(op)}
    fields |= {"pass": fields.pop("pass_"), "param_tensors": fields.pop("tensors", np.nan)}
    return {"device": name, "op_family": op.family, "time_us": 1.0, **fields, **more}


def both(model: KernelModel, name: str, ops: list[KernelOp], **more: Any) -> tuple[Any, Any]:
    """Times as validation has them and as prediction has them, each in an order of its own."""
    table = pd.DataFrame([row_of(op, name, **more) for op in ops])
    software = "/".join(more.values()) or None
    return model.table_times(table), model.times(device(name), ops, software=software)


@given(
    name=st.sampled_from(sorted(devices())),
    ops=st.lists(kernels, min_size=1, max_size=6, unique=True),
)
@settings(max_examples=30, deadline=None)
def test_rows_of_ones_own_table_get_what_prediction_says(
    model: KernelModel, name: str, ops: list[KernelOp]
) -> None:
    for op in ops:  # one at a time: float32 networks differ in the last bits by the size of a batch
        validated, predicted = both(model, name, [op])
        assert (
            validated.time_s[0] == KernelModel.times(fresh(model), device(name), [op]).time_s[0]
        ), (name, op)
        assert validated.provenance == predicted.provenance


def fresh(model: KernelModel) -> KernelModel:
    """The same weights without remembered times."""
    again = KernelModel(model._regressors._weights)
    again._regressors = model._regressors
    return again


@pytest.mark.parametrize(
    ("name", "source", "software"),
    [
        ("A100-SXM4-80GB", "estimate_train_time", "torch+torch.profiler(GPT-NeoX operators)"),
        ("B200", "simumax", "transformer_engine"),
        ("H100", "aiconfigurator", "vllm-0.24.0"),
    ],
)
def test_rows_of_a_measured_source_are_that_software(
    model: KernelModel, name: str, source: str, software: str
) -> None:
    for direction in ("fwd", "dgrad", "wgrad", "bwd"):
        op = Gemm(m=4096, n=8192, k=4096, pass_=direction)
        validated, _ = both(model, name, [op], source=source, software=software)
        predicted = fresh(model).times(device(name), [op], software=f"{source}/{software}")
        for of_row, of_prediction in zip(
            (validated.time_s, validated.lo_s, validated.hi_s),
            (predicted.time_s, predicted.lo_s, predicted.hi_s),
            strict=True,
        ):
            # processors add in orders of their own
            np.testing.assert_allclose(of_row[0], of_prediction[0], rtol=1e-12)


def test_the_command_writes_the_same_numbers(model: KernelModel, tmp_path: Path) -> None:
    op = Gemm(m=2048, n=12288, k=4096, pass_="dgrad")
    pd.DataFrame([row_of(op, "H100", source="my own")]).to_csv(tmp_path / "gemm.csv", index=False)
    validate_kernels([tmp_path / "gemm.csv"], None, tmp_path / "out.csv")
    expected = fresh(model).times(device("H100"), [op])
    row = pd.read_csv(tmp_path / "out.csv").iloc[0]
    assert row["predicted_time_us"] == pytest.approx(expected.time_s[0] * 1e6, rel=1e-12)
    assert row["provenance"] == expected.provenance[0]
