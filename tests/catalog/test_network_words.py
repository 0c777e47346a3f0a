"""Networks in the words of engineers: whatever the unit, order and punctuation, one network has one
reading."""

import csv
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.catalog import cluster_for
from perfmodel.catalog.networks import ADAPTERS_NOT_STATED, Network, read_network, unread_link_words
from perfmodel.errors import PerfModelError

NODE = 8


@pytest.mark.parametrize(
    ("words", "gbit"),
    [
        ("8x400 Gb/s", 400),
        ("8x50 GB/s", 400),
        ("3.2 Tbps", 400),
        ("400 GB/s per node", 400),
        ("100GbE", 12.5),
        ("4x HDR", 100),
        ("2x NDR200", 50),
        ("EFA v2 3200", 400),
        ("RoCE 200G", 25),
        ("8x HDR100", 100),
        ("1x Ethernet 100Gb/s, 8x NVIDIA Quantum-2 CX7 InfiniBand (400Gb/s)", 400),
        ("3,200 Gbps EFA", 400),
        ("8 NVIDIA ConnectX-7 NICs", 400),
        ("400Gb/s/GPU IB", 400),
        ("8\u00d7HDR", 200),
        ("dual-port 100GbE", 25),
        ("one HDR InfiniBand", 25),
        ("four EDR links per node", 50),
        ("GPUDirect-TCPX", 100),
        ("FasTrak", 200),
        ("800 MB/s per GPU", 6.4),
        ("Slingshot-11, 4 NICs per node", 100),
        ("900 GB/s bidirectional per node", 450),
        ("8x 400G RoCEv2 (Spectrum-X)", 400),
        ("InfiniBand NDR", 400),
        ("400 Gb/s NDR InfiniBand", 400),
        ("4x InfiniBand per node, 800 Gbps in all", 100),
        ("Omni-Path, 4 links per node", 50),
        ("10Gb/25Gb/100Gb Ethernet, 2 ports", 25),
        ("8x CX7 NDR; 2x BlueField-3 400Gb/s (storage)", 400),
        ("10x ConnectX-7 400Gb/s", 400),
        ("8x ConnectX-7 IB NDR 400Gb/s + 200Gb/s Ethernet NIC", 400),
        ("Ultra Ethernet 800G", 100),
        ("8x MT43244 BlueField-3", 400),
        ("8x MT2910 Family [ConnectX-7]", 400),
        ("8x BCM57608", 400),
        ("8x Broadcom Thor 2", 400),
        ("8x AMD Pensando Pollara 400 AI NIC", 400),
        ("8x ConnectX-6 Dx", 200),
        ("4x E810-C, 2x X710", 50),
        ("8 rails x 400G", 400),
        ("rail-optimized 8x400G", 400),
        ("A3 Mega 1.6Tbps", 200),
        ("gVNIC 8x200Gbps", 200),
    ],
)
def test_examples_are_read(words, gbit):
    network = read_network(words)
    assert network.gbit_per_s_per_device(NODE) == pytest.approx(gbit)
    assert network.not_understood == ()


@pytest.mark.parametrize(
    ("words", "network"),
    [
        ("Compute: 8x ConnectX-7 IB NDR 400Gb/s, Management: 100Gb/s Ethernet NIC", "8x NDR"),
        (
            "Storage: 2x ConnectX-7 IB NDR 400Gb/s, Compute: 8x ConnectX-7 IB NDR 400Gb/s, "
            "Management: 100Gb/s Ethernet NIC",
            "8x NDR",
        ),
        (
            "Storage&Compute: 4x ConnectX-7 IB NDR 400Gb/s, Management: 25Gb/s Ethernet NIC",
            "4x NDR",
        ),
        ("BF3 200Gbps for NS and 2xBF3 400Gbps for EW", "2x 400 Gb/s"),
        ("Ethernet, Infiniband", "Infiniband"),
        ("Infiniband; Data bandwidth for GPU-PCIe: 504GB/s; PCIe-NIC: 500GB/s", "Infiniband"),
        ("Infiniband:Data bandwidth for GPU-PCIe: 504GB/s; PCIe-NIC: 500GB/s", "Infiniband"),
        ("Management: 1x Ethernet 10GB/Sec", ""),
        ("Gig Ethernet", ""),
        ("Ethernet", "Ethernet"),
        ("N/A", ""),
        ("back-end: 8x 400G RoCE; front-end: 2x 200G Ethernet", "8x 400G RoCE"),
    ],
)
def test_the_network_for_computing_is_told_from_the_others(words, network):
    for_computing = replace(read_network(words), other_counts=(), other_gbit_per_s=())
    assert for_computing == read_network(network)


