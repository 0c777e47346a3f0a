"""Errors of the shipped kernel weights beside the baselines: `python training/report.py`.

Reads the records that training left in the weights and training/baselines.json (from
training/baselines.py, same kept-out shapes); writes training/report.md and cards/*.md.
"""

import json
import tomllib
from pathlib import Path
from typing import Any

from perfmodel.cost.learn import kernel_records
from perfmodel.ingest.tables import write_text

HERE = Path(__file__).parent
NOT_STUDIED = {"n": 0}
"""Weights fitted without a study of what lies beyond the data."""
BASELINES = ("roofline", "trees", "trees_told_software")


def main() -> None:
    """Write the report and the cards."""
    records = kernel_records()
    baselines = json.loads((HERE / "baselines.json").read_text())
    sources = tomllib.loads((HERE / "sources.toml").read_text())
    text = report(records, baselines)
    write_text(HERE / "report.md", text)
    for name, record in records.items():
        write_text(
            HERE / "cards" / f"{name}.md", card(name, record, baselines.get(name, {}), sources)
        )
    print(text)


def report(records: dict[str, dict[str, Any]], baselines: dict[str, dict[str, float]]) -> str:
    """Format the report: a line per regressor with its errors on left-out shapes, beside the
    baselines, and beyond the data."""
    lines = [
        "# Kernel regressors: mean absolute error in per cent on shapes that training never saw",
        "",
        "| regressor | kept-out rows | ours | roofline | trees | trees told the software | inside 90 % interval"
        " | large shapes out | a device out (near relative measured) | a device out (generation not measured) |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, record in records.items():
        inside = record["in_range"]
        # Baselines of a new family may not be computed yet.
        theirs = [f"{baselines[name][b]:.1f}" if name in baselines else "" for b in BASELINES]
        large = record.get("large_left_out", NOT_STUDIED)
        covered = f"{inside['coverage_90']:.1%}" if "coverage_90" in inside else ""
        cells = [
            name,
            f"{inside['n']:,}",
            f"**{inside['mean_ape']:.1f}**",
            *theirs,
            covered,
            f"{large['mean_ape']:.1f}" if large["n"] else "",
            left_out(record, "near"),
            left_out(record, "far"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def left_out(record: dict[str, Any], relation: str) -> str:
    """Errors on devices left out, by device."""
    devices = record.get("device_left_out", {})
    return ", ".join(
        f"{device} {figures['mean_ape']:.0f}"
        for device, figures in devices.items()
        if figures["relation"] == relation
    )


def card(
    name: str, record: dict[str, Any], baselines: dict[str, float], sources: dict[str, Any]
) -> str:
    """Model card of one weights file."""
    inside = record["in_range"]
    lines = [
        f"# Model card: {name}",
        "",
        "Flax regressor of log(time / wave-quantised roofline); form and use in `perfmodel/cost/learn`.",
        f"Recipe `training/recipes/{name}.toml`, seed {record['seed']}; tables by SHA-256 in the weights' metadata.",
        "",
        "| source | distinct rows | origin | licence |",
        "|---|--:|---|---|",
    ]
    for source, rows in record["rows_by_source"].items():
        lines.append(
            f"| {source} | {rows:,} | {sources[source]['origin']} | {sources[source]['licence']} |"
        )
    # Records of earlier trainings have the share beside the recipe.
    share = record["recipe"]["holdout"] if "recipe" in record else record["holdout"]
    lines += [
        "",
        f"Errors below are on {share:.0%} of shapes, kept out on every device and software (split by shape hash); "
        "the shipped weights then went on training with all rows.",
        "",
        f"Mean {inside['mean_ape']} %, median {inside['median_ape']} %, 90th percentile {inside['p90_ape']} %, "
        f"bias {inside['bias']} %. {coverage(inside)}Baselines: "
        + ", ".join(f"{k.replace('_', ' ')} {v} %" for k, v in baselines.items())
        + ".",
        "",
    ]
    # By device and by source, as a mean hides a device that is not learned.
    for title, key in (("dtype", "by_dtype"), ("device", "by_device"), ("source", "by_source")):
        lines += table(title, inside[key])
    lines += ["Beyond the data (trained without them):", ""]
    large = record.get("large_left_out", NOT_STUDIED)
    # What lies beyond the data is told apart: there errors are larger.
    beyond = {"largest tenth of shapes": large} if large["n"] else {}
    for device, figures in record.get("device_left_out", {}).items():
        beyond[f"{device} ({figures['relation']} relative)"] = figures
    return "\n".join(lines + table("left out", beyond))


def coverage(inside: dict[str, Any]) -> str:
    """Interval coverage, where the training studied it."""
    if "coverage_90" not in inside:
        return ""
    return (
        f"{inside['coverage_90']:.1%} are inside the 90 % interval (calibrated on one half of the kept-out shapes, "
        "counted on the other). "
    )


def table(title: str, figures: dict[str, dict[str, Any]]) -> list[str]:
    """Error figures as a table."""
    lines = [f"| {title} | n | mean % | median % | p90 % | bias % |", "|---|--:|--:|--:|--:|--:|"]
    for label, errors in figures.items():
        cells = [errors[key] for key in ("mean_ape", "median_ape", "p90_ape", "bias")]
        lines.append(f"| {label} | {errors['n']:,} | {' | '.join(map(str, cells))} |")
    return [*lines, ""]


if __name__ == "__main__":
    main()
