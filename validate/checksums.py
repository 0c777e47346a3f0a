"""Write the checksums of the fitted JSON files of the package anew: `make checksums`.

`fit_sites.py` and `fit_priors.py` do it for what they write. Run this after a fitted file was
changed by hand, or after files of two branches were merged; the package refuses a file that does
not agree with its checksum.
"""

from pathlib import Path

from perfmodel.files import CHECKSUMS_FILE, checksum_lines

PACKAGE = Path(__file__).parents[1] / "perfmodel"
FOLDERS = (PACKAGE / "prediction" / "sites", PACKAGE / "validation")


def main() -> None:
    """Write the file of checksums of each folder that holds fitted files."""
    # Each folder has a file of its own, read with the fitted files beside it.
    for folder in FOLDERS:
        (folder / CHECKSUMS_FILE).write_text(checksum_lines(folder))
        print(f"wrote {folder / CHECKSUMS_FILE}")


if __name__ == "__main__":
    main()
