"""Keeps programs that JAX compiles on disk, so that the next process has them at once."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import jax

from perfmodel.session import cache_folder, cache_limit_bytes, drop_least_recently_used

_LOOKED_AT_EVERY_S: Final = 3600.0
"""Seconds between two checks of the disk space of compiled evaluators."""


def keep_compilations() -> None:
    """Keep everything that this process compiles, for a process that runs one of our commands."""
    _limit_compilations(cache_folder("xla"))
    jax.config.update("jax_compilation_cache_dir", str(cache_folder("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def keep_long_compilations() -> None:
    """Keep programs that JAX compiles for over a second, in processes that use Python's API.

    Where the process has chosen a folder of its own (`jax_compilation_cache_dir`), that stays. JAX
    looks at the setting at its first compilation: a process that has compiled something before
    keeps nothing.
    """
    folder = cache_folder("xla")
    chosen = jax.config.values["jax_compilation_cache_dir"]
    if chosen is not None or not cache_limit_bytes("xla"):
        return
    # Without a place to write to JAX would warn at every compilation.
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        _limit_compilations(folder)
        jax.config.update("jax_compilation_cache_dir", str(folder))


def _limit_compilations(folder: Path) -> None:
    """Delete the least recently used compiled evaluators if all together take too much space.

    Each is two files: to ask the size of thousands takes longer than many a command, and within an
    hour few are added.
    """
    limit_bytes = cache_limit_bytes("xla")
    looked = folder / ".looked"
    with suppress(OSError):
        if 0 <= time.time() - looked.stat().st_mtime < _LOOKED_AT_EVERY_S:
            return
    drop_least_recently_used(folder, limit_bytes)
    with suppress(OSError):
        looked.touch()
