"""Notebooks ship with outputs (`make notebooks`), which code hosts show; `make docs` runs each from
top to bottom, and an error there fails the site."""

import ast
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


TIMED = ("calibrate_this_machine",)
"""Notebooks whose outputs are times of the machine that ran them: those of another machine would
mislead."""


def test_a_notebook_that_times_its_machine_ships_without_outputs() -> None:
    for path in NOTEBOOKS:
        if path.stem in TIMED:
            cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
            assert cells
            assert all(not c["outputs"] and c["execution_count"] is None for c in cells)


@pytest.mark.parametrize(
    "path", [p for p in NOTEBOOKS if p.stem not in TIMED], ids=lambda p: p.stem
)
def test_notebook_ships_with_outputs(path):
    """Outputs of one run from top to bottom, small enough for a repository, and none that a code
    host does not show."""
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    assert [c["execution_count"] for c in cells] == list(range(1, len(cells) + 1))
    outputs = [output for c in cells for output in c["outputs"]]
    assert len(outputs) >= len(cells) / 2
    assert not [
        output
        for output in outputs
        if output["output_type"] == "error" or output.get("name") == "stderr"
    ]
    assert "<iframe" not in path.read_text()
    assert path.stat().st_size < 250_000


def code(name: str) -> list[str]:
    """The code cells of a notebook."""
    path = Path(__file__).parents[1] / "notebooks" / f"{name}.ipynb"
    return [
        "".join(c["source"])
        for c in json.loads(path.read_text())["cells"]
        if c["cell_type"] == "code"
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_no_notebook_waits_for_a_process_without_a_limit(path):
    for cell in code(path.stem):
        calls = [node for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.Call)]
        for call in calls:
            if re.search(
                r"subprocess\.(run|call|check_\w+)$|\.(communicate|wait)$", ast.unparse(call.func)
            ):
                assert "timeout" in {keyword.arg for keyword in call.keywords}, ast.unparse(call)


def test_the_documentation_is_built_within_a_limit():
    recipe = (
        (Path(__file__).parents[1] / "Makefile")
        .read_text()
        .partition("\ndocs:")[2]
        .partition("\n\n")[0]
    )
    assert re.search(r"timeout --kill-after=\d+ \$\(DOCS_LIMIT_S\) .*sphinx", recipe)
    configuration = (Path(__file__).parents[1] / "docs" / "conf.py").read_text()
    assert int(re.search(r"nb_execution_timeout = (\d+)", configuration)[1]) <= 300


@pytest.mark.parametrize("rows", [0, 3])
def test_the_calibration_of_a_busy_machine_is_shown_all_the_same(rows):
    """Whether or not rows are left when others took the processor from all of them."""
    preparation, *_ = cells = code("calibrate_this_machine")
    plan = tomllib.loads(re.search(r'PLAN = """(.*?)"""', preparation, re.DOTALL)[1].format(m=[64]))
    assert plan["rule"]["interference_limit"] > 0.9
    (shown,) = [cell for cell in cells if "reports = {" in cell]
    figures = {"n": rows, "median_ape": 5.0 if rows else None}
    families = {"gemm": {"all": figures}} if rows else {}

    def perfmodel(*arguments: str) -> str:
        return json.dumps({"families": families, "all": figures})

    import pandas as pd

    names: dict[str, Any] = {"json": json, "pd": pd, "perfmodel": perfmodel}
    exec(shown, names)
    assert set(names["reports"]) == {"data sheet", "calibrated"}
