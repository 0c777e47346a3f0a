"""Measure this machine: `python calibrate/measure.py PLAN --out DIR`.

Interrupted, the same command goes on with the next row.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from perfmodel.errors import PerfModelError
from perfmodel.measure import read_plan, run_plan


def main() -> int:
    """Run the plan, show progress on stderr, name what was written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path, help="sweep plan (TOML)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tables and their cards")
    arguments = parser.parse_args()
    try:
        plan = read_plan(arguments.plan)
        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("measuring", total=len(plan.kernels) + len(plan.collectives))
            # rows measured again make the bar's total grow rather than overrun
            cards = run_plan(plan, arguments.out, lambda op: bar.update(task, advance=1, description=op.family))
    except PerfModelError as error:
        print(f"measure: {error}", file=sys.stderr)
        return 2
    for card in cards:
        print(f"{arguments.out / card.table}: {card.rows} rows, {card.suspect_rows} of them disturbed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
