"""Describes this machine from what the operating system reports: its cores, and its CPU as a
device."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from perfmodel.spec import Device, PeakRates
from perfmodel.units import GIB, KIB, MIB

CPU_NAMES = frozenset({"cpu", "this-cpu", "host"})

DEFAULT_CLOCK_HZ = 2.5e9
DEFAULT_MEMORY_BYTES = 8 * GIB
DEFAULT_CACHE_BYTES = 8 * MIB
BANDWIDTH_PER_CORE_BYTES_PER_S = 10e9
"""Bandwidth at which one core streams from DRAM, limited by its outstanding misses; usually 8 to 15
GB/s."""
SOCKET_BANDWIDTH_BYTES_PER_S = 200e9
"""Largest DRAM bandwidth of a socket, however many cores use it: eight channels of DDR4-3200."""
LOOPBACK_BYTES_PER_S = 5e9
"""Rate between processes of one machine, through shared memory or loopback sockets."""

_FMA_LANES = {"avx512f": 16, "avx2": 8, "avx": 4, "asimd": 4}
_FMA_UNITS = 2


def this_cpu(root: Path = Path("/"), cores: int | None = None) -> Device:
    """The CPU that runs this process.

    Peaks count two fused multiply-add units per core of the widest vector extension present. The
    figures that no file states (memory bandwidth, links) are the documented defaults of this
    module; where a file is missing (another operating system) its default stands in.

    Args:
        root: folder in which `proc` and `sys` are mounted.
        cores: logical cores to use; default: those this process may run on.
    """
    info = _cpu_info(_text(root / "proc/cpuinfo"))
    count = cores or len(usable_cores())
    clock_hz = _clock_hz(root, info)
    # The flags are in the order from the widest vector on; 4 lanes are SSE's.
    lanes = next((w for flag, w in _FMA_LANES.items() if flag in info.get("flags", "").split()), 4)
    # A fused multiply-add is two operations.
    fp32 = count * clock_hz * lanes * _FMA_UNITS * 2
    bf16 = fp32 * 2 if "avx512_bf16" in info.get("flags", "").split() else None
    return Device(
        name="cpu",
        vendor=info.get("vendor_id", "unknown"),
        architecture=info.get("model name", "unknown"),
        memory_bytes=_memory_bytes(root),
        memory_bandwidth_bytes_per_s=min(
            count * BANDWIDTH_PER_CORE_BYTES_PER_S, SOCKET_BANDWIDTH_BYTES_PER_S
        ),
        peak=PeakRates(fp64=fp32 / 2, fp32=fp32, bf16=bf16),
        compute_units=count,
        clock_hz=clock_hz,
        l2_bytes=_cache_bytes(root),
        link_bandwidth_bytes_per_s=LOOPBACK_BYTES_PER_S,
        source="read from /proc and /sys; bandwidths are defaults",
        aliases=tuple(sorted(CPU_NAMES - {"cpu"})),
    )


def usable_cores() -> tuple[int, ...]:
    """Logical cores that this process may run on, sorted."""
    # Containers and schedulers give a process fewer cores than the machine has; macOS does not say.
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return tuple(sorted(affinity(0))) if affinity else tuple(range(os.cpu_count() or 1))


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _cpu_info(text: str) -> dict[str, str]:
    """Fields of the first processor (ARM calls its flags `Features`)."""
    fields = dict(re.findall(r"^([\w ]+?)\s*:[ \t]*(.*)$", text.split("\n\n", 1)[0], re.MULTILINE))
    if "Features" in fields:
        fields.setdefault("flags", fields["Features"])
    return fields


def _clock_hz(root: Path, info: Mapping[str, str]) -> float:
    """Highest clock of the processor."""
    # The highest clock is the one that peaks count; virtual machines hide it and say the current
    # one.
    khz = _text(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").strip()
    if khz.isdigit() and int(khz):
        return float(khz) * 1e3
    try:
        return float(info["cpu MHz"]) * 1e6 or DEFAULT_CLOCK_HZ
    except (KeyError, ValueError):
        return DEFAULT_CLOCK_HZ


def _memory_bytes(root: Path) -> float:
    match = re.search(r"^MemTotal:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return float(match[1]) * KIB if match else float(DEFAULT_MEMORY_BYTES)


def _cache_bytes(root: Path) -> float:
    """Largest cache of the first core."""
    # Index 0 and 1 are the first level, for data and instructions; the levels above follow as far
    # as there are any.
    unit_bytes = {"": 1, "K": KIB, "M": MIB}
    sizes = []
    for number in range(5):
        text = _text(root / f"sys/devices/system/cpu/cpu0/cache/index{number}/size").strip()
        size = re.match(r"(\d+)([KM]?)$", text)
        if size:
            sizes.append(float(size[1]) * unit_bytes[size[2]])
    return max(sizes, default=float(DEFAULT_CACHE_BYTES))
