"""Fit the shipped collective weights; write their card and a report of their worth where nothing was measured.

    python training/fit_collectives.py --data DIR [--out DIR] [--no-study]

Some ten minutes on one core, most of it the study; `--no-study` keeps the interval widths of the shipped weights.
"""

import argparse
import hashlib
import logging
import tomllib
from pathlib import Path

from collectives_report import collective_card, study_lines

from perfmodel.cost.learn import Sources, collective_weights, fit_collectives, study_collectives, weight_files
from perfmodel.ingest.tables import read_table, write_text

HERE = Path(__file__).parent
REPORT = """# Collectives

Mean and median absolute error in per cent of rows predicted without their kind, `python training/fit_collectives.py`;
`series alike` (and the share inside the interval): of at most 400 rows of each series, so that dense sweeps do not
decide for all. Shapes and rank counts by the series' own corrections, `devices` (inside a node) by those of the same
links on other devices or by physics, `fabrics between nodes` (each left out whole) and `rank counts beyond`
(the most ranks of each series left out) by physics alone, fitted without them.

"""


def main() -> None:
    """Read the plan and the tables, study, fit, write weights, card and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the public measurement tables")
    parser.add_argument("--out", type=Path, default=HERE.parent / "perfmodel" / "cost" / "learn" / "weights")
    parser.add_argument("--no-study", action="store_true", help="keep the interval widths of the shipped weights")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    plan = tomllib.loads((HERE / "collectives.toml").read_text())
    paths = {name: arguments.data / name for name in plan["tables"]}
    tables = [read_table(path) for path in paths.values()]
    unhealthy = tuple(tuple(parts) for parts in plan["unhealthy"])
    as_timed = tuple(tuple(parts) for parts in plan["as_timed"])
    sources = Sources(tuple(plan["reference"]), unhealthy, as_timed, tuple(plan["physics_only"]), keep_slow=True)
    if arguments.no_study:
        spread = dict(collective_weights(weight_files(None)).spread)
    else:
        study = study_collectives(tables, sources)
        spread = study.spread
        write_text(HERE / "collectives_report.md", REPORT + "\n".join(study_lines(study)) + "\n")
    weights = fit_collectives(tables, arguments.out, sources=sources, spread=spread)
    hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in paths.items()}
    write_text(HERE / "cards" / "collectives.md", collective_card(weights, hashes))


if __name__ == "__main__":
    main()
