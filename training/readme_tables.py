"""Put the measured accuracy figures into README.md, between its markers.

    python training/readme_tables.py

The tables are those that training/report.py, benchmarks/collective_baselines.py and validate/run.py wrote.
"""

import json
import re
from pathlib import Path

from perfmodel.io import write_text

ROOT = Path(__file__).parents[1]
RUNS = {
    "Megatron-LM SC21 Table 1": "Megatron-LM, SC21 table 1 (1.7B to 1T, 32 to 3,072 A100s)",
    "Korthikanti et al. 2022 Table 5": "Korthikanti et al. 2022, table 5 (22B to 1T, full and selective recompute)",
    "Zero Bubble Pipeline Parallelism paper": "Zero Bubble paper (1F1B, interleaved, ZB-1p, ZB-2p)",
    "NVIDIA NeMo performance summary": "NVIDIA NeMo, H100",
    "mosaicml llm-foundry benchmarking table": "llm-foundry, FSDP on A100 and H100",
    "vTrain validation measurements": "vTrain, 1 to 512 A100s",
}


def body(path: Path) -> str:
    """A report without its heading."""
    return re.sub(r"\A# .*\n+", "", path.read_text()).strip()


def main() -> None:
    report = json.loads((ROOT / "validate" / "report.json").read_text())["cases"]
    lines = ["| published runs | rows | mean error | median error |", "|---|--:|--:|--:|"]
    for source, title in RUNS.items():
        figures = report["sources"][source]
        lines.append(f"| {title} | {figures['n']} | {figures['mean_ape']:.1%} | {figures['median_ape']:.1%} |")
    parts = [
        "**Whole steps** (`make validate`; all sources beside the project's bars: `validate/report.md`;\n"
        "constants fitted to published runs leave out the source of the rows):\n\n" + "\n".join(lines),
        "**Kernels** (`python training/report.py`):\n\n" + body(ROOT / "training" / "report.md"),
    ]
    collectives = ROOT / "training" / "collectives_report.md"
    if collectives.exists():
        title = "**Collectives** (`python benchmarks/collective_baselines.py --report training/collectives_report.md`):"
        parts.append(title + "\n\n" + body(collectives))
    readme = ROOT / "README.md"
    begin, end = "<!-- accuracy:begin (python training/readme_tables.py) -->", "<!-- accuracy:end -->"
    head, _, rest = readme.read_text().partition(begin)
    write_text(readme, head + begin + "\n" + "\n\n".join(parts) + "\n" + end + rest.partition(end)[2])


if __name__ == "__main__":
    main()