ETHERNET_BESIDE = (
    "{0}, {1}",
    "{1}, {0}",
    "{0} + {1}",
    "{1} and {0}",
    "{0} {1}",
    "{1} {0}",
    "{0}; {1}",
)


@given(
    network=st.sampled_from(
        ["InfiniBand", "4x InfiniBand", "HDR", "8x NDR", "IB NDR 400Gb/s", "Infiniband per node"]
    ),
    ethernet=st.sampled_from(["10GbE", "25GbE", "100GbE", "2x 100GbE", "1x 25GbE", "dual 25GbE"]),
    together=st.sampled_from(ETHERNET_BESIDE),
    columns=st.booleans(),
)
def test_a_rate_of_ethernet_is_not_that_of_infiniband_beside_it(
    network, ethernet, together, columns
):
    words = read_network(together.format(ethernet, network))
    alone = read_network(network)
    assert replace(words, other_counts=(), other_gbit_per_s=()) == alone
    # A column that was filled from the words says no more than they do.
    beside = read_network(ethernet)
    count = beside.adapters if columns else None
    assert words.with_adapters(count, beside.gbit_per_s) == words
    # What the network has is not stated by what Ethernet has: the same is open as without it.
    levels = [cluster_for("H100-SXM5-80GB", NODE, "", n).levels[-1] for n in (words, alone)]
    assert levels[0] == levels[1]


@pytest.mark.parametrize(
    ("words", "gbit"),
    [
        ("8x 100GbE EDR InfiniBand", 100),
        ("ConnectX-5 EDR 100GbE", 100),
        ("Omni-Path 100GbE", 100),
        ("8x 400GbE RoCE", 400),
        ("8x 200GbE Slingshot", 200),
        ("EFA 4x 100GbE", 50),
        ("8x ConnectX-7 400Gb/s InfiniBand/Ethernet", 400),
        ("8x 400Gb/s InfiniBand; Ethernet", 400),
    ],
)
def test_a_rate_of_ethernet_is_that_of_networks_that_run_on_it_or_have_it_too(words, gbit):
    assert read_network(words).gbit_per_s_per_device(NODE) == gbit


@given(
    computing=st.integers(2, 8),
    storage=st.integers(1, 8),
    rate=st.sampled_from([100, 200, 400]),
    storage_rate=st.sampled_from([25, 50, 100, 200, 400]),
    label=st.sampled_from(["Storage: ", "Management: ", "front-end: "]),
)
def test_columns_filled_from_another_network_of_the_words_change_nothing(
    computing, storage, rate, storage_rate, label
):
    words = f"{label}{storage}x {storage_rate}Gb/s RoCE, Compute: {computing}x {rate}Gb/s RoCE"
    network = read_network(words)
    assert network.with_adapters(storage, storage_rate) == network
    # A figure of no network in the words replaces that of the one for computing.
    assert network.with_adapters(16, None).adapters == 16


@pytest.mark.parametrize(
    ("device", "gbit", "open_"),
    [("A100-SXM4-80GB", 800, False), ("A100-SXM4-80GB", 200, True), ("H100-SXM5-80GB", 400, True)],
)
def test_a_rate_that_no_adapter_of_a_device_has_is_the_node_s(device, gbit, open_):
    level = cluster_for(device, NODE, "", f"{gbit} Gb/s RDMA").levels[-1]
    assert level.bandwidth_bytes_per_s == pytest.approx(gbit / NODE * 1e9 / 8)
    assert (level.source == ADAPTERS_NOT_STATED) is open_


FAMILIES = ("InfiniBand", "RoCE", "RDMA", "Ethernet", "AWS EFA", "")
UNITS = (
    ("{0:g} Gb/s", 1),
    ("{0:g}Gbps", 1),
    ("{0:g} Gbit/s", 1),
    ("{0:g}G", 1),
    ("{0:g} Gb/Sec", 1),
    ("{0:g} gbps", 1),
    ("{0:g} GB/s", 8),
    ("{0:g}GBps", 8),
    ("{0:.12g} Tb/s", 1e3),
    ("{0:.12g} Tbps", 1e3),
    ("{0:.12g} TB/s", 8e3),
    ("{0:.12g} MB/s", 8e-3),
    ("{0:g} gigabits per second", 1),
    ("{0:g} GBytes/s", 8),
)


