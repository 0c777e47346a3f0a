"""Estimates the duration of a plan, and finds rows that are already measured.

The stopping rule bounds a row (`measuring_s`). Between the fewest samples and the most, rows are
taken to need `TYPICAL_REPEATS` times the fewest. The time of a call is a guess from outside (a
calibrated model or a roofline); where there is none, calls are taken to be shorter than
`min_sample_s`. Once rows are measured, what they took corrects the rest, family by family.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from typing import Any, Final

from perfmodel.display import shorten_reprs
from perfmodel.errors import CalibrationError
from perfmodel.ingest.tables import read_table
from perfmodel.measure._plan import Plan
from perfmodel.measure.backends import geometric_runs
from perfmodel.measure.tables import (
    PartialFile,
    Point,
    Record,
    Row,
    card_path,
    collector_sha256,
    is_suspect,
    point_key,
    present,
    read_card,
    row_key,
    software,
)
from perfmodel.measure.timing import WARMUP_CALLS, MachineMeter, StoppingRule, sampling_s
from perfmodel.ops import Collective, Op

TYPICAL_REPEATS: Final = 4
"""Typical number of samples of a row relative to `min_repeats`; the median of
datasets/cpu_kernels.csv is 4.5, including those set aside."""
_BUNDLING_CALLS: Final = 1
"""Number of calls, after the warm-up, that determine how many calls a sample bundles."""
SETUP_S: Final = {"jax": 0.35, "torch": 0.05, "nccl-tests": 0.0}
"""Seconds to build and compile one op and its inputs, by backend."""
GROUP_START_S: Final = 6.0
"""Seconds to start a group of ranks."""
PROGRAM_START_S: Final = 15.0
"""Seconds to start a program of nccl-tests on all nodes."""
FLUSH_S: Final = 0.02
"""Seconds to flush the caches before a cold call."""
TRUST_S: Final = 20.0
"""Measured seconds of one family that have the same weight as the information from all families."""

GuessCalls = Callable[[Sequence[Point]], Sequence[float]]
"""Function that returns the seconds of one call of each point; NaN if unknown."""


@dataclass(frozen=True)
class PointEstimate:
    """Estimated effort of measuring one row."""

    key: str
    """What identifies the row (`point_key`)."""
    family: str
    """Op family, or `collective`."""
    seconds: float
    devices: int
    """Number of devices that are busy during the measurement."""


def estimate_plan(plan: Plan, backend: str, guess: GuessCalls) -> list[PointEstimate]:
    """Estimate every row of a plan, in measuring order."""
    kernel_points = (*plan.kernel_points, *plan.beside_points)
    points = (*kernel_points, *plan.collective_points)
    # All guesses in one call, as a model prices many ops at once.
    call_s = guess(points)
    n_kernels = len(kernel_points)
    seconds = []
    for point, kernel_s in zip(kernel_points, call_s[:n_kernels], strict=True):
        load_s = plan.load_s if point.loaded else 0.0
        start_s = GROUP_START_S if point.beside is not None else 0.0
        seconds.append(load_s + start_s + _kernel_s(point, plan.rule, kernel_s, SETUP_S[backend]))
    if backend == "nccl-tests":
        seconds += _nccl_tests_s(plan, call_s[n_kernels:])
    else:
        seconds += _collectives_s(plan, backend, call_s[n_kernels:])
    return [_estimate(point, row_s) for point, row_s in zip(points, seconds, strict=True)]


def _nccl_tests_s(plan: Plan, call_s: Sequence[float]) -> list[float]:
    """Seconds of each collective's row, measured by nccl-tests."""
    calls = plan.nccl_tests.calls_per_size if plan.nccl_tests else 0

    # A program measures a whole run of sizes, which share the time that it takes to start.
    start_s = []
    for run, _ in geometric_runs(plan.collective_points):
        start_s += [PROGRAM_START_S / len(run)] * len(run)
    return [
        row_start_s + calls * _known(row_call_s)
        for row_start_s, row_call_s in zip(start_s, call_s, strict=True)
    ]


def _collectives_s(plan: Plan, backend: str, call_s: Sequence[float]) -> list[float]:
    """Seconds of each collective's row, measured on our own ranks."""
    # Ranks on CPUs are metered by counters of the system, which want long samples.
    rule = plan.collective_rule.resolved_by(MachineMeter(()))
    seconds = []
    group_ranks = 0
    for point, row_call_s in zip(plan.collective_points, call_s, strict=True):
        row_s = samples_s(rule, row_call_s) + SETUP_S[backend]
        # A new group is started where the number of ranks changes.
        if point.collective.num_ranks != group_ranks:
            row_s += GROUP_START_S
            group_ranks = point.collective.num_ranks
        seconds.append(row_s)
    return seconds


def kept_rows(plan: Plan, folder: Path) -> dict[str, Row]:
    """Read the rows that a run left in the folder, finished or not, by `point_key`."""
    # An interrupted run has copied the finished table's rows to the partial one when it began.
    rows: dict[str, Row] = {}
    for name in (plan.kernel_table, plan.beside_table, plan.collective_table):
        records = PartialFile(folder / f".{name}.partial", {}).read(any_header=True)
        if records is not None:
            rows |= {record.key: record.row for record in records}
        elif (folder / name).is_file():
            for record in read_table(folder / name).to_dict("records"):
                row = {str(column): value for column, value in record.items()}
                rows[row_key(row)] = row
    return rows


def _estimate(point: Point, seconds: float) -> PointEstimate:
    """The estimate of a row with its identity; a collective keeps a device per rank busy."""
    op = point.op
    devices = op.num_ranks * op.concurrent if isinstance(op, Collective) else 1
    if point.beside is not None:
        devices = point.beside.num_ranks
    return PointEstimate(point_key(point), op.family, seconds, devices)


