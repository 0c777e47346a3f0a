"""Explains the error of a prediction and the parameter changes that would remove it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from perfmodel import catalog
from perfmodel.calibration import priors
from perfmodel.errors import PerfModelError, TableError
from perfmodel.ingest.tables import read_table
from perfmodel.ops import Collective, Op
from perfmodel.prediction import (
    event_shares,
    explain,
    priced_events,
    step_derivatives,
    step_problem,
)
from perfmodel.prediction.sites import LOSSES
from perfmodel.spec import Device, Framework
from perfmodel.validation._cases import predict_cases
from perfmodel.validation.rows import Row, read_tables, rows_of
from perfmodel.validation.unstated import predict_run

MOST_EVENTS = 8
WORST = 5
"""Number of runs that are explained if none is named."""


@dataclass(frozen=True)
class EventResidual:
    """An event of the critical path, with the nearest measurement."""

    event: str
    time_s: float
    """Seconds of the step."""
    provenance: str
    nearest: str = ""
    """Measured kernel of the same device, family, operator and pass; empty where no table given has
    one."""
    nearest_us: float | None = None
    doublings: float | None = None
    """Distance of its shape: sum of |log2| of the ratios over the dimensions."""


@dataclass(frozen=True)
class TermChange:
    """The change of a single parameter that would explain the error."""

    parameter: str
    share: float
    """d log(step time) / d parameter: for a log factor, its share of the step."""
    needed: float
    """Log of the factor on its time; for a loss, its amount."""
    prior_sd: float

    @property
    def deviations(self) -> float:
        """The needed change, in standard deviations of the parameter's prior."""
        return self.needed / self.prior_sd


@dataclass(frozen=True)
class CaseResidual:
    """The explanation of one run."""

    case_id: str
    measured_s: float
    predicted_s: float
    lo_s: float
    """Lower end of the 90 % interval."""
    hi_s: float
    """Upper end of the 90 % interval."""
    breakdown_s: dict[str, float]
    """Seconds by activity, summing to the prediction."""
    extrapolated: float
    """Share of the critical path that rests on no measurement of this device."""
    events: tuple[EventResidual, ...]
    """Events that take most of the critical path."""
    terms: tuple[TermChange, ...]
    """Changes of one parameter that would explain the error, the most likely first."""

    @property
    def error(self) -> float:
        """Error of the prediction relative to the measured time."""
        return self.predicted_s / self.measured_s - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"error": self.error}


def explain_case(
    row: Row,
    calibration: Path | None = None,
    tables: Sequence[pd.DataFrame] = (),
    framework: Framework | str | None = None,
) -> CaseResidual:
    """Explain the error of one published run, with the likeliest values of its open settings.

    The step is linear in small changes of the parameters that runs can move
    (`perfmodel.prediction.sites.PARAMETERS`), with derivatives through the timeline; `needed` is
    the change that alone makes up log(measured / predicted).

    Args:
        row: cells of a table of runs, None where empty.
        calibration: directory made by `perfmodel fit`.
        framework: instead of the one that the row names.
        tables: measured kernels and collectives (of `pm.read_table`), among which the nearest are
            looked up.

    Raises:
        PerfModelError: a row that cannot be predicted, or was not timed.
    """
    chosen = catalog.framework(framework) if isinstance(framework, str) else framework
    case = predict_run(row, calibration, framework=chosen).case
    measured = row.get("measured_iter_time_s")
    if measured is None:
        raise PerfModelError(
            f"{case.case_id}: the run has no measured step time, so there is no error to explain"
        )

    # The step is linear in small changes, so each parameter alone makes up the gap at gap / share.
    # One with hardly any share cannot, and a loss cannot make a step shorter.
    problem = step_problem(case.model, case.cluster, case.job, calibration, case.framework)
    prediction = explain(problem, case.layout)
    known = priors([(problem, [case.layout])], calibration, case.cluster.device.name)
    derivatives = step_derivatives(problem, [case.layout], [prior.name for prior in known])
    by_parameter = derivatives.by_parameter[0] / derivatives.step_s[0]
    gap = log(float(measured) / prediction.step_time_s)
    terms = []
    for prior, share in zip(known, by_parameter, strict=True):
        is_impossible = prior.name in LOSSES and gap < 0
        if share > 1e-4 and not is_impossible:
            terms.append(TermChange(prior.name, float(share), gap / float(share), prior.sd))

    # The events that take most of the critical path, each with the measurement nearest to it.
    shares = event_shares(problem, case.layout)
    order = np.argsort(-shares.critical_s)[:MOST_EVENTS].tolist()
    timed = priced_events(problem, shares.ops)
    events = []
    for i in order:
        if shares.critical_s[i] <= 0:
            continue
        nearest = _nearest_measured_row(shares.ops[i], case.cluster.device, tables)
        critical_s = float(shares.critical_s[i])
        events.append(EventResidual(shares.ops[i].label, critical_s, timed.provenance[i], *nearest))
    return CaseResidual(
        case_id=case.case_id,
        measured_s=float(measured),
        predicted_s=prediction.step_time_s,
        lo_s=prediction.step_time_lo_s,
        hi_s=prediction.step_time_hi_s,
        breakdown_s=prediction.breakdown_s,
        extrapolated=prediction.provenance["extrapolated"] + prediction.provenance["analytical"],
        events=tuple(events),
        terms=tuple(sorted(terms, key=lambda term: abs(term.deviations))),
    )