@given(
    count=st.integers(1, 16),
    rate=st.sampled_from([25, 40, 50, 100, 200, 400, 800]),
    family=st.sampled_from(FAMILIES),
    unit=st.sampled_from(UNITS),
    times=st.sampled_from(["{0}x", "{0} x", "{0}\u00d7", "{0}*", "{0} adapters"]),
    per=st.sampled_from(["", "per node", "/node", "per server"]),
    joint=st.sampled_from([" ", "  "]),
    order=st.integers(0, 23),
)
@settings(max_examples=100, deadline=None)
def test_unit_order_and_punctuation_do_not_matter(
    count, rate, family, unit, times, per, joint, order
):
    notation, gbit = unit
    counted = f"{times.format(count)}"
    parts = [f"{counted} {notation.format(rate / gbit)}", family, per]
    written = joint.join(list(permutations(parts))[order % 6]).strip()
    expected = read_network(f"{count}x {rate} Gb/s {family} per node")
    assert expected.gbit_per_s_per_device(count) == pytest.approx(rate)
    network = read_network(written)
    assert network.gbit_per_s == pytest.approx(rate)
    assert (network.adapters, network.family, network.scope) == (count, expected.family, "node"), (
        written
    )


@given(
    rate=st.sampled_from([12.5, 25, 50, 100]),
    name=st.sampled_from(["", "RoCE", "InfiniBand"]),
    per=st.sampled_from(["per node", "per GPU"]),
)
def test_a_byte_is_eight_bits(rate, name, per):
    bits, bytes_ = (
        read_network(f"{8 * rate:g} Gb/s {name} {per}"),
        read_network(f"{rate:g} GB/s {name} {per}"),
    )
    assert bits == bytes_
    assert bits.gbit_per_s == 8 * rate


@given(
    network=st.builds(
        Network,
        family=st.sampled_from(
            ["", "InfiniBand", "RoCE", "AWS EFA", "Ethernet", "Slingshot", "Omni-Path", "RDMA"]
        ),
        adapters=st.one_of(st.none(), st.integers(1, 99)),
        gbit_per_s=st.sampled_from([25.0, 37.5, 66.0, 50.0]),
        scope=st.sampled_from(["node", "device", "rack"]),
        domain=st.sampled_from([0, 0, 72]),
    )
)
@settings(deadline=None)
def test_a_network_is_read_back_from_its_words(network):
    assert read_network(network.words) == network


def test_every_published_wording_is_read_back_from_its_words(data_dir):
    wordings = set()
    for folder in ("published", "published2"):
        for path in (data_dir / folder).glob("*.csv"):
            with open(path) as file:
                for row in csv.DictReader(file):
                    wordings |= {row.get("inter_link") or "", row.get("inter_link_as_stated") or ""}
    assert len(wordings) > 60
    for words in wordings:
        network = read_network(words)
        again = read_network(network.words)
        for field in ("family", "generation", "adapters", "gbit_per_s", "scope", "absent"):
            assert getattr(again, field) == getattr(network, field), words


def test_words_that_are_not_understood_are_named_and_not_used():
    network = read_network("8x 400 Gb/s FlorpNet NDR")
    assert network.not_understood == ("FlorpNet",)
    assert network == read_network("8x 400 Gb/s NDR").__class__(
        family="InfiniBand",
        generation="NDR",
        adapters=8,
        gbit_per_s=400.0,
        not_understood=("FlorpNet",),
    )
    assert read_network("wobble 3000").not_understood == ("wobble", "3000")


@pytest.mark.parametrize(
    ("words", "gb_per_s"),
    [
        ("PCIe Gen4", 31.5),
        ("PCI-E 4.0", 31.5),
        ("PCI Express 4.0 x16", 31.5),
        ("PCIe4", 31.5),
        ("PCIe G5", 63),
        ("PHB", 63),
        ("PIX", 63),
        ("NV18", 450),
        ("NVLink-C2C", 450),
        ("third-generation NVSwitch", 450),
        ("HGX H100 baseboard", 450),
        ("NVLink, PCIe Gen5", 450),
        ("SXM5", 450),
    ],
)
def test_links_inside_a_node_are_pcie_by_every_spelling(words, gb_per_s):
    cluster = cluster_for("H100", 8, words, "")
    assert cluster.levels[0].bandwidth_bytes_per_s == pytest.approx(gb_per_s * 1e9)
    assert unread_link_words(words) == ()


def test_words_for_links_that_are_not_understood_are_named():
    assert unread_link_words("NVLink florp, fully connected") == ("florp",)


