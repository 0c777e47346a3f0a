"""A small plan from start to finish, in a process of its own as users run it."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from perfmodel.errors import TableError
from perfmodel.io import read_table, write_table
from perfmodel.measure import card_path, read_card, read_plan
from perfmodel.measure._card import write_card
from perfmodel.measure._earlier import earlier_rows
from perfmodel.measure._rows import SUSPECT, op_columns

ROOT = Path(__file__).parents[2]
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
op = "relu"
"rows,hidden" = [[2, 3]]
dtype = "fp32"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "plan.toml").write_text(PLAN)
    command = [sys.executable, str(ROOT / "calibrate" / "measure.py"), str(folder / "plan.toml"), "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "3 rows" in done.stdout
    return folder


def test_writes_a_table_and_its_card_and_nothing_else(folder: Path):
    assert sorted(p.name for p in folder.iterdir()) == ["kernels.card.json", "kernels.csv", "plan.toml"]
    table, card = read_table(folder / "kernels.csv"), read_card(folder / "kernels.csv")
    assert (card.rows, card.device, card.licence) == (3, "box", "Apache-2.0")
    assert table["m"].tolist()[:2] == [4, 8]
    assert table["rows"].iloc[2] == 2
    assert "4.0" not in (folder / "kernels.csv").read_text().splitlines()[1].split(",")
    assert card.method["threads"] == 1
    assert card.method["call_overhead_us"] > 0


def test_only_disturbed_rows_of_a_finished_table_are_measured_again(folder: Path, tmp_path: Path):
    table = pd.read_csv(folder / "kernels.csv")
    table["variant"] = ["", SUSPECT, ""]
    table["interference"] = [0.0, 0.9, 0.0]
    write_table(tmp_path / "kernels.csv", table)
    plan = read_plan(folder / "plan.toml")
    write_card(tmp_path / "kernels.csv", read_table(tmp_path / "kernels.csv"), plan.rule, {})
    earlier = earlier_rows(tmp_path / "kernels.csv", plan.device, plan.kernels, op_columns)
    assert [op for op, _ in earlier] == [plan.kernels[0], plan.kernels[2]]
    assert [row["time_us"] for _, row in earlier] == table["time_us"].iloc[[0, 2]].tolist()
    assert earlier_rows(tmp_path / "kernels.csv", "another device", plan.kernels, op_columns) == []
    assert earlier_rows(tmp_path / "none.csv", plan.device, plan.kernels, op_columns) == []


def test_a_card_does_not_fit_another_table(folder: Path, tmp_path: Path):
    for name in ("kernels.csv", "kernels.card.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    path = tmp_path / "kernels.csv"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(TableError, match="not the table"):
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


def test_the_script_names_a_bad_plan_and_exits_with_two(tmp_path: Path):
    command = [sys.executable, str(ROOT / "calibrate" / "measure.py"), "nowhere.toml", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "nowhere.toml" in done.stderr
