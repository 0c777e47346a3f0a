"""Put the measured accuracy figures into README.md, between its markers.

    python training/readme_tables.py

The figures are those that training/report.py, training/fit_collectives.py, validate/operators.py and
validate/run.py wrote; each table names the report that has the rest.
"""

import json
from pathlib import Path

from perfmodel.cost.learn import kernel_records
from perfmodel.ingest.tables import write_text

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- accuracy:begin (python training/readme_tables.py) -->", "<!-- accuracy:end -->"


def steps() -> str:
    """Published runs by source, the mean over sources first."""
    cases = json.loads((ROOT / "validate" / "report.json").read_text())["cases"]
    mean, generic = cases["over_sources"], cases["generic"]
    lines = [
        "**Whole steps** (`make validate` writes `validate/report.md`: memory, intervals, order of layouts, other "
        "predictors). Every run is predicted as `predict --framework` predicts what its row says; constants fitted to "
        "published runs leave out its source. `generic`: the same without the framework. Width: upper over lower end "
        "of the 90 % interval:",
        "",
        "| published runs | framework | rows | mean error | as `generic` | bias | inside 90 % | width | memory |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
        f"| **mean over {mean['sources']} sources** | | | **{mean['mean_ape']:.1%}** "
        f"| {generic['over_sources']['mean_ape']:.1%} | {mean['bias']:+.1%} | {mean['coverage_90']:.0%} "
        f"| {mean['width_90']:.2f} | |",
    ]
    for name, of in cases["sources"].items():
        if of["n"]:
            memory = f"{of['memory']['mean_ape']:.1%}" if of["memory"]["n"] else ""
            lines.append(
                f"| {name} | {', '.join(of['frameworks'])} | {of['n']:,} | {of['mean_ape']:.1%} "
                f"| {generic['sources'][name]['mean_ape']:.1%} | {of['bias']:+.1%} | {of['coverage_90']:.0%} "
                f"| {of['width_90']:.2f} | {memory} |"
            )
    every = cases["all"]
    lines.append(
        f"| all runs together | | {every['n']:,} | {every['mean_ape']:.1%} | | {every['bias']:+.1%} "
        f"| {every['coverage_90']:.0%} | {every['width_90']:.2f} | |"
    )
    return "\n".join(lines)


def kernels() -> str:
    """Regressors on shapes that training never saw."""
    baselines = json.loads((ROOT / "training" / "baselines.json").read_text())
    lines = [
        "**Kernels**, mean error in per cent on shapes that training never saw (`training/report.md`, with large "
        "shapes and whole devices left out; `validate/operators.md`, operator by operator):",
        "",
        "| regressor | kept-out rows | ours | roofline | trees | inside 90 % interval |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, record in kernel_records().items():
        inside, theirs = record["in_range"], baselines.get(name, {})
        others = " | ".join(f"{theirs[b]:.1f}" if b in theirs else "" for b in ("roofline", "trees"))
        lines.append(
            f"| {name} | {inside['n']:,} | **{inside['mean_ape']:.1f}** | {others} | {inside['coverage_90']:.1%} |"
        )
    return "\n".join(lines)


def collectives() -> str:
    """Collectives, all kinds together, small and large messages apart."""
    lines = [
        "**Collectives**, the same (`training/collectives_report.md`, by kind):",
        "",
        "| kept out | messages | rows | ours | median | series alike | physics | interpolation | in 90 % interval |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for line in (ROOT / "training" / "collectives_report.md").read_text().splitlines():
        cells = [c.strip() for c in line.strip("| ").split("|")]
        if len(cells) == 10 and cells[2] == "all":
            lines.append("| " + " | ".join([*cells[:2], f"{int(cells[3]):,}", *cells[4:9], f"{cells[9]}%"]) + " |")
    return "\n".join(lines)


def main() -> None:
    readme = ROOT / "README.md"
    head, _, rest = readme.read_text().partition(BEGIN)
    text = "\n\n".join([steps(), kernels(), collectives()])
    write_text(readme, head + BEGIN + "\n" + text + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
