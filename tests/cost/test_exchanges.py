"""Exchanges of tokens at published rates: the figures themselves, and the laws of collectives."""

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.catalog import ExchangeRates, cluster, exchange_library
from perfmodel.cost import CollectiveModel, share_of_link
from perfmodel.cost.learn.collectives import Fabric
from perfmodel.errors import PerfModelError
from perfmodel.ops import Collective, Exchange
from perfmodel.spec import Cluster

RACK, NODES = cluster("gb200-nvl72"), cluster("dgx-h100")
WAYS = ("dispatch", "combine")
BYTES = 4096 * 7168 * 2.0


@cache
def model() -> CollectiveModel:
    return CollectiveModel.load()


def exchanged_s(
    machine: Cluster, n_bytes: float, ranks: int, per_node: int, exchange: Exchange | None, **more
) -> float:
    op = Collective(
        collective="all_to_all",
        bytes=n_bytes,
        num_ranks=ranks,
        ranks_per_node=min(ranks, per_node),
        level=int(ranks > per_node),
        exchange=exchange,
        **more,
    )
    return model().times(machine, [op]).time_s.item()


def changed(machine: Cluster, level: int, **factors: float) -> Cluster:
    levels = list(machine.levels)
    levels[level] = replace(
        levels[level], **{k: getattr(levels[level], k) * f for k, f in factors.items()}
    )
    return replace(machine, levels=tuple(levels))


@pytest.mark.parametrize("way", WAYS)
def test_published_rates_are_reproduced(way):
    inside, between = exchange_library("hybridep").rate
    for rates, machine, per_node in ((inside, RACK, 72), (between, NODES, 8)):
        for parties, rate in zip(rates.parties, getattr(rates, f"{way}_gb_per_s"), strict=True):
            ranks = parties * (rates.ranks_per_node or 1)
            n_bytes = BYTES * parties * (1 - (1 - 1 / parties) ** 8)
            took_s = exchanged_s(machine, n_bytes, ranks, per_node, Exchange("hybridep", way))
            assert n_bytes / took_s == pytest.approx(rate * 1e9)


def test_what_is_not_published_takes_what_an_all_to_all_takes():
    hybrid = Exchange("hybridep", "dispatch")
    for machine, ranks, per_node, exchange in (
        (RACK, 32, 72, Exchange("deepep", "combine")),
        (NODES, 8, 8, hybrid),  # NVLink 4
        (NODES, 16, 4, hybrid),  # other ranks per node
        (cluster("gb300-nvl72"), 144, 72, hybrid),
    ):
        usual_s = exchanged_s(machine, 3e8, ranks, per_node, None)
        assert exchanged_s(machine, 3e8, ranks, per_node, exchange) == usual_s


@pytest.mark.parametrize("way", WAYS)
def test_groups_beside_one_another_share_a_rate_between_nodes_and_not_inside_one(way):
    """Rates between nodes are of a node's adapters, which all its groups send through."""
    exchange, ranks = Exchange("hybridep", way), 32
    alone_s = exchanged_s(NODES, 1e9, ranks, 8, exchange)
    assert alone_s != exchanged_s(NODES, 1e9, ranks, 8, None)
    for groups in (2, 4, 8):
        assert exchanged_s(NODES, 1e9, ranks, 8, exchange, concurrent=groups) == pytest.approx(
            groups * alone_s
        )
    inside_s = exchanged_s(RACK, 1e9, ranks, 72, exchange)
    assert exchanged_s(RACK, 1e9, ranks, 72, exchange, concurrent=2) == pytest.approx(inside_s)


@settings(max_examples=60, deadline=None)
@given(
    place=st.sampled_from([(RACK, 72, 1), (NODES, 8, 8)]),
    parties=st.tuples(st.integers(2, 72), st.integers(2, 72)).map(sorted),
    size=st.floats(1, 1e10),
    way=st.sampled_from(WAYS),
    factor=st.floats(1, 40),
)
def test_laws_of_exchanges(place, parties, size, way, factor):
    machine, per_node, each = place
    exchange, level = Exchange("hybridep", way), int(each > 1)
    ranks, more_ranks = (n * each for n in parties)
    took_s = exchanged_s(machine, size, ranks, per_node, exchange)
    at_least = took_s * (1 - 1e-9)
    assert exchanged_s(machine, size, more_ranks, per_node, exchange) >= at_least
    assert (
        at_least
        <= exchanged_s(machine, size * factor, ranks, per_node, exchange)
        <= took_s * factor * (1 + 1e-9)
    )
    assert (
        exchanged_s(changed(machine, level, latency_s=factor), size, ranks, per_node, exchange)
        >= at_least
    )
    faster = changed(machine, level, bandwidth_bytes_per_s=factor)
    assert exchanged_s(faster, size, ranks, per_node, exchange) <= took_s * (1 + 1e-9)
    # nor faster than links carry what leaves a rank
    rate = Fabric.of(machine).levels[level].bandwidth
    assert took_s >= (ranks - min(each, ranks)) / ranks * size / rate * (1 - 1e-9)
    if level:
        assert exchanged_s(machine, size, ranks, per_node, exchange, concurrent=2) >= at_least


@given(parties=st.integers(2, 200), way=st.sampled_from(WAYS))
def test_rates_lie_within_what_was_published(parties, way):
    for rates in exchange_library("hybridep").rate:
        published = np.array(getattr(rates, f"{way}_gb_per_s")) / rates.link_gb_per_s
        assert (
            published.min() * (1 - 1e-12)
            <= share_of_link(rates, way, np.array([parties]))[0]
            <= published.max() * (1 + 1e-12)
        )


def test_rates_that_rise_with_the_parties_are_refused():
    for parties, rates in (((8, 16), (1.0, 2.0)), ((16, 8), (2.0, 1.0)), ((8, 16), (1.0,))):
        with pytest.raises(PerfModelError, match="NVLink9"):
            ExchangeRates(
                link="NVLink9",
                link_gb_per_s=900.0,
                parties=parties,
                dispatch_gb_per_s=rates,
                combine_gb_per_s=rates,
            )


def test_the_model_of_tables_of_exchanges_prices_no_exchange_of_a_step() -> None:
    """The report tells how accurate it is, and that no prediction rests on it: without it every
    step is the same."""
    report = (Path(__file__).parents[2] / "training" / "collectives_report.md").read_text()
    assert (
        "**No prediction of a step uses it.**"
        in report.partition("## Tables of expert exchanges")[2]
    )
    weights = model().weights
    assert len(weights.moe.series) > 0
    without = CollectiveModel(replace(weights, moe=type(weights.moe)()))
    exchanges = [
        None,
        *(Exchange(library, way) for library in ("deepep", "hybridep") for way in WAYS),
    ]
    ops = [
        Collective(
            collective="all_to_all",
            bytes=n_bytes,
            num_ranks=ranks,
            ranks_per_node=8,
            level=int(ranks > 8),
            exchange=exchange,
        )
        for n_bytes, ranks, exchange in product((1e4, 1e8), (8, 64), exchanges)
    ]
    for machine in (NODES, RACK, cluster("dgx-a100")):
        assert list(without.times(machine, ops).rows()) == list(model().times(machine, ops).rows())
