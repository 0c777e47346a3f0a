"""Put the measured accuracy and the beginning of what `make plan` prints into README.md, between
its markers, and what naming a framework is worth into docs/explanation/where_it_is_wrong.md.

    python training/readme_tables.py

The figures are those that training/report.py, training/fit_collectives.py, validate/live.py,
validate/blind.py and validate/run.py wrote; each row names the report that has the rest. The plan
is searched anew.

One rule for all: every source of runs, op family and series of collectives counts the same, however
many rows it has; where the mean over rows is another figure, it stands beside (`beside`).
"""

import io
import json
import os
import re
import shlex
import textwrap
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.cli import main as command
from perfmodel.cost.learn import kernel_records
from perfmodel.errors import PerfModelError
from perfmodel.ingest.tables import write_text

ROOT = Path(__file__).parents[1]
FACTORS_PAGE = ROOT / "docs" / "explanation" / "where_it_is_wrong.md"
GROUPS = {
    "H100": "steps on H100",
    "H200": "steps on H200",
    "B200": "steps on B200",
    "GB200": "steps on GB200",
    "mixtures of experts": "steps of mixtures of experts",
    "context parallelism": "steps with context parallelism",
}
APART = 0.1
"""Share of a mean by which the mean over rows differs before it stands beside."""
COLLECTIVES = {
    ("devices", "all"): "collectives inside a node of devices never seen",
    ("fabrics between nodes", "1 MiB and more"): "collectives from 1 MiB on fabrics never seen",
    ("fabrics between nodes", "below 1 MiB"): "collectives below 1 MiB on fabrics never seen",
    (
        "rank counts beyond",
        "1 MiB and more",
    ): "collectives from 1 MiB over more ranks than were measured",
}


def blind() -> list[str]:
    """Rows on sources that nobody had looked at: as first predicted, and today."""
    figures = json.loads((ROOT / "validate" / "blind" / "blind.json").read_text())
    first = figures["first"]
    today = figures["today"]
    report = "`validate/blind/README.md`"

    runs = f"{first['predicted']} runs of {first['sources']} sources not seen before"
    title = f"**steps of {runs}, first prediction**"
    rows = [row(title, first["mean_over_sources"], _score_text(first), report)]
    # A record without today's predictions is one of first looks alone.
    if today["predicted"]:
        title = f"today, {today['predicted']} runs of {today['sources']} sources; nothing is fitted to their teams"
        rows.append(row(title, today["mean_over_sources"], _score_text(today), report))
    return rows


def _score_text(score: dict[str, Any]) -> str:
    """A score's median row and its intervals, in words."""
    return (
        f"median row {score['median_row']:.1%}; {score['inside']:.0%} inside the 90 % interval, whose ends are a factor "
        f"{score['ratio']:.2f} apart"
    )


def steps() -> list[str]:
    """Rows on step times of published runs whose sources were looked at while the model was built;
    sources count the same."""
    # Sources that were known from the beginning: what a stranger meets is `blind`'s.
    cases = json.loads((ROOT / "validate" / "report.json").read_text())["cases"]
    mean, groups = cases["over_sources"], cases["groups"]
    sources = cases["sources"]
    worst_error, worst_source = max(
        (figures["mean_ape"], name) for name, figures in sources.items() if figures["n"]
    )
    memory = [figures["memory"] for figures in sources.values() if figures["memory"]["n"]]
    memory_error, memory_by_row = means(
        [peaks["mean_ape"] for peaks in memory], [peaks["n"] for peaks in memory]
    )
    by_row = beside(mean["mean_ape"], cases["all"]["mean_ape"])
    report = "`validate/report.md`"
    return [
        row(
            f"steps of {cases['all']['n']:,} runs of {mean['sources']} sources known from the beginning",
            mean["mean_ape"],
            f"{by_row}bias {mean['bias']:+.1%}; {mean['coverage_90']:.0%} inside the 90 % interval, whose ends are a "
            f"factor {mean['width_90']:.2f} apart",
            report,
        ),
        row(
            "the same without the factors that a framework's name brings",
            _without_factors(),
            f"{cases['generic']['over_sources']['mean_ape']:.1%} with `--framework generic`",
            "`docs/explanation/where_it_is_wrong.md`",
        ),
        row("the worst of these sources", worst_error, worst_source, report),
        *_group_rows(groups, report),
        row(
            "peak memory",
            memory_error,
            f"{beside(memory_error, memory_by_row)}{len(memory)} sources",
            report,
        ),
    ]


def _group_rows(groups: dict[str, Any], report: str) -> list[str]:
    """A row for each of `GROUPS` that has any run."""
    rows = []
    for name, title in GROUPS.items():
        if group := groups.get(name):
            more = f"{group['sources']} sources, {_by_row_of(group)}bias {group['bias']:+.1%}"
            rows.append(row(title, group["error"], more, report))
    return rows


