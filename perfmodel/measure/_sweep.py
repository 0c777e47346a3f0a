"""Many measurements: resumable, disturbed rows measured again."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from perfmodel.measure._partial import PartialFile, Record, row_key
from perfmodel.measure._rows import Row

OpT = TypeVar("OpT")


def sweep(
    ops: Sequence[OpT],
    columns: Callable[[OpT], Row],
    measure: Callable[[Sequence[OpT]], Iterable[Row]],
    partial: PartialFile,
    *,
    interference_limit: float,
    attempts: int = 3,
    earlier: Iterable[tuple[OpT, Row]] = (),
) -> list[Row]:
    """Measure every op at least once; ops whose row was disturbed again, in up to `attempts` passes.

    Args:
        columns: the op's own columns, which tell it from the others.
        measure: yields the rows of the given ops in order, each as soon as it is measured.
        partial: where rows are kept; undisturbed ones found there are not measured again.
        earlier: rows that stand for their ops already.

    Returns:
        One row per distinct op in the order of `ops`: the least disturbed of its measurements.
    """
    by_key = {row_key(columns(op)): op for op in ops}
    found: dict[str, list[Row]] = {key: [] for key in by_key}
    for op, row in earlier:
        found[row_key(columns(op))].append(row)
    for record in partial.open():
        found.setdefault(record.key, []).append(record.row)
    for attempt in range(attempts):
        pending = [key for key in by_key if _wanted(found[key], attempt, interference_limit)]
        for key, row in zip(pending, measure([by_key[key] for key in pending]), strict=True):
            partial.append(Record(key, row))
            found[key].append(row)
    return [least_disturbed(found[key]) for key in by_key]


def least_disturbed(rows: Sequence[Mapping[str, float]]) -> Row:
    """The row with the smallest interference, the first of equals."""
    return dict(min(rows, key=lambda row: row["interference"]))


def _wanted(rows: Sequence[Row], attempt: int, limit: float) -> bool:
    return len(rows) <= attempt and all(row["interference"] > limit for row in rows)
