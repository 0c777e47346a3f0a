"""A small plan from start to finish, in a process of its own as users run it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from perfmodel.errors import CalibrationError, TableError
from perfmodel.ingest.tables import read_table, write_table
from perfmodel.measure import read_plan
from perfmodel.measure.estimate import finished_rows
from perfmodel.measure.tables import (
    SUSPECT,
    Record,
    card_path,
    is_pending,
    point_key,
    read_card,
    write_card,
)
from perfmodel.measure.timing import StoppingRule

PACKAGES = ("jax", "jaxlib", "numpy", "perfmodel")
PLAN = """
device = "box"
kernel_table = "kernels.csv"
attempts = 1
[rule]
half_width = 0.5
max_s = 0.05
[[kernels]]
family = "gemm"
m = [4, 8]
"n,k" = [[4, 4]]
dtype = "fp32"
[[kernels]]
family = "memory"
cache = ["warm", "cold"]
op = "relu"
"rows,hidden" = [[2, 3]]
dtype = "fp32"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "plan.toml").write_text(PLAN)
    command = [
        sys.executable,
        "-m",
        "perfmodel.cli",
        "calibrate",
        "--plan",
        str(folder / "plan.toml"),
    ]
    done = subprocess.run(
        [*command, "--out", str(folder)], capture_output=True, text=True, check=True
    )
    assert "4 rows" in done.stdout
    return folder


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_writes_a_table_and_its_card_and_nothing_else(folder: Path):
    assert sorted(p.name for p in folder.iterdir()) == [
        "kernels.card.json",
        "kernels.csv",
        "plan.toml",
    ]
    table, card = read_table(folder / "kernels.csv"), read_card(folder / "kernels.csv")
    assert (card.rows, card.device, card.licence) == (4, "box", "Apache-2.0")
    assert table["m"].tolist()[:2] == [4, 8]
    assert table["rows"].tolist()[2:] == [2, 2]
    assert table["variant"].str.endswith("cold").tolist() == [False, False, False, True]
    assert "4.0" not in (folder / "kernels.csv").read_text().splitlines()[1].split(",")
    assert card.method["threads"] == 1
    assert card.method["call_overhead_us"] > 0


def changed(path: Path, change: Callable[[pd.DataFrame], None]) -> pd.DataFrame:
    """The finished table, edited, with a card that belongs to it."""
    table = pd.read_csv(path)
    change(table)
    write_table(path, table)
    write_card(path, read_table(path), StoppingRule(), {}, packages=PACKAGES)
    return table


def kept(path: Path) -> dict[str, Record]:
    return {record.key: record for record in finished_rows(path, "box", PACKAGES)}


def test_rows_of_a_finished_table_are_known_again(copied: Path):
    plan = read_plan(copied / "plan.toml")
    found = kept(copied / "kernels.csv")
    assert list(found) == [point_key(point) for point in plan.kernel_points]
    table = read_table(copied / "kernels.csv")
    assert [record.row["time_us"] for record in found.values()] == table["time_us"].tolist()


def test_disturbed_rows_of_a_finished_table_are_found_by_their_points(copied: Path):
    def disturb(table: pd.DataFrame) -> None:
        table["variant"] = ["", SUSPECT, SUSPECT, f"{SUSPECT}_cold"]
        table["interference"] = [0.0, 0.9, 0.9, 0.9]

    changed(copied / "kernels.csv", disturb)
    plan = read_plan(copied / "plan.toml")
    found = kept(copied / "kernels.csv")
    assert list(found) == [point_key(point) for point in plan.kernel_points]
    assert [is_pending([record], 0, 0.06) for record in found.values()] == [False, True, True, True]
    assert read_card(copied / "kernels.csv").suspect_rows == 3


def test_a_table_measured_otherwise_is_not_overwritten(copied: Path):
    path = copied / "kernels.csv"
    before = path.read_bytes()
    with pytest.raises(CalibrationError, match="another device"):
        finished_rows(path, "another box", PACKAGES)
    with pytest.raises(CalibrationError, match="another software"):
        finished_rows(path, "box", ("torch",))
    card_path(path).unlink()
    with pytest.raises(CalibrationError, match="the table's card"):
        finished_rows(path, "box", PACKAGES)
    assert path.read_bytes() == before
    assert finished_rows(copied / "none.csv", "box", PACKAGES) == []


def test_a_card_does_not_fit_another_table(folder: Path, tmp_path: Path):
    for name in ("kernels.csv", "kernels.card.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    path = tmp_path / "kernels.csv"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(TableError, match="does not match its card"):
        read_card(path)


def test_cards_of_another_schema_or_shape_are_refused(folder: Path, tmp_path: Path):
    path = tmp_path / "kernels.csv"
    path.write_bytes((folder / "kernels.csv").read_bytes())
    with pytest.raises(TableError, match="not a readable card"):
        read_card(path)
    values = json.loads(card_path(folder / "kernels.csv").read_text())
    card_path(path).write_text(json.dumps({**values, "schema_version": 99}))
    with pytest.raises(TableError, match="schema version 99"):
        read_card(path)
