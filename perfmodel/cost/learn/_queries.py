"""Queries to regressors and their answers, also from rows of measurement tables."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64

from perfmodel.cost.learn.rows import Rows, physics_of, rows_from_table
from perfmodel.cost.learn.stack import Figures, in_catalog
from perfmodel.ingest import clean_kernels
from perfmodel.ingest.tables import factorise, relabel, text
from perfmodel.ops import KernelKind, Physics
from perfmodel.ops.physics import Machine
from perfmodel.units import DTYPE_BYTES

if TYPE_CHECKING:
    import pandas as pd

PROVENANCE: Final = ("measured", "learned", "extrapolated", "analytical")
"""Provenances in order of trust; codes of `Prediction.provenance` index into it."""


class Query(NamedTuple):
    """The target of a query: a device, and optionally a software."""

    figures: Figures
    source: str | None = None
    software: str | None = None


class Prediction(NamedTuple):
    """Log seconds [n] with 90 % bounds and provenance codes."""

    log_time: Float64[np.ndarray, "n"]
    log_low: Float64[np.ndarray, "n"]
    log_high: Float64[np.ndarray, "n"]
    provenance: Int64[np.ndarray, "n"]

    @classmethod
    def empty(cls, n: int) -> "Prediction":
        """An empty answer of length `n`."""
        return cls(np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n, np.int64))

    @classmethod
    def around(
        cls, log_time: Float64[np.ndarray, "n"], half_width: float, provenance: str
    ) -> "Prediction":
        """Times with intervals of one half-width in log time."""
        code = np.full(len(log_time), PROVENANCE.index(provenance))
        return cls(log_time, log_time - half_width, log_time + half_width, code)

    def take(self, index: np.ndarray) -> "Prediction":
        """The answers at `index`."""
        return Prediction(*(column[index] for column in self))

    def put(self, index: np.ndarray, answers: "Prediction") -> None:
        """Set the answers at positions."""
        for column, values in zip(self, answers, strict=True):
            column[index] = values

    def move(self, index: np.ndarray, log_by: Float64[np.ndarray, "m"]) -> None:
        """Increase the times at positions, together with their intervals."""
        for log in (self.log_time, self.log_low, self.log_high):
            log[index] += log_by

    def at_least(self, index: np.ndarray, log_least: Float64[np.ndarray, "m"]) -> None:
        """Bound the times at positions, and the ends of their intervals, from below."""
        for log in (self.log_time, self.log_low, self.log_high):
            log[index] = np.maximum(log[index], log_least)


@dataclass(frozen=True)
class PriceQuery:
    """Rows with their queries."""

    rows: Rows
    queries: tuple[Query, ...]
    query: Int64[np.ndarray, "n"]
    """Index into `queries` of every row."""
    host_launch: bool = False
    """Whether requested times include the host's launch, as eager measurements do."""

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, index: np.ndarray) -> "PriceQuery":
        """The rows at `index`."""
        return replace(self, rows=self.rows.take(index), query=self.query[index])

    def with_rows(self, rows: Rows) -> "PriceQuery":
        """The request with other rows of the same queries."""
        return replace(self, rows=rows)

    def of_query(self, fact: Callable[[Query], Any]) -> np.ndarray:
        """Read an attribute of each row's query, as an array [n]."""
        return np.array([fact(query) for query in self.queries])[self.query]

    def log_of(
        self, seconds: Callable[[Figures, Rows], Float64[np.ndarray, "m"]]
    ) -> Float64[np.ndarray, "n"]:
        """Log of a time computed from each row and the figures of its device."""
        log_time = np.zeros(len(self))
        for number in np.unique(self.query).tolist():
            index = np.flatnonzero(self.query == number)
            log_time[index] = np.log(seconds(self.queries[number].figures, self.rows.take(index)))
        return log_time

    def combinations(self) -> tuple[list[tuple[Query, KernelKind]], np.ndarray]:
        """The distinct pairs of query and kind, and the index of each row's [n]."""
        kinds = self.rows.kinds
        # a pair as one number, as sorting these is much faster than comparing records
        numbers, pair_of = np.unique(self.query * len(kinds) + self.rows.kind, return_inverse=True)
        pairs = []
        for number in numbers.tolist():
            query, kind = divmod(number, len(kinds))
            pairs.append((self.queries[query], kinds[kind]))
        return pairs, pair_of


class RowsAndHalves(NamedTuple):
    """Rows of a request together with rows of half their batches."""

    request: PriceQuery
    """The `m` distinct rows, in ascending order of their batches."""
    place: Int64[np.ndarray, "n"]
    """Index of every requested row among them."""
    half: Int64[np.ndarray, "m"]
    """Index of each row's half; its own index if it is not divided."""


