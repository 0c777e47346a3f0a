"""Fitting from tables: kernels and collectives side by side in one calibration directory."""

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pandas as pd

from perfmodel.cost.learn._regressor import Regressor, cell_hash
from perfmodel.cost.learn._weights import MeasuredLoad, read_header, save_regressor, weight_files
from perfmodel.cost.learn.collectives import (
    FILE_NAME,
    NO_SOURCES,
    CollectiveWeights,
    Scope,
    Sources,
    collective_rows,
    collective_weights,
    device_name,
    fit_rows,
    save_collective_weights,
    shape_spread,
    sharing_exponents,
    slowdowns,
    usable,
)
from perfmodel.cost.learn.collectives import expert_exchanges as moe
from perfmodel.cost.learn.parameters import Parameters
from perfmodel.cost.learn.rows import KindCode
from perfmodel.cost.learn.training._base import fit_base, groups_of_samples
from perfmodel.cost.learn.training._recipe import Recipe, small_recipe
from perfmodel.cost.learn.training._tables import Samples, gather, table_hashes
from perfmodel.display import Report, frame_html, shows_progress
from perfmodel.errors import CalibrationError, TableError
from perfmodel.ingest import clean_kernels, is_marked_suspect
from perfmodel.ingest.tables import number, read_table, table_kind, text
from perfmodel.measure.tables import BESIDE, LOADED, MEASURED, SOURCE, state_of
from perfmodel.ops import FAMILIES, KernelKind
from perfmodel.units import require_seed

if TYPE_CHECKING:
    from perfmodel.cost.learn.training._evaluate import Evaluation

_LOG: Final = logging.getLogger(__name__)
_TIMING: Final = frozenset({*MEASURED, "n_repeats", "n_set_aside", "variant"})
"""Columns in which rows of one kernel may differ."""


def fit(
    tables: Sequence[Path | str | pd.DataFrame],
    out: Path | str,
    *,
    family: str | None = None,
    recipes: Sequence[Recipe] | None = None,
    seed: int = 0,
    resume: bool = True,
    progress: Report | None = None,
) -> dict[str, dict[str, Any]]:
    """Fit regressors to tables of kernel timings and write them to a calibration directory.

    Each regressor is first trained with whole shapes left out (for errors and in-range intervals),
    with large shapes left out, and with each device left out in turn (for out-of-range intervals).
    The last training, on all rows, is saved as `<out>/<name>.safetensors`.

    Args:
        tables: files (csv, csv.gz, parquet) with the columns of the measurement schema, or frames
            that `read_table` made.
        family: only this op family; all that the tables have by default.
        recipes: settings; sized to the number of rows by default.
        resume: go on from checkpoints in `out`, and keep regressors there that were fitted from the
            same files with the same recipe and seed.

    Returns:
        By regressor name: `rows`, how many were `kept_out` to tell errors by, `mean_ape`,
        `median_ape` and `coverage_90` (fractions, None without any) on shapes kept out, by reason
        the rows `set_aside`, and how many times `longer` kernels take in other states of the
        machine, where these were measured (`slowdowns_by_state`).

    Raises:
        TableError: for a malformed table, an unknown device, or no usable row.
    """
    out = Path(out)
    frames = [table if isinstance(table, pd.DataFrame) else read_table(table) for table in tables]
    rows = {name: _rows_of_family(frames, name) for name in FAMILIES}
    names = [name for name in FAMILIES if rows[name] and family in (None, name)]
    if not names:
        raise TableError(
            f"the tables have no rows of {family or 'a kernel family'}; families: {', '.join(FAMILIES)}"
        )
    chosen = recipes if recipes is not None else [small_recipe(name, rows[name]) for name in names]
    # kept in the weights, so that a later run knows what they were fitted from
    hashes = table_hashes(tables)
    result = {}
    for recipe in chosen:
        if recipe.family not in names:
            continue
        record = _done(out, recipe, seed, hashes) if resume else None
        if record is None:
            record = _fit_one(frames, recipe, seed, hashes, out, resume, progress)
        result[recipe.name] = _headline(record) | {"set_aside": _set_aside(frames, recipe.family)}
        longer = slowdowns_by_state(frames, recipe.family)
        if longer:
            result[recipe.name]["longer"] = longer
    return result


def _rows_of_family(frames: Sequence[pd.DataFrame], family: str) -> int:
    """Rows that tables hold of an op family."""
    return sum(int((text(frame, "op_family") == family).sum()) for frame in frames)


