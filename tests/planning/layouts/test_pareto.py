"""Pareto fronts are those of brute force."""

from collections import Counter

import numpy as np
import pytest

from perfmodel.cli import main
from perfmodel.errors import PerfModelError
from perfmodel.planning.layouts import (
    Tariff,
    ask,
    default_space,
    enumerate_layouts,
    non_dominated,
    pareto,
    restrict,
)
from perfmodel.prediction import evaluate
from perfmodel.prediction.memory import peak_memory


def plain_front(points):
    """By all pairs: rows that no other beats or equals everywhere, each distinct one once."""
    distinct = {tuple(row) for row in points.tolist()}
    return sorted(
        a
        for a in distinct
        if not any(b != a and all(y <= x for x, y in zip(a, b, strict=True)) for b in distinct)
    )


def test_non_dominated_is_that_of_all_pairs():
    rng = np.random.default_rng(0)
    for columns in (2, 3, 4):
        points = rng.integers(-4, 9, size=(200, columns)).astype(float)
        assert sorted(map(tuple, points[non_dominated(points)].tolist())) == plain_front(points)


@pytest.mark.parametrize(
    ("objectives", "constraints"),
    [
        (("time", "memory"), ()),
        (("time", "memory", "cost"), ()),
        (("memory", "tokens_per_s"), ("devices < 8",)),
    ],
)
def test_the_front_is_that_of_brute_force(case, objectives, constraints):
    space = restrict(
        default_space(case, fewer_devices="cost" in objectives or bool(constraints)),
        "micro_batch=1",
    )
    question = ask(
        case.model, case.cluster, devices=case.devices, global_batch=16, job=case.job, space=space
    )
    front = pareto(
        question, objectives, constraints=constraints, tariff=Tariff(price_per_device_hour=2.0)
    )
    layouts = list(enumerate_layouts(space, case, Counter()))
    peak = peak_memory(case.step_problem, layouts)[0]
    step_s = evaluate(case.step_problem, layouts).step_time_s
    devices = np.array([layout.devices for layout in layouts])
    tokens = case.job.global_batch * case.job.seq_len
    of = {
        "time": step_s,
        "memory": peak,
        "cost": step_s * devices * 2 / 3600 * 1e6 / tokens,
        "tokens_per_s": -tokens / step_s,
    }
    fits = peak <= case.cluster.device.memory_bytes * (
        1 - case.step_problem.framework.memory.memory_margin
    )
    fits &= (devices < 8) | (not constraints)
    expected = np.array(plain_front(np.stack([of[name][fits] for name in objectives], axis=1)))
    ours = np.abs(front.values)
    assert len(ours) == len(expected)
    np.testing.assert_allclose(ours, np.abs(expected), rtol=2e-5)
    assert front.evaluated < front.feasible
    assert len(front.to_frame()) == len(front.layouts)
    assert front.to_dict()["layouts"][0]["objectives"]


def test_refusals_and_command(case, capsys):
    question = ask(case.model, case.cluster, devices=8, global_batch=16, job=case.job)
    with pytest.raises(PerfModelError, match="two objectives"):
        pareto(question, ["memory"])
    command = [
        "search",
        "--model",
        "gpt3-1.3b",
        "--cluster",
        "dgx-a100",
        "--devices",
        "8",
        "--global-batch",
        "16",
        "--fix",
        "micro_batch=1,zero=1",
    ]
    assert main([*command, "--pareto", "time,memory"]) == 0
    assert "no other layout is better in every objective" in capsys.readouterr().out
    assert main([*command, "--pareto", "time,memry"]) == 2
    assert "memory" in capsys.readouterr().err
