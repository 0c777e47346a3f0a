"""Many measurements: resumable, disturbed rows measured again."""

from collections.abc import Callable, Iterable, Sequence

from perfmodel.measure._partial import PartialFile, Record
from perfmodel.measure._rows import Point, Row, point_key

Measure = Callable[[Sequence[Point]], Iterable[Row]]
"""Yields the rows of the given points in order, each as soon as it is measured."""


def sweep(
    points: Sequence[Point],
    measure: Measure,
    partial: PartialFile,
    *,
    interference_limit: float,
    attempts: int = 3,
    earlier: Callable[[], Sequence[Record]] = tuple,
) -> list[Row]:
    """Measure every point at least once; those whose row was disturbed again, in up to `attempts` passes.

    Args:
        partial: where rows are kept; undisturbed ones found there are not measured again.
        earlier: rows of a finished table, asked for where no interrupted run is found.

    Returns:
        One row per distinct point in the order of `points`, the least disturbed of its measurements;
        then rows found of points that were not asked for, which stay in the table.
    """
    wanted = {point_key(point): point for point in points}
    found: dict[str, list[Record]] = {key: [] for key in wanted}
    for record in partial.open(earlier):
        found.setdefault(record.key, []).append(record)
    for attempt in range(attempts):
        pending = [key for key in wanted if is_pending(found[key], attempt, interference_limit)]
        for key, row in zip(pending, measure([wanted[key] for key in pending]), strict=True):
            record = Record(key, row)
            partial.append(record)
            found[key].append(record)
    return [least_disturbed(records) for records in found.values()]


def least_disturbed(records: Sequence[Record]) -> Row:
    """The row with the smallest interference, the first of equals."""
    return dict(min((record.row for record in records), key=lambda row: row["interference"]))


def is_pending(records: Sequence[Record], attempt: int, limit: float) -> bool:
    """Whether a point has no undisturbed row and was measured at most `attempt` times by this sweep."""
    measured = sum(not record.earlier for record in records)
    return measured <= attempt and all(record.row["interference"] > limit for record in records)
