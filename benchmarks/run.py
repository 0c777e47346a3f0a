"""All benchmarks, as ratios within one run: `make bench` writes out/bench.json.

Every module beside this one has `run() -> {name: {"ratio": .., "baseline": .., "unit": ..}}`; names
given on the command line run alone.
"""

import importlib
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
OUT = HERE.parent / "out" / "bench.json"


def main(chosen: list[str]) -> None:
    sys.path[:0] = [str(HERE), str(HERE.parent / "validate")]  # benchmarks, and the studies that some time
    from timing import show

    names = chosen or sorted(p.stem for p in HERE.glob("*.py") if p.stem not in ("run",))
    results = json.loads(OUT.read_text()) if chosen and OUT.exists() else {}
    for name in names:
        module = importlib.import_module(name)
        if not hasattr(module, "run"):
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        found = module.run()
        show(found)
        results |= found
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
