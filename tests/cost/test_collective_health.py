"""Rows that say nothing of a device's links are set aside with a word; all others are kept."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.cost import CollectiveModel, describe_calibration
from perfmodel.cost.learn import fit_calibration
from perfmodel.cost.learn.collectives import (
    Sources,
    collective_rows,
    least_volume,
    set_aside,
    slowdowns,
)
from perfmodel.cost.learn.collectives.links import link_class
from perfmodel.cost.learn.training import fit_collectives, slowdowns_by_state
from perfmodel.errors import TableError
from perfmodel.ingest.tables import read_table
from perfmodel.ops import Collective, CollectiveKind

SIZE = 2.0 ** np.arange(10, 31)
CLUSTER = catalog.cluster("dgx-a100")
HEALTHY = {
    "V100-SXM2-32GB": ("NVLink2", 130e9),
    "A100-SXM4-80GB": ("NVLink3 NVSwitch", 230e9),
    "L40S": ("PCIe4", 20e9),
    "H100-SXM5-80GB": ("NVLink4 NVSwitch", 360e9),
    "MI300X": ("Infinity Fabric", 310e9),
}


def log(
    device: str, links: str, bus: float, kind: str = "all_gather", ranks: int = 8, per_node: int = 8
) -> pd.DataFrame:
    """A log of one rate (as nccl-tests counts it) and 20 us of latency."""
    volume = least_volume(kind, np.array([ranks]), np.array([ranks]), False)[0]
    return pd.DataFrame(
        {
            "source": "log",
            "device": device,
            "interconnect": links,
            "collective": kind,
            "algorithm": "auto",
            "num_ranks": ranks,
            "ranks_per_node": per_node,
            "bytes": SIZE,
            "dtype": "fp32",
            "software": "nccl",
            "variant": "",
            "time_us": 20 + 1e6 * volume * SIZE / bus,
        }
    )


def reasons(table: pd.DataFrame, *no_guide: tuple[str, ...]) -> list[str]:
    return set_aside(collective_rows(table), no_guide).tolist()


@pytest.mark.parametrize("device", HEALTHY)
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_healthy_rates_are_kept(device: str, kind: str) -> None:
    links, bus = HEALTHY[device]
    assert set(reasons(log(device, links, bus, kind))) == {""}


@settings(max_examples=25)
@given(
    device=st.sampled_from(sorted(HEALTHY)),
    factor=st.floats(0.001, 100),
    kind=st.sampled_from(["all_reduce", "all_to_all"]),
)
def test_by_the_nominal_rate(device: str, factor: float, kind: str) -> None:
    """Below a fifth of the link everything goes; above the link what is faster than that; between,
    nothing."""
    links, bus = HEALTHY[device]
    table = log(device, links, factor * bus, kind)
    nominal = {
        "NVLink2": 150e9,
        "NVLink3 NVSwitch": 300e9,
        "PCIe4": 32e9,
        "NVLink4 NVSwitch": 450e9,
    }.get(links, 448e9)
    found = reasons(table)
    share = factor * bus / nominal
    if share < 0.18:
        assert all(why.startswith("below 20%") for why in found)
    elif 0.25 < share < 1:
        assert set(found) == {""}
    elif share > 2.1:
        assert found[-1].startswith("faster than")
    assert all("\n" not in why for why in found)


def test_small_messages_of_a_healthy_device_are_no_fault() -> None:
    table = log("A100-SXM4-80GB", "NVLink3 NVSwitch", 230e9)
    assert set(reasons(table[table["bytes"] < 2**20])) == {""}


def test_one_host_at_fault_does_not_condemn_the_others() -> None:
    good, bad = (
        log("L40S", "PCIe4", 20e9),
        log("L40S", "PCIe4", 1.3e9).assign(software="nccl-of-that-host"),
    )
    found = reasons(pd.concat([good, bad], ignore_index=True))
    assert set(found[: len(good)]) == {""}
    assert all(found[len(good) :])


def test_a_stated_rate_is_the_measure() -> None:
    """What is far below the nominal rate, or above it, is right for links said to be so."""
    assert set(reasons(log("L40S", "PCIe4@2GB/s", 1.3e9))) == {""}
    assert set(reasons(log("H100-SXM5-80GB", "RoCE@50GB/s", 45e9, ranks=16, per_node=1))) == {""}
    assert any(reasons(log("H100-SXM5-80GB", "RoCE", 45e9, ranks=16, per_node=1)))


def test_links_that_nobody_names() -> None:
    table = log("A100-SXM4-80GB", "NVLink3", 12e9, ranks=16, per_node=8)
    assert all("a known link between nodes" in why for why in reasons(table))
    assert set(reasons(table, ("log", "A100-SXM4-80GB"))) == {""}
    assert all(
        "a known link inside a node" in why for why in reasons(log("A100-SXM4-80GB", "", 230e9))
    )
    assert set(reasons(log("cpu", "gloo loopback", 1e8))) == {""}


def test_a_fit_says_what_it_set_aside(tmp_path) -> None:
    good, bad = log("A100-SXM4-80GB", "NVLink3", 230e9), log("L40S", "PCIe4", 1.3e9)
    report = fit_calibration([good, bad], tmp_path)["collectives"]
    ((reason, count),) = report["set_aside"].items()
    assert reason.startswith("L40S all_gather: below 20% of PCIe4's 32 GB/s inside a node")
    assert count == len(bad)
    assert (
        "21 rows set aside: L40S all_gather: below 20%"
        in describe_calibration(tmp_path)["collectives"]
    )
    with pytest.raises(
        TableError, match="no collective row can be used: L40S all_gather: below 20%"
    ):
        fit_calibration([bad], tmp_path)


def test_slow_placements_that_are_kept_are_told_as_measured_and_guide_nobody(tmp_path) -> None:
    good, slow = log("A100-SXM4-80GB", "NVLink3", 230e9), log("L40S", "PCIe4", 1.3e9)
    weights = fit_collectives([good, slow], tmp_path, sources=Sources(keep_slow=True))
    assert weights.notes["set_aside"] == {}
    model = CollectiveModel(weights)
    own, others = (model.table_times(slow.assign(source=source)) for source in ("log", "of others"))
    np.testing.assert_allclose(own.time_s * 1e6, slow["time_us"], rtol=0.02)
    assert set(own.provenance) == {"measured"}
    assert not set(others.provenance) & {"measured", "learned"}
    assert others.time_s[-1] < 0.2 * own.time_s[-1]


def test_four_grace_hoppers_are_joined_pair_by_pair() -> None:
    assert link_class("NVLink4-4xGH200", "GH200-96GB", False).mesh
    assert not link_class("NVLink4 NVSwitch", "H100-SXM5-80GB", False).mesh


@pytest.mark.shared
def test_public_tables(data_dir) -> None:
    """The L40S host at fault is found with 4 and 8 ranks, of whatever library; the other host and
    all else of NVIDIA's data-centre devices stay."""
    table = pd.concat(
        [
            read_table(data_dir / f"aiconfigurator/collective_{name}.csv.gz")
            for name in ("nccl", "custom_allreduce")
        ]
    )
    rows = collective_rows(
        table[
            table["collective"].isin(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
        ]
    )
    gone = rows.take(set_aside(rows) != "")
    assert set(gone.of_series("device")) <= {"L40S", "Intel-Arc-Pro-B60"}
    l40s = gone.take(gone.of_series("device") == "L40S")
    assert set(l40s.ranks) == {4.0, 8.0}
    assert set(l40s.kind) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    assert "sglang-0.5.12" not in set(l40s.software)


@settings(max_examples=12)
@given(
    slower=st.floats(1.05, 4.0),
    disturbed=st.lists(st.booleans(), min_size=len(SIZE), max_size=len(SIZE)),
    kind=st.sampled_from(["all_reduce", "all_gather", "all_to_all"]),
)
def test_disturbed_rows_change_no_verdict_and_are_named(
    slower: float, disturbed: list[bool], kind: str
) -> None:
    links, bus = HEALTHY["A100-SXM4-80GB"]
    clean = log("A100-SXM4-80GB", links, bus, kind)
    marked = clean.assign(
        variant=np.where(disturbed, "suspect_interference", ""),
        time_us=np.where(disturbed, slower * clean["time_us"], clean["time_us"]),
    )
    because = set_aside(collective_rows(marked))
    assert ["disturbed" in why for why in because] == disturbed
    assert (
        because[~np.array(disturbed, bool)]
        == set_aside(collective_rows(clean))[~np.array(disturbed, bool)]
    ).all()


def collectives_report_of_equal_fits(
    clean: pd.DataFrame, other: pd.DataFrame, folder: Path
) -> dict[str, Any]:
    """The report of a fit with other rows beside the clean ones, which are predicted as without
    them."""
    (_, alone), (report, both) = (
        (fit_calibration(tables, folder / name), CollectiveModel.load(folder / name))
        for name, tables in (("clean", [clean]), ("both", [clean, other]))
    )
    assert (alone.table_times(clean).time_s == both.table_times(clean).time_s).all()
    return report["collectives"]


def test_disturbed_rows_are_no_part_of_a_fit(tmp_path) -> None:
    clean = log("L40S", "PCIe4", 20e9)
    other = clean.assign(variant="suspect_interference", time_us=3 * clean["time_us"])
    report = collectives_report_of_equal_fits(clean, other, tmp_path)
    (count,) = (n for why, n in report["set_aside"].items() if "disturbed" in why)
    assert count == len(other)
    with pytest.raises(
        TableError, match="disturbed by other work while it was timed; measure again"
    ):
        fit_calibration([other], tmp_path / "none")


@settings(max_examples=12)
@given(
    longer=st.floats(0.9, 6.0),
    groups=st.integers(2, 8),
    beside=st.lists(st.booleans(), min_size=len(SIZE), max_size=len(SIZE)).filter(any),
)
def test_rows_of_several_groups_are_compared_with_one_group_alone(
    longer: float, groups: int, beside: list[bool]
) -> None:
    """They are no part of a series, change no verdict on rows of one group, and their slowdown is
    told."""
    clean = log("A100-SXM4-80GB", "NVLink3 NVSwitch", 230e9)
    more = clean[beside].assign(
        variant=f"groups_at_once_{groups}", time_us=longer * clean["time_us"][beside]
    )
    rows = collective_rows(pd.concat([clean, more], ignore_index=True))
    assert len(rows.keys) == 1
    reason = set_aside(rows)
    assert (reason[: len(clean)] == set_aside(collective_rows(clean))).all()
    assert all("while other groups communicated" in why for why in reason[len(clean) :])
    assert slowdowns(rows) == {
        f"A100-SXM4-80GB all_gather inside a node, {groups} groups at once": pytest.approx(longer)
    }


def test_slowdowns_need_the_same_size_alone_and_no_disturbance() -> None:
    clean = log("A100-SXM4-80GB", "NVLink3 NVSwitch", 230e9)
    beside = clean.assign(variant="groups_at_once_2", time_us=2 * clean["time_us"])
    disturbed = clean.assign(
        variant="suspect_interference_groups_at_once_2", time_us=9 * clean["time_us"]
    )
    assert slowdowns(collective_rows(clean)) == {}
    assert slowdowns(collective_rows(beside)) == {}
    assert slowdowns(collective_rows(pd.concat([clean[:4], beside[4:]], ignore_index=True))) == {}
    rows = collective_rows(pd.concat([clean, beside, disturbed], ignore_index=True))
    assert [*slowdowns(rows).values()] == [pytest.approx(2.0)]
    assert sum("disturbed" in why for why in set_aside(rows)) == len(disturbed)


def test_rows_of_several_groups_are_no_part_of_a_fit(tmp_path) -> None:
    clean = log("L40S", "PCIe4", 20e9)
    beside = clean.assign(variant="groups_at_once_2", time_us=2 * clean["time_us"])
    report = collectives_report_of_equal_fits(clean, beside, tmp_path)
    assert [*report["groups_at_once"].values()] == [pytest.approx(2.0)]


def beside(alone: pd.DataFrame, exponent: float, groups: int) -> pd.DataFrame:
    """The rows with those of several groups at once, each of which gets the rate of one alone over
    n^exponent."""
    latency_us = 20
    more_us = (alone["time_us"] - latency_us) * groups**exponent
    variant = f"groups_at_once_{groups}"
    return pd.concat(
        [alone, alone.assign(variant=variant, time_us=latency_us + more_us)], ignore_index=True
    )


def test_pairs_that_did_not_use_their_bridge_say_nothing_of_it() -> None:
    """A pair is judged by the bridge, four ranks by the bus that joins the pairs."""
    links = "pairwise-NVLink-bridge+PCIe"
    (slow,) = set(reasons(log("A40", links, 4e9, "all_gather", 2, 2)))
    assert "did not use" in slow
    assert set(reasons(log("A40", links, 40e9, "all_gather", 2, 2))) == {""}
    assert set(reasons(log("A40", links, 8e9, "all_gather", 4, 4))) == {""}


def test_corrections_of_transfers_do_not_correct_latency(tmp_path: Path) -> None:
    """Logs that begin at 16 MiB differ in their rate, and so do not move a message of 1 KiB."""
    large = SIZE >= 2**24

    def times(bus: float, rows: np.ndarray) -> np.ndarray:
        table = log("A100-SXM4-80GB", "NVLink3 NVSwitch", bus)[rows]
        folder = tmp_path / f"{bus:g}.{rows.sum()}"
        fit_calibration([table], folder)
        small = Collective(
            collective="all_gather", bytes=2.0**10, num_ranks=8, ranks_per_node=8, level=0
        )
        ops = [small, replace(small, bytes=2.0**30)]
        return CollectiveModel.load(folder).times(CLUSTER, ops).time_s

    fast, slow = times(200e9, large), times(100e9, large)
    np.testing.assert_allclose(slow / fast, [1.0, 2.0], rtol=0.1)
    # Measured at every size, the small ones are as measured.
    np.testing.assert_allclose(times(200e9, SIZE > 0)[0], 20e-6, rtol=0.1)


@settings(max_examples=3, deadline=None)
@given(
    exponent=st.floats(0, 1.5),
    groups=st.sampled_from([2, 4]),
    kind=st.sampled_from(["all_reduce", "all_gather"]),
)
def test_predictions_share_links_as_measured(exponent: float, groups: int, kind: str) -> None:
    """Two ranks of each of eight nodes with eight adapters: by the nominal rates four groups share
    nothing."""
    alone = log("A100-SXM4-80GB", "NVLink3 + InfiniBand HDR", 17e9, kind, 16, 2)
    with TemporaryDirectory() as folder:
        report = fit_calibration([beside(alone, exponent, groups)], folder)
        model = CollectiveModel.load(folder)
    (fitted,) = report["collectives"]["sharing"].values()
    assert fitted == pytest.approx(exponent, abs=0.05)

    def slowdown(kind: CollectiveKind, groups: int) -> float:
        op = Collective(collective=kind, bytes=2.0**30, num_ranks=16, ranks_per_node=2, level=1)
        alone_s, beside_s = model.times(CLUSTER, [op, replace(op, concurrent=groups)]).time_s
        return beside_s / alone_s

    assert slowdown(kind, groups) == pytest.approx(groups**exponent, rel=0.03)
    # Kinds that were not measured share the same links.
    assert slowdown("reduce_scatter", groups) == pytest.approx(groups**exponent, rel=0.03)
    # Of what was not measured the law holds: more groups are never faster, nor any faster than the
    # nominal rate.
    assert slowdown(kind, 2) <= slowdown(kind, 4) * (1 + 1e-9)
    op = Collective(
        collective=kind, bytes=2.0**30, num_ranks=16, ranks_per_node=2, level=1, concurrent=groups
    )
    beside_s, alone_s = (
        CollectiveModel.load().times(CLUSTER, [op, replace(op, concurrent=1)]).time_s
    )
    assert beside_s == pytest.approx(alone_s)


def test_no_link_carries_more_than_its_rate_however_groups_were_measured() -> None:
    """Eight ranks of a node fill its adapters alone: two such groups take twice as long whatever a
    table says."""
    alone = log("A100-SXM4-80GB", "NVLink3 + InfiniBand HDR", 150e9, "all_gather", 64, 8)
    with TemporaryDirectory() as folder:
        fit_calibration([beside(alone, 0.0, 2)], folder)
        model = CollectiveModel.load(folder)
    op = Collective(
        collective="all_gather",
        bytes=2.0**30,
        num_ranks=64,
        ranks_per_node=8,
        level=1,
        concurrent=2,
    )
    sent_bytes = least_volume("all_gather", np.array([64.0]), np.array([8.0]), False)[0] * op.bytes
    nominal_bytes_per_s = CLUSTER.levels[1].bandwidth_bytes_per_s / 2
    assert model.times(CLUSTER, [op]).time_s[0] >= sent_bytes / nominal_bytes_per_s


def test_messages_that_latency_bounds_fit_no_exponent(tmp_path: Path) -> None:
    alone = log("A100-SXM4-80GB", "NVLink3 + InfiniBand HDR", 17e9, "all_reduce", 16, 2)[:2]
    report = fit_calibration([beside(alone, 1.0, 2)], tmp_path)
    assert "sharing" not in report["collectives"]


def test_kernels_set_aside_are_counted(tmp_path) -> None:
    m = 2 ** np.arange(6, 12)
    rows = pd.DataFrame(
        {
            "device": "A100-SXM4-80GB",
            "op_family": "gemm",
            "op": "linear",
            "dtype": "bf16",
            "m": m,
            "n": 1024,
            "k": 1024,
            "batch": 1,
            "pass": "forward",
            "variant": "",
            "time_us": 5 + 0.02 * m,
        }
    )
    disturbed = rows.assign(variant="suspect_interference", time_us=9 * rows["time_us"])
    report = fit_calibration(
        [pd.concat([rows, disturbed], ignore_index=True)], tmp_path, family="gemm"
    )
    ((_, figures),) = report.items()
    assert (figures["rows"], figures["set_aside"]) == (
        len(rows),
        {"marked as suspect": len(disturbed)},
    )


@settings(max_examples=20)
@given(
    loaded=st.floats(0.8, 3.0),
    cold=st.floats(0.8, 3.0),
    measured=st.lists(
        st.sampled_from(["", "loaded", "cold", "suspect_interference_loaded"]),
        min_size=6,
        max_size=6,
    ),
)
def test_kernels_of_other_states_are_compared_with_the_usual_one(
    loaded: float, cold: float, measured: list[str]
) -> None:
    usual = pd.DataFrame(
        {
            "source": "perfmodel",
            "device": "A100-SXM4-80GB",
            "op_family": "gemm",
            "op": "linear",
            "dtype": "bf16",
            "m": 2 ** np.arange(6, 12),
            "n": 1024,
            "k": 1024,
            "variant": "",
            "time_us": np.arange(1.0, 7.0),
            "interference": 0.0,
        }
    )
    factor = np.array([{"loaded": loaded, "cold": cold}.get(state, 9.0) for state in measured])
    others = usual.assign(variant=measured, time_us=usual["time_us"] * factor, interference=0.1)
    others = others[others["variant"] != ""]
    table = pd.concat([usual, others], ignore_index=True)
    expected = {
        state: value for state, value in (("loaded", loaded), ("cold", cold)) if state in measured
    }
    found = slowdowns_by_state([table], "gemm")
    assert found.keys() == expected.keys()
    assert all(found[state] == pytest.approx(value) for state, value in expected.items())
    assert slowdowns_by_state([table.assign(source="others")], "gemm") == {}
    assert slowdowns_by_state([others], "gemm") == {}