def _set_aside(frames: Sequence[pd.DataFrame], family: str) -> dict[str, int]:
    """Rows of a family that say nothing of their kernels, by reason."""
    # `clean_kernels` names the flaw of rows that do not describe their kernel.
    counts: Counter[str] = Counter()
    for frame in frames:
        rows: Any = frame[text(frame, "op_family") == family]
        counts.update(flaw for flaw in clean_kernels(rows)["flaw"] if flaw)
    return dict(counts.most_common())


def slowdowns_by_state(frames: Sequence[pd.DataFrame], family: str) -> dict[str, float]:
    """Slowdown of kernels in other states than the usual one: under load, with cold caches, beside
    a collective.

    Such rows are not part of a fit. Medians over kernels that `calibrate` measured in both states,
    by state.
    """
    ratios: dict[str, list[float]] = defaultdict(list)
    for kernel in _kernels_by_state(frames, family):
        ratios[kernel.state].append(kernel.ratio)
    return {state: float(np.median(measured)) for state, measured in ratios.items()}


def measured_loads(frames: Sequence[pd.DataFrame], family: str) -> tuple[MeasuredLoad, ...]:
    """Slowdown of a family's kernels under sustained load, by device and element type: medians over
    kernels."""
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for kernel in _kernels_by_state(frames, family):
        if kernel.state == LOADED:
            ratios[kernel.device, kernel.dtype].append(kernel.ratio)
    loads = []
    for (device, dtype), measured in sorted(ratios.items()):
        loads.append(MeasuredLoad(device, family, dtype, float(np.median(measured))))
    return tuple(loads)


def measured_held_shares(frames: Sequence[pd.DataFrame], family: str) -> list[tuple[str, float]]:
    """Share of each device that collectives beside a family's kernels hold: medians over kernels.

    A kernel that takes t alone and u beside a collective runs at t / u of its speed, so that the
    collective holds 1 - t / u.
    """
    shares: dict[str, list[float]] = defaultdict(list)
    for kernel in _kernels_by_state(frames, family):
        if kernel.state == BESIDE:
            shares[kernel.device].append(1 - 1 / max(kernel.ratio, 1.0))
    return [(device, float(np.median(measured))) for device, measured in sorted(shares.items())]


class _StateRatio(NamedTuple):
    """Time of a kernel in a state of the machine over that in the usual state."""

    device: str
    dtype: str
    state: str
    """`LOADED`, `COLD` or `BESIDE`."""
    ratio: float


def _kernels_by_state(frames: Sequence[pd.DataFrame], family: str) -> list[_StateRatio]:
    """Kernels that `calibrate` measured in a state and as usual; others say nothing, nor do
    disturbed rows."""
    usual_us: dict[tuple[str, ...], list[float]] = defaultdict(list)
    in_state: list[tuple[tuple[str, ...], _StateRatio]] = []
    for frame in frames:
        mask = (text(frame, "op_family") == family) & (text(frame, "source") == SOURCE)
        rows: Any = frame[mask]
        times_us = number(rows, "time_us").tolist()
        # Rows that agree in everything but their times and notes are of one kernel, measured in
        # several states.
        same_kernel = [text(rows, str(name)) for name in rows.columns if name not in _TIMING]
        labels = [text(rows, name) for name in ("device", "dtype", "variant")]
        kernels = zip(*same_kernel, strict=True)
        labels_of_row = zip(*labels, strict=True)
        for kernel, (device, dtype, variant), time_us in zip(
            kernels, labels_of_row, times_us, strict=True
        ):
            state = state_of(variant)
            if is_marked_suspect(variant) or not time_us > 0:
                continue
            if state:
                in_state.append((kernel, _StateRatio(device_name(device), dtype, state, time_us)))
            else:
                usual_us[kernel].append(time_us)

    # Each state against the same kernels as usually run.
    compared = []
    for kernel, timed in in_state:
        if kernel in usual_us:
            compared.append(timed._replace(ratio=timed.ratio / float(np.median(usual_us[kernel]))))
    return compared


def _fit_one(
    frames: Sequence[pd.DataFrame],
    recipe: Recipe,
    seed: int,
    hashes: dict[str, str],
    out: Path,
    resume: bool,
    progress: Report | None,
) -> dict[str, Any]:
    """Fit one regressor, write it and return its record."""
    if progress is not None:
        progress(f"{recipe.name}: reading rows", 0, 1)
    samples = gather(frames, recipe.family, recipe.dtypes)
    regressor = fit_regressor(
        samples,
        recipe,
        seed=seed,
        hashes=hashes,
        checkpoints=out if resume else None,
        progress=progress,
    )
    loads = measured_loads(frames, recipe.family)
    held_shares = measured_held_shares(frames, recipe.family)
    if loads or held_shares:
        measured = {"loads": loads, "held_shares": held_shares}
        regressor = replace(regressor, record={**regressor.record, **measured})
    save_regressor(regressor, out)
    return regressor.record


