"""Fitting regressors from tables: train, measure errors on what was kept out, refit, save."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from perfmodel.errors import TableError
from perfmodel.learn._base import fit_base
from perfmodel.learn._inputs import machine_of, shape_with_flags
from perfmodel.learn._kinds import KindCode
from perfmodel.learn._parameters import Parameters
from perfmodel.learn._physics import PHYSICS
from perfmodel.learn._recipe import Recipe, small_recipe
from perfmodel.learn._regressor import Regressor, cell_hash
from perfmodel.learn._rows import FAMILIES
from perfmodel.learn._tables import Samples, digest, figures_lookup, gather
from perfmodel.learn._weights import save_regressor

if TYPE_CHECKING:
    from perfmodel.learn._evaluate import Evaluation
    from perfmodel.learn._train import Report


def fit(
    tables: Sequence[Path | str],
    out: Path | str,
    *,
    family: str | None = None,
    recipes: Sequence[Recipe] | None = None,
    seed: int = 0,
    resume: bool = True,
    quiet: bool = False,
) -> dict[str, dict[str, Any]]:
    """Fit regressors to tables of kernel timings and write them to a calibration directory.

    Each regressor is first trained with whole shapes kept out (errors and in-range intervals),
    with large shapes kept out, and with each device kept out in turn (out-of-range intervals);
    then once more on all rows, which is what is saved.

    Args:
        tables: csv, csv.gz or parquet files with the columns of the measurement schema.
        family: only this op family; all that the tables have by default.
        recipes: settings; sized to the number of rows by default.
        resume: continue from checkpoints in `out` and skip regressors that are already there and
            were fitted from the same files, recipe and seed.

    Returns:
        By regressor name: errors, coverage, rows by source (the contents of its model card).

    Raises:
        TableError: for a malformed table, an unknown device, or no usable row.
    """
    from perfmodel.io import read_table
    from perfmodel.learn._progress import progress

    out = Path(out)
    frames = [read_table(path) for path in tables]
    present = {f for frame in frames if "op_family" in frame for f in frame["op_family"].unique()} & set(FAMILIES)
    wanted = present if family is None else present & {family}
    if not wanted:
        raise TableError(f"the tables hold no row of {family or 'a kernel family'}; families: {', '.join(FAMILIES)}")
    hashes = digest(tables)
    cards = {}
    chosen = _recipes(frames, sorted(wanted), recipes)
    with progress(quiet) as report:
        for recipe in chosen:
            samples = gather(frames, recipe.family, recipe.dtypes, figures_lookup())
            regressor = fit_regressor(samples, recipe, seed=seed, hashes=hashes, out=out, resume=resume, report=report)
            save_regressor(regressor, out)
            cards[recipe.name] = regressor.record
    return cards


def _recipes(frames: Iterable[pd.DataFrame], wanted: Sequence[str], recipes: Sequence[Recipe] | None) -> list[Recipe]:
    if recipes is not None:
        return [r for r in recipes if r.family in wanted]
    counts = {f: sum(int((t["op_family"] == f).sum()) for t in frames if "op_family" in t) for f in wanted}
    return [small_recipe(f, counts[f]) for f in wanted]


def fit_regressor(
    samples: Samples,
    recipe: Recipe,
    *,
    seed: int = 0,
    hashes: dict[str, str] | None = None,
    out: Path | None = None,
    resume: bool = True,
    report: Any = None,
) -> Regressor:
    """Evaluate a recipe on held-out data and fit it to all `samples`."""
    from perfmodel.learn._evaluate import evaluate
    from perfmodel.learn._train import train

    code = KindCode.of(sorted(set(samples.rows.kind.tolist())))

    def checkpoint(stage: str) -> Path | None:
        return out / f".{recipe.name}.{stage}.ckpt.npz" if out is not None and resume else None

    def staged(stage: str) -> "Report | None":
        return (
            None if report is None else lambda now, steps, error: report(f"{recipe.name}: {stage}", now, steps, error)
        )

    evaluation = evaluate(samples, recipe, code, seed=seed, checkpoint=checkpoint, report=staged)
    base = fit_base(samples, seed)
    params = train(
        samples, base, code, recipe, fit_on=np.arange(len(samples)), seed=seed,
        steps=evaluation.best_steps, report=staged("all rows"), checkpoint=checkpoint("final"),
    )  # fmt: skip
    return assemble(samples, recipe, code, base.groups, params, evaluation, seed=seed, hashes=hashes or {})


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
    sources = np.array([s.source for s in samples.stacks], object)[samples.stack]
    rows = {str(k): int(v) for k, v in zip(*np.unique(sources.astype(str), return_counts=True), strict=True)}
    record = {"rows_by_source": rows, "seed": seed, "holdout": recipe.holdout, "tables": hashes, **evaluation.record}
    return Regressor(
        name=recipe.name, family=recipe.family, dtypes=recipe.dtypes, params=params, stacks=samples.stacks,
        groups=groups, code=code, intervals=evaluation.intervals, cells=cells, record=record,
    )  # fmt: skip
