"""Time until `import perfmodel` and `perfmodel --help` are done, less that of an empty Python process."""

import subprocess
import sys

from timing import best_s

CASES = {"import": (["-c", "import perfmodel"], 0.3), "help": (["-m", "perfmodel.cli", "--help"], 0.5)}
"""Arguments of Python, and the seconds to stay below."""


def seconds(arguments: list[str], repeats: int = 7) -> float:
    """The quickest of some runs of Python."""
    command = [sys.executable, *arguments]
    return best_s(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL), repeats)


def run() -> dict[str, dict[str, object]]:
    empty_s = seconds(["-c", ""])
    found: dict[str, dict[str, object]] = {}
    for name, (arguments, most_s) in CASES.items():
        more_s = seconds(arguments) - empty_s
        found[f"start/{name}"] = {
            "ratio": more_s / most_s, "baseline": f"{most_s} s more than an empty Python process", "unit": "x",
            "target": "<= 1", "seconds": more_s,
        }  # fmt: skip
    return found