def _done(out: Path, recipe: Recipe, seed: int, hashes: dict[str, str]) -> dict[str, Any] | None:
    """Record of a regressor that was already fitted from the same inputs."""
    try:
        record = read_header(out / f"{recipe.name}.safetensors")["record"]
    except CalibrationError:
        return None
    try:
        # equal files, recipe and seed give equal weights: nothing to fit anew
        same_recipe = Recipe.from_dict(record["recipe"]) == recipe
    except (KeyError, TypeError):
        # of a release with other settings
        return None
    if same_recipe and (record.get("seed"), record.get("tables")) == (seed, hashes):
        return record
    return None


def _headline(record: dict[str, Any]) -> dict[str, Any]:
    """Figures of a record that a user is told: rows, and errors as fractions (None without rows
    kept out)."""
    kept_out = record["in_range"]
    errors = {}
    for name in ("mean_ape", "median_ape"):
        errors[name] = kept_out[name] / 100 if kept_out["n"] else None
    rows = {"rows": sum(record["rows_by_source"].values()), "kept_out": kept_out["n"]}
    return rows | errors | {"coverage_90": kept_out["coverage_90"]}


def fit_regressor(
    samples: Samples,
    recipe: Recipe,
    *,
    seed: int = 0,
    hashes: dict[str, str] | None = None,
    checkpoints: Path | None = None,
    progress: Report | None = None,
) -> Regressor:
    """Measure a recipe's errors on kept-out data, then fit it to all `samples`."""
    from perfmodel.cost.learn.training._evaluate import evaluate
    from perfmodel.cost.learn.training._recipe import Stages
    from perfmodel.cost.learn.training._train import Training, train_members

    # errors and intervals first, on rows that the fit did not see
    code = KindCode.of(samples.rows.kinds)
    stages = Stages(recipe.name, checkpoints, progress)
    evaluation = evaluate(samples, recipe, code, seed=seed, stages=stages)

    # The saved network is trained on every row. It continues from the evaluated network, so that
    # its errors are similar.
    base = fit_base(samples, seed)
    training = Training(
        samples,
        base,
        code,
        recipe,
        fit_on=np.arange(len(samples)),
        steps=recipe.refit_steps,
        start=evaluation.params,
        seed=seed,
        report=stages.report("all rows"),
        checkpoint=stages.checkpoint("all"),
    )
    params = train_members(training)
    regressor = assemble(
        samples, recipe, code, base.groups, params, evaluation, seed=seed, hashes=hashes or {}
    )
    stages.clear()
    return regressor


def assemble(
    samples: Samples,
    recipe: Recipe,
    code: KindCode,
    groups: tuple[tuple[int, KernelKind], ...],
    params: Parameters,
    evaluation: "Evaluation",
    *,
    seed: int,
    hashes: dict[str, str],
) -> Regressor:
    """Put fitted parameters, intervals and the record of their making together."""
    # cells of the shape axes in which something was measured: what lies in one of them counts as
    # measured, too
    axes = samples.physics()[0].axes
    positions = np.stack([np.broadcast_to(a, (len(samples),)) for a in axes], axis=1)
    cells = np.unique(cell_hash(samples.stacks, *groups_of_samples(samples), positions))
    sources = np.array([s.source for s in samples.stacks])[samples.stack]
    names, counts = np.unique(sources, return_counts=True)
    rows = dict(zip(names.tolist(), counts.tolist(), strict=True))
    record = {
        "recipe": recipe.to_dict(),
        "seed": seed,
        "tables": hashes,
        "rows_by_source": rows,
        **evaluation.record,
    }
    return Regressor(
        name=recipe.name,
        family=recipe.family,
        dtypes=recipe.dtypes,
        params=params,
        stacks=samples.stacks,
        groups=groups,
        code=code,
        intervals=evaluation.intervals,
        cells=cells,
        record=record,
    )


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
    progress: Report | None = None,
) -> FitReport:
    """Fit cost models to tables of kernels, collectives or both, and write a calibration directory.

    `KernelModel.load(out)` and `CollectiveModel.load(out)` read it; the shipped weights supply what
    it lacks. Measured series of collectives replace the shipped ones of the same fabric (device and
    links) and kind, and no others.

    Args:
        tables: files (csv, csv.gz, parquet), or frames that `read_table` made.
        family: only this op family, or `collectives`.
        resume: go on from checkpoints in `out`.

    Returns:
        By fitted file: `rows`, the errors on shapes kept out of the fit (fractions), and the rows
        `set_aside` by reason. For collectives also the number of `series`, the number of shipped
        series `kept`, the names of those `replaced` by fabric, how much longer they took with
        `groups_at_once` where that was measured (`slowdowns`), and the exponents of `sharing` that
        predictions use (`CollectiveWeights.sharing`).

    Raises:
        TableError: for a malformed table, or if no table has a usable row of the wanted family.
    """
    require_seed(seed)
    table_list = [tables] if isinstance(tables, Path | str | pd.DataFrame) else list(tables)
    frames = [
        (table if isinstance(table, pd.DataFrame) else read_table(table)) for table in table_list
    ]
    kinds = [table_kind(frame) for frame in frames]
    # tables as given: the hashes of files tell a later run that nothing has changed
    kernels = [table for table, kind in zip(table_list, kinds, strict=True) if kind == "compute"]
    collectives = [frame for frame, kind in zip(frames, kinds, strict=True) if kind == "collective"]
    summary = FitReport()
    if kernels and family != "collectives":
        summary.update(
            fit(kernels, out, family=family, seed=seed, resume=resume, progress=progress)
        )
    if collectives and family in (None, "collectives"):
        summary["collectives"] = _fit_and_merge_collectives(collectives, Path(out))
    if not summary:
        raise TableError(
            f"no table has rows of family {family!r}; found {', '.join(sorted(set(kinds)))} tables"
        )
    return summary


