"""Rows kept on disk as they are measured, so that an interrupted sweep goes on where it stopped."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from perfmodel.errors import CalibrationError
from perfmodel.io import write_text
from perfmodel.measure._rows import Row


def row_key(columns: Mapping[str, object]) -> str:
    """Identity of a row: its op's columns in canonical form."""
    return json.dumps(dict(columns), sort_keys=True)


@dataclass(frozen=True)
class Record:
    """One measurement of one row."""

    key: str
    row: Row


@dataclass(frozen=True)
class PartialFile:
    """Append-only file of records: a header line, then one JSON object per line.

    A record counts once its line is complete and on disk; a torn last line is dropped on opening.
    """

    path: Path
    header: Mapping[str, str]
    """What must agree for two runs to belong together: device, collector, software."""

    def open(self) -> list[Record]:
        """Records of an earlier run; starts the file where there is none.

        Raises:
            CalibrationError: if the file was written under another header.
        """
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        if not whole:
            write_text(self.path, json.dumps(dict(self.header)) + "\n")
            return []
        try:
            header, *entries = [json.loads(line) for line in whole]
            records = [Record(entry["key"], entry["row"]) for entry in entries]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise CalibrationError(f"{self.path}: not a partial table ({error}); remove it to start anew") from None
        if header != dict(self.header):
            differing = sorted(k for k in {*header, *self.header} if header.get(k) != self.header.get(k))
            raise CalibrationError(
                f"{self.path}: rows of an interrupted sweep were measured with another {', '.join(differing)}; "
                "remove the file to measure anew"
            )
        if len(whole) < len(lines):
            write_text(self.path, "".join(whole))
        return records

    def append(self, record: Record) -> None:
        """Add a record and wait until it is on disk."""
        with self.path.open("a") as file:
            file.write(json.dumps({"key": record.key, "row": record.row}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Delete the file, once its rows are in a table."""
        self.path.unlink(missing_ok=True)
