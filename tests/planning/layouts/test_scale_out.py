"""Processes, Dask, several JAX devices, interrupts and resuming give what one process does."""

import subprocess
import sys

import numpy as np
import pytest

from perfmodel.cli import main
from perfmodel.errors import PerfModelError
from perfmodel.planning.layouts import default_space, evaluation, open_executor, restrict, search

COMMAND = [
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
    "micro_batch=1",
]


def found(case, **options):
    space = restrict(default_space(case), "micro_batch=1")
    return search(
        case.model, case.cluster, devices=8, global_batch=16, job=case.job, space=space, **options
    )


@pytest.fixture(scope="module")
def alone(case):
    return found(case)


def same(a, b) -> bool:
    return [p.layout for p in a.layouts] == [p.layout for p in b.layouts] and np.array_equal(
        a.evaluation.step_time_s, b.evaluation.step_time_s
    )


@pytest.mark.slow
def test_processes_find_the_same(case, alone):
    assert same(found(case, workers=2), alone)


def test_dask_finds_the_same(case, alone):
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=1, processes=False, dashboard_address=None) as cluster:
        assert same(found(case, dask=cluster.scheduler_address), alone)


def test_an_interrupted_search_gives_the_best_so_far_and_goes_on(
    case, alone, tmp_path, monkeypatch
):
    state = tmp_path / "state.npz"
    monkeypatch.setattr(evaluation, "FIRST_BATCH", 12)
    monkeypatch.setattr(evaluation, "BATCH", 16)
    original, calls = evaluation.evaluate_some, []

    def interrupted(*arguments):
        calls.append(0)
        if len(calls) == 2:
            raise KeyboardInterrupt
        original(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(evaluation, "evaluate_some", interrupted)
        partial = found(case, resume=state)
    assert not partial.complete
    assert 0 < partial.evaluated <= 12  # the first batch, without variants that recompute more
    assert partial.lower_bound_s <= alone.layouts[0].step_time_s <= partial.layouts[0].step_time_s
    assert partial.certificate.startswith("interrupted")
    assert partial.progress.unresolved == 0 or partial.gap > 0

    evaluated = []
    run = evaluation._step_s
    monkeypatch.setattr(
        evaluation,
        "_step_s",
        lambda context, layouts: evaluated.extend(layouts) or run(context, layouts),
    )
    whole = found(case, resume=state)
    assert whole.complete
    assert len(evaluated) == whole.evaluated - partial.evaluated
    assert [p.layout for p in whole.layouts] == [p.layout for p in alone.layouts]
    evaluated.clear()
    found(case, resume=state)
    assert not evaluated


def test_a_state_of_another_search_is_refused(case, tmp_path):
    state = tmp_path / "state.npz"
    found(case, resume=state)
    with pytest.raises(PerfModelError, match="another search"):
        search(case.model, case.cluster, devices=8, global_batch=16, job=case.job, resume=state)
    state.write_text("nothing")
    with pytest.raises(PerfModelError, match="not the saved state of a search"):
        found(case, resume=state)


def test_impossible_executors_are_refused(capsys):
    with pytest.raises(PerfModelError, match="at least 1"), open_executor(0):
        pass
    assert main([*COMMAND, "--workers", "0"]) == 2
    assert "workers must be at least 1" in capsys.readouterr().err


def test_the_command_line_shows_the_best_so_far_when_interrupted(monkeypatch, capsys):
    original, calls = evaluation.evaluate_some, []

    def interrupted(*arguments):
        calls.append(0)
        if len(calls) == 2:
            raise KeyboardInterrupt
        original(*arguments)

    monkeypatch.setattr(evaluation, "FIRST_BATCH", 12)
    monkeypatch.setattr(evaluation, "evaluate_some", interrupted)
    assert main(COMMAND) == 130
    out, err = capsys.readouterr()
    assert "interrupted: " in " ".join(out.split())  # lines break anywhere
    assert err.startswith("perfmodel: interrupted")
    assert err.count("\n") == 1


def test_several_devices_share_a_batch():
    script = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, numpy as np
import perfmodel.timeline._many as many
from perfmodel.program import ProgramSpec, build
from perfmodel.timeline import compile_structure, makespan_lanes, makespan_many
many.LEAST_DIVIDED = 1
programs = [compile_structure(build(ProgramSpec(stages=4, micro_batches=m))) for m in range(4, 12)]
rng = np.random.default_rng(0)
durations = [rng.random((3, p.structure.n_classes)).astype(np.float32) for p in programs]
batch = many.ProgramBatch(tuple(programs))
spans = makespan_many(batch, durations)
used = {device for tables in batch._tables.values() for device in tables.program.devices()}
assert len(used) == 2, used
for p, d, s in zip(programs, durations, spans):
    np.testing.assert_allclose(s, makespan_lanes(p, d), rtol=1e-6)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
