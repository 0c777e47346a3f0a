from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import CalibrationError
from perfmodel.measure import (
    Plan,
    RankGroup,
    Sample,
    StoppingRule,
    measuring_s,
    plan_text,
    read_plan,
    time_calls,
    transfer_time_s,
    write_plan,
)
from perfmodel.measure._meter import NoMeter
from perfmodel.ops import (
    Attention,
    Collective,
    CollectiveKind,
    Convolution,
    Embedding,
    Gemm,
    MemoryBound,
    OptimizerStep,
)

size = st.integers(1, 1 << 20)
gemm = st.builds(Gemm, m=size, n=size, k=size, batch=st.integers(1, 3), pass_=st.sampled_from(["fwd", "wgrad"]),
                 accumulate=st.booleans(), dtype=st.sampled_from(["fp32", "bf16"]))  # fmt: skip
attention = st.builds(Attention, batch=size, heads=size, kv_heads=size, seq_q=size, seq_kv=size, head_dim=size,
                      causal=st.booleans(), pass_=st.sampled_from(["fwd", "bwd"]))  # fmt: skip
memory = st.builds(MemoryBound, op=st.sampled_from(["relu", "add"]), rows=size, hidden=size, n_inputs=st.integers(1, 2))
embedding = st.builds(Embedding, tokens=size, hidden=size, vocab=size)
optimizer = st.builds(OptimizerStep, n_params=size, bytes_per_param=st.sampled_from([28.0, 30.0]))
conv = st.builds(Convolution, batch=size, c_in=size, h_in=size, w_in=size, c_out=size, k_h=size, k_w=size)
collective = st.builds(
    lambda kind, ranks, units, dtype: Collective(collective=kind, bytes=float(units * ranks * 4), num_ranks=ranks,
                                                 ranks_per_node=ranks, dtype=dtype),
    st.sampled_from(["all_reduce", "send_recv"]), st.integers(2, 9), size, st.sampled_from(["fp32", "fp16"]),
)  # fmt: skip
plans = st.builds(
    Plan,
    device=st.text(max_size=8),
    rule=st.builds(StoppingRule, half_width=st.floats(0.001, 0.5), max_s=st.floats(1e-5, 10)),
    collective_rule=st.builds(StoppingRule),
    kernels=st.lists(st.one_of(gemm, attention, memory, embedding, optimizer, conv), max_size=12).map(tuple),
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


def test_a_transfer_takes_what_the_side_that_came_last_saw():
    """DistSim section 4.2: it begins when the second of the calls is launched and ends when both return."""
    send = [[0.0, 5.0], [10.0, 12.0]]
    receive = [[3.0, 5.0], [7.0, 12.0]]
    assert transfer_time_s(send, receive).tolist() == [2.0, 2.0]  # pyright: ignore
    # the receiver's clock may be another
    shifted = [[100 + a, 100 + b] for a, b in receive]
    assert transfer_time_s(send, shifted).tolist() == [2.0, 2.0]  # pyright: ignore
    with pytest.raises(CalibrationError, match="two equal lists"):
        transfer_time_s(send, receive[:1])  # pyright: ignore
    with pytest.raises(CalibrationError, match="before it starts"):
        transfer_time_s([[1.0, 0.0]], [[0.0, 1.0]])  # pyright: ignore


@pytest.mark.parametrize(("kind", "wall_s"), [("send_recv", 4.0), ("all_reduce", 12.0)])
def test_a_group_counts_messages_so(kind: CollectiveKind, wall_s: float, monkeypatch: pytest.MonkeyPatch):
    """Of a collective the slowest rank counts, from the start of its first call to the end of its last."""
    group = RankGroup(2)
    answers = {"load": [None] * 2, "own_s": [0.0] * 2, "run": [[(0.0, 5.0), (10.0, 12.0)], [(3.0, 5.0), (7.0, 12.0)]]}
    monkeypatch.setattr(group, "ask", lambda name, *_: answers[name])
    group.load(Collective(collective=kind, bytes=64, num_ranks=2, ranks_per_node=2, dtype="fp32"))
    assert group.sample(2, NoMeter()).wall_s == wall_s


@pytest.mark.parametrize("call_s", [1e-6, 5e-3, 0.05, 0.4, 3.0])
def test_the_effort_stated_is_the_time_that_the_stopping_rule_takes(call_s: float):
    rule = StoppingRule(max_s=1.0)
    for noise, wanted in ((0.0, measuring_s(rule, call_s).least), (0.4, measuring_s(rule, call_s).most)):
        spent_s, turn = 0.0, 0

        def sample(calls: int, noise: float = noise) -> Sample:
            nonlocal spent_s, turn
            turn += 1
            # a scatter so wide that the interval never suffices, the mean as stated
            wall_s = calls * call_s * (1 + noise * (-0.5 if turn % 2 else 0.5))
            spent_s += wall_s
            return Sample(calls, wall_s, 0.0)

        time_calls(sample, rule)
        assert spent_s == pytest.approx(wanted, rel=0.3)