def _kernel_s(point: Point, rule: StoppingRule, call_s: float, setup_s: float) -> float:
    """Seconds of a kernel's row."""
    # Cold samples are single calls, each after a flush that no limit counts.
    if point.cold:
        calls = WARMUP_CALLS + _BUNDLING_CALLS + TYPICAL_REPEATS * rule.min_repeats
        return setup_s + calls * (FLUSH_S + _known(call_s))
    return setup_s + samples_s(rule, call_s)


def samples_s(rule: StoppingRule, call_s: float) -> float:
    """Seconds of warm-up, bundling and a typical number of samples."""
    call_s = _known(call_s)
    repeats = min(rule.max_repeats, TYPICAL_REPEATS * rule.min_repeats)
    return _BUNDLING_CALLS * call_s + sampling_s(rule, call_s, repeats)


def _known(seconds: float) -> float:
    """Seconds of a call, or 0 if unknown, so that the shortest sample counts."""
    return 0.0 if isnan(seconds) else seconds


@dataclass
class RemainingTime:
    """Remaining time of a plan, corrected by the rows measured so far."""

    estimates: Sequence[PointEstimate]
    """Estimates of the rows that are not measured yet."""
    clock: Callable[[], float] = time.monotonic
    _left: dict[str, PointEstimate] = field(init=False)
    _took_s: dict[str, float] = field(init=False, default_factory=dict)
    _expected_s: dict[str, float] = field(init=False, default_factory=dict)
    _current: PointEstimate | None = field(init=False, default=None)
    _started_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._left = {estimate.key: estimate for estimate in self.estimates}

    @property
    def rows_left(self) -> int:
        """Number of rows not yet started."""
        return len(self._left)

    def start(self, point: Point) -> None:
        """Note the start of a point's measurement and the end of the previous one."""
        now_s = self.clock()
        done = self._current
        if done is not None:
            self._took_s[done.family] = self._took_s.get(done.family, 0.0) + now_s - self._started_s
            self._expected_s[done.family] = self._expected_s.get(done.family, 0.0) + done.seconds

        # A disturbed row that is measured again is not part of the estimate any more.
        self._current = self._left.pop(point_key(point), None)
        self._started_s = now_s

    def device_s(self) -> float:
        """Device-seconds until the plan is done; the current row counts in full."""
        remaining = list(self._left.values())
        if self._current:
            remaining.append(self._current)
        return sum(
            estimate.devices * estimate.seconds * self._ratio(estimate.family)
            for estimate in remaining
        )

    def _ratio(self, family: str) -> float:
        """Measured over expected time of a family, shrunk towards the ratio of all families, which
        is shrunk towards 1."""
        # `TRUST_S` is the weight of the prior in both: with few measured seconds it decides.
        took_s = sum(self._took_s.values())
        expected_s = sum(self._expected_s.values())
        overall = (took_s + TRUST_S) / (expected_s + TRUST_S)
        family_took_s = self._took_s.get(family, 0.0)
        family_expected_s = self._expected_s.get(family, 0.0)
        return (family_took_s + TRUST_S * overall) / (family_expected_s + TRUST_S)


def summary(estimates: Iterable[PointEstimate]) -> dict[str, Any]:
    """Rows, device-minutes and minutes per family and in all, as `--dry-run` prints them."""
    # A row of n ranks occupies n devices: users pay for device-minutes and wait for minutes.
    families: dict[str, dict[str, float]] = {}
    for estimate in estimates:
        family = families.setdefault(
            estimate.family, {"rows": 0, "device_minutes": 0.0, "minutes": 0.0}
        )
        family["rows"] += 1
        family["device_minutes"] += estimate.devices * estimate.seconds / 60
        family["minutes"] += estimate.seconds / 60
    total = {}
    for name in ("rows", "device_minutes", "minutes"):
        total[name] = sum(family[name] for family in families.values())
    return {**total, "families": families}


def finished_rows(path: Path, device: str, packages: Sequence[str]) -> list[Record]:
    """Rows of the table at `path`; empty if there is none.

    Raises:
        CalibrationError: if the table was measured on another device, or with another collector or
            software: rows of one table are measured alike, and what was measured is not
            overwritten.
    """
    if not path.exists():
        return []
    away = "move it away, or choose another folder"
    if not card_path(path).exists():
        raise CalibrationError(
            f"{path}: the table's card ({card_path(path).name}) is missing; {away}"
        )
    card = read_card(path)
    expected = {
        "device": device,
        "collector_sha256": collector_sha256(),
        "software": software(packages),
    }
    differing = [name for name, value in expected.items() if getattr(card, name) != value]
    if differing:
        raise CalibrationError(
            f"{path}: the table was measured with another {', '.join(differing)}; {away}"
        )

    # Columns that an op lacks are empty cells in the table, and absent in a row; `variant` is
    # always there.
    records = []
    for read_row in read_table(path).to_dict("records"):
        row = {
            str(name): value
            for name, value in read_row.items()
            if present(value) or name == "variant"
        }
        records.append(Record(row_key(row), row, earlier=True))
    return records


def recorded_s(plan: Plan, folder: Path | str) -> dict[Op, float]:
    """Seconds of the plan's ops in a folder's tables, if measured undisturbed as usual."""
    rows_by_key = kept_rows(plan, Path(folder))
    seconds = {}
    for point in (*plan.kernel_points, *plan.collective_points):
        row = rows_by_key.get(point_key(point))
        if not point.state and row is not None and not is_suspect(row):
            seconds[point.op] = row["time_us"] * 1e-6
    return seconds


shorten_reprs(__name__)
