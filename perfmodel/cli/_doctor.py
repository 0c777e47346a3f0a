"""`perfmodel doctor`: what is installed, what it can see, and what looks stale."""

import os
import platform
import sys
from importlib import metadata
from typing import Any

import perfmodel

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


def examine() -> dict[str, Any]:
    """Versions, devices, shipped calibration, caches and settings, as plain values."""
    from perfmodel.cost import describe_calibration
    from perfmodel.timeline import cache_dir

    return {
        "perfmodel": perfmodel.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "jax_devices": _jax_devices(),
        "calibration": describe_calibration(None),
        "caches": {"structures": str(cache_dir())},
        "settings": {k: os.environ.get(k) for k in ("PERFMODEL_DATA", "PERFMODEL_CACHE", "JAX_PLATFORMS")},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _jax_devices() -> list[str]:
    import jax

    return [str(device) for device in jax.devices()]
