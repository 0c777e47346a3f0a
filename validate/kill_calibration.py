"""Kill real calibrations:
`python validate/kill_calibration.py [--kills 50] [--backend jax|torch] [--seed 0]`.

A tiny plan of kernels and collectives is run by `perfmodel calibrate`, which is killed (SIGKILL,
its ranks left behind) after random times until there were as many kills as asked for, and then left
to end; a new folder is begun whenever a run comes to its end. No row may be lost, doubled or
measured again, no file half written.
"""

import argparse
import json
import math
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from perfmodel.ingest.tables import read_table
from perfmodel.measure import read_plan
from perfmodel.measure.estimate import kept_rows
from perfmodel.measure.tables import card_path, point_key, read_card

PLAN = """
device = "this CPU"
attempts = 1
[rule]
half_width = 0.5
max_s = 0.05
interference_limit = 0.99
[collective_rule]
min_repeats = 1
max_repeats = 1
interference_limit = 0.99
[[kernels]]
family = "gemm"
dtype = "fp32"
cache = ["warm", "cold"]
m = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
"n,k" = [[16, 16], [32, 32]]
[[collectives]]
collective = ["all_reduce", "all_gather"]
num_ranks = 2
bytes = 1024
"""


def main() -> None:
    """Kill calibrations at random times, check what they leave, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--backend", default="jax", choices=("jax", "torch"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    # Kills come at random times, so that they meet every stage of a run.
    draw = random.Random(arguments.seed)
    counts = Counter[str]()
    folders = 0
    while counts["killed"] < arguments.kills:
        folders += 1
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "plan.toml").write_text(PLAN)
            finished = False
            while not finished:
                before = rows(folder)
                kills_are_left = counts["killed"] < arguments.kills
                kill_after_s = draw.uniform(0.1, 3.0) if kills_are_left else math.inf
                # Most kills come so long after a row was written; the others while Python, the
                # framework and the ranks start.
                from_first_write = draw.random() < 0.8
                finished = run(
                    folder, arguments.backend, kill_after_s, from_first_write=from_first_write
                )
                after = rows(folder)

                # Rows that were measured before are still there, with the very same time.
                assert before.items() <= after.items(), "a row was lost or measured again"
                counts["ended" if finished else "killed"] += 1
                if not finished:
                    counts["of them amid measuring"] += len(after) > len(before)
                    has_table = (folder / "kernels.csv").exists()
                    counts["of them with a table there already"] += has_table
            check_finished(folder)
    print(json.dumps({"backend": arguments.backend, "folders": folders, **counts}))


def run(folder: Path, backend: str, kill_after_s: float, *, from_first_write: bool) -> bool:
    """Run the command once; returns whether it came to its end."""
    options = ["calibrate", "--plan", "plan.toml", "--out", str(folder), "--backend", backend]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "perfmodel.cli", *options],
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        before = written(folder)
        start_s = time.monotonic()
        while process.poll() is None:
            # Until something is written the clock is set back: such a kill meets the run while it
            # measures.
            if from_first_write and written(folder) == before:
                start_s = time.monotonic()
            if time.monotonic() - start_s > kill_after_s:
                process.kill()
                break
            time.sleep(0.01)
        status = process.wait()
    assert status in (0, -signal.SIGKILL), (folder / "output").read_text()
    return status == 0


def written(folder: Path) -> dict[str, int]:
    """Sizes of the files of rows."""
    sizes = {}
    for path in folder.glob(".*.partial"):
        with suppress(FileNotFoundError):  # the run has just given it up
            sizes[path.name] = path.stat().st_size
    return sizes


def points(folder: Path) -> list[str]:
    """Keys of the rows that the plan asks for."""
    plan = read_plan(folder / "plan.toml")
    return [point_key(point) for point in (*plan.kernel_points, *plan.collective_points)]


def rows(folder: Path) -> dict[str, float]:
    """Times of the rows in the folder, by their keys; fails if a row is damaged."""
    # A card that is not whole does not parse.
    for table in (folder / "kernels.csv", folder / "collectives.csv"):
        if card_path(table).exists():
            json.loads(card_path(table).read_text())
    return {
        key: row["time_us"]
        for key, row in kept_rows(read_plan(folder / "plan.toml"), folder).items()
    }


def check_finished(folder: Path) -> None:
    """Check that both tables have their cards and every row of the plan exactly once."""
    tables = [folder / "kernels.csv", folder / "collectives.csv"]
    assert sum(read_card(table).rows for table in tables) == len(points(folder))
    assert sum(len(read_table(table)) for table in tables) == len(points(folder))
    assert set(rows(folder)) == set(points(folder))
    expected = {
        "plan.toml",
        "output",
        *(t.name for t in tables),
        *(card_path(t).name for t in tables),
    }
    assert {path.name for path in folder.iterdir()} == expected


if __name__ == "__main__":
    main()
