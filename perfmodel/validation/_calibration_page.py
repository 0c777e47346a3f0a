"""The page of a calibration: predictions, measurements, uncertainty, what to measure next."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pandas as pd

from perfmodel.cost import calibration_files
from perfmodel.display import Report, calibration_page, inline_frame, shows_progress
from perfmodel.errors import CalibrationError
from perfmodel.ingest.tables import write_text
from perfmodel.spec import Layout, Problem
from perfmodel.validation._next_measurements import WantedMeasurement, near_shapes, of_step
from perfmodel.validation._parity import all_rows, compared_rows, is_runs
from perfmodel.validation._report import errors

MOST_POINTS: Final = 4000
"""Most rows in the page; if there are more, those with the largest errors and a regular sample of
each group."""
FARTHEST: Final = 10
"""Number of rows with the largest errors of each group that are always in the page."""
HEIGHT_PX: Final = 900
"""Height of the page in a notebook."""


@dataclass(frozen=True, eq=False)
class CalibrationReport:
    """A calibration's predictions beside measured rows; notebooks show it as `write` writes it."""

    data: dict[str, Any]
    """Plain values that the page shows: `groups` have their errors, `rows` are a sample of the
    rows, `next` is what to measure."""

    def to_html(self) -> str:
        """Return the page as a single file that needs no network."""
        return calibration_page(self.data)

    def write(self, path: Path | str) -> None:
        """Write the page atomically."""
        write_text(path, self.to_html())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return self.data

    def to_frame(self) -> pd.DataFrame:
        """One row per group and device: `group`, `device`, `kind`, `n` and the errors as
        fractions."""
        return pd.DataFrame(self.data["groups"])

    def _repr_html_(self) -> str:
        return inline_frame(self.to_html(), HEIGHT_PX, title="calibration")


@shows_progress("calibration")
def calibration_report(
    tables: Sequence[Path | str] = (),
    calibration: Path | str | None = None,
    *,
    problem: Problem | None = None,
    layout: Layout | str = "",
    progress: Report | None = None,
) -> CalibrationReport:
    """Report how well a calibration predicts, where it is uncertain, and what to measure next.

        calibration_report(["kernels.csv", "collectives.csv"], "fitted").write("calibration.html")

    Args:
        tables: measured kernels, collectives or whole runs, also mixed; without any, the page shows
            the calibration's own record: its rows, and its errors on shapes kept out of the fit.
        calibration: directory made by `perfmodel fit`; the shipped one for `None`.
        problem, layout: a step whose events to measure next, instead of shapes near those of the
            tables.
        progress: called with the name of each stage and how far it is.

    Raises:
        TableError: a missing or malformed table.
        CalibrationError: missing or unreadable weights; no table beside the shipped ones.
        LayoutError: a layout that the problem's model cannot have.
    """
    folder = None if calibration is None or str(calibration) == "default" else Path(calibration)
    if not tables and folder is None and not layout:
        raise CalibrationError(
            "there is nothing to show; give tables of measurements, or the folder of a calibration"
        )
    files = calibration_files(folder)
    if not files:
        raise CalibrationError(
            f"{folder}: the folder has no weights; write them with 'perfmodel fit TABLE... --out {folder}'"
        )
    # Rows that were not measured, or that cannot be predicted, are counted but have no place in the
    # figures.
    rows = all_rows(tables, folder, progress)
    compared = compared_rows(rows)
    step = (problem, layout) if problem is not None and layout else None
    proposal = of_step(*step, folder) if step else near_shapes(tables, folder)
    return CalibrationReport(
        {
            "kind": "calibration",
            "calibration": str(folder) if folder else "shipped",
            "tables": [str(table) for table in tables],
            "fitted_from": [str(table) for table in tables if not is_runs(Path(table))],
            "files": files,
            "groups": _groups(compared),
            "rows": _points(compared),
            "skipped": [[why, n] for why, n in _skipped(rows).most_common()],
            "next": [vars(measurement) for measurement in proposal.wanted],
            "plan": proposal.plan,
            "next_of": _next_of(proposal, problem, layout),
        }
    )


def _next_of(proposal: WantedMeasurement, problem: Problem | None, layout: Layout | str) -> str:
    if problem is not None and layout:
        layout_label = layout if isinstance(layout, str) else layout.label
        step = f"{problem.model.name} as {layout_label} on {problem.cluster.name}"
        return f"Events of a step of {step}, by their share of the uncertainty."
    return proposal.description


def _groups(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Errors by group and device, kernels before collectives before runs."""
    groups = []
    for key, group_rows in rows.groupby(["kind", "group", "device"], sort=True):
        kind, group, device = map(str, cast(tuple, key))
        members = pd.DataFrame(group_rows)
        figures = errors(
            members["measured_s"], members["predicted_s"], members["lo_s"], members["hi_s"]
        )
        figures.pop("spearman")
        # Whole runs have no provenance of their own.
        provenance = members["provenance"]
        has_provenance = bool("".join(provenance))
        from_measured = float(np.mean(provenance == "measured")) if has_provenance else None
        groups.append(
            {"group": group, "device": device, "kind": kind}
            | figures
            | {"from_measured": from_measured}
        )
    order = ("kernels", "collectives", "runs")
    return sorted(groups, key=lambda group: order.index(group["kind"]))


def _points(rows: pd.DataFrame) -> dict[str, Any]:
    """Columns of the rows that the page draws, six significant figures each."""
    part = pd.DataFrame(rows.iloc[_sample(rows)]) if len(rows) > MOST_POINTS else rows

    def short(name: str) -> list[float]:
        return [float(f"{value:.6g}") for value in part[name].tolist()]

    return {
        "of": len(rows),
        "group": part["group"].tolist(),
        "device": part["device"].tolist(),
        "what": part["what"].tolist(),
        "origin": part["provenance"].tolist(),
        **{name: short(name) for name in ("measured_s", "predicted_s", "lo_s", "hi_s")},
    }


def _sample(rows: pd.DataFrame) -> np.ndarray:
    """Rows to draw: per group and device, the largest errors and a regular sample of the rest."""
    predicted_s = rows["predicted_s"].to_numpy(float)
    measured_s = rows["measured_s"].to_numpy(float)
    log_error = np.abs(np.log(predicted_s / measured_s))
    sampled = []
    for indices in rows.groupby(["group", "device"]).indices.values():
        index = np.asarray(indices)
        by_error = index[np.argsort(-log_error[index], kind="stable")]
        # The farthest show the worst errors; the others, at regular distances, show how the group
        # is spread.
        share = max(FARTHEST, round(MOST_POINTS * len(index) / len(rows)))
        distance = max(1, -(-len(index) // share))
        sampled.append(by_error[:FARTHEST])
        sampled.append(np.sort(by_error[FARTHEST:])[::distance])
    return np.unique(np.concatenate(sampled))


def _skipped(rows: pd.DataFrame) -> Counter[str]:
    """Reasons why rows were not compared."""
    skipped: Counter[str] = Counter()
    is_unmeasured = rows["measured_s"].isna().tolist()
    for why, unmeasured in zip(rows["skipped_reason"].tolist(), is_unmeasured, strict=True):
        if why or unmeasured:
            skipped[why or "the row has no time"] += 1
    return skipped