def explain_cases(
    files: Sequence[Path],
    case_id: str | None = None,
    calibration: Path | None = None,
    tables: Sequence[Path] = (),
    framework: Framework | str | None = None,
) -> list[CaseResidual]:
    """Explain one run by its id, or the five timed runs with the largest errors.

    Raises:
        TableError: for an unreadable file, or an id that no table has.
    """
    runs, _ = read_tables(files)
    if case_id is not None:
        chosen = runs[runs["case_id"] == case_id]
        if chosen.empty:
            raise TableError(
                f"no run {case_id!r} in these tables; the first is {runs['case_id'].iloc[0]!r}"
            )
    else:
        # Ratios, since a step predicted at half the measured time is as far off as one at twice.
        # Runs without a time become 0 and go last.
        predicted = predict_cases(runs, calibration, framework=framework)[
            "predicted_iter_time_s"
        ].astype(float)
        off = np.abs(
            np.log(np.asarray(predicted, float) / np.asarray(runs["measured_iter_time_s"], float))
        )
        chosen = runs.iloc[np.argsort(-np.nan_to_num(off))[:WORST]]

    # Tables are read once for all runs.
    measured = [read_table(path) for path in tables]
    return [
        explain_case(row, calibration, measured, framework) for row in rows_of(pd.DataFrame(chosen))
    ]


class _MeasuredNeighbour(NamedTuple):
    """A measured event near a predicted one; empty if there is none."""

    label: str = ""
    time_us: float | None = None
    doublings: float | None = None
    """Distance: the sum over all sizes of how many doublings they are apart."""


def _nearest_measured_row(
    op: Op, device: Device, tables: Sequence[pd.DataFrame]
) -> _MeasuredNeighbour:
    """The measured event nearest to a given one."""
    best = _MeasuredNeighbour()
    for table in tables:
        # Compare with the same device, family, operator and pass only.
        candidates: Any = table[_is_device(table["device"], device)]
        if isinstance(op, Collective):
            if "collective" not in candidates:
                continue
            candidates = candidates[candidates["collective"] == op.collective]
        elif "op_family" in candidates:
            candidates = candidates[
                (candidates["op_family"] == op.family) & (candidates["op"] == op.op)
            ]
            candidates = candidates[candidates["pass"] == op.pass_]
        else:
            continue
        # Shapes are compared in doublings, over the sizes that both the event and the table have.
        sizes: dict[str, float] = {}
        for name in (field.name for field in fields(op)):
            value = getattr(op, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if name in candidates and is_number and value:
                sizes[name] = float(value)
        names = list(sizes)
        if candidates.empty or not names:
            continue
        shape = candidates[names].astype(float).replace(0, np.nan).fillna(1.0).to_numpy()
        doublings = np.abs(np.log2(shape / np.array(list(sizes.values())))).sum(axis=1)
        nearest = int(doublings.argmin())
        if best.doublings is None or doublings[nearest] < best.doublings:
            label = " ".join(
                f"{name}={value:g}" for name, value in zip(names, shape[nearest], strict=True)
            )
            best = _MeasuredNeighbour(
                label,
                float(candidates["time_us"].iloc[nearest]),
                float(doublings[nearest]),
            )
    return best


def _is_device(names: Any, device: Device) -> pd.Series:
    """Whether each of a table's names is a name of the device."""

    def is_device(name: object) -> bool:
        try:
            return catalog.device(str(name)).name == device.name
        except PerfModelError:
            return False

    return names.map({name: is_device(name) for name in names.unique()}).astype(bool)
