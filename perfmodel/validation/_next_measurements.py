"""What to measure next: where a calibration's intervals leave most open."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import expm1
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from perfmodel.calibration import model_plan
from perfmodel.errors import PerfModelError
from perfmodel.ingest.tables import read_table, table_kind
from perfmodel.measure import INTERCONNECT, MEASURED_FAMILIES, Plan, StoppingRule, check_kernel, plan_text, present
from perfmodel.ops import Collective, Op
from perfmodel.prediction import event_shares, layout_of, priced_events, step_problem_of
from perfmodel.spec import Layout, Problem
from perfmodel.validation._parity import is_runs, predicted_times, row_labels, sizes_of

MOST: Final = 24
"""Measurements that are proposed."""
MOST_OF_KIND: Final = 3
"""Of one kind of kernel or collective, where the tables say which shapes matter."""
MOST_TRIED: Final = 300
"""Measured rows of a kind whose neighbours are considered."""
SURE: Final = 0.02
"""Half-width of an interval that one more measurement would not narrow."""
_FIXED: Final = frozenset({"num_ranks", "num_nodes", "ranks_per_node"})
"""Numbers of the machine, not of the work."""
_KIND: Final = ("device", "op_family", "op", "collective", "dtype", "pass")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measurement worth making."""

    what: str
    device: str
    predicted_s: float
    half_width: float
    """Of its 90 % interval, as a share of the predicted time."""
    step_share: float | None = None
    """Of the step's time, where a step is asked about."""


@dataclass(frozen=True)
class Wanted:
    """What to measure next, the most telling first."""

    wanted: tuple[Measurement, ...] = ()
    plan: str = ""
    """TOML for `perfmodel calibrate --plan`; empty where no collector measures any of them."""
    of: str = ""
    """What was looked at, as a sentence."""


def of_step(problem: Problem, layout: Layout | str, calibration: Path | None) -> Wanted:
    """Events of one layout's step by share of the step times half-width of their interval.

    Raises:
        LayoutError: if the model cannot have the layout.
    """
    laid_out, _ = layout_of(problem, layout)
    priced = step_problem_of(problem, calibration)
    shares = event_shares(priced, laid_out)
    times = priced_events(priced, shares.ops)
    half = 0.5 * np.log(np.maximum(times.hi_s, 1e-30) / np.maximum(times.lo_s, 1e-30))
    share = shares.critical_s / shares.step_time_s
    order = [int(i) for i in np.argsort(-share * half, kind="stable") if half[i] > SURE and share[i] > 0][:MOST]
    device = problem.cluster.device.name
    wanted = [
        Measurement(
            what=shares.ops[i].label,
            device=device,
            predicted_s=float(times.time_s[i]),
            half_width=expm1(half[i]),
            step_share=float(share[i]),
        )
        for i in order
    ]
    whole = model_plan(problem.model, problem.cluster, problem.job, [laid_out], framework=problem.framework).plan
    chosen = {shares.ops[i] for i in order}
    plan = replace(
        whole,
        kernels=tuple(op for op in whole.kernels if op in chosen),
        collectives=tuple(op for op in whole.collectives if op in chosen),
    )
    return Wanted(tuple(wanted), plan_text(plan) if plan.kernels or plan.collectives else "")


