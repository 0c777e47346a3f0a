"""The constant rates of stored answers see every field of a collective."""

from dataclasses import fields, replace
from typing import Any

import pytest
from constant_rates import Links, Rates

from perfmodel import catalog
from perfmodel.ops import Collective, Exchange

BASE = Collective(collective="all_to_all", bytes=1e8, num_ranks=4, ranks_per_node=2, level=1)
OTHER_VALUES: dict[str, Any] = {
    "collective": "all_reduce",
    "bytes": 2e8,
    "num_ranks": 8,
    "ranks_per_node": 1,
    "dtype": "fp32",
    "level": 0,
    "concurrent": 2,
    "interleaved": 2,
    "relayed_bytes": 1e8,
    "exchange": Exchange("deepep", "combine"),
}


@pytest.mark.parametrize("name", [field.name for field in fields(Collective)])
def test_every_field_of_a_collective_changes_its_price(name: str) -> None:
    """Otherwise no table of answers at these rates would notice a wrong one."""
    cluster = catalog.cluster("dgx-h100")
    changed = replace(BASE, **{name: OTHER_VALUES[name]})
    rated = Rates().times(cluster, [BASE, changed]).time_s
    assert rated[0] != rated[1]
    if name != "level":
        # The cluster has one level between nodes.
        linked = Links().times(cluster, [BASE, changed]).time_s
        assert linked[0] != linked[1]
