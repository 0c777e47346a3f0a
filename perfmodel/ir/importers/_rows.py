"""Rows of an op table, and groups of ranks: along a mesh's axes, or as modules write them."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, TypeVar

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.ops import Collective, CollectiveKind, KernelOp
from perfmodel.spec import Cluster

Groups = tuple[tuple[int, ...], ...]
"""Ranks that communicate with one another, group by group; for `send_recv` (source, target)
pairs."""


@dataclass(frozen=True, slots=True)
class KernelRow:
    """Equal kernels of one device."""

    op: KernelOp
    """Kernel whose time it takes."""
    flops: float
    """FLOPs of one execution, exactly (`op.flops` may round)."""
    bytes: float
    """Bytes read and written by one execution."""
    source: str
    """Name in the imported program; a fused chain has the names of its ops."""
    count: float = 1.0
    """Number of executions."""


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """Equal collectives that one device takes part in."""

    collective: CollectiveKind
    bytes: float
    """Sized as `spec.Collective` does."""
    groups: Groups
    dtype: str
    source: str
    count: float = 1.0

    @property
    def num_ranks(self) -> int:
        """Ranks of the largest group."""
        return max(map(len, self.groups), default=1)

    def on(self, cluster: Cluster) -> Collective:
        """The collective on a cluster whose devices are numbered node by node, like the ranks.

        If the groups lie differently in the network, the one that spans most nodes is used, because
        all ranks wait for the slowest group.

        Raises:
            PerfModelError: a rank that the cluster does not have.
        """
        highest = max(chain.from_iterable(self.groups), default=0)
        cluster.require(highest + 1, "the program")
        # Ranks fill nodes in order.
        nodes = []
        for group in self.groups:
            nodes.append({rank // cluster.devices_per_node for rank in group})
        spans = [len(nodes_of_group) for nodes_of_group in nodes]
        widest = self.groups[spans.index(max(spans))]

        # Groups that leave the same node share its links.
        leaving: Counter[int] = Counter()
        for nodes_of_group in nodes:
            if len(nodes_of_group) > 1:
                leaving.update(nodes_of_group)
        place = cluster.reach(widest)._replace(concurrent=max(leaving.values(), default=1))
        return Collective(
            collective=self.collective,
            bytes=self.bytes,
            num_ranks=len(widest),
            dtype=self.dtype,
            **place._asdict(),
        )


@dataclass(frozen=True, slots=True)
class Unmapped:
    """An operation without a kernel."""

    name: str
    reason: str
    flops: float
    """FLOPs of one execution; one per output element if unknown."""
    count: float = 1.0


Row = TypeVar("Row", KernelRow, CollectiveRow, Unmapped)


def repeated(rows: Iterable[Row], count: float) -> list[Row]:
    """Multiply the counts of rows by `count`."""
    return [replace(row, count=row.count * count) for row in rows]


def merged(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Merge equal rows, in order of first appearance."""
    total: dict[Any, float] = {}
    for row in rows:
        # Layers repeat the same kernels: equal rows are one, with a count.
        once = replace(row, count=1.0)
        total[once] = total.get(once, 0.0) + row.count
    return tuple(replace(once, count=count) for once, count in total.items())


def axis_groups(sizes: Mapping[str, int], axes: Iterable[str]) -> Groups:
    """Groups of ranks that differ only along some axes of a mesh; rank numbers vary fastest along
    the last axis.

    Raises:
        PerfModelError: an axis that the mesh does not have.
    """
    axis_names = tuple(axes)
    missing = [name for name in axis_names if name not in sizes]
    if missing:
        raise PerfModelError(f"mesh axis {missing[0]!r} is not among {', '.join(sizes)}")
    names = list(sizes)
    ranks = np.arange(int(np.prod(list(sizes.values())))).reshape(tuple(sizes.values()))
    # With the axes wanted last, ranks that differ along them only stand side by side.
    others_first = [i for i, name in enumerate(names) if name not in axis_names]
    order = others_first + [names.index(name) for name in axis_names]
    width = int(np.prod([sizes[name] for name in axis_names]))
    return _rows(ranks.transpose(order).reshape(-1, width))


