"""Measured collectives as typed columns, and the rows that do not represent a device's links.

Rows of five kinds are set aside, each with the reason in words: rows that others disturbed, rows of
several groups at once (`_sharing` fits what they show), links that the table does not name (an
efficiency would be relative to a guess), rates above the link (a wrong unit, size or link), and
rates far below it (a host at fault, another job on the network).
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from perfmodel.catalog.networks import DEVICES_PER_NODE, NVL72_DEVICES
from perfmodel.cost.learn.collectives._fabrics import Fabric
from perfmodel.cost.learn.collectives._physics import KINDS, least_volume
from perfmodel.cost.learn.collectives.links import (
    TRAY,
    LinkClass,
    is_known,
    is_network,
    is_rack,
    link_classes,
    states_rate,
)
from perfmodel.ingest import clean_collectives
from perfmodel.ingest.tables import groups_of, number, text

if TYPE_CHECKING:
    import pandas as pd


class SeriesKey(NamedTuple):
    """Key of a measured series: one kind of collective, run in one way by one source."""

    source: str
    device: str
    interconnect: str
    kind: str
    algorithm: str
    way: str

    def __str__(self) -> str:
        return "|".join(self)

    def starts(self, leading: Iterable[Sequence[str]]) -> bool:
        """Whether the key begins with the parts of one of `leading`, where `""` matches
        anything."""
        for parts in leading:
            pairs = zip(self, parts, strict=False)
            if all(part in ("", series_part) for series_part, part in pairs):
                return True
        return False


@dataclass(frozen=True)
class CollectiveRows:
    """Rows of one or more tables, one array element per row."""

    kind: np.ndarray
    """Collective kind, str[n]."""
    series: np.ndarray
    """Index into `keys`, int64[n]."""
    keys: tuple[SeriesKey, ...]
    """All series, sorted."""
    software: np.ndarray
    """Library with its version, str[n]."""
    dtype: np.ndarray
    """Element type as in the table, str[n]."""
    fabric: np.ndarray
    """`Fabric` of every row, object[n]; equal ones are one object."""
    algorithm: np.ndarray
    """The algorithm that the run was forced to use (`ALGORITHMS`), else `""`; str[n]."""
    any_algorithm: np.ndarray
    """Whether the library chose the algorithm, bool[n]."""
    host_launches: np.ndarray
    """Whether the host launched each call, rather than a graph that replays it, bool[n]."""
    buffer_bytes: np.ndarray
    """Bytes of the buffer as nccl-tests counts them, float64[n]."""
    ranks: np.ndarray
    """Ranks of the group, float64[n]."""
    ranks_per_node: np.ndarray
    """Ranks of the group on each of its nodes, float64[n]."""
    time_s: np.ndarray
    """Seconds, NaN if the table has none, float64[n]."""
    doubtful: np.ndarray
    """Whether a row repeats the same test (`in_place`) or was marked by a `check`, bool[n]."""
    disturbed: np.ndarray
    """Whether its collector marked the row because others used the machine while it was timed,
    bool[n]."""
    groups: np.ndarray
    """Groups that ran at once on the same nodes, int64[n]; 1: the row's group alone."""
    slow: np.ndarray
    """Whether a row is known to run far below its links' rates (`usable`), so that it says nothing
    about others; bool[n]."""
    skipped: np.ndarray
    """Why a row cannot be used, `""` for those that can; str[n]."""

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def between(self) -> np.ndarray:
        """Whether a row's group spans several nodes, bool[n]."""
        return self.ranks > self.ranks_per_node

    def take(self, index: np.ndarray) -> "CollectiveRows":
        """The rows at `index` (integers or a mask)."""
        columns = {f.name: getattr(self, f.name)[index] for f in fields(self) if f.name != "keys"}
        return replace(self, **columns)

    def of_series(self, part: str) -> np.ndarray:
        """One part of every row's series, such as `source` or `device`, str objects [n]."""
        return np.array([getattr(key, part) for key in self.keys] or [""], object)[self.series]

    def starting(self, leading: Sequence[Sequence[str]]) -> np.ndarray:
        """Whether the series of each row begins with the parts of one of `leading`, bool[n]."""
        return np.array([key.starts(leading) for key in self.keys] or [False], bool)[self.series]

    def anonymous(self) -> "CollectiveRows":
        """The rows without their source."""
        return replace(
            self,
            series=np.zeros(len(self), np.int64),
            keys=(SeriesKey("", "", "", "", "auto", ""),),
        )


