"""One call for tables of any kind: kernels and collectives side by side in one calibration directory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from perfmodel.display import frame_html, shows_progress
from perfmodel.errors import TableError
from perfmodel.io import read_table, table_kind
from perfmodel.learn._collective_fit import fit_collectives
from perfmodel.learn._fit import Progress, fit


class FitReport(dict[str, dict[str, Any]]):
    """Figures by fitted file."""

    def to_frame(self) -> pd.DataFrame:
        """One row per fitted file: `family` and its figures."""
        return pd.DataFrame([{"family": family, **figures} for family, figures in self.items()])

    def _repr_html_(self) -> str:
        return frame_html(self.to_frame())


@shows_progress("fit")
def fit_calibration(
    tables: Sequence[Path | str | pd.DataFrame] | Path | str | pd.DataFrame,
    out: Path | str,
    *,
    family: str | None = None,
    seed: int = 0,
    resume: bool = True,
    progress: Progress | None = None,
) -> FitReport:
    """Fit cost models to tables of kernels, collectives or both, and write a calibration directory.

    `KernelModel.load(out)` and `CollectiveModel.load(out)` read it; what it lacks, the shipped weights serve.

    Args:
        tables: files (csv, csv.gz, parquet), or frames that `read_table` made.
        family: only this op family, or `collectives`.
        resume: go on from checkpoints in `out`.

    Returns:
        By fitted file: `rows` and the errors on shapes kept out (fractions), or the number of collective series.

    Raises:
        TableError: for a malformed table, or if no table has a usable row of the wanted family.
    """
    given = [tables] if isinstance(tables, Path | str | pd.DataFrame) else list(tables)
    frames = [(t if isinstance(t, pd.DataFrame) else read_table(t)) for t in given]
    kinds = [table_kind(frame) for frame in frames]
    kernels = [t for t, kind in zip(given, kinds, strict=True) if kind == "compute"]
    collectives = [f for f, kind in zip(frames, kinds, strict=True) if kind == "collective"]
    summary = FitReport()
    if kernels and family != "collectives":
        summary.update(fit(kernels, out, family=family, seed=seed, resume=resume, progress=progress))
    if collectives and family in (None, "collectives"):
        weights = fit_collectives(collectives, Path(out), seed)
        summary["collectives"] = {"rows": sum(map(len, collectives)), "series": len(weights.series)}
    if not summary:
        raise TableError(f"no table has rows of family {family!r}; found {', '.join(sorted(set(kinds)))} tables")
    return summary
