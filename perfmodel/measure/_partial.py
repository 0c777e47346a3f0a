"""Rows kept on disk as they are measured, so that an interrupted sweep goes on where it stopped."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perfmodel.errors import CalibrationError
from perfmodel.ingest.tables import write_text
from perfmodel.measure._rows import Row


@dataclass(frozen=True)
class Record:
    """One measurement of one row."""

    key: str
    """`row_key` of the row."""
    row: Row
    earlier: bool = False
    """From a finished table: no attempt of this sweep."""

    def line(self) -> str:
        earlier = {"earlier": True} if self.earlier else {}
        return json.dumps({"key": self.key, "row": self.row, **earlier}) + "\n"


@dataclass(frozen=True)
class PartialFile:
    """Append-only file of records: a header line, then one JSON object per line.

    A record counts once its line is complete and on disk; a torn last line is dropped on opening.
    """

    path: Path
    header: Mapping[str, str]
    """What must agree for two runs to belong together: device, collector, software."""

    def open(self, earlier: Callable[[], Sequence[Record]] = tuple) -> list[Record]:
        """Records of an interrupted run; where there is none, starts the file with `earlier()`.

        Raises:
            CalibrationError: if the file was written under another header.
        """
        records = self.read()
        if records is None:
            records = list(earlier())
            self._rewrite(records)
        elif not self.path.read_bytes().endswith(b"\n"):
            self._rewrite(records)
        return records

    def read(self, *, any_header: bool = False) -> list[Record] | None:
        """Records of an interrupted run, the file left as it is; `None` where there is none."""
        # bytes: a line may be torn within a character
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        if not whole:
            return None
        try:
            header, *entries = [json.loads(line) for line in whole]
            records = [Record(**entry) for entry in entries]
        except (ValueError, TypeError) as error:
            raise CalibrationError(f"{self.path}: not a partial table ({error}); remove it to start anew") from None
        if not any_header and header != dict(self.header):
            differing = sorted(k for k in {*header, *self.header} if header.get(k) != self.header.get(k))
            raise CalibrationError(
                f"{self.path}: rows of an interrupted sweep were measured with another {', '.join(differing)}; "
                "move it away to measure anew"
            )
        return records

    def _rewrite(self, records: Sequence[Record]) -> None:
        header = json.dumps(dict(self.header)) + "\n"
        write_text(self.path, header + "".join(record.line() for record in records))

    def append(self, record: Record) -> None:
        """Add a record and wait until it is on disk."""
        with self.path.open("a") as file:
            file.write(record.line())
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Delete the file, once its rows are in a table."""
        self.path.unlink(missing_ok=True)