def collective_rows(table: "pd.DataFrame") -> CollectiveRows:
    """Canonical rows of a collective table (columns of the data README); invalid rows do not raise.

    Missing text columns count as empty, missing `ranks_per_node` as `num_ranks / num_nodes` or, if
    neither is there, as up to eight ranks to a node.
    """
    table = clean_collectives(table)
    kind = text(table, "collective")
    size = number(table, "bytes")
    ranks = number(table, "num_ranks")

    # ranks per node: as stated, else by the number of nodes, else as nodes usually are
    per_node = number(table, "ranks_per_node")
    by_nodes = np.ceil(ranks / np.maximum(number(table, "num_nodes"), 1))
    per_node = np.where(np.isfinite(per_node) & (per_node >= 1), per_node, by_nodes)
    per_node = np.where(np.isfinite(per_node), per_node, DEVICES_PER_NODE)
    table, per_node = _in_racks(table, ranks, per_node)

    # neighbours exchange: inside a node a group of two, over nodes one rank of each
    is_send = kind == "send_recv"
    nodes = np.where(is_send & (ranks > per_node), np.ceil(ranks / np.maximum(per_node, 1)), 1)
    group = np.where(is_send & (ranks >= 2), np.maximum(nodes, 2), ranks)
    ranks_per_node = np.where(
        is_send & (nodes > 1), 1.0, np.minimum(np.maximum(per_node, 1), group)
    )

    series, keys = _series(table)
    return CollectiveRows(
        kind=kind,
        series=series,
        keys=keys,
        software=text(table, "software"),
        dtype=text(table, "dtype"),
        fabric=_fabrics(table, per_node),
        algorithm=text(table, "held_to"),
        any_algorithm=table["library_chose"].to_numpy(bool),
        host_launches=table["host_launches"].to_numpy(bool),
        buffer_bytes=size,
        ranks=group,
        ranks_per_node=ranks_per_node,
        time_s=number(table, "time_us") * 1e-6,
        doubtful=table["doubtful"].to_numpy(bool),
        disturbed=table["disturbed"].to_numpy(bool),
        groups=table["groups"].to_numpy(np.int64),
        slow=np.zeros(len(table), bool),
        skipped=_reasons(kind, size, ranks),
    )


def _in_racks(
    table: "pd.DataFrame", ranks: np.ndarray, per_node: np.ndarray
) -> "tuple[pd.DataFrame, np.ndarray]":
    """The table and ranks per node; the trays of a rack that NVLink joins count as one node if no
    node is stated."""
    # tables count the four devices of a tray as a node, but its links go through the rack's
    # switches
    names = zip(text(table, "interconnect"), text(table, "device"), strict=True)
    in_racks = np.array([is_rack(*name) for name in names], bool)
    states_nodes = number(table, "devices_per_node") > TRAY
    trays = in_racks & (per_node <= TRAY) & (ranks > per_node) & ~states_nodes
    racks = np.ceil(ranks / NVL72_DEVICES)
    nics = number(table, "nics_per_node") * np.where(trays, NVL72_DEVICES / TRAY, 1.0)
    per_rack = np.ceil(ranks / np.maximum(racks, 1))
    return table.assign(nics_per_node=nics), np.where(trays, per_rack, per_node)


def _series(table: "pd.DataFrame") -> tuple[np.ndarray, tuple[SeriesKey, ...]]:
    """Index of every row's series, and all series."""
    columns = [
        text(table, name)
        for name in ("source", "device", "interconnect", "collective", "algorithm", "way")
    ]
    place: dict[SeriesKey, int] = {}
    places = []
    for parts in zip(*columns, strict=True):
        places.append(place.setdefault(SeriesKey(*parts), len(place)))

    # sorted, so that the order of rows in a table changes nothing
    keys = sorted(place, key=str)
    rank = np.zeros(len(keys) or 1, np.int64)
    rank[[place[key] for key in keys]] = np.arange(len(keys))
    return rank[np.array(places, int)], tuple(keys)


