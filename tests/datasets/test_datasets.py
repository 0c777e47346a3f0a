"""The committed tables, their cards, and the index of public tables."""

import gzip
import re
import tomllib
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from perfmodel.ingest import kernel_table_paths
from perfmodel.ingest.tables import COLUMNS, read_table
from perfmodel.measure import read_plan
from perfmodel.measure.tables import (
    COLD,
    SCHEMA_VERSION,
    SUSPECT,
    UNITS,
    card_path,
    collective_columns,
    op_columns,
    read_card,
)

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "datasets"
TABLES = sorted(FOLDER.glob("*.csv"))
INDEX = tomllib.loads((FOLDER / "index.toml").read_text())
LOCAL = re.compile(r"/work|/home|/root|/tmp|\.\./|localhost")


@pytest.fixture(params=TABLES, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_the_tables_that_the_readme_names_are_there():
    named = set(re.findall(r"`(\w+\.csv)`", (FOLDER / "README.md").read_text())) - {"X.csv"}
    assert {p.name for p in TABLES} == named


def test_card_and_table_belong_together(path: Path):
    table, card = read_table(path), read_card(path)
    assert card.rows == len(table) > 0
    assert card.schema_version == SCHEMA_VERSION
    assert card.suspect_rows == table["variant"].str.startswith(SUSPECT).sum()
    assert [card.device] == table["device"].unique().tolist()
    assert card.licence == "Apache-2.0"
    assert re.fullmatch("[0-9a-f]{64}", card.collector_sha256)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", card.date)
    assert card.machine["cores"] > 0
    framework = "torch" if "torch" in card.software else "jax"
    assert card.software[framework].partition("+")[0] in table["software"].iloc[0]


def test_every_number_has_a_unit_or_is_a_count(path: Path):
    table, card = read_table(path), read_card(path)
    assert card.units == {name: unit for name, unit in UNITS.items() if name in table}
    for name, column in COLUMNS.items():
        if column.unit and name in table:
            assert card.units[name] == column.unit
    counts = table.select_dtypes("number").columns.difference([*card.units])
    assert all((table[name].dropna() % 1 == 0).all() for name in counts)


def test_rows_are_plausible(path: Path):
    table, card = read_table(path), read_card(path)
    assert (table["source"] == "perfmodel").all()
    assert (table["time_us_std"] >= 0).all()
    assert (table["n_repeats"] >= 1).all()
    clean = table[~table["variant"].str.startswith(SUSPECT)]
    assert (clean["interference"] <= card.method["interference_limit"]).all()
    # nothing is much faster than the call that does next to nothing (torch's smallest ops are one
    # dispatch like it)
    assert (table["time_us"] >= 0.5 * card.method.get("call_overhead_us", 0.0)).all()


def test_every_op_of_the_plan_was_measured_once():
    plan = read_plan(ROOT / "calibrate" / "cpu.toml")
    assert plan.device == read_card(FOLDER / plan.kernel_table).device
    kernels = read_table(FOLDER / plan.kernel_table)
    cold = kernels["variant"].str.endswith(COLD)
    _same_ops([op_columns(op) for op in plan.kernels], kernels[~cold])
    if cold.any():
        _same_ops([op_columns(op) for op in plan.cold_kernels], kernels[cold])
    if (FOLDER / plan.collective_table).exists():
        _same_ops(
            [collective_columns(op) for op in plan.collectives],
            read_table(FOLDER / plan.collective_table),
        )


def _same_ops(wanted: list[dict[str, Any]], table: pd.DataFrame) -> None:
    expected = pd.DataFrame(wanted)
    found = table[list(expected.columns)]
    numbers = expected.select_dtypes("number").columns
    assert not found.duplicated().any()
    pd.testing.assert_frame_equal(
        found.astype(dict.fromkeys(numbers, float)).astype(object).fillna(""),
        expected.astype(dict.fromkeys(numbers, float)).astype(object).fillna(""),
    )


def test_nothing_names_this_machine():
    for file in FOLDER.iterdir():
        assert not LOCAL.search(file.read_text()), file.name
    for card in (card_path(p).read_text() for p in TABLES):
        assert "hostname" not in card
        assert "user" not in card


@pytest.mark.parametrize("source", INDEX["sources"], ids=lambda s: s["name"])
def test_index_entries_are_complete(source: dict[str, Any]):
    assert source["origins"]
    for origin in source["origins"]:
        assert origin["repository"].startswith("https://github.com/")
        # what is kept is named to the last digit, the rest as far as its tables state it
        kept = source["training"] and "figures only" not in source["licence"]
        assert re.fullmatch(
            "[0-9a-f]{40}" if kept else "([0-9a-f]{7,40})?", origin.get("commit", "")
        )
    uses = [*source["training"], *source["validation"], *source["unused"]]
    assert sorted(uses) == sorted(source["rows"])  # each table has exactly one use
    assert all(count > 0 for count in source["rows"].values())
    if source["licence"] == "none stated":
        assert source["training"] == []
    assert not any(
        name.startswith("suspect_") for name in [*source["training"], *source["validation"]]
    )


def test_published_runs_are_never_trained_on():
    runs = [*INDEX["published"], *INDEX["published2"]]
    assert all("training" not in entry and entry["licence"] and entry["rows"] > 0 for entry in runs)


@pytest.mark.shared
def test_the_index_lists_every_public_table_and_its_rows(data_dir: Path):
    for source in INDEX["sources"]:
        files = {
            p.name.split(".")[0]: p
            for p in (data_dir / source["name"]).iterdir()
            if ".csv" in p.name
        }
        assert {name: _rows(file) for name, file in files.items()} == source["rows"], source["name"]
    for collection in ("published", "published2"):
        rows = {p.stem: _rows(p) for p in (data_dir / collection).glob("*.csv")}
        assert rows == {entry["name"]: entry["rows"] for entry in INDEX[collection]}, collection
    folders = {p.name for p in data_dir.iterdir() if p.is_dir()}
    assert folders == {"published", "published2"} | {source["name"] for source in INDEX["sources"]}


@pytest.mark.shared
def test_the_index_says_what_the_weights_are_fitted_on(data_dir: Path):
    plan = tomllib.loads((ROOT / "training" / "collectives.toml").read_text())
    fitted = {"/".join(p.parts[-2:]) for p in kernel_table_paths(data_dir)} | set(plan["tables"])
    listed = {
        f"{source['name']}/{name}.csv.gz"
        for source in INDEX["sources"]
        for name in source["training"]
    }
    assert listed == fitted


def _rows(path: Path) -> int:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        count = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    # quoted line breaks are rare and only in small files
    return count - 1 if path.suffix == ".gz" else len(pd.read_csv(path, low_memory=False))
