"""Sentences of reports: a figure in them is computed from the run that they describe."""

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from factors import without_factors
from hypothesis import given
from hypothesis import strategies as st
from studies.emulation_report import emulation_report
from studies.emulation_runs import claims, judged, waited_text
from studies.record_text import record_text

from perfmodel import catalog
from perfmodel.prediction import Site

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
    "emulation_wire.py": ("16 MiB", "2 %", "4 %"),
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
    cited = {
        id(k.value)
        for k in ast.walk(tree)
        if isinstance(k, ast.keyword) and k.arg in ("elsewhere", "help")
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in documentation | cited
        ):
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
    for text in (
        "the 90 % interval",
        "A100 with tp = 8",
        "SC21 T1",
        "figure 4)",
        "gpt3-1.3b",
        "2,520 devices",
    ):
        assert not TYPED.search(INTERVAL.sub("", text))


def test_the_emulation_report_is_of_its_figures() -> None:
    report = json.loads((ROOT / "validate" / "emulation.json").read_text())
    assert emulation_report(report) == (ROOT / "validate" / "emulation.md").read_text()
    worst = json.loads(json.dumps(report))
    worst["micro"]["rows"][0]["overhead"] = 0.23
    assert "+23.0%" in emulation_report(worst).split("## What is missing or missed")[1]
    assert "bar" not in emulation_report({}).split("## What is missing or missed")[1]


def report_of(name: str) -> dict:
    return json.loads((ROOT / "validate" / name).read_text())


def test_the_report_is_of_its_figures() -> None:
    """Every figure of every table: nothing of the page was written by hand, and nothing is of an
    earlier record."""
    report = report_of("report.json")
    page = record_text(report["cases"], report["kernels"], report_of("live.json"))
    assert page == (ROOT / "validate" / "report.md").read_text()


def test_the_report_says_how_often_runs_ran_by_their_probability() -> None:
    """Every run with a prediction is in one range, and the probability is no further off than it
    was."""
    fits = report_of("report.json")["cases"]["fits"]
    ranges = fits["reliability"]
    assert (
        sum(members["n"] for members in ranges) == fits["all"]["ran"] + fits["all"]["did_not_run"]
    )
    assert (ranges[0]["from"], ranges[-1]["to"]) == (0, 1)
    ran = sum(members["n"] * members["ran"] for members in ranges)
    assert ran == pytest.approx(fits["all"]["ran"])
    for members in ranges:
        assert members["from"] <= members["said"] <= members["to"]
        # Before the memory of strangers was modelled, 45 % ran of those that were told 5 to 25 %.
        assert abs(members["said"] - members["ran"]) < 0.26
    ran_by_range = [members["ran"] for members in ranges]
    assert ran_by_range == sorted(ran_by_range)


@pytest.fixture(scope="module")
def readme_tables() -> ModuleType:
    """The script that puts figures into README.md."""
    spec = importlib.util.spec_from_file_location(
        "readme_tables", ROOT / "training" / "readme_tables.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_has_the_figures_of_the_reports(readme_tables: ModuleType) -> None:
    assert (
        f"-->\n{readme_tables.accuracy()}\n<!-- accuracy:end -->"
        in (ROOT / "README.md").read_text()
    )


def test_a_site_without_factors_multiplies_no_time() -> None:
    named = (catalog.framework("torchtitan"), catalog.device("H100-SXM5-80GB"))
    for site, multiplies in ((without_factors("nobody"), False), (Site.without("nobody"), True)):
        adjustment = site.expected(*named)
        assert adjustment is not None
        assert any(value != 0 for _, value in adjustment.values) is multiplies


def test_what_a_framework_s_factors_are_worth_is_told_by_the_report(
    readme_tables: ModuleType,
) -> None:
    page = (ROOT / "docs" / "explanation" / "where_it_is_wrong.md").read_text()
    assert f"-->\n{readme_tables.factors()}\n<!-- factors:end -->" in page
    assert not re.search(r"\d points", page.replace(readme_tables.factors(), ""))


def test_the_first_figure_is_the_one_of_strangers(readme_tables: ModuleType) -> None:
    _, _, first, *others = readme_tables.accuracy().splitlines()
    assert "not seen before, first prediction" in first
    assert first.startswith("| **")
    assert not any("**" in line for line in others)


def test_sources_weigh_alike_in_the_readme_and_rows_stand_beside(readme_tables: ModuleType) -> None:
    """One rule for steps, memory, kernels and collectives: more rows of one source move no mean but
    the one by row."""
    figures = {
        line.split("|")[1].strip(" *"): line for line in readme_tables.accuracy().splitlines()
    }
    cases = report_of("report.json")["cases"]
    times = {name: of for name, of in cases["sources"].items() if of["n"]}
    memory = {name: of["memory"] for name, of in cases["sources"].items() if of["memory"]["n"]}
    known = f"steps of {cases['all']['n']:,} runs of {len(times)} sources known from the beginning"
    for name, sources in ((known, times), ("peak memory", memory)):
        errors = [of["mean_ape"] for of in sources.values()]
        runs = [of["n"] for of in sources.values()]
        alike = sum(errors) / len(errors)
        by_row = sum(error * n for error, n in zip(errors, runs, strict=True)) / sum(runs)
        assert f"| {alike:.1%} |" in figures[name]
        assert f"by row {by_row:.1%}; " in figures[name]
    for line in figures.values():
        assert "by row" in line or not line.strip("| ").startswith(("collectives", "kernels"))


@given(st.lists(st.tuples(st.floats(0.001, 2.0), st.integers(1, 10_000)), min_size=1, max_size=9))
def test_the_mean_by_row_stands_beside_wherever_it_is_another_figure(
    readme_tables: ModuleType, sources: list[tuple[float, int]]
) -> None:
    errors, counts = [error for error, _ in sources], [count for _, count in sources]
    alike, by_row = readme_tables.means(errors, counts)
    assert alike == pytest.approx(sum(errors) / len(errors))
    rows = [error for error, count in sources for _ in range(count)]
    assert by_row == pytest.approx(sum(rows) / len(rows))
    assert (f"by row {by_row:.1%}; " == readme_tables.beside(alike, by_row)) == (
        abs(by_row / alike - 1) > 0.1
    )
    assert readme_tables.beside(alike, alike) == ""


def test_errors_are_judged_only_where_the_noise_of_real_runs_allows_it() -> None:
    assert [judged(error, 0.01, 0.02) for error in (0.02, -0.02, 0.021, -0.021)] == [
        "yes",
        "yes",
        "no",
        "no",
    ]
    assert judged(0.0, 0.011, 0.02) == "too noisy"
    assert claims(["yes", "no", "yes"], 0.02) == "2 of the 3 whose noise is at most 1% within 2%"
    assert claims(["yes", "too noisy"], 0.02) == (
        "1 of the 1 whose noise is at most 1% within 2%; nothing is claimed of the other"
    )
    assert claims(["too noisy", "too noisy"], 0.02).endswith("of the 2 others")


def test_reports_tell_how_long_turns_waited_for_a_quiet_machine() -> None:
    assert (
        waited_text([{"waited_s": 3.0}, {"waited_s": 4.0}])
        == "Turns waited 7 s in all for a quiet machine."
    )
    assert "before turns waited" in waited_text([{"waited_s": 3.0}, {}])