def with_half_batches(request: PriceQuery, divided: Bool[np.ndarray, "n"]) -> RowsAndHalves:
    """Distinct rows of a request and of its halves: half the batch, a quarter and so on while it is
    divisible.

    Args:
        divided: whether the halves of a row are needed.
    """
    rows = request.rows

    # Level by level: the rows as they are, then halves of those that divide, then halves of these.
    # `source` is the row that a part comes from, `half` its place among all parts of its own half
    # (itself, until it is divided).
    source = np.arange(len(request))
    batch = rows.shape["batch"]
    place = np.arange(len(request))
    sources, batches, halves = [], [], []
    n_parts = 0
    while True:
        sources.append(source)
        batches.append(batch)
        half = place.copy()
        halves.append(half)
        n_parts += len(source)

        # The next level: halves of those that divide, placed behind all parts so far.
        even = np.flatnonzero(divided[source] & (batch % 2 == 0) & (batch > 1))
        if not len(even):
            break
        place = n_parts + np.arange(len(even))
        half[even] = place
        source = source[even]
        batch = batch[even] / 2
    source = np.concatenate(sources)
    batch = np.concatenate(batches)
    half = np.concatenate(halves)

    # Keep one of equal parts. The batch comes first in the key, so that `unique` sorts by it.
    other_columns = (values[source] for name, values in rows.shape.items() if name != "batch")
    key = np.column_stack([batch, request.query[source], rows.kind[source], *other_columns])
    _, first, place = np.unique(key, axis=0, return_index=True, return_inverse=True)
    distinct = request.take(source[first])
    distinct = distinct.with_rows(distinct.rows.changed({"batch": batch[first]}))
    return RowsAndHalves(distinct, place[: len(request)], place[half[first]])


@dataclass(frozen=True)
class TableQueries:
    """Rows of a table with their queries."""

    rows: Rows
    queries: tuple[Query, ...]
    query: Int64[np.ndarray, "n"]
    reasons: np.ndarray
    """`skipped: why` per row, empty if the row can be priced (object dtype)."""
    host_launch: np.ndarray
    """Whether the row's time contains the host's launch, bool[n]."""

    def parts(self) -> Iterator[tuple[np.ndarray, PriceQuery]]:
        """The rows that can be answered, with their positions, in two parts: timed without the
        host's launch, and with it."""
        for host_launch in (False, True):
            index = np.flatnonzero((self.reasons == "") & (self.host_launch == host_launch))
            if len(index):
                yield (
                    index,
                    PriceQuery(self.rows.take(index), self.queries, self.query[index], host_launch),
                )


def table_rows(table: "pd.DataFrame", family: str) -> TableQueries:
    """Convert a table's rows of one family to queries; unknown devices, dtypes and shapes get a
    reason."""
    device_code, devices = factorise(text(table, "device"))
    figures = [in_catalog(name) for name in devices]
    table = clean_kernels(table)
    rows, complete = rows_from_table(table, family)

    # A row has one reason: the last of these that holds.
    reasons = np.full(len(table), "", object)
    reasons[~complete] = "skipped: a shape column is empty"
    known_dtype = relabel(text(table, "dtype"), lambda d: d in DTYPE_BYTES or d.startswith("fp8"))
    reasons[~known_dtype.astype(bool)] = "skipped: unknown dtype"
    flaw = table["flaw"].to_numpy(object)
    reasons[flaw != ""] = "skipped: " + flaw[flaw != ""]
    unknown = np.array([f is None for f in figures])[device_code]
    reasons[unknown] = "skipped: unknown device"

    # One query per device and software. Rows of unknown devices are never asked; a known device
    # stands in for theirs, so that the index of queries fits all rows.
    software_code, labels = factorise(text(table, "source") + "\t" + text(table, "software"))
    joint = device_code * len(labels) + software_code
    distinct, query = np.unique(joint, return_inverse=True)
    any_known = next((f for f in figures if f is not None), None)
    queries = []
    for value in distinct:
        source, _, software = labels[value % len(labels)].partition("\t")
        device = figures[value // len(labels)] or any_known
        if device is not None:
            queries.append(Query(device, source or None, software or None))
    return TableQueries(rows, tuple(queries), query, reasons, table["host_launch"].to_numpy(bool))


def kernel_physics(figures: Figures, rows: Rows) -> tuple[Physics, Machine]:
    """FLOPs, traffic and waves of rows on one device, and the device's figures per row."""
    return physics_of([figures], np.zeros(len(rows), np.int64), rows)
