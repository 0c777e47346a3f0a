import csv

import pytest

import perfmodel
from perfmodel.catalog import cluster, cluster_for, clusters
from perfmodel.errors import PerfModelError, UnknownNameError

GB = 1e9


def test_every_listed_cluster_loads_with_sources():
    for name in clusters():
        found = cluster(name)
        assert found.name == name
        assert found.source
        assert all(level.source for level in found.levels)


@pytest.mark.parametrize(
    ("name", "device", "node", "intra_gb", "inter_gb"),
    [
        ("dgx-a100", "A100-SXM4-80GB", 8, 300, 25),
        ("DGX A100 40GB", "A100-SXM4-40GB", 8, 300, 25),
        ("selene", "A100-SXM4-80GB", 8, 300, 25),
        ("dgx-h100", "H100-SXM5-80GB", 8, 450, 50),
        ("dgx-2", "V100-SXM3-32GB", 16, 150, 6.25),
        ("gb200-nvl72", "GB200-NVL72", 72, 900, 50),
        ("jean-zay-a100", "A100-SXM4-80GB", 8, 300, 2.25),
        ("a40x4", "A40", 4, 31.5, 3.125),
        ("mi355x", "MI355X", 8, 537.6, 50),
        ("gaudi2", "Gaudi2", 8, 262.5, 37.5),
        ("gaudi3", "Gaudi3", 8, 525, 75),
    ],
)
def test_nominal_figures(name, device, node, intra_gb, inter_gb):
    found = cluster(name)
    assert found.device.name == device
    assert found.devices_per_node == node
    assert found.levels[0].bandwidth_bytes_per_s == intra_gb * GB
    assert found.levels[1].bandwidth_bytes_per_s == inter_gb * GB


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("aws-p4d", "EFA"),
        ("aws-p5", "EFA"),
        ("jean-zay-a100", "Omni-Path, 4 links per node"),
        ("jean-zay-v100", "Omni-Path, 4 links per node"),
    ],
)
def test_a_cluster_by_name_has_the_network_that_its_words_have_in_a_published_table(name, words):
    named = cluster(name)
    told = cluster_for(named.device.name, named.devices_per_node, "", words)
    for field in ("bandwidth_bytes_per_s", "contention", "rank_latency_s", "latency_s"):
        assert getattr(named.levels[1], field) == pytest.approx(getattr(told.levels[1], field))


def test_an_unknown_name_is_answered_with_near_ones():
    with pytest.raises(UnknownNameError, match=r"unknown cluster 'dgx-a10'.*dgx-a100"):
        cluster("dgx-a10")


TOML = """
device = "A100"
levels = [{ name = "NVLink3", size = 8, bandwidth_gb_per_s = 300, latency_us = 2 }]
"""

INLINE = """
name = "mine"
levels = [{ name = "bus", size = 4, bandwidth_gb_per_s = 12.5, latency_us = 3.5 }]
[device]
name = "chip"
vendor = "us"
architecture = "one"
memory_gib = 32
memory_bandwidth_gb_per_s = 1000
peak_tflops = { bf16 = 100 }
compute_units = 10
clock_mhz = 1000
l2_mib = 8
link_gb_per_s = 50
source = "our data sheet, 2026"
"""


