"""One tiny kernel from op to table."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pandas as pd
import pytest

from perfmodel import catalog
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.ingest.tables import read_table, write_table
from perfmodel.measure.backends import (
    Backend,
    JaxBackend,
    call_overhead_s,
    cold_sampler,
    host_flush,
    kernel_row,
    open_backend,
    unrounded,
)
from perfmodel.measure.tables import Point
from perfmodel.measure.timing import NoMeter, OwnCoreMeter, Sample, StoppingRule, time_calls
from perfmodel.ops import Gemm, OptimizerStep
from perfmodel.ops.programs import Program

RULE = StoppingRule(
    half_width=0.2, max_repeats=20, max_s=0.5, min_repeats=6, interference_limit=0.99
)


def test_a_tiny_gemm_becomes_a_row_of_a_table(tmp_path: Path):
    with open_backend("jax") as backend:
        measured = kernel_row(backend, Point(Gemm(m=32, n=16, k=8, dtype="fp32")), "this-cpu", RULE)
    write_table(tmp_path / "t.csv", pd.DataFrame([measured]))
    (row,) = read_table(tmp_path / "t.csv").to_dict("records")
    assert {
        k: row[k]
        for k in ("source", "device", "op_family", "op", "dtype", "pass", "m", "n", "k", "batch")
    } == {
        "source": "perfmodel",
        "device": "this-cpu",
        "op_family": "gemm",
        "op": "linear",
        "dtype": "fp32",
        "pass": "fwd",
        "m": 32,
        "n": 16,
        "k": 8,
        "batch": 1,
    }
    assert 0 < row["time_us"] < 1e5
    assert row["n_repeats"] >= 1
    assert row["software"].startswith("jax")


@pytest.fixture(params=["jax", "torch"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    with open_backend(request.param) as opened:
        yield opened


def test_updates_in_place_are_fed_back(backend: Backend):
    # a donated buffer may not be used twice: the second call fails unless the first one's result is
    # passed on
    sample = backend.sampler(OptimizerStep(n_params=64, bytes_per_param=28.0))
    assert [sample(calls).calls for calls in (1, 3, 1)] == [1, 3, 1]


def test_more_work_takes_longer_and_every_call_has_a_cost(backend: Backend):
    small, large = (
        time_calls(backend.sampler(Gemm(m=n, n=n, k=n, dtype="fp32")), RULE) for n in (16, 512)
    )
    assert small.median_s < large.median_s
    assert 0 < call_overhead_s(backend, RULE) < large.median_s


def test_cold_rows_say_so(backend: Backend):
    row = kernel_row(
        backend, Point(Gemm(m=4, n=256, k=256, dtype="fp32"), cold=True), "this-cpu", RULE
    )
    assert row["variant"] == "cold"
    assert row["time_us"] > 0


def test_time_of_flushes_does_not_count_but_their_disturbance_does():
    clock = [0.0]

    def spend(seconds: float) -> None:
        clock[0] += seconds

    # the thread gets all of a call's second and nine of a flush's ten
    meter = OwnCoreMeter(wall_clock=lambda: clock[0], own_clock=lambda: clock[0] - clock[0] // 11)
    sample = cold_sampler(Program(spend, (1.0,)), meter, lambda output: None, lambda: spend(10.0))(
        3
    )
    assert (sample.calls, sample.wall_s) == (3, 3.0)
    assert sample.interference == pytest.approx(3 / 33)


def test_a_flush_reaches_beyond_the_caches():
    flush = host_flush()
    assert flush.keywords["out"].nbytes >= 2 * catalog.device("cpu").l2_bytes
    flush()


def test_a_cpu_says_what_it_is(backend: Backend):
    assert backend.accelerator is None
    assert backend.software.endswith("-cpu")
    assert backend.method["threads"] == 1


def test_the_rule_is_the_callers():
    with open_backend("jax") as backend:
        op, rule = Gemm(m=4, n=4, k=4, dtype="fp32"), StoppingRule(max_repeats=6, min_repeats=6)
        row = kernel_row(backend, Point(op), "x", rule)
    assert row["n_repeats"] <= 6 or row["interference"] > 0


@pytest.mark.parametrize("cap_s", [0.02, 0.2])
def test_ends_near_its_time_cap(cap_s: float):
    rule = StoppingRule(half_width=1e-9, max_repeats=10**6, max_s=cap_s)
    with open_backend("jax") as backend:
        timing = time_calls(backend.sampler(Gemm(m=8, n=8, k=8, dtype="fp32")), rule)
    assert timing.n_repeats * rule.min_sample_s < 5 * cap_s


@pytest.mark.parametrize(
    ("capability", "dtype", "cold", "message"),
    [
        ((9, 0), "fp32", True, "--backend torch for cache"),
        ((8, 0), "fp8", False, "capability 8.9"),
        ((0, 0), "tf32", False, "tf32"),
    ],
)
def test_jax_on_an_accelerator_refuses_what_it_cannot_time(
    capability: tuple[int, int], dtype: str, cold: bool, message: str
):
    backend = JaxBackend("gpu", "NVIDIA X", capability, NoMeter())
    with pytest.raises(PerfModelError, match=message):
        backend.check(Gemm(m=16, n=16, k=16, dtype=dtype), cold=cold)
    JaxBackend("gpu", "NVIDIA X", (9, 0), NoMeter()).check(Gemm(m=16, n=16, k=16, dtype="fp8"))


def test_calls_on_an_accelerator_are_queued_and_fp32_products_not_rounded():
    op = Gemm(m=4, n=4, k=4, dtype="fp32")
    precisions = []
    backend = JaxBackend("gpu", "NVIDIA X", (9, 0), NoMeter())
    sample = unrounded(
        lambda calls: (
            precisions.append(jax.config.jax_default_matmul_precision) or Sample(calls, 1.0, 0)
        )
    )
    assert sample(3).calls == backend.sampler(op)(3).calls == 3
    assert precisions == ["highest"]
    assert "queued" in backend.method["calls"]


def test_unknown_backends_are_named():
    with pytest.raises(UnknownNameError, match="tensorflow"), open_backend("tensorflow"):
        pass