def _fit_and_merge_collectives(tables: Sequence[pd.DataFrame], out: Path) -> dict[str, Any]:
    """Fit collectives, merge them with the shipped weights and write both; returns what became of
    the rows and series."""
    # at a site a series of a forced algorithm counts where nothing else was measured there
    weights = fit_collectives(
        tables, out, base=collective_weights(weight_files(None)), sources=Sources(forced=True)
    )
    notes = weights.notes
    facts = {name: notes[name] for name in ("kept", "replaced", "set_aside")}
    longer = slowdowns(collective_rows(pd.concat(list(tables), ignore_index=True)))
    if longer:
        facts["groups_at_once"] = longer
    exponents = {}
    for key, exponent in weights.sharing.items():
        if key.kind:
            exponents[f"{key.kind} on {key.device}, {key.links}"] = exponent
    if exponents:
        facts["sharing"] = exponents
    return {"rows": sum(map(len, tables)), "series": notes["own"] + notes["own_exchanges"]} | facts


def fit_collectives(
    tables: Sequence[pd.DataFrame],
    out: Path,
    *,
    base: CollectiveWeights | None = None,
    sources: Sources = NO_SOURCES,
    spread: Mapping[Scope, float] | None = None,
) -> CollectiveWeights:
    """Fit the collective model and write `out/collectives.safetensors`.

    With `base`, its physics is kept and the tables' series replace those of the same fabrics and
    kinds; `notes` tells what was replaced. Without, physics is fitted too.

    Args:
        tables: collective tables as `read_table` gives them; `moe_alltoall` rows may stand among
            them.
        spread: widths of intervals from studies (`study_collectives`), beside those of the measured
            series.

    Raises:
        TableError: if no row of the tables can be used.
    """
    rows, exchanges, odd = usable(tables, sources)
    if not len(rows) and not len(exchanges):
        why = next(iter(odd), "each row needs bytes, num_ranks and time_us")
        raise TableError(f"no collective row can be used: {why}")
    for reason, count in odd.items():
        _LOG.info("set aside %d rows: %s", count, reason)
    # tables of exchanges alone leave the rest as it was
    weights = fit_rows(rows, base, sources) if len(rows) else base or CollectiveWeights(physics={})
    if len(rows):
        measured = {**weights.spread, **(spread or {}), **shape_spread(rows, weights, sources)}
        weights = replace(weights, spread=measured)
    if len(exchanges):
        weights = replace(weights, moe=moe.fit_moe(exchanges, weights.moe))

    if len(rows):
        # Rows of several concurrent groups do not describe a single group, so the curves leave them
        # out.
        all_rows = collective_rows(pd.concat(list(tables), ignore_index=True))
        weights = replace(
            weights, sharing={**weights.sharing, **sharing_exponents(all_rows, weights)}
        )

    # the weights record their own sources
    facts = {"rows": len(rows), "exchange_rows": len(exchanges), "set_aside": odd}
    facts["own_exchanges"] = len(np.unique(exchanges.series))
    notes = {"replaced": {}, "kept": 0, "own": 0, **weights.notes, **facts}
    weights = replace(weights, notes=notes)
    save_collective_weights(weights, Path(out) / FILE_NAME)
    return weights
