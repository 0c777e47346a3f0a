import csv

import pytest

from perfmodel.catalog import device, devices
from perfmodel.catalog.this_machine import DEFAULT_CLOCK_HZ, DEFAULT_MEMORY_BYTES, this_cpu
from perfmodel.errors import UnknownNameError
from perfmodel.units import GIB


def test_every_listed_device_loads_and_names_its_source():
    for name in devices():
        found = device(name)
        assert found.name == name
        assert found.source


def test_every_device_of_the_measurement_tables_resolves_to_its_figures(data_dir):
    with open(data_dir / "devices.csv") as file:
        for row in csv.DictReader(file):
            found = device(row["device"])
            gib = found.memory_bytes / GIB
            assert gib == pytest.approx(float(row["mem_gb"]), rel=0.01), row["device"]
            bandwidth = found.memory_bandwidth_bytes_per_s / 1e9
            assert bandwidth == pytest.approx(float(row["mem_bw_gb_per_s"]), rel=0.01), row[
                "device"
            ]
            if row["bf16_fp16_dense_tflops"]:
                peak = found.peak.flops_per_s("fp16") / 1e12
                assert peak == pytest.approx(float(row["bf16_fp16_dense_tflops"]), rel=0.02), row[
                    "device"
                ]


def test_every_device_of_the_published_runs_resolves(data_dir):
    names = set()
    for path in (data_dir / "published").glob("*.csv"):
        with open(path) as file:
            names |= {row["device"] for row in csv.DictReader(file) if row.get("device")}
    assert names
    for name in names:
        device(name)


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("V100-SXM2-16GB", 16),
        ("V100-SXM2-32GB", 32),
        ("A100-40GB", 40),
        ("A100-80GB", 80),
        ("A100", 80),
        ("H100-SXM5-80GB", 80),
        ("H200", 141),
        ("TPU v5p", 95),
        ("tpu_v5e", 16),
    ],
)
def test_memory_size_follows_the_variant(name, gib):
    assert device(name).memory_bytes == gib * GIB


def test_names_ignore_case_and_separators():
    assert device("h100") is device("H100-SXM5-80GB")
    assert device("Tesla V100") is device("V100-SXM2-16GB")


def test_an_unknown_name_is_answered_with_near_ones():
    with pytest.raises(UnknownNameError, match=r"unknown device 'A100-SXM4-81GB'.*A100-SXM4-80GB"):
        device("A100-SXM4-81GB")


def test_the_machine_at_hand_is_read_from_its_own_files(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "processor : 0\nvendor_id : GenuineIntel\nmodel name : Some CPU\ncpu MHz : 2000.0\n"
        "flags : fpu avx2 avx512f\n\nprocessor : 1\ncpu MHz : 3000.0\n"
    )
    (tmp_path / "proc/meminfo").write_text("MemTotal:       1048576 kB\n")
    cache = tmp_path / "sys/devices/system/cpu/cpu0/cache/index2"
    cache.mkdir(parents=True)
    (cache / "size").write_text("2048K\n")
    cpu = this_cpu(tmp_path, cores=4)
    assert (cpu.architecture, cpu.compute_units, cpu.clock_hz) == ("Some CPU", 4, 2e9)
    assert (cpu.memory_bytes, cpu.l2_bytes) == (GIB, 2 * 1024**2)
    assert cpu.peak.fp32 == 4 * 2e9 * 16 * 2 * 2  # cores, clock, lanes, units, multiply and add


def test_a_machine_without_these_files_gets_the_documented_defaults(tmp_path):
    cpu = this_cpu(tmp_path, cores=1)
    assert (cpu.clock_hz, cpu.memory_bytes) == (DEFAULT_CLOCK_HZ, DEFAULT_MEMORY_BYTES)


def test_cpu_is_a_device_like_others():
    assert device("CPU").compute_units >= 1
