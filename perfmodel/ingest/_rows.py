"""Measurements as table rows, completed by the user's facts; repeats of a shape become one row,
their median."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, get_args

import pandas as pd

from perfmodel import catalog
from perfmodel.errors import PerfModelError, TableError, UnknownNameError
from perfmodel.ops import CollectiveKind

Row = dict[str, Any]
"""Value of each column; unknown values are left out."""

_FIRST: Final = (
    "source",
    "device",
    "interconnect",
    "op_family",
    "op",
    "collective",
    "algorithm",
    "dtype",
    "pass",
)
_LAST: Final = ("time_us", "time_us_std", "n_repeats", "software", "variant")
_LARGEST: Final = 2**62
_MEASURED: Final = ("time_us", "time_us_std", "n_repeats")


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Facts that the user states about the files; a file is refused only if it contradicts them."""

    device: str = ""
    """Name for the `device` column instead of the one in the file."""
    ranks: int | None = None
    """Number of ranks for collectives in files that do not state it."""
    ranks_per_node: int | None = None
    collective: str = ""
    """Kind of collective, as in the tables (all_to_all), for logs that do not print the program's
    name."""

    def __post_init__(self) -> None:
        for name in ("ranks", "ranks_per_node"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PerfModelError(f"{name} must be at least 1, got {value}")
        kinds = get_args(CollectiveKind)
        if self.collective and self.collective not in kinds:
            raise UnknownNameError("collective", self.collective, kinds)

    def nodes(self, ranks: int) -> dict[str, int]:
        """Columns that place a group of ranks on nodes, if the user states the ranks per node."""
        if self.ranks_per_node is None:
            return {}
        per_node = min(self.ranks_per_node, ranks)
        return {"num_nodes": -(-ranks // per_node), "ranks_per_node": per_node}

    def name_of(self, reported: str) -> str:
        """The device's name: from the user, else the catalog's name for the reported device, else
        the reported name."""
        return self.device or _catalog_name(reported.strip())


_FORMS: Final = (
    (re.compile(r"A100-SXM(?:4)?-(40|80)GB", re.I), "A100-SXM4-{}GB"),
    (re.compile(r"A100-PCIE-(40|80)GB|A100 (80)GB PCIe", re.I), "A100-PCIE-{}GB"),
    (re.compile(r"H100 80GB HBM3", re.I), "H100-SXM5-80GB"),
    (re.compile(r"H100 PCIe", re.I), "H100-PCIE-80GB"),
    (re.compile(r"H100 NVL", re.I), "H100-NVL-94GB"),
    (re.compile(r"\bH200$", re.I), "H200-SXM-141GB"),
    (re.compile(r"\bB200$", re.I), "B200-SXM-180GB"),
    (re.compile(r"GH200 (?:480|120)GB|GH200-96GB", re.I), "GH200-96GB"),
    (re.compile(r"V100-SXM2-(16|32)GB", re.I), "V100-SXM2-{}GB"),
    (re.compile(r"V100-PCIE-(16|32)GB", re.I), "V100-PCIE-{}GB"),
)
"""Drivers' names of boards that have another name in the catalog."""


def _catalog_name(reported: str) -> str:
    # Drivers name a board by its memory where the catalog needs the socket too, and the clusters
    # follow from that.
    for form, name in _FORMS:
        board = form.search(reported)
        if board:
            memory_gb = next((group for group in board.groups() if group), "")
            return name.format(memory_gb)
    bare_name = re.sub(r"^(NVIDIA|AMD|Tesla)\s+(GeForce\s+|Instinct\s+|Tesla\s+)?", "", reported)
    try:
        return catalog.device(bare_name).name if bare_name else ""
    except UnknownNameError:
        return reported


class CollectiveCalls:
    """Times of the kernels of collectives on each device.

    A kernel waits for devices that arrive later; only the kernel of the last device does not wait.
    If all devices of a group were recorded, the shortest kernel of a collective is therefore its
    time; otherwise every kernel's time counts.
    """

    def __init__(self) -> None:
        self._calls: dict[tuple[Any, ...], dict[object, list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self._row: dict[tuple[Any, ...], Row] = {}

    def add(self, row: Row, group: str, device: object, time_us: float) -> None:
        """A kernel of a collective of a group of devices, in the order in which the device ran
        them."""
        key = (group, *row.values())
        self._row[key] = row
        self._calls[key][device].append(time_us)

    def rows(self) -> list[Row]:
        """A row per collective."""
        rows: list[Row] = []
        for key, times_by_device in self._calls.items():
            row = self._row[key]
            call_counts = {len(times_us) for times_us in times_by_device.values()}
            all_ranks = len(times_by_device) == row["num_ranks"] > 1
            # The n-th kernels of all devices are one call only if every device ran as many.
            if all_ranks and len(call_counts) == 1:
                variant = "kernel of the last rank to arrive"
                durations_us = list(map(min, *times_by_device.values()))
            else:
                variant = "kernel with the wait for other ranks"
                durations_us = list(chain.from_iterable(times_by_device.values()))
            rows += [row | {"time_us": time_us, "variant": variant} for time_us in durations_us]
        return rows


@dataclass(frozen=True, eq=False)
class Measurements:
    """Kernels and collectives that the files of one format hold."""

    format: str
    kernels: pd.DataFrame
    """A row per kernel, element type and shape (columns as in `perfmodel.ingest.tables`); may be
    empty."""
    collectives: pd.DataFrame
    """A row per collective, size and group; may be empty."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Number of records left out, by reason."""

    def tables(self, kind: str, place: object) -> dict[str, pd.DataFrame]:
        """The tables that hold rows, by kind.

        Args:
            kind: `compute` or `collective` alone; empty: both.
            place: the files, for messages.

        Raises:
            UnknownNameError: another kind.
            TableError: no row; says why records were left out.
        """
        by_kind = {"compute": self.kernels, "collective": self.collectives}
        if kind and kind not in by_kind:
            raise UnknownNameError("kind of table", kind, by_kind)
        chosen = {
            name: table for name, table in by_kind.items() if len(table) and kind in ("", name)
        }
        if not chosen:
            reasons = "; ".join(
                f"{reason}: {count}" for reason, count in list(self.skipped.items())[:3]
            )
            raise TableError(
                f"{place}: it has no row for a table{f': {reasons}' if reasons else ''}"
            )
        return chosen

    def to_dict(self) -> dict[str, Any]:
        """Counts; JSON types only."""
        counts = {"kernels": len(self.kernels), "collectives": len(self.collectives)}
        return {"format": self.format, **counts, "skipped": dict(self.skipped)}


def measurements(format: str, rows: Iterable[Row], skipped: Mapping[str, int]) -> Measurements:
    """Rows of both kinds, repeats joined."""
    counts = Counter(skipped)
    kernels: list[Row] = []
    collectives: list[Row] = []
    for row in rows:
        # Columns of pandas are int64: a larger size would become a column of objects, or an error
        # far from its cause.
        if any(isinstance(value, int) and value >= _LARGEST for value in row.values()):
            counts["a size beyond that of any tensor"] += 1
        else:
            (collectives if "collective" in row else kernels).append(row)
    return Measurements(format, _joined(kernels), _joined(collectives), dict(counts.most_common()))


def _joined(rows: list[Row]) -> pd.DataFrame:
    """Median of equal rows, with their standard deviation if there are several, else the one that
    the row states."""
    if not rows:
        return pd.DataFrame()
    table = pd.DataFrame(rows)
    for name in _LAST:
        if name not in table:
            table[name] = None
    table["n_repeats"] = table["n_repeats"].fillna(1)
    # Repeats differ in nothing but their times. The median, since single calls wait for clocks,
    # hosts and other ranks.
    keys = [name for name in table.columns if name not in _MEASURED]
    groups = table.groupby(keys, dropna=False, sort=False)
    joined = groups.agg(
        time_us=("time_us", "median"),
        spread=("time_us", "std"),
        time_us_std=("time_us_std", "first"),
        n_repeats=("n_repeats", "sum"),
    ).reset_index()
    stated = pd.Series(joined["time_us_std"], dtype=float)
    # A single repeat has no spread in pandas, but the benchmark may have stated one.
    joined["time_us_std"] = joined["spread"].where(joined["spread"].notna(), stated)
    joined["n_repeats"] = joined["n_repeats"].astype(int)
    names = [name for name in joined.columns if name != "spread"]
    order = [name for name in _FIRST if name in names]
    order += [name for name in names if name not in _FIRST and name not in _LAST]
    order += _LAST
    return joined.loc[:, order]
