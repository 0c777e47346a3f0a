"""Fit the shipped collective weights: `python training/fit_collectives.py --data DIR [--out DIR]`."""

import argparse
import logging
import tomllib
from pathlib import Path

from perfmodel.io import read_table
from perfmodel.learn import fit_collectives

HERE = Path(__file__).parent


def main() -> None:
    """Read the plan and the tables, fit, write the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the public measurement tables")
    parser.add_argument("--out", type=Path, default=HERE.parent / "perfmodel" / "learn" / "weights")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)
    plan = tomllib.loads((HERE / "collectives.toml").read_text())
    tables = [read_table(arguments.data / name) for name in plan["tables"]]
    fit_collectives(
        tables,
        arguments.out,
        seed=plan["seed"],
        reference_sources=plan["reference_sources"],
        unhealthy=plan["unhealthy"],
    )


if __name__ == "__main__":
    main()