def _reasons(kind: np.ndarray, size: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Why each row cannot be priced; `""` for those that can."""
    reason = np.full(len(kind), "", dtype=object)
    known = np.isin(kind, KINDS)
    reason[~known] = np.array(
        [f"collective {k!r} is not modelled" for k in kind[~known]], dtype=object
    )
    for bad, why in ((~(size > 0), "no bytes"), (~(ranks >= 1), "no num_ranks")):
        reason[known & bad & (reason == "")] = why
    return reason


def _fabrics(table: "pd.DataFrame", per_node: np.ndarray) -> np.ndarray:
    """Fabric of every row, object[n]; each distinct one is made once, as reading names takes
    long."""
    import pandas as pd

    figures = [
        number(table, name) for name in ("nics_per_node", "nic_gbit_per_s", "devices_per_node")
    ]
    frame = pd.DataFrame(
        dict(enumerate([text(table, "device"), text(table, "interconnect"), per_node, *figures]))
    )
    fabrics = np.empty(len(frame), dtype=object)
    for key, index in frame.groupby(list(frame.columns), dropna=False, sort=False).indices.items():
        fabric = Fabric.of_row(*key)  # pyright: ignore[reportGeneralTypeIssues]
        # one by one: NumPy would read a record as an array of its fields
        for i in index:
            fabrics[i] = fabric
    return fabrics


TOLERANCE: Final = 1.02
"""Factor by which a measurement may exceed the nominal rate, because rates and clocks are rounded
(25.2 GB/s on Slingshot of 25)."""
FAR_BELOW: Final = 0.2
"""Share of the nominal rate below which large messages do not represent the device. In the public
tables, all devices except on faulty hosts reach 0.23 of their slowest link; most reach 0.5 to
0.9."""
LARGE_S: Final = 1e-3
"""Messages that take at least this time at the nominal rate are large: latency no longer explains
low rates..."""
HOPS: Final = 10.0
"""...and neither do this many hops per rank."""
DISTURBED: Final = "disturbed by other work while it was timed; measure again on a quiet machine"
BESIDE: Final = "timed while other groups communicated; compared with one group alone"
MESH_PEERS: Final = 7
"""Peers in a node of eight without a switch, where each has a separate link, so that few ranks use
only a share of the links."""


def set_aside(rows: CollectiveRows, no_guide: Sequence[Sequence[str]] = ()) -> np.ndarray:
    """The reason why each row does not represent its links; `""` if it does. str[n].

    Args:
        no_guide: first parts of series that are kept as they are between nodes, since nothing is
            learned from them for other clusters.
    """
    reasons, _ = reasons_to_set_aside(rows, no_guide)
    return reasons


def reasons_to_set_aside(
    rows: CollectiveRows, no_guide: Sequence[Sequence[str]] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """The reasons of `set_aside`, and whether the reason is a rate far below the links.

    Returns:
        str[n] and bool[n].
    """
    reason = np.full(len(rows), "", dtype=object)
    slow = np.zeros(len(rows), bool)
    reason[rows.groups > 1] = BESIDE
    reason[rows.disturbed] = DISTURBED

    # These pass no other check, and the rates of their series are those of the others.
    single_groups = np.flatnonzero(~rows.disturbed & (rows.groups == 1))
    for (code, between), group in groups_of(
        rows.series[single_groups], rows.between[single_groups]
    ):
        index = single_groups[group]
        key = rows.keys[code]
        if not (between and key.starts(no_guide)):
            tier = between or is_network(key.interconnect, key.device)
            reason[index], slow[index] = _reasons_in_tier(
                rows.take(index), key.kind, key.device, key.interconnect, tier
            )
    return reason, slow


def counted(rows: CollectiveRows, reason: np.ndarray) -> dict[str, int]:
    """Count the rows of each reason, by device and kind."""
    device = rows.of_series("device")
    counts: Counter[str] = Counter()
    for name, kind, why in zip(device, rows.kind, reason, strict=True):
        if why:
            counts[f"{name} {kind}: {why}"] += 1
    return dict(counts.most_common())


def slowdowns(rows: CollectiveRows) -> dict[str, float]:
    """Slowdown of collectives while other groups communicate: the median over sizes that were
    measured both ways.

    Groups that share a link equally take as many times as long as there are groups, groups on links
    of their own take no longer.

    Returns:
        By device, kind, place and number of groups, in words.
    """
    device = rows.of_series("device")
    ratios: dict[tuple[str, int], list[float]] = defaultdict(list)
    for i, ratio in times_over_alone(rows):
        place = "between nodes" if rows.between[i] else "inside a node"
        ratios[f"{device[i]} {rows.kind[i]} {place}", int(rows.groups[i])].append(ratio)

    result = {}
    for (key, groups), measured in sorted(ratios.items()):
        result[f"{key}, {groups} groups at once"] = float(np.median(measured))
    return result


def times_over_alone(rows: CollectiveRows) -> list[tuple[int, float]]:
    """Rows of several groups at once, each with its time over that of one group alone.

    Rows without a group of the same series, placement and size alone, and disturbed ones, are left
    out. Rows of one group that were repeated count by their median.
    """
    alone_s: dict[tuple[Hashable, ...], list[float]] = defaultdict(list)
    concurrent: list[tuple[int, tuple[Hashable, ...]]] = []
    columns = (
        rows.series,
        rows.software,
        rows.dtype,
        rows.ranks,
        rows.ranks_per_node,
        rows.buffer_bytes,
    )
    has_time = np.isfinite(rows.time_s) & (rows.time_s > 0)
    for i in np.flatnonzero(~rows.disturbed & has_time).tolist():
        case = tuple(column[i] for column in columns)
        if rows.groups[i] == 1:
            alone_s[case].append(float(rows.time_s[i]))
        else:
            concurrent.append((i, case))
    return [
        (i, float(rows.time_s[i]) / float(np.median(alone_s[case])))
        for i, case in concurrent
        if case in alone_s
    ]


def _reasons_in_tier(
    rows: CollectiveRows, kind: str, device: str, interconnect: str, between: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Reasons why rows of one series and tier do not represent their links, and whether they run
    far below the links' rates."""
    reason = np.full(len(rows), "", dtype=object)
    below = np.zeros(len(rows), bool)
    place = "between nodes" if between else "inside a node"

    # An efficiency would be relative to a guess where the links are not known.
    if not is_known(interconnect, device, between):
        reason[:] = (
            f"interconnect {interconnect!r} does not name a known link {place}; name one such as 'NVLink3 + "
            "InfiniBand HDR'"
        )
        return reason, below
    links = link_classes(interconnect, device, between)
    if not all(link.limited for link in links):
        return reason, below

    # No algorithm moves less than its least volume, so a row faster than the fastest link has a
    # wrong unit, size or link.
    fastest = max(links, key=lambda link: link.bandwidth_bytes_per_s)
    volume = least_volume(kind, rows.ranks, rows.ranks_per_node, fastest.reduces)
    rate = volume * rows.buffer_bytes / rows.time_s
    above = rate > TOLERANCE * fastest.bandwidth_bytes_per_s
    reason[above] = (
        f"faster than {fastest.name}'s {fastest.bandwidth_bytes_per_s / 1e9:g} GB/s {place}; check sizes and "
        f"units, or state the rate, as in '{fastest.name}@50GB/s'"
    )

    # Far below the slowest link: a host at fault, or another job. The rate of an Ethernet port is
    # anybody's guess unless it is stated.
    slowest = min(links, key=lambda link: link.bandwidth_bytes_per_s)
    # A bridge joins pairs, so a pair is judged by the bridge and larger groups by what joins the
    # pairs (`pairwise-NVLink-bridge+PCIe`).
    if fastest.name == "NVLink-bridge":
        off_bridge = _far_below(rows, kind, fastest, interconnect) & (rows.ranks == 2) & ~above
        below |= off_bridge
        reason[off_bridge] = (
            f"a pair below {FAR_BELOW:.0%} of {fastest.name}'s "
            f"{fastest.bandwidth_bytes_per_s / 1e9:g} GB/s, which it did not use"
        )
    if slowest.name != "Ethernet" or states_rate(interconnect):
        far_below = _far_below(rows, kind, slowest, interconnect) & ~above
        below |= far_below
        reason[far_below] = (
            f"below {FAR_BELOW:.0%} of {slowest.name}'s {slowest.bandwidth_bytes_per_s / 1e9:g} GB/s {place}, "
            "which suggests a fault of host or network; if the link is really that slow, state its rate, as in "
            f"'{slowest.name}@2GB/s'"
        )
    return reason, below


def _far_below(rows: CollectiveRows, kind: str, link: LinkClass, interconnect: str) -> np.ndarray:
    """Rows of placements and software whose large messages stay far below the link's rate,
    including their small messages.

    Rates are nccl-tests' bus bandwidths, which do not count a node's ranks: one adapter per node is
    enough to pass.
    """
    import pandas as pd

    bus = least_volume(kind, rows.ranks, rows.ranks, reduces=False) * rows.buffer_bytes
    # in a mesh each pair has its own link, of which few ranks use few
    nominal = np.full(len(rows), link.bandwidth_bytes_per_s)
    if not link.between_nodes and _is_mesh(link, interconnect):
        nominal *= np.minimum((rows.ranks - 1) / MESH_PEERS, 1.0)

    # The time of small messages is latency and does not show the rate. The large messages of a
    # placement therefore decide for all of its rows.
    is_large = bus / nominal >= np.maximum(LARGE_S, HOPS * rows.ranks * link.hop_s)
    share = pd.Series(np.where(is_large, bus / rows.time_s / nominal, np.nan))
    # the median of a placement under one software, so that a few slow runs do not condemn it
    middle = share.groupby([rows.software.astype(str), rows.ranks, rows.ranks_per_node]).transform(
        "median"
    )
    return np.asarray(middle, np.float64) < FAR_BELOW


def _is_mesh(link: LinkClass, interconnect: str) -> bool:
    """Whether devices may be joined by direct links instead of a switch."""
    name = interconnect.lower()
    joins_pairs_alone = link.name == "NVLink-bridge"
    return (
        not joins_pairs_alone
        and link.name.startswith(("NVLink", "XGMI"))
        and "switch" not in name
        and "nvl72" not in name
    )
