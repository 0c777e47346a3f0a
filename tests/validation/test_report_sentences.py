"""Sentences of reports: a figure in them is computed from the run that they describe."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from studies.emulation_report import emulation_report
from studies.emulation_runs import claims, judged, waited_text

ROOT = Path(__file__).parents[2]
GENERATORS = sorted(
    path
    for folder in ("validate", "validate/studies", "training", "perfmodel/validation")
    for path in (ROOT / folder).glob("*.py")
)
UNITS = r"%|per cent|times|x|s|ms|us|seconds|minutes|hours|GB|GiB|MiB|GB/s|rows|runs|layouts|points"
TYPED = re.compile(rf"(?<![\w.,\-])\d[\d.,]*\s?(?:{UNITS})(?![\w/])")
INTERVAL = re.compile(r"90 % interval|90 % \||inside 90 %|\| 90 %")
ALLOWED = {
    # studies' own settings, the same in every run
    "record_html.py": ("100%", "95 %"),
    "record_text.py": ("90 %",),
    "pairs.py": ("3.0 %",),
    "distir.py": ("3 %",),
    "end_to_end.py": ("90 %",),
    "serving.py": ("15 %", "2.4 times", "30 %"),
    "readme_tables.py": ("1 MiB",),
    "schedule_tables.py": ("0 GB", "1 GB"),
    "active_selection.py": ("6 layouts",),
    "search.py": ("75 layouts", "32 GB"),
    "distsim_profiling.py": ("2 ms", "15 layouts"),
    # where a block of calls ends, and what the paper's own table says
    "emulation_wire.py": ("16 MiB", "4 %"),
    "emulation.py": ("1.2 times", "1.5 times"),
    "optimise.py": ("3 times", "99 %", "10 s"),
    "bars.py": ("10 %",),
    # images of data sets, in pixels
    "timeprest.py": ("8 x", "32 x", "64 x", "224 x"),
    # widths of parameters' names, styles
    "fit_collectives.py": ("400 rows", "1 MiB"),
}
"""By file: what is a setting, a bar or a style, and no result."""


def sentences(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Texts of a module that are not documentation, nor what others have reached."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    cited = {id(k.value) for k in ast.walk(tree) if isinstance(k, ast.keyword) and k.arg in ("elsewhere", "help")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation | cited:
            yield node.lineno, INTERVAL.sub("", node.value)


@pytest.mark.parametrize("path", GENERATORS, ids=lambda p: p.stem)
def test_figures_are_computed(path: Path) -> None:
    found = [
        f"{path.name}:{line}: {typed}"
        for line, text in sentences(ast.parse(path.read_text()))
        for typed in TYPED.findall(text)
        if typed.strip() not in ALLOWED.get(path.name, ())
    ]
    assert found == []


def test_the_scan_finds_what_was_typed() -> None:
    for text in (
        "no overhead above 0.3 %.",
        "2.5 to 6.3 % too short",
        "takes 4 to 8 ms per",
        "is 1.6 to 1.8 times as",
        "5% of",
    ):
        assert TYPED.search(text)
    for text in ("the 90 % interval", "A100 with tp = 8", "SC21 T1", "figure 4)", "gpt3-1.3b", "2,520 devices"):
        assert not TYPED.search(INTERVAL.sub("", text))


def test_the_emulation_report_is_of_its_figures() -> None:
    report = json.loads((ROOT / "validate" / "emulation.json").read_text())
    assert emulation_report(report) == (ROOT / "validate" / "emulation.md").read_text()
    worst = json.loads(json.dumps(report))
    worst["micro"]["rows"][0]["overhead"] = 0.23
    assert "+23.0%" in emulation_report(worst).split("## What is missing or missed")[1]
    assert "bar" not in emulation_report({}).split("## What is missing or missed")[1]


def test_errors_are_judged_only_where_the_noise_of_real_runs_allows_it() -> None:
    assert [judged(error, 0.01, 0.02) for error in (0.02, -0.02, 0.021, -0.021)] == ["yes", "yes", "no", "no"]
    assert judged(0.0, 0.011, 0.02) == "too noisy"
    assert claims(["yes", "no", "yes"], 0.02) == "2 of the 3 whose noise is at most 1% within 2%"
    assert claims(["yes", "too noisy"], 0.02) == (
        "1 of the 1 whose noise is at most 1% within 2%; nothing is claimed of the 1 others"
    )


def test_reports_tell_how_long_turns_waited_for_a_quiet_machine() -> None:
    assert waited_text([{"waited_s": 3.0}, {"waited_s": 4.0}]) == "Turns waited 7 s in all for a quiet machine."
    assert "before turns waited" in waited_text([{"waited_s": 3.0}, {}])
