"""Suggests what to measure next, where a calibration's intervals are widest."""

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
from perfmodel.measure import Plan, plan_text
from perfmodel.measure.backends import INTERCONNECT, MEASURED_FAMILIES, check_kernel
from perfmodel.measure.tables import present
from perfmodel.measure.timing import StoppingRule
from perfmodel.ops import Collective, Op
from perfmodel.prediction import event_shares, layout_of, priced_events, step_problem_of
from perfmodel.spec import Layout, Problem
from perfmodel.validation._parity import is_runs, predicted_times, row_labels, sizes_of

MOST: Final = 24
"""Number of proposed measurements."""
MOST_OF_KIND: Final = 3
"""Most proposals for one kind of kernel or collective if the tables show which shapes matter."""
MOST_TRIED: Final = 300
"""Number of measured rows of a kind whose neighbours are considered."""
SURE: Final = 0.02
"""Half-width of an interval that one more measurement would not narrow."""
_FIXED: Final = frozenset({"num_ranks", "num_nodes", "ranks_per_node"})
"""Columns that describe the machine, not the work."""
_KIND: Final = ("device", "op_family", "op", "collective", "dtype", "pass")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One suggested measurement."""

    what: str
    device: str
    predicted_s: float
    half_width: float
    """Half-width of its 90 % interval, as a share of the predicted time."""
    step_share: float | None = None
    """Share of the step's time, if the suggestions are for a step."""


@dataclass(frozen=True)
class WantedMeasurement:
    """Suggested measurements, most informative first, with a plan that makes them."""

    wanted: tuple[Measurement, ...] = ()
    plan: str = ""
    """TOML for `perfmodel calibrate --plan`; empty if no collector can measure them."""
    description: str = ""
    """Sentence about the errors that the suggestions are based on."""


def of_step(problem: Problem, layout: Layout | str, calibration: Path | None) -> WantedMeasurement:
    """Events of a layout's step, by share of the step times half-width of their interval.

    Raises:
        LayoutError: if the model cannot have the layout.
    """
    laid_out, _ = layout_of(problem, layout)
    priced = step_problem_of(problem, calibration)
    shares = event_shares(priced, laid_out)
    times = priced_events(priced, shares.ops)
    half_width_log = 0.5 * np.log(np.maximum(times.hi_s, 1e-30) / np.maximum(times.lo_s, 1e-30))
    # The uncertainty that an event contributes to the step: its share of the step times its own
    # uncertainty.
    share = shares.critical_s / shares.step_time_s
    unsure = (half_width_log > SURE) & (share > 0)
    by_doubt = np.argsort(-share * half_width_log, kind="stable")
    order = by_doubt[unsure[by_doubt]][:MOST].tolist()
    device = problem.cluster.device.name
    candidates = [
        Measurement(
            what=shares.ops[i].label,
            device=device,
            predicted_s=float(times.time_s[i]),
            half_width=expm1(half_width_log[i]),
            step_share=float(share[i]),
        )
        for i in order
    ]

    # Only events that a collector measures can be in a plan; others are named in the list alone.
    plan_of_model = model_plan(
        problem.model, problem.cluster, problem.job, [laid_out], framework=problem.framework
    )
    full_plan = plan_of_model.plan
    chosen = {shares.ops[i] for i in order}
    plan = replace(
        full_plan,
        kernels=tuple(op for op in full_plan.kernels if op in chosen),
        collectives=tuple(op for op in full_plan.collectives if op in chosen),
    )
    text = plan_text(plan) if plan.kernels or plan.collectives else ""
    return WantedMeasurement(tuple(candidates), text)