def near_shapes(tables: Sequence[Path | str], calibration: Path | None) -> Wanted:
    """Shapes within a factor of two of those in the tables, but not among them, whose intervals are widest.

    Each size that a kind of kernel or collective varies in the tables is halved and doubled; of a kind the widest few
    are taken, so that one family does not fill the list.
    """
    frames = [read_table(table) for table in tables if not is_runs(Path(table))]
    tried = [made for frame in frames if len(made := _neighbours(frame))]
    if not tried:
        return Wanted()
    found: list[tuple[float, float, dict[str, Any], list[str]]] = []
    for frame in tried:
        times = predicted_times(frame, table_kind(frame), calibration)
        half = 0.5 * np.log(times.hi_s / times.lo_s)
        known = np.isfinite(half) & (half > SURE)
        records, sizes = frame.to_dict("records"), sizes_of(frame)
        found += [(float(half[i]), float(times.time_s[i]), records[i], sizes) for i in np.flatnonzero(known)]
    found.sort(key=lambda one: -one[0])
    taken: list[tuple[float, float, dict[str, Any]]] = []
    of_kind: dict[tuple[Any, ...], list[np.ndarray]] = {}
    for one in found:
        kind = tuple(one[2].get(name, "") for name in _KIND)
        sizes = np.array([np.log2(max(float(one[2][name]), 1.0)) if present(one[2][name]) else 0.0 for name in one[3]])
        others = of_kind.setdefault(kind, [])
        if len(others) < MOST_OF_KIND and all(abs(sizes - other).max() >= 1.0 for other in others):
            others.append(sizes)
            taken.append(one[:3])
        if len(taken) == MOST:
            break
    labels = [str(row_labels(pd.DataFrame([record])).iloc[0]) for *_, record in taken]
    wanted = tuple(
        Measurement(what=label, device=str(record["device"]), predicted_s=time_s, half_width=expm1(half))
        for label, (half, time_s, record) in zip(labels, taken, strict=True)
    )
    return Wanted(
        wanted,
        _plan([record for *_, record in taken]),
        f"Shapes half or twice as large as measured ones, widest intervals first, at most {MOST_OF_KIND} of a kind.",
    )


def _neighbours(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows with one varied size halved or doubled that the table does not hold."""
    numbers = [name for name in sizes_of(frame) if name not in _FIXED]
    labels = [name for name in (*_KIND, "interconnect", "source", *_FIXED) if name in frame]
    identity = [*labels, *numbers]
    parts = []
    for _, own in frame.groupby(labels, dropna=False, sort=True):
        kind = pd.DataFrame(own)
        some = kind.iloc[:: max(1, -(-len(kind) // MOST_TRIED))]
        for name in numbers:
            if len(set(kind[name].dropna().tolist())) < 2:
                continue
            for factor in (0.5, 2.0):
                size = some[name] * factor
                whole = size.notna() & (size >= 1) & (size == np.floor(size))
                parts.append(some[whole].assign(**{name: size[whole]}))
    if not parts:
        return frame.iloc[:0]
    made = pd.concat(parts, ignore_index=True).drop_duplicates(identity)
    made = made.merge(frame[identity].drop_duplicates().assign(_known=True), on=identity, how="left")
    return pd.DataFrame(made[made["_known"].isna()]).drop(columns="_known").reset_index(drop=True)


def _plan(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of the first one's device as a plan; empty where no collector measures any."""
    here = [record for record in rows if record["device"] == rows[0]["device"]] if rows else []
    ops = [op for record in here if (op := _op_of(record)) is not None]
    if not ops:
        return ""
    rule = StoppingRule()
    links = next((str(record["interconnect"]) for record in here if present(record.get("interconnect"))), INTERCONNECT)
    return plan_text(
        Plan(
            device=str(here[0]["device"]),
            rule=rule,
            collective_rule=rule,
            kernels=tuple(op for op in ops if not isinstance(op, Collective)),
            collectives=tuple(op for op in ops if isinstance(op, Collective)),
            kernel_table="kernels.csv",
            collective_table="collectives.csv",
            attempts=3,
            patience_s=0.0,
            interconnect=links,
        )
    )


def _op_of(record: dict[str, Any]) -> Op | None:
    """The op that a record measures; `None` where no collector does, or the record lacks a size."""
    family = record.get("op_family")
    kind: Any = Collective if "collective" in record else MEASURED_FAMILIES.get(str(family))
    if kind is None:
        return None
    said = {"pass_" if name == "pass" else str(name): value for name, value in record.items() if present(value)}
    words: dict[str, Any] = {f.name: said[f.name] for f in fields(kind) if f.name in said}
    words = {name: int(v) if isinstance(v, float) and v == int(v) else v for name, v in words.items()}
    try:
        op = kind(**words)
        if not isinstance(op, Collective):
            check_kernel(op)
    except (PerfModelError, TypeError):
        return None
    return op
