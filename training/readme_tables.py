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
    """Runs of sources that nobody had looked at: as first predicted, and today."""
    figures = json.loads((ROOT / "validate" / "blind" / "blind.json").read_text())
    first, today, report = figures["first"], figures["today"], "`validate/blind/README.md`"

    def words(of: dict[str, Any]) -> str:
        return (
            f"median row {of['median_row']:.1%}; {of['inside']:.0%} inside the 90 % interval, whose ends are a factor "
            f"{of['ratio']:.2f} apart"
        )

    runs = f"{first['predicted']} runs of {first['sources']} sources not seen before"
    rows = [
        row(
            f"**steps of {runs}, first prediction**",
            first["mean_over_sources"],
            words(first),
            report,
        )
    ]
    if today["predicted"]:
        again = f"today, {today['predicted']} runs of {today['sources']} sources; nothing is fitted to their teams"
        rows.append(row(again, today["mean_over_sources"], words(today), report))
    return rows


def steps() -> list[str]:
    """Published runs that were looked at while the model was built, equal weight for every
    source."""
    cases = json.loads((ROOT / "validate" / "report.json").read_text())["cases"]
    mean, groups = cases["over_sources"], cases["groups"]
    worst = max((of["mean_ape"], name) for name, of in cases["sources"].items() if of["n"])
    memory = [of["memory"] for of in cases["sources"].values() if of["memory"]["n"]]
    memory_error, memory_by_row = means(
        [of["mean_ape"] for of in memory], [of["n"] for of in memory]
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
        row("the worst of these sources", worst[0], worst[1], report),
        *(
            row(
                words,
                of["error"],
                f"{of['sources']} sources, {_of_group(of)}bias {of['bias']:+.1%}",
                report,
            )
            for name, words in GROUPS.items()
            if (of := groups.get(name))
        ),
        row(
            "peak memory",
            memory_error,
            f"{beside(memory_error, memory_by_row)}{len(memory)} sources",
            report,
        ),
    ]


def kernels() -> list[str]:
    """Regressors on shapes that training never saw, and the physics alone."""
    baselines = json.loads((ROOT / "training" / "baselines.json").read_text())
    records = {name: record["in_range"] for name, record in kernel_records().items()}
    errors = [record["mean_ape"] / 100 for record in records.values()]
    counts = [record["n"] for record in records.values()]
    ours, by_row = means(errors, counts)
    physics = (
        float(np.mean([baselines[name]["roofline"] for name in records if name in baselines])) / 100
    )
    words = f"{beside(ours, by_row)}{sum(counts):,} rows, {len(records)} op families; a roofline {physics:.0%}"
    return [row("kernels of shapes never seen", ours, words, "`training/report.md`")]


def collectives() -> list[str]:
    """Collectives of fabrics and rank counts that fitting never saw."""
    out = []
    for line in (ROOT / "training" / "collectives_report.md").read_text().splitlines():
        cells = [c.strip() for c in line.strip("| ").split("|")]
        if (
            len(cells) == 10
            and cells[2] == "all"
            and (words := COLLECTIVES.get((cells[0], cells[1])))
        ):
            by_row = f"{int(cells[3]):,} rows, by row {cells[4].strip('*')} %, median {cells[5]} %"
            out.append(
                row(words, float(cells[6]) / 100, by_row, "`training/collectives_report.md`")
            )
    return out


def live() -> list[str]:
    """Real ranks on one machine."""
    figures = json.loads((ROOT / "validate" / "live.json").read_text())
    words = f"{figures['configurations']} steps on 2 to 8 ranks, largest {figures['largest_step_error']:.1%}"
    return [
        row(
            "a machine that was calibrated (`make live`)",
            figures["mean_step_error"],
            words,
            "`validate/live.md`",
        )
    ]


def means(errors: Sequence[float], counts: Sequence[int]) -> tuple[float, float]:
    """The mean of the errors of sources, families or series, and the mean of all their rows."""
    return float(np.mean(errors)), float(np.average(errors, weights=counts))


def beside(mean: float, by_row: float) -> str:
    """The mean over rows in words, where it is another figure than the mean of equal weights."""
    return f"by row {by_row:.1%}; " if abs(by_row - mean) > APART * mean else ""


def _of_group(group: dict[str, Any]) -> str:
    # A record made before groups had a mean over rows has none to show.
    return beside(group["error"], group["by_row"]) if "by_row" in group else ""


def row(what: str, error: float, more: str, report: str) -> str:
    return f"| {what} | {error:.1%} | {more} | {report} |"


def accuracy() -> str:
    head = ["| predicted | mean error | | all figures |", "|---|--:|---|---|"]
    return "\n".join([*head, *blind(), *steps(), *kernels(), *collectives(), *live()])


def _without_factors() -> float:
    """Mean error over sources with what frameworks do, but without the factors of their names."""
    return json.loads((ROOT / "validate" / "factors.json").read_text())["over_sources"]["mean_ape"]


def factors() -> str:
    """What naming a framework is worth: what it does, and the factors that its name multiplies
    times by."""
    cases = json.loads((ROOT / "validate" / "report.json").read_text())["cases"]
    named, generic = (of["over_sources"]["mean_ape"] for of in (cases, cases["generic"]))
    facts_alone = _without_factors()
    return textwrap.fill(
        f"The mean error over sources is {named:.1%} with the framework named, {facts_alone:.1%} with what it does but "
        f"without its factors, and {generic:.1%} with `--framework generic`, which has neither: of "
        f"{100 * (generic - named):.1f} points, {100 * (facts_alone - named):.1f} come from the factors "
        "(`validate/report.md`, `validate/factors.json`).",
        120,
    )


def plan() -> str:
    """What the search of `make plan` prints at 80 columns, before the files that it writes.

    Raises:
        PerfModelError: the search failed.
    """
    recipe = re.search(
        r"^plan:.*?\n(.*?)\n\n", (ROOT / "Makefile").read_text(), re.DOTALL | re.MULTILINE
    )
    assert recipe is not None
    words = shlex.split(recipe[1].replace("\\\n", " ").partition("/perfmodel ")[2])
    argv = words[: words.index("--script")]
    os.environ["COLUMNS"] = "80"
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
    put_between_markers(ROOT / "README.md", "plan", plan())
    put_between_markers(ROOT / "README.md", "accuracy", accuracy())
    put_between_markers(FACTORS_PAGE, "factors", factors())


if __name__ == "__main__":
    main()
