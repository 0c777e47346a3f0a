"""How much of the disk caches may take: one limit, divided among their kinds."""

import math
import os
from typing import Final

from perfmodel.errors import PerfModelError

VARIABLE: Final = "PERFMODEL_CACHE_LIMIT_GB"
DEFAULT_GB: Final = 2.0
SHARES: Final = {"structures": 0.75, "pipelines": 0.125, "xla": 0.125}
"""Of the limit, for each folder below `cache_dir()`."""


def cache_limit_bytes(kind: str | None = None) -> float:
    """`$PERFMODEL_CACHE_LIMIT_GB` (default 2; 0: no cache) in bytes: of all caches, or of one of `SHARES`.

    Raises:
        PerfModelError: if the variable is no number of gigabytes.
    """
    text = os.environ.get(VARIABLE) or str(DEFAULT_GB)
    try:
        limit_gb = float(text)
    except ValueError:
        limit_gb = math.nan
    if not 0 <= limit_gb < math.inf:
        raise PerfModelError(f"{VARIABLE}={text!r} is not a number of gigabytes; set e.g. 2, or 0 for no cache")
    return limit_gb * 1e9 * (SHARES[kind] if kind else 1.0)
