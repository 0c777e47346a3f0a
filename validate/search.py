"""Searches of DistIR and Megatron-LM, and choices among published runs: writes validate/search.md and search.json.

python validate/search.py --data DIR [SECTION ...]: only these (distir, megatron, groups).
"""

import argparse
import json
from pathlib import Path

from studies.search_sections import SEARCH_SECTIONS

from perfmodel.ingest.tables import write_text

HERE = Path(__file__).parent
PARTS = HERE.parent / "out" / "search"
HEAD = (
    "# Searches of papers, and choices among published runs\n\nWritten by `python validate/search.py --data DIR`. "
    "Nothing is fitted on what is compared here: kernels and collectives are priced by the shipped calibration "
    "(devices never measured through their nearest relatives), clusters and models are catalog entries.\n\n"
)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SEARCH_SECTIONS))
    given = arguments.parse_args()
    if unknown := set(given.sections) - set(SEARCH_SECTIONS):
        arguments.error(f"no section {', '.join(sorted(unknown))}; known: {', '.join(SEARCH_SECTIONS)}")
    PARTS.mkdir(parents=True, exist_ok=True)
    for name in given.sections or SEARCH_SECTIONS:
        text, figures = SEARCH_SECTIONS[name](given.data)
        write_text(PARTS / f"{name}.json", json.dumps({"text": text, "figures": figures}))
    done = {name: PARTS / f"{name}.json" for name in SEARCH_SECTIONS}
    parts = {name: json.loads(path.read_text()) for name, path in done.items() if path.exists()}
    write_text(HERE / "search.md", HEAD + "\n".join(part["text"] for part in parts.values()))
    figures = {name: part["figures"] for name, part in parts.items()}
    write_text(HERE / "search.json", json.dumps(figures, indent=1) + "\n")
    print((HERE / "search.md").read_text())


if __name__ == "__main__":
    main()