@dataclass(frozen=True)
class _Candidate:
    """A shape that was not measured, with its prediction."""

    half_width_log: float
    """Half-width of the logarithm of its time."""
    time_s: float
    record: dict[str, Any]
    sizes: list[str]
    """Columns of the record that are sizes."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """Name of what is measured, apart from its sizes."""
        return tuple(self.record.get(name, "") for name in _KIND)

    def log2_sizes(self) -> np.ndarray:
        """log2 of the sizes; 0 for sizes that are not stated."""
        powers = []
        for name in self.sizes:
            size = self.record[name]
            power = np.log2(max(float(size), 1.0)) if present(size) else 0.0
            powers.append(power)
        return np.array(powers)


def near_shapes(tables: Sequence[Path | str], calibration: Path | None) -> WantedMeasurement:
    """Unmeasured shapes within a factor of two of measured ones, with the widest intervals.

    Each size that a kind of kernel or collective varies in the tables is halved and doubled; of a
    kind the widest few are taken, so that one family does not fill the list.
    """
    frames = [read_table(table) for table in tables if not is_runs(Path(table))]
    neighbours = [_neighbours(frame) for frame in frames]
    neighbours = [frame for frame in neighbours if len(frame)]
    if not neighbours:
        return WantedMeasurement()

    # Only shapes that one more measurement would inform are candidates.
    candidates: list[_Candidate] = []
    for frame in neighbours:
        times = predicted_times(frame, table_kind(frame), calibration)
        half = 0.5 * np.log(times.hi_s / times.lo_s)
        unsure = np.isfinite(half) & (half > SURE)
        records: list[Any] = frame.to_dict("records")
        sizes = sizes_of(frame)
        for i in np.flatnonzero(unsure):
            candidates.append(_Candidate(float(half[i]), float(times.time_s[i]), records[i], sizes))
    candidates.sort(key=lambda candidate: -candidate.half_width_log)

    # No two events of a kind are chosen whose sizes are all within a factor of two, because one
    # would inform the other.
    chosen: list[_Candidate] = []
    taken_sizes: dict[tuple[Any, ...], list[np.ndarray]] = {}
    for candidate in candidates:
        sizes_of_kind = taken_sizes.setdefault(candidate.kind, [])
        log2_sizes = candidate.log2_sizes()
        is_far = all(abs(log2_sizes - taken_before).max() >= 1.0 for taken_before in sizes_of_kind)
        if is_far and len(sizes_of_kind) < MOST_OF_KIND:
            sizes_of_kind.append(log2_sizes)
            chosen.append(candidate)
        if len(chosen) == MOST:
            break

    wanted = []
    for candidate in chosen:
        record = candidate.record
        wanted.append(
            Measurement(
                what=str(row_labels(pd.DataFrame([record])).iloc[0]),
                device=str(record["device"]),
                predicted_s=candidate.time_s,
                half_width=expm1(candidate.half_width_log),
            )
        )
    return WantedMeasurement(
        tuple(wanted),
        _plan([candidate.record for candidate in chosen]),
        f"Shapes half or twice as large as measured ones, widest intervals first, at most {MOST_OF_KIND} of a kind.",
    )


def _neighbours(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows that the table lacks, each with one size of a measured row halved or doubled."""
    numbers = [name for name in sizes_of(frame) if name not in _FIXED]
    labels = [name for name in (*_KIND, "interconnect", "source", *_FIXED) if name in frame]
    identity = [*labels, *numbers]
    parts = []
    for _, members in frame.groupby(labels, dropna=False, sort=True):
        kind = pd.DataFrame(members)

        # If a kind has many rows, a regular sample is enough to find unmeasured neighbours.
        sampled = kind.iloc[:: max(1, -(-len(kind) // MOST_TRIED))]
        for name in numbers:
            if len(set(kind[name].dropna().tolist())) < 2:
                continue
            for factor in (0.5, 2.0):
                size = sampled[name] * factor
                is_whole = size.notna() & (size >= 1) & (size == np.floor(size))
                parts.append(sampled[is_whole].assign(**{name: size[is_whole]}))
    if not parts:
        return frame.iloc[:0]
    neighbours = pd.concat(parts, ignore_index=True).drop_duplicates(identity)

    # Drop neighbours that the table holds: join with the measured rows, and keep what found no
    # partner.
    known = frame[identity].drop_duplicates().assign(_known=True)
    neighbours = neighbours.merge(known, on=identity, how="left")
    unknown = pd.DataFrame(neighbours[neighbours["_known"].isna()])
    return unknown.drop(columns="_known").reset_index(drop=True)


def _plan(rows: Sequence[dict[str, Any]]) -> str:
    """A plan of the rows on the first row's device; empty if no collector can measure them."""
    # A plan is for one machine: that of the most uncertain shape.
    device_records = [record for record in rows if record["device"] == rows[0]["device"]]
    ops = [op for op in map(_op_of, device_records) if op is not None]
    if not ops:
        return ""
    rule = StoppingRule()
    links = next(
        (
            str(record["interconnect"])
            for record in device_records
            if present(record.get("interconnect"))
        ),
        INTERCONNECT,
    )
    return plan_text(
        Plan(
            device=str(device_records[0]["device"]),
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
    """The op that a record measures; `None` if it has no collector, or a size is missing."""
    family = record.get("op_family")
    kind: Any = Collective if "collective" in record else MEASURED_FAMILIES.get(str(family))
    if kind is None:
        return None
    # Tables hold whole numbers as 4.0 beside empty cells.
    op_fields: dict[str, Any] = {}
    for field_name in (f.name for f in fields(kind)):
        column = "pass" if field_name == "pass_" else field_name
        value: Any = record.get(column)
        if present(value):
            is_whole = isinstance(value, float) and value == int(value)
            op_fields[field_name] = int(value) if is_whole else value
    try:
        op = kind(**op_fields)
        if not isinstance(op, Collective):
            check_kernel(op)
    except (PerfModelError, TypeError):
        return None
    return op
