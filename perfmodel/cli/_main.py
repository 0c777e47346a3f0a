"""Entry point: platform options in one place, bad input as one line and exit status 2."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from perfmodel.cli._files import complete_from_job, complete_from_launch
from perfmodel.cli._interrupts import INTERRUPTED, uninterrupted
from perfmodel.cli._parser import given, parser
from perfmodel.display import require_picture
from perfmodel.errors import PerfModelError

_FOLDERS: Final = ("calibrate", "fit", "emulate")
"""Commands whose --out is a folder."""


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (0 ok, 2 bad input, 130 interrupted)."""
    arguments = parser().parse_args(argv)
    try:
        measures = arguments.command == "calibrate" and not arguments.for_decision
        if not measures and arguments.command not in ("doctor", "completion"):  # of any device, or of none
            # the model's own arrays are small: an accelerator would only add latency
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
            _keep_compilations()
        _require_outputs(arguments)
        complete_from_job(arguments, given(argv))
        complete_from_launch(arguments)
        return arguments.run(arguments)
    except PerfModelError as error:
        print(f"perfmodel: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None:  # no file of the user's
            raise
        print(f"perfmodel: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        with uninterrupted():
            print(f"perfmodel: {str(stop) or 'interrupted'}", file=sys.stderr)
            return INTERRUPTED


def _require_outputs(arguments: argparse.Namespace) -> None:
    """Refuse outputs that cannot be written before anything is computed for them."""
    for name in ("png", "html", "trace", "out", "export"):
        path: Path | None = getattr(arguments, name, None)
        if path is None:
            continue
        if name == "png" or (name == "out" and arguments.command == "plot"):
            require_picture(path)
        folder = name == "out" and arguments.command in _FOLDERS
        if path.exists() and path.is_dir() != folder:
            raise PerfModelError(f"{path}: is a {'file, not a folder' if folder else 'folder'}; give another --{name}")


def _keep_compilations() -> None:
    """Compiled evaluators stay on disk beside the structures, so that the next run starts at once."""
    import jax

    from perfmodel.ingest.tables import drop_least_recently_used
    from perfmodel.timeline import cache_dir, cache_limit_bytes

    drop_least_recently_used(cache_dir() / "xla", cache_limit_bytes("xla"))
    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
