"""`perfmodel doctor`: shows what is installed, which devices are visible, and problems."""

import argparse
import os
import platform
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import perfmodel
from perfmodel.cli._flags import add_json
from perfmodel.cli._show import reporting
from perfmodel.display import new_console, table
from perfmodel.errors import PerfModelError

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "numpy",
    "pandas",
    "pyarrow",
    "safetensors",
    "scipy",
    "matplotlib",
    "torch",
)
_PROGRAMS = {
    "all_reduce_perf": "perfmodel calibrate --backend nccl-tests",
    "mpirun": "calibration over several nodes",
    "srun": "calibration over several nodes",
    "nsys": "profiles for perfmodel import nsys",
    "ip": "emulated hosts",
}
_SETTINGS = (
    "PERFMODEL_DATA",
    "PERFMODEL_CACHE",
    "PERFMODEL_CACHE_LIMIT_GB",
    "JAX_PLATFORMS",
    "XLA_FLAGS",
)


def add_command(commands: Any) -> None:
    """Register the command."""
    command: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="show what is installed, and the devices, calibrations and caches of this machine",
    )
    command.add_argument(
        "--calibration",
        type=Path,
        metavar="DIR",
        help="also describe this calibration, made by 'perfmodel fit'",
    )
    command.add_argument("--clear-cache", action="store_true", help="first delete the cache")
    add_json(command)
    command.set_defaults(run=reporting(_examine, _show))


def _examine(arguments: argparse.Namespace) -> dict[str, Any]:
    return examine(arguments.calibration, clear_cache=arguments.clear_cache)


def examine(calibration: Path | None = None, *, clear_cache: bool = False) -> dict[str, Any]:
    """Collect versions, extras, devices, programs, calibrations, caches, settings, `problems`.

    Raises:
        CalibrationError: if `calibration` is missing or unreadable.
    """
    from perfmodel.cost import describe_calibration
    from perfmodel.session import CACHES, cache_folder

    if clear_cache:
        for name in CACHES:
            shutil.rmtree(cache_folder(name), ignore_errors=True)

    own_calibration = {}
    if calibration is not None:
        own_calibration["own_calibration"] = describe_calibration(calibration)
    programs = {}
    for name, use in _PROGRAMS.items():
        programs[name] = shutil.which(name) or f"not found (for {use})"

    # Each part reports what it finds wrong into `problems` and goes on: a broken torch must not
    # hide the rest.
    problems: list[str] = []
    return {
        "perfmodel": perfmodel.__version__,
        "installed_in": str(Path(perfmodel.__file__).parent),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "extras": _extras(),
        "jax_devices": _jax_devices(problems),
        "torch_devices": _torch_devices(problems),
        "programs": programs,
        "calibration": describe_calibration(None),
        **own_calibration,
        "caches": _caches(problems),
        "settings": {name: os.environ.get(name) for name in _SETTINGS},
        "problems": problems,
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _extras() -> dict[str, str]:
    """Return for every extra whether all of its packages are installed."""
    packages_of_extra: dict[str, list[str]] = {}
    for line in metadata.requires("perfmodel") or ():
        # Requirements read `package>=1; extra == "name"`.
        requirement = re.match(r"([\w.-]+).*\bextra == ['\"]([\w-]+)", line)
        if requirement:
            package, extra = requirement.groups()
            packages_of_extra.setdefault(extra, []).append(package)
    states = {}
    for extra, packages in packages_of_extra.items():
        missing = [package for package in packages if _version(package) is None]
        states[extra] = "installed"
        if missing:
            states[extra] = f"without {', '.join(missing)}: pip install 'perfmodel[{extra}]'"
    return states


def _jax_devices(problems: list[str]) -> list[str]:
    """List the devices that JAX can use; if it finds none, add the reason to `problems`."""
    import jax

    try:
        return [str(device) for device in jax.devices()]
    except RuntimeError as error:
        problems.append(f"JAX finds no device: {str(error).splitlines()[0]}")
        return []


def _torch_devices(problems: list[str]) -> list[str]:
    """List the devices that torch sees; if it is broken, add the reason to `problems`."""
    if _version("torch") is None:
        return []
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError) as error:
        problems.append(f"torch is installed but cannot be imported: {error}")
        return []
    return [
        "cpu",
        *(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
    ]


def _caches(problems: list[str]) -> dict[str, Any]:
    """Return the sizes of the caches; adds what is wrong with them to `problems`."""
    from perfmodel.session import CACHE_SHARES, CACHES, cache_dir, cache_folder, cache_limit_bytes

    folder = cache_dir()
    report: dict[str, Any] = {"folder": str(folder)}
    try:
        report["limit_bytes"] = int(cache_limit_bytes())
    except PerfModelError as error:
        problems.append(str(error))
    for name in CACHES:
        sizes = [path.stat().st_size for path in cache_folder(name).rglob("*") if path.is_file()]
        report |= {
            name: str(cache_folder(name)),
            f"{name}_files": len(sizes),
            f"{name}_bytes": sum(sizes),
        }
    # Only caches that grow share the limit; a compiled peer is one small file per version.
    used = sum(report[f"{kind}_bytes"] for kind in CACHE_SHARES)
    if used > report.get("limit_bytes", used):
        problems.append(
            f"caches hold {used / 1e9:.1f} GB, more than their limit; run perfmodel doctor --clear-cache"
        )

    # The cache folder may not exist yet; what counts is whether its nearest parent can be
    # written.
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        problems.append(
            f"{existing} is not writable, so nothing is cached between runs; set PERFMODEL_CACHE to another folder"
        )
    return report


def _show(report: dict[str, Any]) -> None:
    """Print the report in its order."""
    rows = []
    for key, value in report.items():
        if isinstance(value, dict):
            for name, fact in value.items():
                # Programs and variables of the shell are names that stay as they are.
                label = name.replace("_", " ") if key == "caches" else name
                rows.append((f"{key.replace('_', ' ')}: {label}", _value_text(name, fact)))
        else:
            text = "; ".join(value) or "none" if isinstance(value, list) else str(value)
            rows.append((key.replace("_", " "), text))
    new_console().print(table("", ("what", "value"), rows))


def _value_text(name: str, value: Any) -> str:
    if value is None:
        return "-"
    return f"{value / 1e6:,.0f} MB" if name.endswith("_bytes") else str(value)
