"""The tables of papers beside ours: writes validate/papers/SYSTEM.md and pictures, which pages of
docs/systems show.

python validate/papers.py [SYSTEM ...]
"""

import argparse
from pathlib import Path

from studies.chimera_page import chimera_page
from studies.distsim import distsim_page
from studies.timeprest import timeprest_page

from perfmodel.ingest.tables import write_text

OUT = Path(__file__).parent / "papers"
PAGES = {"chimera": chimera_page, "distsim": distsim_page, "timeprest": timeprest_page}


def main() -> None:
    """Write the pages of some systems, or of all."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("systems", nargs="*", metavar="SYSTEM", help=", ".join(PAGES))
    options = arguments.parse_args()
    # argparse's own `choices` refuses an empty list.
    if unknown := set(options.systems) - set(PAGES):
        arguments.error(f"no system {', '.join(sorted(unknown))}; known: {', '.join(PAGES)}")
    OUT.mkdir(exist_ok=True)
    for name in options.systems or PAGES:
        text = PAGES[name](OUT)
        write_text(
            OUT / f"{name}.md", f"<!-- written by `python validate/papers.py {name}` -->\n\n{text}"
        )
        print(text)


if __name__ == "__main__":
    main()
