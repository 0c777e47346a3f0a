"""Fit the shipped collective weights; write their card and a report of their worth where nothing
was measured.

    python training/fit_collectives.py --data DIR [--out DIR] [--no-study]

Some ten minutes on one core, most of it the study; `--no-study` keeps the interval widths of the
shipped weights.
"""

import argparse
import hashlib
import logging
import tomllib
from collections.abc import Mapping
from math import exp
from pathlib import Path

import numpy as np

from perfmodel.cost.learn import weight_files
from perfmodel.cost.learn.collectives import (
    KINDS,
    LARGE,
    CollectiveWeights,
    Effect,
    LeftOut,
    Scope,
    Sources,
    Study,
    at_most,
    collective_weights,
    expected,
    fabric_names,
    study_collectives,
)
from perfmodel.cost.learn.training import fit_collectives
from perfmodel.ingest.tables import groups_of, read_table, write_text

_INTRO = """# Model card: collectives

Time of all_reduce, all_gather, reduce_scatter, all_to_all, send_recv and broadcast, and of mixture-of-experts dispatch
and combine. A physical curve (ring, double binary tree, reduction in switches, pairwise exchange, and the direct
reductions of inference servers, which read the memory of their peers; low-latency or
bandwidth protocol; inside and between nodes) whose constants are sums of effects of kind and link class, fitted to all
tables at once; where a series was measured, a correction that is piecewise linear over sizes and rank counts; a
projection onto what grows with bytes and ranks. Intervals are conformal, from shapes, rank counts, devices and fabrics
left out.

Not to be used for: networks with contention from other jobs, topologies that a per-device bandwidth does not describe,
collectives that overlap compute (price that apart).
"""


def collective_card(weights: CollectiveWeights, hashes: Mapping[str, str]) -> str:
    """Model card of the collective weights: tables with hashes, constants of the links, and
    interval widths."""
    notes = weights.notes
    text = [
        _INTRO,
        f"Rows: {notes['rows']} collectives, {notes['exchange_rows']} exchanges; {len(weights.series)} series.",
    ]
    if odd := notes.get("set_aside"):
        text += ["", "Set aside, since they say nothing of the device's links:", ""]
        text += [f"- {count} rows of {reason}" for reason, count in odd.items()]
    text += ["", "| table | SHA-256 (first 16) |", "|---|---|"]
    text += [f"| {name} | `{digest}` |" for name, digest in hashes.items()]
    # Links inside nodes and between them have constants of their own.
    for tier in ("inside", "between"):
        links = sorted({effect.link for effect in weights.physics if effect.part == f"hop_{tier}"})
        text += [
            "",
            f"Links {tier} nodes: hop in the low-latency protocol, efficiency by kind.",
            "",
        ]
        text += [f"| link | hop us | {' | '.join(KINDS)} |", "|---|--:|" + "--:|" * len(KINDS)]
        for link in links:
            hop_us = 1e6 * exp(weights.physics[Effect(f"hop_{tier}", link)])
            shares = " | ".join(f"{_efficiency(weights, tier, link, kind):.2f}" for kind in KINDS)
            text.append(f"| {link} | {hop_us:.1f} | {shares} |")
    text += ["", "| interval for | factor |", "|---|--:|"]
    # Widths of single series are many, and of no use to a reader.
    shared = sorted(
        (_scope_text(scope), width)
        for scope, width in weights.spread.items()
        if scope.series is None
    )
    text += [f"| {scope_text} | {exp(width):.2f} |" for scope_text, width in shared]
    return "\n".join(text) + "\n"


def _efficiency(weights: CollectiveWeights, tier: str, link: str, kind: str) -> float:
    """Share of a link's rate that a kind of collective gets: a logistic of summed effects."""
    effects = (Effect(tier, kind=kind), Effect(tier, link), Effect(tier, link, kind))
    # An effect that no table shows has the value that was expected before.
    logit = sum(weights.physics.get(effect, expected(effect)[0]) for effect in effects)
    return 1 / (1 + exp(-logit))


def _scope_text(scope: Scope) -> str:
    """Text that says which collectives an interval holds for."""
    size = "large" if scope.large else "small"
    return " ".join(part for part in (scope.what, scope.tier, scope.kind, size) if part)


