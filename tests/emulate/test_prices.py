"""What collectives take in an emulated cluster."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from perfmodel import catalog
from perfmodel.emulate import Prices, PriceTable, at_one_speed, modelled, placed, plugged, spread
from perfmodel.errors import PerfModelError, TableError
from perfmodel.ops import Collective
from perfmodel.units import parse_seconds

TABLE = """collective,ranks,bytes,time_s,core_s,jitter,copies_per_s
all_reduce,2,1000,0.001,0.0005,0.03,1e6
all_reduce,2,3000,0.003,0.0015,0.03,1e6
"""


def all_reduce(nbytes: float, ranks: int = 2) -> Collective:
    return Collective(collective="all_reduce", bytes=nbytes, num_ranks=ranks, ranks_per_node=1)


@pytest.fixture
def table(tmp_path: Path) -> PriceTable:
    (tmp_path / "prices.csv").write_text(TABLE)
    return PriceTable.read(tmp_path / "prices.csv")


@pytest.mark.parametrize(
    ("nbytes", "time_s"), [(10, 0.001), (2000, 0.002), (3000, 0.003), (6000, 0.006)]
)
def test_table_between_and_beyond_its_rows(table: PriceTable, nbytes: float, time_s: float) -> None:
    assert table.time_s(all_reduce(nbytes)) == pytest.approx(time_s)
    assert table.core_s(all_reduce(nbytes)) == pytest.approx(time_s / 2)
    assert table.conditions == {"jitter": 0.03, "copies_per_s": 1e6}


def test_processor_times_are_stated_for_one_speed_of_the_core() -> None:
    columns = ["time_s", "core_s", "copies_per_s"]
    slow, usual, busy = (0.005, 0.004, 0.5e6), (0.003, 0.002, 1e6), (0.003, 0.004, 2e6)
    found = at_one_speed(pd.DataFrame([slow, usual, busy], columns=columns))
    assert found.copies_per_s.tolist() == [1e6] * 3
    assert found.core_s.tolist() == pytest.approx([0.002, 0.002, 0.008])
    # 1 ms of waiting, 1 ms, none
    assert found.time_s.tolist() == pytest.approx([0.003, 0.003, 0.006])


def test_jitter_is_what_neither_all_ranks_nor_one_have_at_all_times() -> None:
    random = np.random.default_rng(0)
    rounds = (
        random.normal(0, 0.03, (4000, 3))
        + random.normal(0, 0.2, (4000, 1))
        + np.array([0.0, 0.4, 0.1])
    )
    assert spread(rounds.tolist()) == pytest.approx(0.03, rel=0.05)
    assert spread([[0.1, 0.2], [0.3, 0.4]]) == pytest.approx(0.0, abs=1e-12)


def test_core_time_of_other_numbers_of_ranks_follows_the_ring(table: PriceTable) -> None:
    # steps 0.0005 s each, and 0.0005 s for half of 2000 bytes through a rank
    assert table.core_s(all_reduce(2000, 4)) == pytest.approx(
        3 * 0.0005 + 0.0005 * (3 / 4) / (1 / 2)
    )
    assert (
        table.core_s(Collective(collective="broadcast", bytes=8, num_ranks=2, ranks_per_node=1))
        == 0
    )


def test_prices_never_keep_the_core_longer_than_the_call(table: PriceTable) -> None:
    prices = Prices(catalog.cluster("localhost"), lambda op: 1e-4, table)
    assert prices("all_reduce", 2000, (0, 1)) == (1e-4, 1e-4)
    assert prices("all_reduce", 2000, (0,)) == (0.0, 0.0)


def test_groups_are_placed_on_nodes() -> None:
    cluster = catalog.cluster("dgx-a100")  # eight to a node
    inside, across = (
        placed(cluster, "all_gather", 64, range(8)),
        placed(cluster, "reduce", 64, range(0, 64, 8)),
    )
    assert (inside.ranks_per_node, inside.level, inside.concurrent) == (8, 0, 1)
    assert (across.ranks_per_node, across.level, across.concurrent, across.collective) == (
        1,
        1,
        8,
        "broadcast",
    )
    assert placed(cluster, "send", 64, range(64)).num_ranks == 2
    neighbours = placed(cluster, "all_reduce", 64, (7, 8))  # of two nodes
    assert (neighbours.ranks_per_node, neighbours.level) == (1, 1)


def test_calibrated_model_grows_with_ranks_and_bytes() -> None:
    from perfmodel.cost import CollectiveModel

    cluster = catalog.cluster("dgx-a100")
    prices = Prices(cluster, modelled(cluster, CollectiveModel.load()))
    times_s = [
        prices("all_reduce", n << 20, tuple(range(ranks)))[0] for ranks in (8, 64) for n in (1, 64)
    ]
    assert times_s[0] < times_s[1] < times_s[3]
    assert prices("all_reduce", 1 << 20, tuple(range(8)))[1] == 0.0


def test_plug_in() -> None:
    assert plugged("math:sqrt")(4.0) == 2.0  # pyright: ignore[reportArgumentType]
    for name in ("math:nothing", "no_such_module:f", "math"):
        with pytest.raises(PerfModelError, match="module:function"):
            plugged(name)
    with pytest.raises(PerfModelError, match="must be finite and at least 0, got nan"):
        Prices(catalog.cluster("localhost"), lambda op: np.nan)("all_reduce", 8, (0, 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("collective,ranks,bytes\n", "time_s missing"),
        ("collective,ranks,bytes,time_s\nall_reduce,1,8,1\n", "ranks >= 2"),
        ("collective,ranks,bytes,time_s\nall_reduce,2,8,much\n", "row 0"),
        ("", "not a table"),
    ],
)
def test_tables_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(TableError, match=message):
        PriceTable.read(tmp_path / "bad.csv")


def test_kinds_that_the_table_does_not_hold(table: PriceTable) -> None:
    with pytest.raises(PerfModelError, match="all_reduce on 8 ranks, which the table lacks"):
        table.time_s(all_reduce(8, 8))


@pytest.mark.parametrize(
    ("text", "seconds"), [("2ms", 2e-3), ("50us", 5e-5), ("0.5", 0.5), ("1s", 1.0), ("0", 0.0)]
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "ms", "-1ms", "nan", "inf", "2 hours"])
def test_no_times(text: str) -> None:
    with pytest.raises(PerfModelError, match="is not a valid time"):
        parse_seconds(text)
