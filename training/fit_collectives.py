"""Fit the shipped collective weights and write their card.

    python training/fit_collectives.py --data DIR [--out DIR] [--start FILE]

Half an hour on one core from scratch; `--start` keeps the hyperparameters and networks of an earlier fit.
`python benchmarks/collective_baselines.py --report training/collectives_report.md` then writes the report.
"""

import argparse
import hashlib
import logging
import tomllib
from pathlib import Path

from perfmodel.io import read_table, write_text
from perfmodel.learn import collective_card, fit_collectives, load_collective_weights

HERE = Path(__file__).parent


def main() -> None:
    """Read the plan and the tables, fit, write weights and card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the public measurement tables")
    parser.add_argument("--out", type=Path, default=HERE.parent / "perfmodel" / "learn" / "weights")
    parser.add_argument("--start", type=Path, help="weights whose hyperparameters are kept")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)
    plan = tomllib.loads((HERE / "collectives.toml").read_text())
    paths = {name: arguments.data / name for name in plan["tables"]}
    weights = fit_collectives(
        [read_table(path) for path in paths.values()],
        arguments.out,
        seed=plan["seed"],
        reference_sources=plan["reference_sources"],
        unhealthy=plan["unhealthy"],
        start=load_collective_weights(arguments.start) if arguments.start else None,
    )
    hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in paths.items()}
    write_text(HERE / "cards" / "collectives.md", collective_card(weights, hashes))


if __name__ == "__main__":
    main()