def study_lines(study: Study) -> list[str]:
    """Table of the study: errors by part that was left out, size and collective."""
    heads = (
        "kept out",
        "size",
        "collective",
        "rows",
        "this model",
        "median",
        "series alike",
        "physics alone",
    )
    lines = [
        f"| {' | '.join(heads)} | interpolation | inside 90 % interval |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for part in study.parts:
        large = part.rows.buffer_bytes >= 1 << LARGE
        # Small messages are latency and large ones are bandwidth: two models in one.
        predicted = np.flatnonzero(np.isfinite(part.error))
        is_large = large[predicted]
        for size, of_size in (
            ("all", predicted),
            ("below 1 MiB", predicted[~is_large]),
            ("1 MiB and more", predicted[is_large]),
        ):
            if len(of_size):
                lines.append(_line(part, size, "all", of_size))
            for (kind,), i in groups_of(part.rows.kind[of_size]):
                if len(i):
                    lines.append(_line(part, size, kind, of_size[i]))
    return [*lines, "", *_fabric_lines(study), "", EXCHANGES, *_exchange_lines(study)]


def _fabric_lines(study: Study) -> list[str]:
    """Table of errors on fabrics that were left out whole, and of their mean with equal weight for
    every fabric."""
    part = next(part for part in study.parts if part.what == "fabrics between nodes")
    large = part.rows.buffer_bytes >= 1 << LARGE
    known = np.flatnonzero(np.isfinite(part.error))
    lines = [
        "| fabric left out | collective | size | rows | mean | median | bias | inside 90 % interval |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    # Fabrics differ more from each other than kinds or sizes do.
    groups = groups_of(fabric_names(part.rows)[known], part.rows.kind[known], large[known])
    for (fabric, kind, is_large), members in groups:
        lines.append(
            f"| {fabric} | {kind} | {_SIZES[is_large]} | {_errors(part, known[members])} |"
        )

    # Each fabric counts the same, however many rows were measured on it.
    by_fabric = groups_of(fabric_names(part.rows)[known], large[known])
    for is_large in (False, True):
        errors = [
            np.abs(np.expm1(part.error[known[members]]))
            for (_, size), members in by_fabric
            if size == is_large
        ]
        mean = 100 * np.mean([of_fabric.mean() for of_fabric in errors])
        rows = sum(map(len, errors))
        lines.append(
            f"| {len(errors)} fabrics alike | all | {_SIZES[is_large]} | {rows} | **{mean:.1f}** | - | - | - |"
        )
    return lines


_SIZES = {False: "below 1 MiB", True: "1 MiB and more"}


def _errors(part: LeftOut, index: np.ndarray) -> str:
    """Cells of a row: number of rows, mean and median error, bias, and share inside the
    interval."""
    off = 100 * np.abs(np.expm1(part.error[index]))
    bias = 100 * np.expm1(np.median(part.error[index]))
    inside = 100 * np.mean(np.abs(part.error[index]) <= part.half_width[index])
    return f"{len(index)} | {off.mean():.1f} | {np.median(off):.1f} | {bias:+.0f} | {inside:.0f}"


def _line(part: LeftOut, size: str, kind: str, index: np.ndarray) -> str:
    """A row of the study: ours over all rows and over few of each series, and simpler models."""
    few = at_most(part.rows, index)
    off = 100 * np.abs(np.expm1(part.error[index]))
    off_alike = 100 * np.abs(np.expm1(part.error[few]))
    inside = 100 * np.mean(np.abs(part.error[few]) <= part.half_width[few])
    # Simpler models do not answer for every row: each is told over its own.
    simpler = []
    for name in ("physics", "interpolation"):
        known = part.simpler.get(name, np.full(len(part.rows), np.nan))[index]
        known = known[np.isfinite(known)]
        simpler.append(f"{100 * np.abs(np.expm1(known)).mean():.1f}" if len(known) else "-")
    return (
        f"| {part.what} | {size} | {kind} | {len(index)} | **{off.mean():.1f}** | {np.median(off):.1f} "
        f"| {off_alike.mean():.1f} | {' | '.join(simpler)} | {inside:.0f} |"
    )


def _exchange_lines(study: Study) -> list[str]:
    """Errors of the model of exchange tables, by what was left out."""
    lines = ["| kept out | rows | mean | median | inside 90 % interval |", "|---|--:|--:|--:|--:|"]
    for what, (error, half_width) in study.exchanges.items():
        known = np.isfinite(error)
        off = 100 * np.abs(np.expm1(error[known]))
        inside = 100 * np.mean(np.abs(error[known]) <= half_width[known])
        lines.append(
            f"| {what} | {known.sum()} | **{off.mean():.1f}** | {np.median(off):.1f} | {inside:.0f} |"
        )
    return lines


HERE = Path(__file__).parent
REPORT = """# Collectives

Mean and median absolute error in per cent of rows predicted without their kind, `python training/fit_collectives.py`;
`series alike` (and the share inside the interval): of at most 400 rows of each series, so that dense sweeps do not
decide for all. Shapes and rank counts by the series' own corrections, `devices` (inside a node) by those of the same
links on other devices or by physics, `fabrics between nodes` (each left out whole) and `rank counts beyond`
(the most ranks of each series left out) by physics alone, fitted without them.

"""


EXCHANGES = """## Tables of expert exchanges

Rows of dispatch and combine kernels are priced by a model of their own where such a table itself is read and compared
(`perfmodel validate kernels`). **No prediction of a step uses it.** A step prices the exchange of tokens with experts
as `all_to_all` (above, by what was left out), or, for DeepEP and HybridEP, by the rates that their authors publish,
scaled with the link; what that is worth end to end are the mixtures of experts of `validate/report.md`. The model of
the tables, mean and median absolute error in per cent:
"""


def main() -> None:
    """Read the plan and the tables, study, fit, write weights, card and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with the public measurement tables"
    )
    parser.add_argument(
        "--out", type=Path, default=HERE.parent / "perfmodel" / "cost" / "learn" / "weights"
    )
    parser.add_argument(
        "--no-study", action="store_true", help="keep the interval widths of the shipped weights"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    plan = tomllib.loads((HERE / "collectives.toml").read_text())
    paths = {name: arguments.data / name for name in plan["tables"]}
    tables = [read_table(path) for path in paths.values()]
    unhealthy = tuple(tuple(parts) for parts in plan["unhealthy"])
    as_timed = tuple(tuple(parts) for parts in plan["as_timed"])
    sources = Sources(
        tuple(plan["reference"]), unhealthy, as_timed, tuple(plan["physics_only"]), keep_slow=True
    )
    # Interval widths come from the study, and change little with the constants.
    if arguments.no_study:
        spread = dict(collective_weights(weight_files(None)).spread)
    else:
        study = study_collectives(tables, sources)
        spread = study.spread
        write_text(HERE / "collectives_report.md", REPORT + "\n".join(study_lines(study)) + "\n")
    weights = fit_collectives(tables, arguments.out, sources=sources, spread=spread)
    # A card names its tables by content, as names are used again.
    hashes = {
        name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in paths.items()
    }
    write_text(HERE / "cards" / "collectives.md", collective_card(weights, hashes))


if __name__ == "__main__":
    main()
