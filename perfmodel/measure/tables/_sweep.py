"""Runs many measurements: stored immediately, resumable, with disturbed rows repeated.

One run at a time writes to a folder.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from perfmodel.errors import CalibrationError
from perfmodel.ingest.tables import write_text
from perfmodel.measure.tables._rows import Point, Row, point_key


@dataclass(frozen=True)
class Record:
    """One measurement of one row."""

    key: str
    """`row_key` of the row."""
    row: Row
    earlier: bool = False
    """Whether it is from a finished table instead of an attempt of this sweep."""

    def line(self) -> str:
        """The record as a line of a partial file."""
        earlier = {"earlier": True} if self.earlier else {}
        return json.dumps({"key": self.key, "row": self.row, **earlier}) + "\n"


@dataclass(frozen=True)
class PartialFile:
    """Append-only file of records: a header line, then one JSON object per line.

    A record counts once its line is complete and on disk; a torn last line is dropped on opening.
    """

    path: Path
    header: Mapping[str, str]
    """Facts that must agree for two runs to share a table: device, collector, software."""

    def open(self, earlier: Callable[[], Sequence[Record]] = tuple) -> list[Record]:
        """Records of an interrupted run; if there is none, the file is started with `earlier()`.

        Raises:
            CalibrationError: if the file was written under another header.
        """
        # A torn last line is cut off, or the next record would be appended to it.
        records = self.read()
        if records is None:
            records = list(earlier())
            self._rewrite(records)
        elif not self.path.read_bytes().endswith(b"\n"):
            self._rewrite(records)
        return records

    def read(self, *, any_header: bool = False) -> list[Record] | None:
        """Records of an interrupted run, without changing the file; `None` if there is none."""
        # Read as bytes, since a line may be torn within a character.
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        complete_lines = [line for line in lines if line.endswith(b"\n")]
        if not complete_lines:
            return None
        try:
            header, *entries = [json.loads(line) for line in complete_lines]
            records = [Record(**entry) for entry in entries]
        except (ValueError, TypeError) as error:
            raise CalibrationError(
                f"{self.path}: not a partial table ({error}); remove it to start again"
            ) from None
        if not any_header and header != dict(self.header):
            names = {*header, *self.header}
            differing = sorted(name for name in names if header.get(name) != self.header.get(name))
            raise CalibrationError(
                f"{self.path}: the rows of an interrupted sweep were measured with another "
                f"{', '.join(differing)}; move the file away to start again"
            )
        return records

    def _rewrite(self, records: Sequence[Record]) -> None:
        """Write the file anew with these records."""
        header = json.dumps(dict(self.header)) + "\n"
        write_text(self.path, header + "".join(record.line() for record in records))

    def append(self, record: Record) -> None:
        """Add a record and wait until it is on disk."""
        # A row may have taken minutes, which nobody wants to measure again after a crash.
        with self.path.open("a") as file:
            file.write(record.line())
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Delete the file, once its rows are in a table."""
        self.path.unlink(missing_ok=True)


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
    """Measure each point, and disturbed points again, in up to `attempts` passes.

    Args:
        partial: file that keeps the rows of an interrupted run; its undisturbed rows are not
            measured again.
        earlier: gives the rows of a finished table; called only if there is no interrupted run.

    Returns:
        One row per distinct point in the order of `points`, the least disturbed of its
        measurements. Earlier rows of points that are not in `points` follow.
    """
    # All measurements of each point, those of earlier runs first.
    point_of_key = {point_key(point): point for point in points}
    records_by_key: dict[str, list[Record]] = {key: [] for key in point_of_key}
    for record in partial.open(earlier):
        records_by_key.setdefault(record.key, []).append(record)

    # The machine may be quieter at the next attempt. Each row is on disk before the next is
    # measured.
    for attempt in range(attempts):
        pending = [
            key
            for key in point_of_key
            if is_pending(records_by_key[key], attempt, interference_limit)
        ]
        for key, row in zip(pending, measure([point_of_key[key] for key in pending]), strict=True):
            record = Record(key, row)
            partial.append(record)
            records_by_key[key].append(record)
    return [least_disturbed(records) for records in records_by_key.values()]


def least_disturbed(records: Sequence[Record]) -> Row:
    """The row with the smallest interference, the first of equals."""
    return dict(min((record.row for record in records), key=lambda row: row["interference"]))


def is_pending(records: Sequence[Record], attempt: int, limit: float) -> bool:
    """Whether a point has no undisturbed row, and at most `attempt` rows of this sweep."""
    # Rows of a finished table count as no attempt, so that a new sweep tries disturbed ones again.
    measured = sum(not record.earlier for record in records)
    return measured <= attempt and all(record.row["interference"] > limit for record in records)


LOCK_NAME: Final = ".calibrate.lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the system releases when the process ends.

    Raises:
        CalibrationError: if another process holds it.
    """
    import fcntl

    path = folder / LOCK_NAME
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise CalibrationError(
                f"{folder}: another calibration is writing to this folder; wait until it ends, or stop it"
            ) from None

        # Its last holder may have removed the file in between: then this handle locks nothing, and
        # it is tried again.
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            break
        os.close(handle)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)
