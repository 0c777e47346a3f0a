"""Figures of cluster and device files: every quantity has limits, text may carry a unit, and slips
are named."""

import copy
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from perfmodel import catalog
from perfmodel.catalog import ClusterEntry, DeviceEntry, KindEntry, LevelEntry, LinkEntry
from perfmodel.catalog.entries import package_tables
from perfmodel.catalog.plausible import PEAK_RATE, PLAUSIBLE, Plausible, plausible_figures
from perfmodel.errors import PerfModelError

ENTRIES = (ClusterEntry, KindEntry, LevelEntry, LinkEntry, DeviceEntry)
CLUSTER: dict[str, Any] = {
    "name": "mine",
    "price_per_device_hour": 2.0,
    "device": {
        "name": "chip",
        "vendor": "me",
        "architecture": "new",
        "memory_gib": 80.0,
        "memory_bandwidth_gb_per_s": 3000.0,
        "peak_tflops": {"bf16": 900.0, "fp32": 60.0},
        "compute_units": 100,
        "clock_mhz": 1500.0,
        "l2_mib": 50.0,
        "link_gb_per_s": 450.0,
        "host_gb_per_s": 60.0,
        "power_w": 700.0,
        "source": "test",
    },
    "levels": [
        {"name": "inside", "size": 8, "bandwidth_gb_per_s": 450.0, "latency_us": 2.0},
        {"name": "between", "size": 64, "bandwidth_gb_per_s": 50.0, "latency_us": 5.0},
    ],
}


def numbers_of(entry: type) -> set[str]:
    """Fields of an entry that hold a number."""
    hints = get_type_hints(entry)
    return {
        f.name for f in fields(entry) if {int, float} & {hints[f.name], *get_args(hints[f.name])}
    }


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_quantity_of_a_file_has_limits(entry: type) -> None:
    assert numbers_of(entry) <= set(PLAUSIBLE)


@pytest.mark.parametrize("folder", ["clusters", "devices"])
def test_the_catalog_lies_within_the_limits(folder: str) -> None:
    for name, tables in package_tables(folder).items():
        assert plausible_figures(tables, name) == tables


@pytest.mark.parametrize(
    ("key", "limits", "unit"),
    [
        (key, limits, unit)
        for key, limits in (*PLAUSIBLE.items(), ("bf16", PEAK_RATE))
        for unit in limits.mistaken
    ],
)
def test_a_figure_in_another_unit_is_refused_with_that_unit(
    key: str, limits: Plausible, unit: str
) -> None:
    """The likely figure, in the wrong unit: 450 GB/s as 450e9, 2 us as 2e-6."""
    middle = (max(limits.least, 1e-3) * limits.most) ** 0.5
    for likely in (limits.least, middle, limits.most):
        written = likely / limits.mistaken[unit]
        if limits.holds(written):  # nobody can tell
            continue
        table: dict[str, Any] = (
            {"peak_tflops": {key: written}} if limits is PEAK_RATE else {key: written}
        )
        with pytest.raises(PerfModelError, match=f"{key}.*is not plausible.*if it is in {unit}"):
            plausible_figures(table, "file.toml")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"levels.0.bandwidth_gb_per_s": 450e9}, "450 if it is in bytes/s"),
        ({"levels.1.latency_us": 2e-6}, "2 if it is in s"),
        ({"levels.1.latency_us": 1e300}, "look at the figure"),
        ({"levels.1.bandwidth_gb_per_s": 1e-300}, "look at the figure"),
        ({"device.memory_gib": 80 * 2**30}, "80 if it is in bytes"),
        ({"device.memory_bandwidth_gb_per_s": 3.35e12}, "3350 if it is in bytes/s"),
        ({"device.peak_tflops.bf16": 989e12}, "989 if it is in FLOP/s"),
        ({"device.clock_mhz": 1.98e9}, "1980 if it is in Hz"),
        ({"device.clock_mhz": 1.98}, "1980 if it is in GHz"),
        ({"device.power_w": 700e3}, "mW"),
        ({"price_per_device_hour": 1e5}, "cents"),
    ],
)
def test_a_cluster_file_with_a_slip_of_units_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(PerfModelError, match=words):
        catalog.cluster(written(tmp_path, change))


@pytest.mark.parametrize(
    ("change", "path", "value"),
    [
        ({"levels.1.bandwidth_gb_per_s": "200Gbit/s"}, "levels.1.bandwidth_bytes_per_s", 25e9),
        ({"levels.0.bandwidth_gb_per_s": "450 GB/s"}, "levels.0.bandwidth_bytes_per_s", 450e9),
        ({"levels.1.latency_us": "5us"}, "levels.1.latency_s", 5e-6),
        ({"device.memory_gib": "80GiB"}, "device.memory_bytes", 80 * 2**30),
        (
            {"device.memory_bandwidth_gb_per_s": "3.35TB/s"},
            "device.memory_bandwidth_bytes_per_s",
            3.35e12,
        ),
        ({"device.peak_tflops.bf16": "989TFLOP/s"}, "device.peak.bf16", 989e12),
        ({"device.clock_mhz": "1.98GHz"}, "device.clock_hz", 1.98e9),
        ({"device.power_w": "0.7kW"}, "device.power_w", 700.0),
    ],
)
def test_a_figure_may_carry_its_unit(
    tmp_path: Path, change: dict[str, Any], path: str, value: float
) -> None:
    found: Any = catalog.cluster(written(tmp_path, change))
    for part in path.split("."):
        found = found[int(part)] if part.isdecimal() else getattr(found, part)
    assert found == pytest.approx(value)


@pytest.mark.parametrize("text", ["200 parsecs", "fast", "-5GB/s", "5s", ""])
def test_text_that_is_no_bandwidth_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(PerfModelError, match="is not a valid bandwidth"):
        catalog.cluster(written(tmp_path, {"levels.1.bandwidth_gb_per_s": text}))


def written(folder: Path, change: dict[str, Any]) -> Path:
    """A cluster file with some values in place of its own."""
    table = copy.deepcopy(CLUSTER)
    for path, value in change.items():
        at: Any = table
        *parents, last = path.split(".")
        for part in parents:
            at = at[int(part)] if part.isdecimal() else at[part]
        at[last] = value
    lines = [
        f'name = "{table["name"]}"',
        f"price_per_device_hour = {table['price_per_device_hour']}",
        "[device]",
    ]
    device = dict(table["device"])
    peaks = device.pop("peak_tflops")
    lines += [f"{key} = {value!r}" for key, value in device.items()]
    lines += ["[device.peak_tflops]", *(f"{key} = {value!r}" for key, value in peaks.items())]
    for level in table["levels"]:
        lines += ["[[levels]]", *(f"{key} = {value!r}" for key, value in level.items())]
    path_of_file = folder / "mine.toml"
    path_of_file.write_text("\n".join(lines).replace("'", '"'))
    return path_of_file
