"""Every notebook runs from top to bottom and ships without outputs."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    assert cells
    assert all(not c["outputs"] and c["execution_count"] is None for c in cells)
    namespace: dict[str, object] = {}
    for i, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"{path.name}[{i}]", "exec"), namespace)