def test_a_cluster_comes_from_toml(tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text(TOML)
    found = cluster(path)
    assert (found.name, found.device.name) == ("lab", "A100-SXM4-80GB")
    assert found.levels[0].latency_s == 2e-6


def test_a_cluster_may_tell_its_links_in_the_words_of_a_table(tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text(
        "device = 'H100'\ndevices_per_node = 8\ninter_link = '4x 400 Gb/s RoCE'\nmax_devices = 64\n"
    )
    told, expected = cluster(path), cluster_for("H100", 8, "", "4x 400 Gb/s RoCE")
    assert (told.name, told.levels, told.max_devices) == ("lab", expected.levels, 64)
    path.write_text("device = 'H100'\ninter_link = '4x 400 Gb/s FlorpNet'\n")
    with pytest.raises(PerfModelError, match=r"lab\.toml: 'FlorpNet' cannot be read in links"):
        cluster(path)
    path.write_text(TOML + "intra_link = 'NVLink'\n")
    with pytest.raises(PerfModelError, match="intra_link: to describe links in words"):
        cluster(path)


def test_a_cluster_may_bring_its_own_device(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(INLINE)
    found = cluster(str(path))
    assert (found.name, found.device.name) == ("mine", "chip")
    assert found.device.peak.bf16 == 100e12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device = 'A100'\n", r"levels: missing"),
        (TOML + "nodes = 3\n", r"nodes: unknown key"),
        (
            TOML.replace("300", "'300 GB'"),
            r"levels\.0\.bandwidth_gb_per_s: '300 GB' is not a valid bandwidth",
        ),
        (TOML.replace("300", "-300"), r"bandwidth_bytes_per_s must be a finite number above zero"),
        (
            TOML.replace("bandwidth_gb_per_s", "bandwidth"),
            r"bandwidth_gb_per_s: missing; .*bandwidth: unknown key",
        ),
        (TOML.replace('"A100"', '"A1000"'), r"unknown device 'A1000'"),
        (INLINE.replace("memory_gib = 32\n", ""), r"device: memory_gib: missing"),
        ("device = ", r"not valid TOML"),
    ],
)
def test_a_bad_file_is_refused_with_all_its_faults(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(PerfModelError, match=message):
        cluster(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PerfModelError, match=r"none\.toml: cannot be read"):
        cluster(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("device", "node", "intra", "inter", "intra_gb", "inter_gb"),
    [
        (
            "A100-SXM4-80GB",
            8,
            "NVLink3/NVSwitch",
            "8x HDR 200 Gbps InfiniBand per node (Selene)",
            300,
            25,
        ),
        ("A100-SXM4-80GB", 8, "NVLink3", "4x 100 Gb RoCE per node", 300, 6.25),
        ("A100-SXM4-80GB", 8, "NVLink3", "Omni-Path, 4 links per node", 300, 0.36 * 6.25),
        (
            "A100-SXM4-80GB",
            8,
            "NVLink3",
            "4x InfiniBand per node, 800 Gbps in the configs",
            300,
            12.5,
        ),
        ("A100-SXM4-80GB", 8, "NVLink3", "RoCE RDMA (rate not stated)", 300, 25),
        ("A100-40GB", 8, "NVLink", "1600 Gbps per node RoCE", 300, 25),
        ("A100-80GB", 8, "", "400 Gbps per node", 300, 6.25),
        ("A100-40GB", 8, "NVLink", "AWS EFA", 300, 6.25),
        ("H100-SXM5-80GB", 8, "NVLink4", "AWS EFA", 450, 50),
        ("H100-SXM5-80GB", 8, "NVLink4", "400 Gbps RoCE per GPU", 450, 50),
        ("H100-80GB", 8, "NVLink", "", 450, 50),
        ("H100-PCIE", 4, "PCIe", "", 63, 50),
        ("V100-SXM2-16GB", 8, "NVLink2", "one EDR InfiniBand 100 Gbps per node", 150, 1.5625),
        (
            "V100-SXM2-16GB",
            4,
            "NVLink2",
            "Omni-Path, 4x 100 Gbps per node (Jean Zay)",
            150,
            0.36 * 12.5,
        ),
        ("GH200-96GB", 4, "NVLink4", "InfiniBand NDR", 450, 50),
        ("B300-SXM", 8, "NVLink5", "", 900, 100),
        ("TPU-v5e", 256, "ICI torus", "DCN between slices", 200, 3.125),
    ],
)
def test_words_become_rates(device, node, intra, inter, intra_gb, inter_gb):
    found = cluster_for(device, node, intra, inter)
    assert found.devices_per_node == node
    assert [level.bandwidth_bytes_per_s / GB for level in found.levels] == [intra_gb, inter_gb]


def test_one_node_has_no_network():
    found = cluster_for("V100-SXM2-16GB", 8, "NVLink2", "none (one node)")
    assert len(found.levels) == 1
    assert found.capacity == 8


def test_a_rack_is_one_domain():
    for words in ("NVLink5 NVL72", "NVLINK Gen5", ""):
        assert cluster_for("GB200", 4, words, "").devices_per_node == 72


@pytest.mark.parametrize(("chip", "pod"), [("TPU-v5e", 256), ("TPU-v5p", 8960), ("TPU-v6e", 256)])
def test_hosts_of_a_slice_are_joined_by_its_torus(chip, pod):
    assert cluster_for(chip, 4, "", "").levels[0].size == pod
    assert cluster_for(chip, 64, "ICI torus", "none (one slice)").levels[0].size == 64


def test_all_published_wordings_are_understood(data_dir):
    seen = set()
    for path in (data_dir / "published").glob("*.csv"):
        with open(path) as file:
            for row in csv.DictReader(file):
                if row.get("device") and row.get("devices_per_node"):
                    node = int(float(row["devices_per_node"]))
                    seen.add((row["device"], node, row["intra_link"], row["inter_link"]))
    assert len(seen) > 30
    for words in seen:
        assert cluster_for(*words).levels


@pytest.mark.parametrize("name", ["h800", "h20", "a800", "l40s", "v100", "rtx-4090"])
def test_a_device_in_place_of_a_cluster_says_which_networks_it_assumes(name: str) -> None:
    """The reference system's, tier by tier, on the command line and in Python."""
    found = cluster(name)
    (told,) = found.assumed
    assert found.device.name in told
    for level in found.levels:
        assert level.name in told
        assert f"up to {level.size:,} devices" in told
    problem = perfmodel.problem("gpt3-125m", name, global_batch=8)
    assert told in problem.job.assumed
    assert not cluster("dgx-h100").assumed
