"""Objectives and constraints: exact against brute force, sound intervals, clear refusals."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cli import main
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.planning.layouts import (
    QUANTITIES,
    Goal,
    Tariff,
    default_space,
    enumerate_layouts,
    evaluation,
    restrict,
    search,
)
from perfmodel.planning.layouts.expressions import Constraint, Expression, Interval
from perfmodel.prediction import evaluate, explain
from perfmodel.prediction.memory import peak_memory
from perfmodel.spec import Job, Layout

TARIFF = Tariff(price_per_device_hour=2.5, power_w=400, idle_power_w=60, tokens=3e9)


@pytest.fixture(scope="module")
def space(case):
    every = default_space(case, fewer_devices=True)
    return restrict(every, "micro_batch=1,zero=1")


@pytest.fixture(scope="module")
def every(case, space):
    """Every layout that fits with its quantities, worked out one by one."""
    layouts = list(enumerate_layouts(space, case, Counter()))
    usable = case.cluster.device.memory_bytes * (
        1 - case.step_problem.framework.memory.memory_margin
    )
    peak = peak_memory(case.step_problem, layouts)[0]
    step_s = evaluate(case.step_problem, layouts).step_time_s
    tokens = case.job.global_batch * case.job.seq_len
    rows = []
    for layout, n_bytes, seconds in zip(layouts, peak.tolist(), step_s.tolist(), strict=True):
        if n_bytes <= usable:
            steps = TARIFF.tokens / tokens
            rows.append(
                {
                    "layout": layout,
                    "step_time_s": seconds,
                    "memory_bytes": n_bytes,
                    "devices": layout.devices,
                    "tokens_per_s": tokens / seconds,
                    "cost": 2.5 / 3600 * seconds * layout.devices * steps,
                    "train_time_s": seconds * steps,
                    "pp": layout.pp,
                }
            )
    return rows


def found(case, space, **options):
    return search(
        case.model,
        case.cluster,
        devices=case.devices,
        global_batch=case.job.global_batch,
        job=case.job,
        space=space,
        distinct=False,
        **options,
    )


@pytest.mark.parametrize(
    ("objective", "of", "constraints", "holds"),
    [
        ("cost", lambda r: r["cost"], [], lambda r: True),
        (
            "tokens_per_s",
            lambda r: -r["tokens_per_s"],
            ["devices <= 4"],
            lambda r: r["devices"] <= 4,
        ),
        (
            "tokens_per_s_per_device",
            lambda r: -r["tokens_per_s"] / r["devices"],
            ["2 < pp"],
            lambda r: r["pp"] > 2,
        ),
        (
            "train_time",
            lambda r: r["train_time_s"],
            ["memory_bytes<3e10"],
            lambda r: r["memory_bytes"] < 3e10,
        ),
        (
            "memory",
            lambda r: r["memory_bytes"],
            ["step_time_s < 1.5"],
            lambda r: r["step_time_s"] < 1.5,
        ),
        (
            "devices",
            lambda r: r["devices"],
            ["step_time_s < 1.5"],
            lambda r: r["step_time_s"] < 1.5,
        ),
        (
            "step_time_s * devices**0.5 + memory_gib / 100",
            lambda r: r["step_time_s"] * r["devices"] ** 0.5 + r["memory_bytes"] / 2**30 / 100,
            ["cost / 2 >= train_time_s / 1000", "max(pp, devices / 2) == 2"],
            lambda r: (
                r["cost"] / 2 >= r["train_time_s"] / 1000 and max(r["pp"], r["devices"] / 2) == 2
            ),
        ),
    ],
)
def test_the_best_is_that_of_brute_force(
    case, space, every, monkeypatch, objective, of, constraints, holds
):
    monkeypatch.setattr(evaluation, "FIRST_BATCH", 8)
    monkeypatch.setattr(evaluation, "BATCH", 32)
    result = found(case, space, objective=objective, constraints=constraints, tariff=TARIFF, top=6)
    expected = sorted((of(row), row["step_time_s"]) for row in every if holds(row))[:6]
    values = [of(next(row for row in every if row["layout"] == p.layout)) for p in result.layouts]
    np.testing.assert_allclose(values, [value for value, _ in expected], rtol=1e-4)
    np.testing.assert_allclose(
        [abs(v) for v in result.values], [abs(value) for value, _ in expected], rtol=1e-4
    )
    np.testing.assert_allclose(
        [p.step_time_s for p in result.layouts], [s for _, s in expected], rtol=1e-3
    )
    assert result.certificate == "exact"
    assert result.gap == 0
    assert result.evaluated < len(every)


def test_energy_is_idle_and_busy_power_of_the_timeline(case, space, every, monkeypatch):
    monkeypatch.setattr(evaluation, "FIRST_BATCH", 8)
    monkeypatch.setattr(evaluation, "BATCH", 32)
    result = found(case, space, objective="energy", tariff=TARIFF, top=4)
    steps = TARIFF.tokens / (case.job.global_batch * case.job.seq_len)

    def energy_j(p):
        return p.devices * p.step_time_s * (60 + 340 * p.time_account.busy_fraction) * steps

    for p, value, quantities in zip(result.layouts, result.values, result.quantities, strict=True):
        assert value == quantities["energy_j"] == pytest.approx(energy_j(p))
    expected = sorted(energy_j(explain(case.step_problem, row["layout"])) for row in every[::3])
    assert result.values[0] <= expected[0] * (1 + 1e-4)
    assert result.evaluated < len(every)


def test_throughput_under_a_latency_bound_with_a_free_batch(case):
    served = Job(global_batch=1, seq_len=512, mode="inference")
    batches, limit_s = (1, 4, 16, 64), 0.2
    result = search(
        case.model,
        case.cluster,
        devices=4,
        global_batch=batches,
        job=served,
        constraints=[f"step_time_s < {limit_s}"],
        top=5,
        distinct=False,
    )
    rows = []
    for batch in batches:
        job = replace(served, global_batch=batch)
        space = default_space(case.replace(job=job, devices=4))
        layouts = list(enumerate_layouts(space, case.replace(job=job, devices=4), Counter()))
        step_s = evaluate(replace(case, job=job).step_problem, layouts).step_time_s
        rows += [(batch * 512 / s, batch) for s in step_s.tolist() if s < limit_s]
    expected = sorted(rows, reverse=True)[:5]
    np.testing.assert_allclose(result.values, [value for value, _ in expected], rtol=1e-4)
    assert result.objective == "tokens_per_s"
    assert result.layouts[0].global_batch == expected[0][1]
    assert len(result.batches) == 4
    assert result.certificate == "exact"


numbers = st.floats(-8, 8).map(lambda x: round(x, 2))
shares = st.floats(0, 1).map(lambda x: round(x, 6))


@given(
    st.lists(st.tuples(numbers, numbers, shares), min_size=2, max_size=2),
    st.sampled_from(
        [
            "a + b",
            "a - b",
            "a * b",
            "a / b",
            "a**2 - a * b",
            "a**3",
            "b**-1",
            "min(a, b) / max(a, 2)",
            "-a * 3 + 1 / b",
        ]
    ),
)
def test_intervals_contain_every_value(ends, text):
    formula = Expression.parse(text, ("a", "b"))
    inside, point = {}, {}
    for name, (x, y, share) in zip("ab", ends, strict=True):
        lo, hi = min(x, y), max(x, y)
        inside[name] = Interval(np.array([lo]), np.array([hi]))
        point[name] = lo + share * (hi - lo)
    interval = formula(inside.__getitem__)
    try:
        value = eval(text, {"min": min, "max": max}, point)
    except ZeroDivisionError:
        return
    slack = 1e-9 * (1 + abs(value))
    assert interval.lo[0] - slack <= value <= interval.hi[0] + slack
    exact = formula(lambda name: Interval.exactly(np.array([point[name]])))
    if np.isfinite(exact.lo[0]) and abs(value) < 1e12:
        np.testing.assert_allclose([exact.lo[0], exact.hi[0]], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory_byte < 7", "memory_bytes"),
        ("memory_bytes", "not a single comparison"),
        ("1 < memory_bytes < 7", "not a single comparison"),
        ("__import__('os') < 7", "is not allowed"),
        ("step_time_s.real < 7", "is not allowed"),
        ("step_time_s ** devices < 7", "is not allowed"),
        ("'a' < step_time_s", "is not allowed"),
        ("step_time_s < ", "not a valid formula"),
        ("min(step_time_s) < 7", "is not allowed"),
    ],
)
def test_what_is_no_constraint_is_refused(text, message):
    with pytest.raises(PerfModelError, match=message):
        Constraint.parse(text, QUANTITIES)


def test_what_nothing_tells_is_asked_for(case):
    unpriced = replace(case.cluster, device=replace(case.cluster.device, usd_per_hour=None))
    with pytest.raises(PerfModelError, match="--price"):
        found(case.replace(cluster=unpriced), None, objective="cost")
    with pytest.raises(PerfModelError, match="--tokens"):
        found(case, None, constraints=["train_time_s < 1e6"])
    with pytest.raises(UnknownNameError, match="tokens_per_s"):
        found(case, None, objective="tokens_per_sec")
    with pytest.raises(PerfModelError, match="at least 0"):
        Tariff(price_per_device_hour=-1)


def test_command(capsys):
    common = [
        "search",
        "--model",
        "gpt3-1.3b",
        "--cluster",
        "dgx-a100",
        "--devices",
        "8",
        "--global-batch",
        "16",
        "--top",
        "2",
        "--fix",
        "micro_batch=1,zero=1",
    ]
    assert (
        main(
            [
                *common,
                "--objective",
                "cost",
                "--price",
                "2.5",
                "--tokens",
                "1e9",
                "--fewer-devices",
                "--constraint",
                "memory_bytes<7e10",
                "--constraint",
                "step_time_s<2",
            ]
        )
        == 0
    )
    assert "cost" in capsys.readouterr().out
    assert main([*common, "--constraint", "memry_bytes<7e10"]) == 2
    assert "did you mean 'memory_bytes'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"top": 0}, "top must be at least 1 layout, got 0"),
        ({"devices": 0}, "devices must be at least 1, got 0"),
        ({"global_batch": []}, "no global batch is given"),
    ],
)
def test_a_search_for_nothing_is_refused(wrong, said):
    with pytest.raises(PerfModelError, match=said):
        search("gpt3-1.3b", "dgx-a100", **({"devices": 8, "global_batch": 16} | wrong))


@pytest.mark.parametrize("etp", [None, 1])
def test_experts_that_no_layout_divides_by_themselves_are_divided_as_the_rest(case, etp):
    layout = Layout(tp=2, dp=4, etp=etp, ep=1 if etp is None else 2)
    goal = Goal.parse(case.step_problem, constraints=("etp <= 2",))
    prediction = explain(case.step_problem, Layout(tp=2, dp=4))
    quantities = goal.named_quantities(replace(prediction, layout=layout))
    assert quantities["etp"] == (2 if etp is None else etp)
