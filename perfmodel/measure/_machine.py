"""What a card says about the machine and its software; nothing that names a host or a user."""

import os
import platform
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def machine() -> dict[str, str | int]:
    """CPU model, logical cores and architecture."""
    return {"cpu_model": _cpu_model(), "cores": os.cpu_count() or 1, "architecture": platform.machine()}


def software(packages: Iterable[str]) -> dict[str, str]:
    """Versions of Python, the system and packages; those not installed are left out."""
    found = {"python": platform.python_version(), "system": platform.system()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        text = cpuinfo.read_text("utf-8", errors="replace")
    except OSError:
        return platform.processor() or "unknown"
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or "unknown"