_BRACES: Final = re.compile(r"\{([\d,\s]*)\}")
_IOTA: Final = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH: Final = re.compile(
    r"mesh\[([^\]]*)\](?:, device_ids=\(?\[([\d,]+)\](?:T\(([\d,]+)\))?\)?)?\s*\{([^}]*)\}"
)
_AXIS: Final = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def parse_groups(text: str, n_devices: int) -> Groups:
    """Replica groups in any of HLO's notations; none given means all devices together.

    `{{0,1},{2,3}}`; `[4,2]<=[2,4]T(1,0)`: 0 to 7 as 2 rows of 4, transposed, in 4 groups of 2; and
    `mesh['a'=2,'b'=4] {'b'}`, where `'b':(2)2` names a part of axis b, and
    `device_ids=([4,2]T(1,0))` may say, like an iota or as a list, which device stands where in the
    mesh.

    Raises:
        PerfModelError: another notation.
    """
    text = text.strip()
    # HLO leaves the groups out where all devices take part.
    if text in ("", "{}"):
        return (tuple(range(n_devices)),)
    if text.startswith("{"):
        groups = []
        for group in _BRACES.findall(text[1:-1]):
            if group.strip():
                groups.append(tuple(int(rank) for rank in group.split(",")))
        return tuple(groups)
    # An iota stands for a long list: ranks 0, 1, ... in one shape, transposed, read in another.
    iota = _IOTA.fullmatch(text)
    if iota is not None:
        shape, first_shape, order = (_numbers(part) for part in iota.groups())
        ranks = np.arange(int(np.prod(first_shape))).reshape(first_shape)
        if order:
            ranks = ranks.transpose(order)
        return _rows(ranks.reshape(shape))
    # A mesh has named axes; its groups count positions, at which any device may stand.
    mesh = _MESH.fullmatch(text)
    if mesh is not None:
        named_sizes, ids, order_of_ids, axes = mesh.groups()
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", named_sizes)}
        device = _device_order(ids, order_of_ids, n_devices)
        groups = []
        for group in _mesh_groups(sizes, axes):
            groups.append(tuple(device[position] for position in group))
        return tuple(groups)
    raise PerfModelError(f"replica groups {text!r} have an unknown notation")


def _numbers(text: str | None) -> tuple[int, ...]:
    """Numbers between commas; empty if the text is absent."""
    return tuple(int(n) for n in text.split(",")) if text else ()


def _device_order(ids: str | None, order: str | None, n_devices: int) -> list[int]:
    """Device at each position of a mesh, row by row.

    Args:
        ids: `3,1,0,2` lists the devices; `2,2` is the shape that all of them are laid out in.
            Without it they stand in order.
        order: axes of that shape, `1,0` for a transposed one.
    """
    if ids is None:
        return list(range(n_devices))
    numbers = _numbers(ids)
    if order is None and sorted(numbers) == list(range(len(numbers))):
        return list(numbers)
    in_order = np.arange(int(np.prod(numbers))).reshape(numbers)
    return in_order.transpose(_numbers(order) or None).ravel().tolist()


def _mesh_groups(sizes: dict[str, int], axes: str) -> Groups:
    """Groups along axes, some of which may be parts of axes: `'b':(m)k` has size k, and m is the
    product of the parts of 'b' before it (Shardy's sub-axis notation)."""
    # A part of an axis is an axis of its own once the axis is split into (before, part, after).
    split: dict[str, int] = {}
    axis_names: list[str] = []
    parts = {name: (int(before), int(size)) for name, before, size in _AXIS.findall(axes) if before}
    for name, size in sizes.items():
        if name not in parts:
            split[name] = size
            continue
        before, part = parts[name]
        split |= {
            f"{name}:before": before,
            f"{name}:part": part,
            f"{name}:after": size // (before * part),
        }
    for name, before, _ in _AXIS.findall(axes):
        axis_names.append(f"{name}:part" if before else name)
    return axis_groups(split, axis_names)


def _rows(ranks: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in ranks.tolist())
