"""Searches of DistIR and Megatron-LM, and choices among published runs: writes validate/search.md and search.json.

python validate/search.py --data DIR [SECTION ...]: only these (distir, megatron, groups); the others stay as they are.
"""

import argparse
import json
from pathlib import Path

from studies.search_sections import SEARCH_SECTIONS, Section

from perfmodel.ingest.tables import write_text

HERE = Path(__file__).parent
PAGE, FIGURES = HERE / "search.md", HERE / "search.json"
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
    for name in given.sections or SEARCH_SECTIONS:
        parts = written() | {name: SEARCH_SECTIONS[name](given.data)}
        parts = {name: parts[name] for name in SEARCH_SECTIONS if name in parts}
        write_text(PAGE, HEAD + "\n".join(text for text, _ in parts.values()))
        write_text(FIGURES, json.dumps({name: figures for name, (_, figures) in parts.items()}, indent=1) + "\n")
    print(PAGE.read_text())


def written() -> dict[str, Section]:
    """Sections as they were written before."""
    if not (PAGE.exists() and FIGURES.exists()):
        return {}
    texts = [f"## {text}" for text in PAGE.read_text().split("\n## ")[1:]]
    figures = json.loads(FIGURES.read_text())
    return {name: (text, figures[name]) for name, text in zip(figures, texts, strict=True)}


if __name__ == "__main__":
    main()
