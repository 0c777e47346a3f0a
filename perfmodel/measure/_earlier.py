"""Rows of an earlier run of the same plan that need not be measured again."""

from collections.abc import Callable, Iterable
from math import isnan
from pathlib import Path
from typing import Any, TypeVar

from perfmodel.errors import TableError
from perfmodel.io import read_table
from perfmodel.measure._card import collector_sha256, read_card
from perfmodel.measure._machine import software
from perfmodel.measure._rows import SUSPECT, Row

OpT = TypeVar("OpT")


def earlier_rows(path: Path, device: str, ops: Iterable[OpT], columns: Callable[[OpT], Row]) -> list[tuple[OpT, Row]]:
    """Undisturbed rows of the table at `path` with the ops of which they tell.

    None where there is no table, or where its card names another device, collector or software:
    rows of one table are measured alike.
    """
    try:
        card = read_card(path)
    except TableError:
        return []
    if (card.device, card.collector_sha256, card.software) != (device, collector_sha256(), software()):
        return []
    rows = [_present(row) for row in read_table(path).to_dict("records")]
    clean = [row for row in rows if row.get("variant") != SUSPECT]
    found = []
    for op in ops:
        wanted = _present(columns(op))
        match = next((row for row in clean if wanted.items() <= row.items()), None)
        if match is not None:
            found.append((op, match))
    return found


def _present(row: Row) -> dict[str, Any]:
    """The row without its empty cells; 4.0, as tables hold whole numbers beside empty cells, equals 4."""
    return {str(k): v for k, v in row.items() if v != "" and v is not None and not (isinstance(v, float) and isnan(v))}
