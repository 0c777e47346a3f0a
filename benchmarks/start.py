"""Time until `import perfmodel` and `perfmodel --help` are done, less that of an empty Python process.

`python benchmarks/start.py` prints the seconds; `run()` returns them as multiples of an empty process.
"""

import subprocess
import sys

from timing import best_s

CASES = {"import": ["-c", "import perfmodel"], "help": ["-m", "perfmodel.cli", "--help"]}
TARGETS_S = {"import": 0.3, "help": 0.5}


def seconds(arguments: list[str], repeats: int = 7) -> float:
    """The quickest of some runs of Python."""
    command = [sys.executable, *arguments]
    return best_s(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL), repeats)


def run() -> dict[str, dict[str, object]]:
    empty_s = seconds(["-c", ""])
    return {
        f"start/{name}": {"ratio": seconds(arguments) / empty_s, "baseline": "an empty Python process", "unit": "x"}
        for name, arguments in CASES.items()
    }


if __name__ == "__main__":
    empty_s = seconds(["-c", ""])
    for name, arguments in CASES.items():
        print(f"{name}: {seconds(arguments) - empty_s:.3f} s, to stay below {TARGETS_S[name]} s")
