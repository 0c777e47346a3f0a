"""What of a benchmark's environment may be kept: settings that change times, never names, paths or users."""

import re
from collections.abc import Iterable
from typing import Final

ALLOWED: Final = frozenset(
    {
        "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_COLLNET_ENABLE", "NCCL_CROSS_NIC",
        "NCCL_CUMEM_ENABLE", "NCCL_IB_DISABLE", "NCCL_IB_QPS_PER_CONNECTION", "NCCL_LAUNCH_MODE", "NCCL_MAX_CTAS",
        "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_MNNVL_ENABLE", "NCCL_NET_GDR_LEVEL",
        "NCCL_NTHREADS", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_P2P_NET_CHUNKSIZE",
        "NCCL_PROTO", "NCCL_SHM_DISABLE",
    }
)  # fmt: skip
"""Variables that are kept."""
_PLAIN: Final = re.compile(r"[A-Za-z0-9_,:;^=+-]{1,64}")
"""Values that are kept: no dots or slashes, so neither hosts nor addresses nor paths."""


def allowed(variables: Iterable[str]) -> dict[str, str]:
    """Of `NAME=value` texts those that are in the allow-list and have plain values, by name."""
    pairs = (text.partition("=") for text in variables)
    return {name: value for name, _, value in sorted(pairs) if name in ALLOWED and _PLAIN.fullmatch(value)}


def variant(layout: str, settings: dict[str, str]) -> str:
    """The `variant` column: where in memory, and the settings that were kept."""
    return ";".join([layout, *(f"{name}={value}" for name, value in settings.items())])
