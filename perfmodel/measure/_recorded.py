"""Rows that a folder's tables hold already: kept, and not measured again."""

from collections.abc import Sequence
from pathlib import Path

from perfmodel.errors import CalibrationError
from perfmodel.ingest.tables import read_table
from perfmodel.measure._card import card_path, collector_sha256, read_card, software
from perfmodel.measure._estimate import kept_rows
from perfmodel.measure._plan import Plan
from perfmodel.measure._rows import is_suspect, point_key, present, row_key
from perfmodel.measure._sweep import Record
from perfmodel.ops import Op


def finished_rows(path: Path, device: str, packages: Sequence[str]) -> list[Record]:
    """Rows of the table at `path`; none where there is no table.

    Raises:
        CalibrationError: if the table was measured on another device, or with another collector or
            software: rows of one table are measured alike, and what was measured is not overwritten.
    """
    if not path.exists():
        return []
    away = "move it away, or choose another folder, to measure anew"
    if not card_path(path).exists():
        raise CalibrationError(f"{path}: is there without its card ({card_path(path).name}); {away}")
    card = read_card(path)
    expected = {"device": device, "collector_sha256": collector_sha256(), "software": software(packages)}
    if differing := [name for name, value in expected.items() if getattr(card, name) != value]:
        raise CalibrationError(f"{path}: was measured with another {', '.join(differing)}; {away}")
    rows = [
        {str(k): v for k, v in row.items() if present(v) or k == "variant"}
        for row in read_table(path).to_dict("records")
    ]
    return [Record(row_key(row), row, earlier=True) for row in rows]


def recorded_s(plan: Plan, folder: Path | str) -> dict[Op, float]:
    """Seconds of the plan's ops that the plan's tables in `folder` hold, measured undisturbed with warm caches."""
    kept = kept_rows(plan, Path(folder))
    rows = {
        point.op: kept.get(point_key(point))
        for point in (*plan.kernel_points, *plan.collective_points)
        if not point.cold
    }
    return {op: row["time_us"] * 1e-6 for op, row in rows.items() if row is not None and not is_suspect(row)}