@pytest.mark.parametrize("words", ["4x HDR 400 Gb/s", "8x NDR 100 GB/s", "2x ConnectX-6 800 Gb/s"])
def test_adapters_do_not_carry_more_than_they_can(words):
    with pytest.raises(PerfModelError, match=r"of one of its adapters"):
        read_network(words)


@pytest.mark.parametrize(
    ("device", "node", "intra", "inter", "said"),
    [
        ("H100-SXM5-80GB", 8, "NVLink4", "8x 400 GB/s", "check bits"),
        ("MI300X", 8, "NVLink", "", "made by AMD"),
        ("A100-SXM4-80GB", 8, "Infinity Fabric", "", "only devices of AMD"),
        ("TPU-v5p", 4, "NVLink", "", "made by Google"),
        ("H100-SXM5-80GB", 8, "NVL72", "", "has no NVLink racks of 72"),
        ("H100-SXM5-80GB", 16, "NVLink NVL8", "", "exceeds the devices of NVL8"),
    ],
)
def test_a_node_whose_parts_do_not_fit_together_is_refused(device, node, intra, inter, said):
    with pytest.raises(PerfModelError, match=said):
        cluster_for(device, node, intra, inter)


@pytest.mark.parametrize("node", [4, 72])
@pytest.mark.parametrize(
    ("words", "nics", "rate"),
    [
        ("4x ConnectX-7", None, None),
        ("4x ConnectX-7 IB NDR 400 Gb/s", None, None),
        ("", 4, 400),
        ("", None, None),
        ("400 Gb/s InfiniBand per GPU", None, None),
        ("NVL72 + 4x NDR per tray", None, None),
        ("72x NDR", None, None),
        ("1.6 Tb/s per node", None, None),
        ("72x 400 Gb/s per rack", None, None),
    ],
)
def test_a_rack_of_nvlink_stays_one_whatever_its_trays_have(node, words, nics, rate):
    rack = cluster_for("GB200", node, "NVLink5", words, nics, rate)
    assert rack.devices_per_node == 72
    assert rack.levels[1].bandwidth_bytes_per_s == pytest.approx(50e9)


def test_columns_of_adapters_win_over_words_that_they_do_not_repeat():
    words = read_network("8x 200 Gb/s RoCE per node")
    assert words.with_adapters(4, 400) == read_network("4x 400 Gb/s RoCE per node")
    assert words.with_adapters(None, 100).adapters == 8
    assert read_network("3x 100 GbE per card").with_adapters(3, 100) == read_network(
        "3x 100 GbE per card"
    )
    assert read_network("1600 Gb/s RoCE per node").with_adapters(8, None) == read_network(
        "8x 200 Gb/s RoCE per node"
    )
    assert read_network("InfiniBand").with_adapters(4, 200) == read_network("4x HDR")


@given(
    rate=st.sampled_from([25, 40, 100, 200, 400]),
    name=st.sampled_from(["", "RoCE", "Ethernet"]),
    more=st.sampled_from(["per node", "per GPU", "per NIC", "2x", "3.2 Tbps"]),
)
def test_a_rate_alone_may_be_that_of_one_of_several_adapters(rate, name, more):
    assert read_network(f"{rate} Gb/s {name}").is_adapter_rate
    said = {"2x": f"2x {rate} Gb/s {name}", "3.2 Tbps": f"3.2 Tbps {name}"}.get(
        more, f"{rate} Gb/s {name} {more}"
    )
    network = read_network(said)
    assert not network.is_adapter_rate
    assert not read_network(f"{rate} Gb/s {name}").with_adapters(4, None).is_adapter_rate


@given(
    device_and_gbit=st.sampled_from(
        [("V100-SXM2-16GB", 100), ("A100-SXM4-40GB", 400), ("H100-SXM5-80GB", 400)]
    ),
    words=st.sampled_from(["AWS EFA {} Gbps", "EFA {}", "EFA v2 {} Gb/s", "{} Gb/s EFA"]),
)
def test_a_rate_of_efa_alone_is_its_instance_s_or_a_device_s_share_of_it(device_and_gbit, words):
    device, gbit = device_and_gbit
    instance = cluster_for(device, NODE, "", "AWS EFA").levels[-1]
    level = cluster_for(device, NODE, "", words.format(gbit)).levels[-1]
    assert level.bandwidth_bytes_per_s == instance.bandwidth_bytes_per_s
    # No adapter's of which a node may have several: nothing about it is open.
    assert level.source != ADAPTERS_NOT_STATED