def kernels() -> list[str]:
    """Rows on kernel regressors for shapes outside their training data, and on the physics
    alone."""
    baselines = json.loads((ROOT / "training" / "baselines.json").read_text())
    records = {name: record["in_range"] for name, record in kernel_records().items()}
    errors = [record["mean_ape"] / 100 for record in records.values()]
    counts = [record["n"] for record in records.values()]
    ours, by_row = means(errors, counts)
    # Baselines are computed by another script, and may lack a new family.
    roofline = [baselines[name]["roofline"] for name in records if name in baselines]
    physics = float(np.mean(roofline)) / 100
    more = f"{beside(ours, by_row)}{sum(counts):,} rows, {len(records)} op families; a roofline {physics:.0%}"
    return [row("kernels of shapes never seen", ours, more, "`training/report.md`")]


def collectives() -> list[str]:
    """Rows on collectives of fabrics and rank counts that were left out of the fit."""
    rows = []
    for line in (ROOT / "training" / "collectives_report.md").read_text().splitlines():
        # The study's rows of all collectives; other tables of the page have fewer columns.
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if len(cells) != 10 or cells[2] != "all":
            continue
        left_out, size, _, n, mean, median, series_alike = cells[:7]
        if title := COLLECTIVES.get((left_out, size)):
            by_row = f"{int(n):,} rows, by row {mean.strip('*')} %, median {median} %"
            error = float(series_alike) / 100
            rows.append(row(title, error, by_row, "`training/collectives_report.md`"))
    return rows


def live() -> list[str]:
    """Rows on real ranks of one machine."""
    figures = json.loads((ROOT / "validate" / "live.json").read_text())
    more = f"{figures['configurations']} steps on 2 to 8 ranks, largest {figures['largest_step_error']:.1%}"
    title = "a machine that was calibrated (`make live`)"
    return [row(title, figures["mean_step_error"], more, "`validate/live.md`")]


def means(errors: Sequence[float], counts: Sequence[int]) -> tuple[float, float]:
    """The mean error with equal weight for every source, family or series, and the mean over all
    their rows."""
    return float(np.mean(errors)), float(np.average(errors, weights=counts))


def beside(mean: float, by_row: float) -> str:
    """Text with the mean over rows, where it differs from the mean with equal weights."""
    return f"by row {by_row:.1%}; " if abs(by_row - mean) > APART * mean else ""


def _by_row_of(group: dict[str, Any]) -> str:
    """The mean over rows of a group, where it is another figure."""
    # A record made before groups had a mean over rows has none to show.
    return beside(group["error"], group["by_row"]) if "by_row" in group else ""


def row(what: str, error: float, more: str, report: str) -> str:
    """A table row: what was predicted, its mean error, and where the details are."""
    return f"| {what} | {error:.1%} | {more} | {report} |"


def accuracy() -> str:
    """The whole table of accuracy."""
    head = ["| predicted | mean error | | all figures |", "|---|--:|---|---|"]
    return "\n".join([*head, *blind(), *steps(), *kernels(), *collectives(), *live()])


def _without_factors() -> float:
    """Mean error over sources with what frameworks do, but without the factors of their names."""
    return json.loads((ROOT / "validate" / "factors.json").read_text())["over_sources"]["mean_ape"]


def factors() -> str:
    """Table of what naming a framework changes: its behaviour, and the factors that its name
    multiplies times by."""
    cases = json.loads((ROOT / "validate" / "report.json").read_text())["cases"]
    named = cases["over_sources"]["mean_ape"]
    generic = cases["generic"]["over_sources"]["mean_ape"]
    facts_alone = _without_factors()
    return textwrap.fill(
        f"The mean error over sources is {named:.1%} with the framework named, {facts_alone:.1%} with what it does but "
        f"without its factors, and {generic:.1%} with `--framework generic`, which has neither: of "
        f"{100 * (generic - named):.1f} points, {100 * (facts_alone - named):.1f} come from the factors "
        "(`validate/report.md`, `validate/factors.json`).",
        120,
    )


def plan() -> str:
    """Output of `make plan`'s search at 80 columns, before the files that it writes.

    Raises:
        PerfModelError: the search failed.
    """
    recipe = re.search(
        r"^plan:.*?\n(.*?)\n\n", (ROOT / "Makefile").read_text(), re.DOTALL | re.MULTILINE
    )
    assert recipe is not None
    # The command as a reader would type it, without the files that it also writes.
    recipe_argv = shlex.split(recipe[1].replace("\\\n", " ").partition("/perfmodel ")[2])
    argv = recipe_argv[: recipe_argv.index("--script")]
    os.environ["COLUMNS"] = "80"
    # In this process: a new one would only import the package once more.
    with redirect_stdout(io.StringIO()) as out:
        if status := command(argv):
            raise PerfModelError(f"perfmodel {shlex.join(argv)} ended with status {status}")
    return f"```\n{out.getvalue().rstrip()}\n```"


def put_between_markers(page: Path, name: str, text: str) -> None:
    """Replace what stands between two markers of a page."""
    begin, end = f"<!-- {name}:begin (python training/readme_tables.py) -->", f"<!-- {name}:end -->"
    head, _, rest = page.read_text().partition(begin)
    write_text(page, f"{head}{begin}\n{text}\n{end}{rest.partition(end)[2]}")


def main() -> None:
    """Renew the three texts."""
    put_between_markers(ROOT / "README.md", "plan", plan())
    put_between_markers(ROOT / "README.md", "accuracy", accuracy())
    put_between_markers(FACTORS_PAGE, "factors", factors())


if __name__ == "__main__":
    main()
