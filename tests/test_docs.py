"""Every Python block of the documentation runs, page by page."""

import re
from pathlib import Path

import pytest

from perfmodel.schedule import parse_schedule, require_valid

PAGES = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": page.stem})


def test_schedule_in_the_page_can_run() -> None:
    (text,) = re.findall(r"```\n(# 1F1B.*?)```", (PAGES[0].parent / "schedules.md").read_text(), re.DOTALL)
    require_valid(parse_schedule(text))
