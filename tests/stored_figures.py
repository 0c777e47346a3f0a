"""Tables of stored answers: figures of many cases, each beside a base from which it differs in few
of them."""

import csv
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

Figures = Mapping[str, float]
ROUNDING = 1e-6
MOST_MOVED = 10
"""So many figures that moved say enough: no further case is computed after them."""


@dataclass(frozen=True)
class StoredCase:
    """Figures of a case."""

    base: str
    """Name of the case that it is a variant of: its own name where it is a base itself."""
    name: str
    figures: Figures


def write_cases(table: Path, cases: Iterable[StoredCase]) -> None:
    """Write the figures of each base, and those of its variants in which they differ from it."""
    bases: dict[str, Figures] = {}
    with table.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["base", "case", "figures"])
        for case in cases:
            base = bases.setdefault(case.base, {})
            # A figure that a variant does not have is written as nothing at all.
            changed = {
                name: case.figures.get(name, math.nan)
                for name in base.keys() | case.figures.keys()
                if name not in base
                or not _is_close(case.figures.get(name, math.nan), base[name], 1e-9)
            }
            if case.base == case.name:
                bases[case.base] = case.figures
            writer.writerow(
                [case.base, case.name, " ".join(f"{k}={v:.7g}" for k, v in sorted(changed.items()))]
            )


def read_cases(table: Path) -> Iterator[StoredCase]:
    """Read whole figures of all cases."""
    bases: dict[str, dict[str, float]] = {}
    with table.open(newline="") as file:
        for row in csv.DictReader(file):
            pairs = (pair.rpartition("=") for pair in row["figures"].split())
            changed = {name: float(value) for name, _, value in pairs}
            whole = bases.get(row["base"], {}) | changed
            figures = {name: value for name, value in whole.items() if not math.isnan(value)}
            if row["base"] == row["case"]:
                bases[row["base"]] = figures
            yield StoredCase(row["base"], row["case"], figures)


def moved_figures(
    now: Iterable[StoredCase], table: Path, rounding: float = ROUNDING, exact: Collection[str] = ()
) -> list[str]:
    """Sentences on cases that came, went or moved since the table was written; the first of many.

    Args:
        rounding: relative difference of figures that are the same.
        exact: names of figures that are held to `ROUNDING`.
    """
    then = {(case.base, case.name): case.figures for case in read_cases(table)}
    moved = []
    for case in now:
        stored = then.pop((case.base, case.name), None)
        if stored is None:
            moved.append(f"{case.base}: {case.name} is new")
            continue
        for name in sorted(stored.keys() | case.figures.keys()):
            values = stored.get(name, math.nan), case.figures.get(name, math.nan)
            if not _is_close(*values, ROUNDING if name in exact else rounding):
                moved.append(
                    f"{case.base}: {case.name}: {name} was {values[0]:.9g}, is {values[1]:.9g}"
                )
        if len(moved) >= MOST_MOVED:
            return moved
    return [*moved, *(f"{base}: {name} is gone" for base, name in then)]


def _is_close(a: float, b: float, rounding: float) -> bool:
    return math.isclose(a, b, rel_tol=rounding, abs_tol=1e-12) or (math.isnan(a) and math.isnan(b))
