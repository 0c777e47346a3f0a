"""Weights of one folder are of one moment, and of the present one."""

import json
import os
import threading
from pathlib import Path

import asked as questions
import numpy as np
import pytest

import perfmodel as pm
from perfmodel.cost import CollectiveModel, KernelModel
from perfmodel.cost.learn import weight_files
from perfmodel.errors import CalibrationError
from perfmodel.ingest.tables import write_bytes
from perfmodel.ops import Gemm
from perfmodel.planning.layouts import ask
from perfmodel.planning.layouts.questions import model_of
from perfmodel.prediction import step_problem
from perfmodel.spec import Job


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    return questions.fits(tmp_path_factory.mktemp("fits"))


def _write(folder: Path, content: dict[str, bytes]) -> None:
    for name, data in content.items():
        write_bytes(folder / name, data)


def _age(folder: Path) -> None:
    """Make all files old enough to be told apart by their times."""
    old = (folder / "gemm_half.safetensors").stat().st_mtime_ns - 3600 * 10**9
    for path in folder.iterdir():
        os.utime(path, ns=(old, old))


def test_kernels_collectives_and_runs_change_together(
    tmp_path: Path, fits: list[dict[str, bytes]]
) -> None:
    """Families that were asked for after a refit are of the refit, those asked for before too."""
    cluster, job = pm.cluster("dgx-a100"), Job(global_batch=16, seq_len=1024)
    _write(tmp_path, fits[1])
    before = step_problem(pm.model("gpt3-1.3b"), cluster, job, tmp_path)
    _write(tmp_path, fits[2])
    after = step_problem(pm.model("gpt3-1.3b"), cluster, job, tmp_path)
    again = step_problem(pm.model("gpt3-1.3b"), cluster, job, tmp_path)
    assert after is again
    op = [Gemm(m=4096, n=4096, k=4096)]
    for problem, shift in ((before, 0.2), (after, 0.4)):  # `before` reads its gemm weights only now
        shipped_s = KernelModel.load().times(cluster.device, op).time_s
        assert np.log(problem.kernels.times(cluster.device, op).time_s / shipped_s)[0] > 0.4 * shift
        assert dict(problem.adjustment.values)["gemm"] == pytest.approx(shift / 4)
    first, second = (
        next(iter(problem.collectives.weights.curves.values())) for problem in (before, after)
    )
    for place, curve in first.items():
        assert second[place].value - curve.value == pytest.approx(0.1, abs=1e-5)


def test_a_folder_is_read_again_exactly_where_it_changed(
    tmp_path: Path, fits: list[dict[str, bytes]]
) -> None:
    _write(tmp_path, fits[1])
    first = KernelModel.load(tmp_path)
    _write(tmp_path, fits[1])  # other times and numbers, equal content
    assert KernelModel.load(tmp_path) is first
    assert CollectiveModel.load(tmp_path) is CollectiveModel.load(tmp_path)
    (tmp_path / "end_to_end.json").unlink()
    assert KernelModel.load(tmp_path) is not first


def test_same_size_in_place_and_same_time_is_another_content(
    tmp_path: Path, fits: list[dict[str, bytes]]
) -> None:
    """Times of files are no proof: a write that restores them is seen all the same."""
    _write(tmp_path, fits[1])
    _age(tmp_path)
    before, path = weight_files(tmp_path), tmp_path / "end_to_end.json"
    stat, text = path.stat(), path.read_text()
    path.write_text(text.replace("0.05", "0.15", 1))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert weight_files(tmp_path) != before


def test_a_reader_beside_a_writer_gets_files_that_were_there_together(
    tmp_path: Path, fits: list[dict[str, bytes]]
) -> None:
    """The writer replaces file after file, first the mark of the run, last the same mark: both are
    always equal."""
    names = ("gemm_half.safetensors", "zz.safetensors")
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            for name in names:
                write_bytes(tmp_path / name, b"%08d" % number)
            stop.wait(0.02)

    for name in names:
        write_bytes(tmp_path / name, b"%08d" % 0)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(20):
            content = weight_files(tmp_path).content
            first, last = (int(content[name]) for name in names)
            assert first - last in (0, 1)  # what the folder held at one moment
    finally:
        stop.set()
        writer.join()


def test_a_search_notices_that_its_weights_changed(
    tmp_path: Path, fits: list[dict[str, bytes]]
) -> None:
    _write(tmp_path, fits[1])
    question = ask("gpt3-1.3b", "dgx-a100", devices=8, global_batch=16, calibration=tmp_path)
    problem = question.step_problem
    assert model_of(question.context) is problem
    _write(tmp_path, fits[2])
    assert question.step_problem is problem
    with pytest.raises(CalibrationError, match="changed while the search ran"):
        model_of(question.context)


def test_the_state_of_a_search_is_of_its_weights(
    tmp_path: Path, fits: list[dict[str, bytes]]
) -> None:
    """A search is not continued with what other weights in the same folder gave."""
    _write(tmp_path / "fitted", fits[1])
    given = {
        "devices": 8,
        "global_batch": 16,
        "calibration": tmp_path / "fitted",
        "resume": tmp_path / "state.npz",
    }
    pm.search("gpt2-345m", "dgx-a100", space=questions.SPACE, **given)
    _write(tmp_path / "fitted", fits[2])
    with pytest.raises(pm.PerfModelError, match="state of another search"):
        pm.search("gpt2-345m", "dgx-a100", space=questions.SPACE, **given)


def test_other_rates_give_other_plans() -> None:
    """Plans of regressors are kept by all figures of a device."""
    from dataclasses import replace

    device = pm.device("A100-SXM4-80GB")
    peak = replace(device.peak, bf16=4 * device.peak.bf16, fp16=4 * device.peak.fp16)
    faster = replace(device, peak=peak)
    op = [Gemm(m=8192, n=8192, k=8192)]
    model = KernelModel(weight_files(None))
    slow_s, fast_s = (model.times(one, op).time_s[0] for one in (device, faster))
    assert fast_s < 0.5 * slow_s
    assert json.dumps(fast_s) == json.dumps(
        KernelModel(weight_files(None)).times(faster, op).time_s[0]
    )
