"""Collective rows as kriging points, in families small enough for exact kriging."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfmodel.learn._collective_table import CollectiveRows
from perfmodel.learn._kriging import Component, Points

COMPONENTS: Final = (
    Component(("machine", "kind", "way"), ("size", "ranks")),
    Component(("machine", "kind", "way", "placement"), ("size",)),
    Component(("machine", "kind", "way", "placement"), ("size",), rough=True),
    Component(("machine", "kind", "way", "placement", "stack"), ("size",), rough=True),
    Component(("machine", "kind", "way", "placement", "dtype"), ("size",)),
    Component(("kind", "way", "placement"), ("size",)),
    Component(("machine", "placement", "stack"), ("size",)),
    Component(("machine", "way"), ("chunk", "ranks")),
    Component(("kind", "way", "dtype", "exact")),
    Component(("kind", "way", "dtype", "exact", "machine")),
)
"""In words: this kind here over rank counts; this placement, smooth and with jumps; a library version; a
dtype; other devices of the same sweep; other kinds here; per-rank chunks over kinds; and what one exact
size does on every device (frameworks that pad or copy misaligned tensors)."""

CATEGORIES: Final = ("machine", "kind", "way", "placement", "stack", "dtype", "exact")
COORDINATES: Final = ("size", "ranks", "chunk")
SHORT_S: Final = 8e-6
"""Times below this are as noisy as the clock."""
MOST_POINTS: Final = 4200
DENSE_SERIES: Final = 256
BINS: Final = 224


@dataclass(frozen=True)
class Family:
    """Rows that inform one another."""

    name: str
    rows: np.ndarray
    """Which rows belong, int[m]."""


def families(rows: CollectiveRows, most: int = MOST_POINTS) -> Iterator[Family]:
    """One family per source and algorithm; those with more than `most` points by kind, then by device too."""
    names = family_names(rows)
    pending = [(0, index) for index in _parts(names[0], np.arange(len(rows)))]
    for depth, index in pending:
        if depth + 1 < len(names) and _distinct(rows, index) > most:
            pending += [(depth + 1, part) for part in _parts(names[depth + 1], index)]
        else:
            yield Family(str(names[depth][index[0]]), index)


def _parts(names: np.ndarray, index: np.ndarray) -> Iterator[np.ndarray]:
    for name in np.unique(names[index].astype(str)):
        yield index[names[index] == name]


def _distinct(rows: CollectiveRows, index: np.ndarray) -> int:
    return int(point_labels(rows.take(index)).max(initial=-1)) + 1


def family_names(rows: CollectiveRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The names under which a row's family may be stored, coarse to fine; str[n] each."""
    source = _join(rows.part(0), rows.part(4))
    by_kind = _join(source, rows.kind)
    return source, by_kind, _join(by_kind, rows.part(1))


def point_labels(rows: CollectiveRows) -> np.ndarray:
    """Which rows make one point, int[n]: equal keys, or neighbours in size within a dense sweep."""
    entry = _codes(rows.series, rows.stack, rows.dtype, rows.ranks, rows.ranks_per_node)
    place = np.zeros(len(rows), dtype=np.int64)
    size = np.log2(rows.buffer_bytes)
    for code in range(entry.max(initial=-1) + 1):
        index = np.flatnonzero(entry == code)
        _, exact = np.unique(rows.buffer_bytes[index], return_inverse=True)
        if exact.max() >= DENSE_SERIES:
            span = size[index] - size[index].min()
            exact = np.floor(span / max(span.max(), 1e-9) * (BINS - 1e-6)).astype(np.int64)
        place[index] = exact
    return _codes(entry, place)


def as_points(rows: CollectiveRows, curve_s: np.ndarray) -> Points:
    """Categories and coordinates of rows; `curve_s` is their physical curve [s]."""
    machine = _join(rows.part(0), rows.part(1), rows.part(2))
    placement = _join(rows.ranks.astype(str), rows.ranks_per_node.astype(str))
    size, ranks = np.log2(rows.buffer_bytes), np.log2(rows.ranks)
    return Points(
        categories={
            "machine": machine,
            "kind": rows.kind,
            "way": _join(rows.part(4), rows.part(5)),
            "placement": placement,
            "stack": rows.stack,
            "dtype": rows.dtype,
            "exact": rows.buffer_bytes.astype(str).astype(object),
        },
        coordinates={"size": size, "ranks": ranks, "chunk": size - ranks},
        unrest=np.minimum(1.0, (SHORT_S / curve_s) ** 2),
    )


def shape_blocks(rows: CollectiveRows) -> np.ndarray:
    """Rows of one whole shape: same device, kind, placement and size, whatever dtype or software; int[n]."""
    return _codes(rows.part(1), rows.kind, rows.ranks, rows.ranks_per_node, rows.buffer_bytes)


def likelihood_sample(rows: CollectiveRows, most: int, seed: int) -> np.ndarray:
    """A sample of points: one repeat of every shape of as many (device, kind) pairs as fit, then others."""
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(rows))
    _, first = np.unique(shape_blocks(rows)[order], return_index=True)
    single = order[first]
    if len(single) <= most:
        rest = np.setdiff1d(order, single)
        return np.concatenate([single, generator.permutation(rest)[: most - len(single)]])
    pair = _codes(rows.part(1), rows.kind)
    chosen: list[int] = []
    for code in generator.permutation(np.unique(pair)):
        chosen.extend(single[pair[single] == code])
        if len(chosen) >= most:
            break
    return np.array(chosen[:most])


def _join(*columns: np.ndarray) -> np.ndarray:
    result = columns[0].astype(object)
    for column in columns[1:]:
        result = result + "|" + column.astype(object)
    return result


def _codes(*columns: np.ndarray) -> np.ndarray:
    label = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        _, code = np.unique(column.astype(str) if column.dtype == object else column, return_inverse=True)
        label = np.unique(label * (code.max(initial=0) + 1) + code, return_inverse=True)[1]
    return label
