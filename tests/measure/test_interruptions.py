"""Calibrations that are killed, interrupted, crowded or run out of disk lose nothing. The clock is
made up."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_backend import PLAN, ROWS, FakeBackend, measured

from perfmodel.errors import CalibrationError, PerfModelError
from perfmodel.ingest.tables import read_table
from perfmodel.measure import read_plan, run_plan
from perfmodel.measure.tables import LOCK_NAME, PartialFile, locked, read_card, row_key

Edit = Callable[[str, str], None]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "plan.toml").write_text(PLAN)
    return tmp_path


@pytest.fixture
def fake(out: Path, monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    fake = FakeBackend(out / "log")
    monkeypatch.setattr("perfmodel.measure._run.open_backend", fake.opened)
    monkeypatch.setattr("perfmodel.measure.open_backend", fake.opened)
    monkeypatch.setattr(
        "perfmodel.cli._calibrate.guess_s", lambda device, points: [float("nan")] * len(points)
    )
    return fake


def run(out: Path, old: str = "", new: str = "", *, only_missing: bool = False) -> list[str]:
    """Run the plan, edited; keys measured meanwhile."""
    (out / "plan.toml").write_text(
        (out / "plan.toml").read_text().replace(old, new) if old else PLAN
    )
    before = len(measured(out / "log"))
    run_plan(read_plan(out / "plan.toml"), out, only_missing=only_missing)
    return measured(out / "log")[before:]


def command(out: Path) -> int:
    from perfmodel.cli import main

    return main(["calibrate", "--plan", str(out / "plan.toml"), "--out", str(out)])


@pytest.mark.slow
def test_fifty_kills_at_random_moments_lose_nothing(tmp_path: Path):
    driver = Path(__file__).with_name("kill_runs.py")
    done = subprocess.run(
        [sys.executable, str(driver), str(tmp_path), "50", "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout)["stages"]
    assert sum(count for stage, count in seen.items() if stage != "ended by itself") >= 50
    # also in the midst of measuring, and between a table, its card and the end of the partial file
    assert {"nothing written", "no row yet", "rows"} <= {
        s.partition(": ")[2] for s in seen if "first run" in s
    }
    for phase in ("first run", "disturbed rows again"):
        assert seen[f"{phase}: table without its card"] > 0
        assert seen[f"{phase}: table and card, partial file still there"] > 0


def test_disturbed_rows_of_a_finished_table_are_measured_again_unless_only_what_is_missing(
    out: Path, fake: FakeBackend
):
    # those of 5 in the second of two attempts, those of 7 in none of them
    assert len(run(out)) == ROWS + 4
    assert read_card(out / "kernels.csv").suspect_rows == 2
    assert run(out, only_missing=True) == []
    (out / "quiet").touch()
    assert len(run(out)) == 2
    assert read_card(out / "kernels.csv").suspect_rows == 0
    assert run(out) == []


def test_a_plan_that_changed_adds_rows_and_drops_none(out: Path, fake: FakeBackend):
    run(out)
    added = run(out, "n_params = [1, 2, 3, 5, 7, 8]", "n_params = [3, 11]", only_missing=True)
    assert len(added) == 2  # of 11 parameters, warm and cold
    table = read_table(out / "kernels.csv")
    assert len({row_key(row) for row in table.to_dict("records")}) == len(table) == ROWS + 2
    assert table["n_params"].tolist()[:4] == [3, 11, 3, 11]
    assert sorted(table["n_params"].unique()) == [1, 2, 3, 5, 7, 8, 11]


def test_two_runs_into_one_folder_do_not_meet(out: Path, fake: FakeBackend):
    with locked(out), pytest.raises(CalibrationError, match="another calibration"):
        run(out)
    assert not (out / LOCK_NAME).exists()
    (out / LOCK_NAME).write_text("left by a killed one")
    assert len(run(out)) == ROWS + 4


def test_what_killed_writes_left_is_removed(out: Path, fake: FakeBackend):
    for name in (
        ".kernels.csv.abcd1234.tmp",
        "..kernels.csv.partial.abcd1234.tmp",
        ".kernels.card.json.abcd1234.tmp",
    ):
        (out / name).write_text("half")
    (out / ".other.csv.abcd1234.tmp").write_text("somebody else's")
    run(out)
    assert [p.name for p in out.glob("*.tmp")] == [".other.csv.abcd1234.tmp"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_run_with_the_way_on(
    out: Path,
    fake: FakeBackend,
    monkeypatch: pytest.MonkeyPatch,
    capsys,
    request,
    number: signal.Signals,
):
    sampler = FakeBackend.sampler

    def interrupted(self, op, *, cold=False):
        if len(measured(self.log)) == 5:
            os.kill(os.getpid(), number)
        return sampler(self, op, cold=cold)

    # processes started in the background of a script ignore it
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, inherited))
    before = signal.getsignal(signal.SIGTERM)
    # shells start background jobs deaf to it
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(FakeBackend, "sampler", interrupted)
            assert command(out) == 130
    finally:
        signal.signal(signal.SIGINT, inherited)
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "interrupted" in last
    assert "run the same command to continue" in last
    assert len(PartialFile(out / ".kernels.csv.partial", {}).read(any_header=True) or ()) == 5
    assert signal.getsignal(signal.SIGTERM) is before
    assert command(out) == 0
    assert f"5 of {ROWS} rows are measured already" in capsys.readouterr().err
    assert len(measured(out / "log")) == ROWS + 4


FULL_DISK = """
import resource, sys
from pathlib import Path
from fake_backend import FakeBackend, install
import perfmodel.cli, perfmodel.cli._main
out = Path(sys.argv[1])
install(FakeBackend(Path(sys.argv[2])))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
sys.exit(perfmodel.cli.main(["calibrate", "--plan", str(out / "plan.toml"), "--out", str(out)]))
"""


def test_a_full_disk_is_one_clear_line_and_loses_nothing(out: Path, fake: FakeBackend):
    words = [sys.executable, "-c", FULL_DISK, str(out), str(out / "log"), "1500"]
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("perfmodel: ")]
    assert "File too large" in line
    assert "measured rows are kept" in line
    kept = {
        record.key
        for record in PartialFile(out / ".kernels.csv.partial", {}).read(any_header=True) or ()
    }
    assert 0 < len(kept) < ROWS
    assert kept.isdisjoint(run(out))
    assert len(read_table(out / "kernels.csv")) == ROWS


def test_an_op_that_cannot_be_measured_is_refused_before_anything_is(out: Path, fake: FakeBackend):
    extra = '[[kernels]]\nfamily = "gemm"\nm = 1\nn = 1\nk = 1'
    with pytest.raises(PerfModelError, match="no gemm"):
        run(out, "[[kernels]]", f"{extra}\n[[kernels]]")
    assert measured(out / "log") == []


def test_a_catalog_device_must_be_the_one_found(
    out: Path, fake: FakeBackend, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(FakeBackend, "accelerator", "NVIDIA H100 80GB HBM3")
    with pytest.raises(CalibrationError, match="A100-SXM4-80GB, but this machine has NVIDIA H100"):
        run(out, 'device = "box"', 'device = "A100-SXM4-80GB"')
    assert measured(out / "log") == []
    run(out, 'device = "A100-SXM4-80GB"', 'device = "A100-SXM4-80GB"\nany_device = true')
    assert read_card(out / "kernels.csv").machine["accelerator"] == "NVIDIA H100 80GB HBM3"
