"""Put the measured accuracy figures into README.md, between its markers.

    python training/readme_tables.py

The figures are those that training/report.py, benchmarks/collective_baselines.py, validate/operators.py and
validate/run.py wrote; each table names the report that has the rest.
"""

import json
from pathlib import Path

from perfmodel.io import write_text
from perfmodel.learn import kernel_records

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- accuracy:begin (python training/readme_tables.py) -->", "<!-- accuracy:end -->"
KEPT_OUT = {"shapes": "shapes", "ranks": "numbers of ranks", "devices": "devices"}


def steps() -> str:
    """Published runs: the groups that the project set itself bars for, and all of them."""
    cases = json.loads((ROOT / "validate" / "report.json").read_text())["cases"]
    lines = [
        "**Whole steps** (`make validate` writes `validate/report.md`: all sources, memory, intervals, what is missing "
        "where a bar is missed). Constants fitted to published runs leave out the source of the rows:",
        "",
        "| published runs | rows | error | bar | best known elsewhere |",
        "|---|--:|--:|--:|---|",
    ]
    for name, bar in cases["bars"].items():
        for what in ("time", "memory"):
            if what in bar:
                title = f"{name}, memory" if what == "memory" and "memory" not in name else name
                of = bar[what]
                lines.append(
                    f"| {title} | {of['n']:,} | {bar['statistic']} {of['error']:.1%} | {of['to_reach']:.1%} "
                    f"| {bar['elsewhere'] if what == 'time' else '-'} |"
                )
    every = cases["all"]
    lines.append(f"| all | {every['n']:,} | mean {every['mean_ape']:.1%}, median {every['median_ape']:.1%} | | |")
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
    """Collectives, all kinds together."""
    lines = [
        "**Collectives**, the same (`training/collectives_report.md`, by kind and source):",
        "",
        "| kept out | rows | ours | alpha-beta | trees | interpolation | inside 90 % interval |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    table = (ROOT / "training" / "collectives_report.md").read_text().partition("By source")[0]
    for line in table.splitlines():
        cells = [c.strip() for c in line.strip("| ").split("|")]
        if len(cells) == 8 and cells[0] in KEPT_OUT and cells[1] == "all":
            rows = f"{int(cells[2]):,}"
            lines.append("| " + " | ".join([KEPT_OUT[cells[0]], rows, *cells[3:7], f"{cells[7]}%"]) + " |")
    return "\n".join(lines)


def main() -> None:
    readme = ROOT / "README.md"
    head, _, rest = readme.read_text().partition(BEGIN)
    text = "\n\n".join([steps(), kernels(), collectives()])
    write_text(readme, head + BEGIN + "\n" + text + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
