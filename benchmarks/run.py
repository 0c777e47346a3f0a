"""All benchmarks, as ratios within one run: `make bench` writes out/bench.json.

Every module beside this one has `run() -> {name: {"ratio": .., "baseline": .., "unit": ..}}`; names
given on the command line run alone: `python benchmarks/run.py search`.
"""

import importlib
import json
import sys
from pathlib import Path

from timing import show

HERE = Path(__file__).parent
OUT = HERE.parent / "out" / "bench.json"


def main(chosen: list[str]) -> None:
    """Run some benchmarks, or all, and keep the results of each as it ends."""
    sys.path.append(str(HERE.parent / "validate"))  # the studies that some time
    names = chosen or sorted(p.stem for p in HERE.glob("*.py") if p.stem not in ("run", "timing"))
    # Those that do not run now stay as they were.
    results = json.loads(OUT.read_text()) if chosen and OUT.exists() else {}
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        ratios = importlib.import_module(name).run()
        show(ratios)
        results |= ratios
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
