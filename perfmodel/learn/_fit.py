"""Fitting regressors from tables: train with parts kept out to know the errors, then on all rows."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from perfmodel.errors import CalibrationError, TableError
from perfmodel.learn._base import fit_base
from perfmodel.learn._frame import text
from perfmodel.learn._inputs import machine_of, shape_with_flags
from perfmodel.learn._kinds import KindCode
from perfmodel.learn._parameters import Parameters
from perfmodel.learn._physics import PHYSICS
from perfmodel.learn._recipe import Recipe, small_recipe
from perfmodel.learn._regressor import Regressor, cell_hash
from perfmodel.learn._rows import FAMILIES
from perfmodel.learn._shared_tables import table_hashes
from perfmodel.learn._tables import Samples, figures_lookup, gather
from perfmodel.learn._weights import read_header, save_regressor

if TYPE_CHECKING:
    from perfmodel.learn._evaluate import Evaluation

Progress = Callable[[str, int, int], None]
"""Called with (what is going on, steps done, steps in all)."""


def fit(
    tables: Sequence[Path | str | pd.DataFrame],
    out: Path | str,
    *,
    family: str | None = None,
    recipes: Sequence[Recipe] | None = None,
    seed: int = 0,
    resume: bool = True,
    progress: Progress | None = None,
) -> dict[str, dict[str, Any]]:
    """Fit regressors to tables of kernel timings and write them to a calibration directory.

    Each regressor is first trained with whole shapes kept out (errors and in-range intervals), with
    large shapes kept out and with each device kept out in turn (out-of-range intervals), and at last
    on all rows, which is what is saved as `<out>/<name>.safetensors`.

    Args:
        tables: files (csv, csv.gz, parquet) with the columns of the measurement schema, or frames that
            `read_table` made.
        family: only this op family; all that the tables have by default.
        recipes: settings; sized to the number of rows by default.
        resume: go on from checkpoints in `out`, and keep regressors there that were fitted from the
            same files with the same recipe and seed.

    Returns:
        By regressor name: `rows`, and `mean_ape`, `median_ape` and `coverage_90` (fractions) on shapes
        kept out.

    Raises:
        TableError: for a malformed table, an unknown device, or no usable row.
    """
    from perfmodel.io import read_table

    out = Path(out)
    frames = [table if isinstance(table, pd.DataFrame) else read_table(table) for table in tables]
    rows = {name: sum(int((text(frame, "op_family") == name).sum()) for frame in frames) for name in FAMILIES}
    wanted = [name for name in FAMILIES if rows[name] and family in (None, name)]
    if not wanted:
        raise TableError(f"the tables hold no row of {family or 'a kernel family'}; families: {', '.join(FAMILIES)}")
    chosen = recipes if recipes is not None else [small_recipe(name, rows[name]) for name in wanted]
    hashes = table_hashes(tables)
    result = {}
    for recipe in chosen:
        if recipe.family in wanted:
            record = _done(out, recipe, seed, hashes) if resume else None
            if record is None:
                record = _fit_one(frames, recipe, seed, hashes, out, resume, progress)
            result[recipe.name] = _headline(record)
    return result


def _fit_one(
    frames: Sequence[pd.DataFrame], recipe: Recipe, seed: int, hashes: dict[str, str], out: Path, resume: bool,
    progress: Progress | None,
) -> dict[str, Any]:  # fmt: skip
    samples = gather(frames, recipe.family, recipe.dtypes, figures_lookup())
    regressor = fit_regressor(
        samples, recipe, seed=seed, hashes=hashes, checkpoints=out if resume else None, progress=progress
    )
    save_regressor(regressor, out)
    return regressor.record


def _done(out: Path, recipe: Recipe, seed: int, hashes: dict[str, str]) -> dict[str, Any] | None:
    """Record of a regressor that was already fitted from the same inputs."""
    try:
        record = read_header(out / f"{recipe.name}.safetensors")["record"]
    except CalibrationError:
        return None
    try:
        same = Recipe.from_dict(record["recipe"]) == recipe
    except (KeyError, TypeError):  # of a release with other settings
        return None
    return record if same and (record.get("seed"), record.get("tables")) == (seed, hashes) else None


def _headline(record: dict[str, Any]) -> dict[str, Any]:
    kept_out = record["in_range"]
    return {
        "rows": sum(record["rows_by_source"].values()),
        "mean_ape": kept_out["mean_ape"] / 100,
        "median_ape": kept_out["median_ape"] / 100,
        "coverage_90": kept_out["coverage_90"],
    }


def fit_regressor(
    samples: Samples,
    recipe: Recipe,
    *,
    seed: int = 0,
    hashes: dict[str, str] | None = None,
    checkpoints: Path | None = None,
    progress: Progress | None = None,
) -> Regressor:
    """Measure a recipe's errors on kept-out data, then fit it to all `samples`."""
    from perfmodel.learn._evaluate import evaluate
    from perfmodel.learn._stages import Stages
    from perfmodel.learn._train import train_members

    code = KindCode.of(sorted(set(samples.rows.kind.tolist())))
    stages = Stages(recipe.name, checkpoints, progress)
    evaluation = evaluate(samples, recipe, code, seed=seed, stages=stages)
    base = fit_base(samples, seed)
    params = train_members(
        samples, base, code, recipe, fit_on=np.arange(len(samples)), steps=recipe.refit_steps,
        start=evaluation.params, seed=seed, report=stages.report("all rows"), checkpoint=stages.checkpoint("all"),
    )  # fmt: skip
    regressor = assemble(samples, recipe, code, base.groups, params, evaluation, seed=seed, hashes=hashes or {})
    stages.clear()
    return regressor


def assemble(
    samples: Samples, recipe: Recipe, code: KindCode, groups: tuple[tuple[int, str], ...], params: Parameters,
    evaluation: "Evaluation", *, seed: int, hashes: dict[str, str],
) -> Regressor:  # fmt: skip
    """Put fitted parameters, intervals and the record of their making together."""
    machine = machine_of([s.figures for s in samples.stacks], samples.stack, samples.dtypes)
    axes = PHYSICS[recipe.family](np, shape_with_flags(samples.rows), machine).axes
    positions = np.stack([np.broadcast_to(a, (len(samples),)) for a in axes], axis=1)
    stacks = np.array([s.key for s in samples.stacks], object)[samples.stack]
    cells = np.unique(cell_hash(stacks + "|" + samples.rows.kind, positions))
    sources = np.array([s.source for s in samples.stacks])[samples.stack]
    rows = {str(k): int(v) for k, v in zip(*np.unique(sources, return_counts=True), strict=True)}
    record = {"recipe": recipe.to_dict(), "seed": seed, "tables": hashes, "rows_by_source": rows, **evaluation.record}
    return Regressor(
        name=recipe.name, family=recipe.family, dtypes=recipe.dtypes, params=params, stacks=samples.stacks,
        groups=groups, code=code, intervals=evaluation.intervals, cells=cells, record=record,
    )  # fmt: skip
