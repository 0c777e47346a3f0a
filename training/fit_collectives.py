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
    """Tables and hashes, constants of the links, interval widths."""
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
    shared = sorted(
        (_words(scope), width) for scope, width in weights.spread.items() if scope.series is None
    )
    text += [f"| {words} | {exp(width):.2f} |" for words, width in shared]
    return "\n".join(text) + "\n"


def _efficiency(weights: CollectiveWeights, tier: str, link: str, kind: str) -> float:
    effects = (Effect(tier, kind=kind), Effect(tier, link), Effect(tier, link, kind))
    return 1 / (
        1 + exp(-sum(weights.physics.get(effect, expected(effect)[0]) for effect in effects))
    )


def _words(scope: Scope) -> str:
    return " ".join(
        part
        for part in (scope.what, scope.tier, scope.kind, "large" if scope.large else "small")
        if part
    )


def study_lines(study: Study) -> list[str]:
    """The table of a study: errors by what was left out, size and collective."""
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
        kept = np.flatnonzero(np.isfinite(part.error))
        for size, among in (
            ("all", kept),
            ("below 1 MiB", kept[~large[kept]]),
            ("1 MiB and more", kept[large[kept]]),
        ):
            kinds = [
                ("all", among),
                *((kind, among[i]) for (kind,), i in groups_of(part.rows.kind[among])),
            ]
            lines += [_line(part, size, kind, index) for kind, index in kinds if len(index)]
    return [*lines, "", *_fabric_lines(study), "", EXCHANGES, *_exchange_lines(study)]


def _fabric_lines(study: Study) -> list[str]:
    """Fabric by fabric, each left out whole; then all fabrics alike."""
    part = next(part for part in study.parts if part.what == "fabrics between nodes")
    large, known = part.rows.buffer_bytes >= 1 << LARGE, np.flatnonzero(np.isfinite(part.error))
    lines = [
        "| fabric left out | collective | size | rows | mean | median | bias | inside 90 % interval |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    groups = groups_of(fabric_names(part.rows)[known], part.rows.kind[known], large[known])
    for (fabric, kind, big), own in groups:
        lines.append(f"| {fabric} | {kind} | {_SIZES[big]} | {_errors(part, known[own])} |")
    whole = groups_of(fabric_names(part.rows)[known], large[known])
    for big in (False, True):
        alike = [
            np.abs(np.expm1(part.error[known[own]])) for (_, size), own in whole if size == big
        ]
        mean = 100 * np.mean([off.mean() for off in alike])
        rows = sum(len(off) for off in alike)
        lines.append(
            f"| {len(alike)} fabrics alike | all | {_SIZES[big]} | {rows} | **{mean:.1f}** | - | - | - |"
        )
    return lines


_SIZES = {False: "below 1 MiB", True: "1 MiB and more"}


def _errors(part: LeftOut, index: np.ndarray) -> str:
    off = 100 * np.abs(np.expm1(part.error[index]))
    bias = 100 * np.expm1(np.median(part.error[index]))
    inside = 100 * np.mean(np.abs(part.error[index]) <= part.half_width[index])
    return f"{len(index)} | {off.mean():.1f} | {np.median(off):.1f} | {bias:+.0f} | {inside:.0f}"


def _line(part: LeftOut, size: str, kind: str, index: np.ndarray) -> str:
    few = at_most(part.rows, index)
    off, alike = (100 * np.abs(np.expm1(part.error[which])) for which in (index, few))
    inside = 100 * np.mean(np.abs(part.error[few]) <= part.half_width[few])
    simpler = []
    for name in ("physics", "interpolation"):
        known = part.simpler.get(name, np.full(len(part.rows), np.nan))[index]
        known = known[np.isfinite(known)]
        simpler.append(f"{100 * np.abs(np.expm1(known)).mean():.1f}" if len(known) else "-")
    return (
        f"| {part.what} | {size} | {kind} | {len(index)} | **{off.mean():.1f}** | {np.median(off):.1f} "
        f"| {alike.mean():.1f} | {' | '.join(simpler)} | {inside:.0f} |"
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
    if arguments.no_study:
        spread = dict(collective_weights(weight_files(None)).spread)
    else:
        study = study_collectives(tables, sources)
        spread = study.spread
        write_text(HERE / "collectives_report.md", REPORT + "\n".join(study_lines(study)) + "\n")
    weights = fit_collectives(tables, arguments.out, sources=sources, spread=spread)
    hashes = {
        name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in paths.items()
    }
    write_text(HERE / "cards" / "collectives.md", collective_card(weights, hashes))


if __name__ == "__main__":
    main()
