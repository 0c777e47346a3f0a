"""Settings of NCCL that rows of nccl-tests keep: its version, and variables of the environment that
change how it runs."""

import re
from collections.abc import Iterable
from typing import Final


def nccl_version(code: int) -> str:
    """`22809` -> `2.28.9` (from 2.9 on; older codes have one digit for the minor version)."""
    if code >= 10000:
        return f"{code // 10000}.{code // 100 % 100}.{code % 100}"
    return f"{code // 1000}.{code // 100 % 10}.{code % 100}"


def algorithm(settings: dict[str, str]) -> str:
    """The `algorithm` column: the one that NCCL was forced to use, or `auto` if it chose."""
    return settings.get("NCCL_ALGO", "auto").lower()


ALLOWED: Final = frozenset(
    {
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "NCCL_ALGO",
        "NCCL_BUFFSIZE",
        "NCCL_COLLNET_ENABLE",
        "NCCL_CROSS_NIC",
        "NCCL_CUMEM_ENABLE",
        "NCCL_IB_DISABLE",
        "NCCL_IB_QPS_PER_CONNECTION",
        "NCCL_LAUNCH_MODE",
        "NCCL_MAX_CTAS",
        "NCCL_MAX_NCHANNELS",
        "NCCL_MIN_CTAS",
        "NCCL_MIN_NCHANNELS",
        "NCCL_MNNVL_ENABLE",
        "NCCL_NET_GDR_LEVEL",
        "NCCL_NTHREADS",
        "NCCL_NVLS_ENABLE",
        "NCCL_P2P_DISABLE",
        "NCCL_P2P_LEVEL",
        "NCCL_P2P_NET_CHUNKSIZE",
        "NCCL_PROTO",
        "NCCL_SHM_DISABLE",
    }
)
"""Variables that are kept."""
_PLAIN: Final = re.compile(r"[A-Za-z0-9_,:;^=+-]{1,64}")
"""Values that are kept: no dots or slashes, so neither hosts nor addresses nor paths."""


def allowed(variables: Iterable[str]) -> dict[str, str]:
    """Values by name of those `NAME=value` texts that are in the allow-list and have plain
    values."""
    pairs = (text.partition("=") for text in variables)
    # Environments hold tokens, paths and names of hosts: only what changes how NCCL runs may enter
    # a table.
    return {
        name: value
        for name, _, value in sorted(pairs)
        if name in ALLOWED and _PLAIN.fullmatch(value)
    }


def variant(layout: str, settings: dict[str, str]) -> str:
    """The `variant` column: the place in memory, and the settings that were kept."""
    return ";".join([layout, *(f"{name}={value}" for name, value in settings.items())])
