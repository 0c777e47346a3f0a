"""Classes of links: rates by lanes and data sheets, latencies of a family, what NCCL may do on
them."""

from dataclasses import replace
from itertools import groupby
from math import exp

import pytest

from perfmodel import catalog
from perfmodel.cost import interconnect_of
from perfmodel.cost.learn.collectives import Effect, Fabric, expected
from perfmodel.cost.learn.collectives.links import (
    LINK_CLASSES,
    UNKNOWN_INTER,
    UNNAMED,
    LinkClass,
    in_node_of,
    link_class,
)

BY_NAME = {link.name: link for link in LINK_CLASSES}
INSIDE = [link for link in LINK_CLASSES if not link.between_nodes and link.limited]
NETWORKS = [link for link in LINK_CLASSES if link.between_nodes]


def family(link: LinkClass) -> str:
    return link.name.split("-")[0].rstrip("0123456789")


@pytest.mark.parametrize(
    ("name", "lanes", "lane_gbit_per_s"),
    [
        # 16 lanes of 8, 16 and 32 GT/s, of which 128 bits in 130 are data
        *((f"PCIe{generation}", 16, 2**generation * 128 / 130) for generation in (3, 4, 5)),
        # four lanes; the older ones of 14.0625 and 25.78125 GBaud, of which 64 bits in 66 are data
        ("InfiniBand-FDR", 4, 14.0625 * 64 / 66),
        ("InfiniBand-EDR", 4, 25.78125 * 64 / 66),
        *(
            (f"InfiniBand-{name}", 4, rate)
            for name, rate in (("HDR", 50), ("NDR", 100), ("XDR", 200))
        ),
        # links of a device, one way: 4, 6, 12 and 18 of 20 and 25 GB/s, 18 of 50
        *(
            (f"NVLink{n}", links, 8 * rate)
            for n, links, rate in ((1, 4, 20), (2, 6, 25), (3, 12, 25), (4, 18, 25))
        ),
        ("NVLink5", 18, 8 * 50),
        ("XGMI", 7, 8 * 64),
    ],
)
def test_a_device_s_rate_is_that_of_its_lanes(
    name: str, lanes: int, lane_gbit_per_s: float
) -> None:
    assert BY_NAME[name].bandwidth_bytes_per_s == pytest.approx(
        lanes * lane_gbit_per_s * 1e9 / 8, rel=0.03
    )


def test_generations_of_a_family_differ_in_rate_and_not_in_latency() -> None:
    for _, generations in groupby(sorted(LINK_CLASSES, key=family), key=family):
        assert len({(link.latency_s, link.hop_s, link.between_nodes) for link in generations}) == 1


def test_a_message_takes_longer_the_farther_it_goes_and_the_more_of_its_way_is_software() -> None:
    """By switches of a node, through a host bridge, by adapters that write to memory themselves, by
    the host's own network stack."""
    inside_s = max(link.hop_s for link in INSIDE)
    offloaded_s = {
        link.hop_s
        for link in NETWORKS
        if link.lines or family(link) in ("OmniPath", "Aries", "Slingshot")
    }
    software_s = {
        link.hop_s for link in NETWORKS if family(link) in ("EFA", "Ethernet", "emulated")
    }
    assert (
        max(link.hop_s for link in INSIDE if family(link) == "NVLink") < inside_s < min(offloaded_s)
    )
    assert max(offloaded_s) < min(software_s)
    assert min(offloaded_s) <= UNNAMED.hop_s < UNKNOWN_INTER.hop_s < max(software_s)


NOT_USUAL = {"DCN": 50e-6}
"""Networks between data centres are called Ethernet, and are farther."""


@pytest.mark.parametrize("name", catalog.clusters())
def test_clusters_of_the_catalog_state_the_latency_that_their_links_usually_have(name: str) -> None:
    cluster = catalog.cluster(name)
    for number, level in enumerate(cluster.levels):
        link = link_class(level.name, cluster.device.name, number > 0)
        if link.known:
            assert level.latency_s == pytest.approx(NOT_USUAL.get(level.name, link.latency_s))


@pytest.mark.parametrize(
    ("interconnect", "device", "between_nodes", "lines"),
    [
        *((f"NVLink{generation}", "", False, generation > 1) for generation in (1, 2, 3, 4, 5)),
        ("4xGH200", "GH200", False, True),
        ("NVLink2 NVSwitch", "V100", False, True),
        ("PCIe4", "L40S", False, False),
        ("XGMI", "MI300X", False, False),
        *(
            (f"InfiniBand {name}", "", True, name != "FDR")
            for name in ("FDR", "EDR", "HDR", "NDR", "XDR")
        ),
        ("RoCE", "H100", True, True),
        ("RDMA-400G", "H100", True, True),
        ("some fabric", "H100", True, True),
        ("AWS EFA", "A100", True, False),
        ("AWS EFA", "H100", True, True),
        ("Slingshot", "A100", True, False),
        ("OmniPath", "A100", True, False),
        ("Aries", "P100", True, False),
        ("Ethernet", "A100", True, False),
    ],
)
def test_lines_go_by_nvlink_since_volta_and_by_adapters_beside_the_device(
    interconnect: str, device: str, between_nodes: bool, lines: bool
) -> None:
    link = link_class(interconnect, device, between_nodes)
    assert link.lines == lines
    assert link.between_nodes == between_nodes


