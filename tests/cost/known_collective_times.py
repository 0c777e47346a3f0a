"""Times of collectives on links with made-up constants, kept in `known_collective_times.csv`.

No fitted constant is among them: what is stored is the physics, each algorithm by itself and the
fastest of all, where latency, the links inside a node or those between nodes set the pace. A change
that is meant to move it is followed by

    PYTHONPATH=tests python tests/cost/known_collective_times.py
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
from stored_figures import StoredCase, write_cases

from perfmodel.cost.learn.collectives import (
    ALGORITHMS,
    Effect,
    LinkConstants,
    collective_time,
    expected,
    least_volume,
)
from perfmodel.cost.learn.collectives.links import LINK_CLASSES, TierConstants
from perfmodel.ops import CollectiveKind

TABLE = Path(__file__).with_suffix(".csv")
INSIDE = TierConstants(
    hop_s=1.1e-6,
    hop_full_s=3.7e-6,
    hop_line_s=1.7e-6,
    latency_shift_s=0.0,
    usual_latency_s=0.9e-6,
    bytes_per_s=2.1e11,
)
BETWEEN = TierConstants(
    hop_s=5.3e-6,
    hop_full_s=14e-6,
    hop_line_s=8.3e-6,
    latency_shift_s=0.0,
    usual_latency_s=4e-6,
    bytes_per_s=2.3e10,
)
LINKS = LinkConstants(
    inside=INSIDE,
    between=BETWEEN,
    launch_s=5e-6,
    hop_switch_s=9.5e-6,
    post_s=1.3e-6,
    peer_s=0.7e-6,
    low_latency_share=0.45,
    line_share=0.9,
    peer_exponent=0.1,
    node_exponent=0.04,
    neighbour_share=0.6,
    eager_bytes=3e5,
    tree_share=0.8,
    switch_share=0.85,
    network_share=0.7,
    direct_s=2.9e-6,
    direct_peers=7.0,
)
MACHINES = {
    "switches": LINKS,
    "no switches": replace(LINKS, switch_share=0.0, network_share=0.0, line_share=0.0),
    "slow inside": replace(LINKS, inside=replace(INSIDE, bytes_per_s=4e9), peer_exponent=0.9),
    "a shared bridge": replace(
        LINKS, inside=replace(INSIDE, bytes_per_s=1.1e10), peer_exponent=-0.7, network_share=0.0
    ),
    "long latencies": replace(
        LINKS,
        inside=replace(INSIDE, latency_shift_s=0.6e-6),
        between=replace(BETWEEN, latency_shift_s=2.1e-6),
    ),
    "calls from the host": replace(LINKS, host_s=25e-6),
    "a mesh of four": replace(LINKS, mesh_peers=3.0, peer_exponent=0.8),
    "short latencies": replace(
        LINKS,
        inside=replace(INSIDE, latency_shift_s=-0.8e-6),
        between=replace(BETWEEN, latency_shift_s=-3.9e-6),
    ),
}
GROUPS = ((2, 2), (8, 8), (5, 5), (2, 1), (16, 8), (24, 4), (64, 1), (256, 8), (1, 1), (3, 2))
"""Ranks, and those of a node."""
OF_LINKS = (
    "hop_inside",
    "peers",
    "low_latency",
    "hop_between",
    "hop_ratio_between",
    "post",
    "peer_s",
    "nodes",
)
OF_ALL = (
    "hop_ratio",
    "hop_line",
    "hop_switch",
    "switch",
    "network",
    "direct",
    "host",
    "neighbours",
    "low_latency_between",
    "hop_line_between",
    "hop_pair",
    "tree",
)
"""Effects on the constants of links: those of a class of links, and those common to all."""
SIZES = (64.0, 4e4, 6e6, 3e9)


def cases() -> Iterator[StoredCase]:
    """Times of every kind by its fastest algorithm, and of reductions by each, on every machine."""
    ranks, per_node = np.repeat(np.array(GROUPS, float), len(SIZES), axis=0).T
    n_bytes = np.tile(SIZES, len(GROUPS))
    for machine, links in MACHINES.items():
        for kind in get_args(CollectiveKind):
            by_choice = ("", *ALGORITHMS) if kind in ("all_reduce", "broadcast") else ("",)
            for algorithm in (*by_choice, "direct") if kind == "all_reduce" else by_choice:
                time_s = collective_time(kind, n_bytes, ranks, per_node, links, algorithm)
                name = f"{kind} {algorithm}".strip()
                base = name if machine == "switches" else machine
                figures = {
                    f"{n:g}x{r:g}.{size:g}": value
                    for n, r, size, value in zip(
                        ranks, per_node, n_bytes, time_s.tolist(), strict=True
                    )
                    if value
                }
                yield StoredCase(name, base, figures)
    ranks, per_node = np.array(GROUPS, float).T
    for kind in get_args(CollectiveKind):
        for reduces in (False, True):
            volume = least_volume(kind, ranks, per_node, reduces)
            figures = {
                f"{n}x{r}": value
                for (n, r), value in zip(GROUPS, volume.tolist(), strict=True)
                if value
            }
            name = f"least volume of {kind}, reduces={reduces}"
            yield StoredCase(name, name, figures)
    for kind in ("all_reduce", "all_to_all"):
        yield StoredCase(f"expected of {kind}", f"expected of {kind}", dict(_expectations(kind)))


def _expectations(kind: str) -> Iterator[tuple[str, float]]:
    """What is known of every effect on a kind of collective before any measurement: its value and
    its deviation."""
    links = ("", *(link.name for link in LINK_CLASSES))
    effects = [Effect(part, kind=kind) for part in ("launch", "inside", "between")]
    effects += [Effect(part, link) for part in OF_LINKS for link in links]
    effects += [
        Effect(part, link, kind) for part in ("inside", "between", "hop_between") for link in links
    ]
    effects += [Effect(part) for part in OF_ALL]
    for effect in effects:
        value, deviation = expected(effect)
        name = str(effect).replace(" ", "-")
        yield from ((f"{name}.value", value), (f"{name}.sd", deviation))


if __name__ == "__main__":
    write_cases(TABLE, cases())
