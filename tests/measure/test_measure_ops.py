"""One tiny kernel from op to table."""

from pathlib import Path

import pytest

from perfmodel.io import read_table, write_table
from perfmodel.measure import StoppingRule, measure_ops
from perfmodel.measure._kernels import call_overhead_s, time_program
from perfmodel.measure._meter import NoMeter
from perfmodel.measure._programs import program
from perfmodel.spec import Gemm, OptimizerStep

RULE = StoppingRule(half_width=0.2, max_repeats=20, max_s=0.5, min_repeats=6, interference_limit=0.99)


def test_a_tiny_gemm_becomes_a_row_of_a_table(tmp_path: Path):
    seen = []
    op = Gemm(m=32, n=16, k=8, dtype="fp32")
    table = measure_ops([op], "this-cpu", rule=RULE, progress=lambda index, op: seen.append((index, op)))
    assert seen == [(0, op)]
    write_table(tmp_path / "t.csv", table)
    (row,) = read_table(tmp_path / "t.csv").to_dict("records")
    assert {k: row[k] for k in ("source", "device", "op_family", "op", "dtype", "pass", "m", "n", "k", "batch")} == {
        "source": "perfmodel", "device": "this-cpu", "op_family": "gemm", "op": "linear", "dtype": "fp32",
        "pass": "fwd", "m": 32, "n": 16, "k": 8, "batch": 1,
    }  # fmt: skip
    assert 0 < row["time_us"] < 1e5
    assert row["n_repeats"] >= 1
    assert row["software"].startswith("jax")


def test_updates_in_place_are_fed_back():
    # a donated buffer may not be used twice: the second call fails unless the first one's result is passed on
    timing = time_program(program(OptimizerStep(n_params=64, bytes_per_param=28.0)), RULE, NoMeter())
    assert timing.n_repeats >= 6


def test_more_work_takes_longer_and_every_call_has_a_cost():
    small, large = (time_program(program(Gemm(m=n, n=n, k=n, dtype="fp32")), RULE, NoMeter()) for n in (16, 512))
    assert small.median_s < large.median_s
    assert 0 < call_overhead_s(RULE, NoMeter()) < large.median_s


def test_an_empty_list_is_an_empty_table():
    assert len(measure_ops([], "this-cpu")) == 0


def test_the_rule_is_the_callers():
    table = measure_ops([Gemm(m=4, n=4, k=4, dtype="fp32")], "x", rule=StoppingRule(max_repeats=6, min_repeats=6))
    assert table["n_repeats"].item() <= 6 or table["interference"].item() > 0


@pytest.mark.parametrize("cap_s", [0.02, 0.2])
def test_ends_near_its_time_cap(cap_s: float):
    rule = StoppingRule(half_width=1e-9, max_repeats=10**6, max_s=cap_s)
    timing = time_program(program(Gemm(m=8, n=8, k=8, dtype="fp32")), rule, NoMeter())
    assert timing.n_repeats * rule.min_sample_s < 5 * cap_s