def test_switches_that_add_up_are_nvswitch_since_hopper_and_infiniband() -> None:
    reduces = {link.name for link in LINK_CLASSES if link.reduces}
    assert reduces == {
        "NVLink4",
        "NVLink5",
        *(link.name for link in NETWORKS if family(link) == "InfiniBand"),
    }


def test_pairs_are_joined_directly_where_there_is_no_switch() -> None:
    """Pascal's and Volta's without NVSwitch, four A100 or Grace Hoppers, and AMD's."""
    assert {link.name for link in LINK_CLASSES if link.mesh} == {
        "NVLink1",
        "NVLink2",
        "NVLink3-mesh",
        "NVLink4-mesh",
        "XGMI",
    }


@pytest.mark.parametrize(
    ("device", "interconnect", "devices", "is_mesh"),
    [
        ("A100-SXM4-40GB", "NVLink3 + Slingshot", 4, True),
        ("A100-SXM4-40GB", "NVLink3 NVSwitch + Slingshot", 4, False),
        ("A100-SXM4-40GB", "NVLink3 + InfiniBand HDR", 8, False),
        ("H100-SXM5-80GB", "NVLink4 + InfiniBand NDR", 4, True),
        ("H100-SXM5-80GB", "NVLink4 + InfiniBand NDR", 8, False),
    ],
)
def test_boards_of_four_are_joined_in_pairs_in_tables_as_in_clusters(
    device: str, interconnect: str, devices: int, is_mesh: bool
) -> None:
    """HGX A100 4-GPU and HGX H100 4-GPU have no switches, unless the name says so."""
    row = Fabric.of_row(device, interconnect, ranks_per_node=2, node_size=devices)
    assert row.inside.link_class.mesh == is_mesh
    link = in_node_of(devices, link_class(interconnect, device, False), interconnect.lower())
    assert link.mesh == is_mesh


def test_ranks_of_one_host_have_no_link_between_them() -> None:
    assert {link.name for link in LINK_CLASSES if not link.limited} == {"loopback", "emulated"}


NCCL_HOPS_US = {"inside": (0.6, 1.9, 3.4), "between": (5.0, 8.5, 14.0)}
"""Latency of a hop in LL, LL128 and Simple, by NVLink and by the network (NCCL
`src/graph/tuning.cc`, hwLat)."""


def test_hops_of_slower_protocols_are_expected_as_nccl_has_them() -> None:
    """As what they take beyond the hop of the fastest, in shares of it."""
    ratios = {}
    for name, part in (
        ("hop_line", "hop_line"),
        ("hop_ratio", "hop_ratio"),
        ("hop_line_between", "hop_line_between"),
    ):
        ratios[name] = 1 + exp(expected(Effect(part))[0])
    near, far = NCCL_HOPS_US["inside"], NCCL_HOPS_US["between"]
    assert ratios["hop_line"] == pytest.approx(near[1] / near[0])
    assert ratios["hop_ratio"] == pytest.approx(near[2] / near[0])
    assert ratios["hop_line_between"] == pytest.approx(far[1] / far[0])
    # between nodes ratios differ by link class: expected below NCCL's single figure, within a
    # deviation of it
    log_ratio, deviation = expected(Effect("hop_ratio_between", "InfiniBand-HDR"))
    assert 1 + exp(log_ratio) <= far[2] / far[0] <= 1 + exp(log_ratio + deviation)


@pytest.mark.parametrize("link", LINK_CLASSES, ids=lambda link: link.name)
def test_a_hop_is_expected_as_its_class_has_it(link: LinkClass) -> None:
    part = "hop_between" if link.between_nodes else "hop_inside"
    assert exp(expected(Effect(part, link.name))[0]) == pytest.approx(link.hop_s)
    assert expected(Effect(part, link.name, "all_reduce"))[0] == 0.0
    # bandwidth of a mesh grows with its peers, that of a bridge is shared, that of a switch stays
    towards = 1 if link.mesh else -1 if link.name.startswith("PCIe") else 0
    peers = expected(Effect("peers", link.name))[0]
    assert (peers > 0) - (peers < 0) == towards


@pytest.mark.parametrize("name", [None, "our own fabric", "our + fabric @ home"])
@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("index", [0, 1])
def test_words_of_links_say_rates_that_their_names_do_not(
    index: int, scale: float, name: str | None
) -> None:
    """Inside a node whatever rate it is. Between nodes a known name says an adapter's, which
    several devices may share: only a higher one is stated; of an unknown name any."""
    cluster = catalog.cluster("dgx-h100")
    device = cluster.device.name
    levels = list(cluster.levels)
    rate = levels[index].bandwidth_bytes_per_s * scale
    levels[index] = replace(
        levels[index], bandwidth_bytes_per_s=rate, name=name or levels[index].name
    )
    words = interconnect_of(replace(cluster, levels=tuple(levels)))
    read = link_class(words, device, index > 0).bandwidth_bytes_per_s
    nominal = link_class(levels[index].name, device, index > 0).bandwidth_bytes_per_s
    assert read == pytest.approx(
        max(rate, nominal) if index > 0 and name is None else rate, rel=1e-5
    )
    assert len(words.split(" + ")) == 2
