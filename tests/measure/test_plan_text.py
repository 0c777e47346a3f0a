from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.measure import Plan, plan_text, read_plan, write_plan
from perfmodel.measure.timing import StoppingRule
from perfmodel.ops import (
    Attention,
    Collective,
    Convolution,
    Embedding,
    Gemm,
    MemoryBound,
    OptimizerStep,
)

size = st.integers(1, 1 << 20)
gemm = st.builds(
    Gemm,
    m=size,
    n=size,
    k=size,
    batch=st.integers(1, 3),
    pass_=st.sampled_from(["fwd", "wgrad"]),
    accumulate=st.booleans(),
    dtype=st.sampled_from(["fp32", "bf16"]),
)
attention = st.builds(
    Attention,
    batch=size,
    heads=size,
    kv_heads=size,
    seq_q=size,
    seq_kv=size,
    head_dim=size,
    causal=st.booleans(),
    pass_=st.sampled_from(["fwd", "bwd"]),
)
memory = st.builds(
    MemoryBound,
    op=st.sampled_from(["relu", "add"]),
    rows=size,
    hidden=size,
    n_inputs=st.integers(1, 2),
)
embedding = st.builds(Embedding, tokens=size, hidden=size, vocab=size)
optimizer = st.builds(OptimizerStep, n_params=size, bytes_per_param=st.sampled_from([28.0, 30.0]))
conv = st.builds(
    Convolution, batch=size, c_in=size, h_in=size, w_in=size, c_out=size, k_h=size, k_w=size
)
collective = st.builds(
    lambda kind, ranks, units, dtype: Collective(
        collective=kind,
        bytes=float(units * ranks * 4),
        num_ranks=ranks,
        ranks_per_node=ranks,
        dtype=dtype,
    ),
    st.sampled_from(["all_reduce", "send_recv"]),
    st.integers(2, 9),
    size,
    st.sampled_from(["fp32", "fp16"]),
)
plans = st.builds(
    Plan,
    device=st.text(max_size=8),
    rule=st.builds(StoppingRule, half_width=st.floats(0.001, 0.5), max_s=st.floats(1e-5, 10)),
    collective_rule=st.builds(StoppingRule),
    kernels=st.lists(
        st.one_of(gemm, attention, memory, embedding, optimizer, conv), max_size=12
    ).map(tuple),
    collectives=st.lists(collective, max_size=6).map(tuple),
    kernel_table=st.just("kernels.csv"),
    collective_table=st.just("collectives.csv"),
    attempts=st.integers(1, 5),
    patience_s=st.floats(0, 1e4),
)


@given(plans)
def test_a_plan_survives_writing_and_reading(tmp_path_factory: pytest.TempPathFactory, plan: Plan):
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    write_plan(path, plan)
    assert read_plan(path) == plan


def test_neighbours_of_a_kind_share_an_entry(tmp_path: Path):
    ops = (Gemm(m=8, n=4, k=2), Gemm(m=8, n=6, k=3), Gemm(m=8, n=6, k=3, pass_="dgrad"))
    path = tmp_path / "plan.toml"
    path.write_text('device = "box"')
    text = plan_text(replace(read_plan(path), kernels=ops))
    assert text.count("[[kernels]]") == 2
    assert '"n,k" = [[4, 2], [6, 3]]' in text
