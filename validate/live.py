"""Calibrate on two ranks, predict, run for real on up to eight, compare:
`python validate/live.py [--out DIR]`.

Needs Linux, root and iproute2: the ranks run on hosts made of network namespaces.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID
from studies.emulation_runs import at_once
from studies.live import LiveSettings, live_report, validate_live
from studies.live_cases import collective_cases, live_cases

from perfmodel.errors import PerfModelError
from perfmodel.ingest.tables import write_json, write_text


def main() -> int:
    """Run everything, write the reports, print their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder for the reports (md and json)"
    )
    parser.add_argument(
        "--only", choices=("steps", "collectives"), help="one of the two sets of configurations"
    )
    arguments = parser.parse_args()
    sets = {"steps": ("live", live_cases), "collectives": ("live_collectives", collective_cases)}
    for chosen in [arguments.only] if arguments.only else sets:
        name, cases = sets[chosen]
        try:
            with Progress(console=Console(stderr=True)) as bar, at_once() as is_allowed:
                task = bar.add_task("calibrating", total=None)

                # Defaults bind this turn's bar; a closure would see the last one.
                def show(
                    what: str, n: int, total: int, bar: Progress = bar, task: TaskID = task
                ) -> None:
                    """Print which part runs, and its place among all parts."""
                    bar.update(task, description=what, completed=n, total=total or None)

                report = validate_live(LiveSettings(at_once=is_allowed), cases(), progress=show)
        except PerfModelError as error:
            print(f"live: {error}", file=sys.stderr)
            return 2
        write_json(arguments.out / f"{name}.json", report.to_dict())
        text = live_report(report)
        write_text(arguments.out / f"{name}.md", text)
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
