"""Learn how people run from published runs: `python validate/fit_priors.py DATA`.

Counts, by team, of the choices that the rows of both collections state, and the strength with which
they are smoothed. Writes `perfmodel/validation/choice_priors.json`, which every prediction of a
described run reads.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from prepared_runs import prepared

from perfmodel.files import CHECKSUMS_FILE, checksum_lines
from perfmodel.validation import fit_choice_priors

OUT = Path(__file__).parent.parent / "perfmodel" / "validation" / "choice_priors.json"
COLLECTIONS = ("published", "published2")


def tables(data: Path) -> Iterator[Path]:
    """Tables of both collections."""
    for collection in COLLECTIONS:
        yield from sorted((data / collection).glob("*.csv"))


def main() -> None:
    """Fit the priors, write them with their checksum, and print what was fitted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="folder with the collections")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        fitted: dict[str, Any] = fit_choice_priors(prepared(tables(arguments.data), Path(folder)))
    OUT.write_text(json.dumps(fitted, indent=1, sort_keys=True) + "\n")
    # The package refuses a fitted file that does not agree with its checksum.
    (OUT.parent / CHECKSUMS_FILE).write_text(checksum_lines(OUT.parent))
    for choice, strength in fitted["strength"].items():
        print(f"{choice:24} strength {strength:4g}, {fitted['teams'][choice]} teams")
    # The tuning that explains the choices of sources left out best is the one that is used.
    for scale, by_source in fitted["log_likelihood"].items():
        totals = np.sum(list(by_source.values()), axis=0)
        choices, sites = fitted["tunings"][int(np.argmax(totals))]
        print(
            f"{scale:24} tuning of choices {choices:g}, of sites {sites:g}, {len(by_source)} sources"
        )
    print(f"wrote {OUT}; {np.sum(list(fitted['rows'].values()))} rows")


if __name__ == "__main__":
    main()
