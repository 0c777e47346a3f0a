"""Atomic file writes: a reader sees the old file or the new one, never half of either."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


def write_atomic(path: Path | str, write: Callable[[BinaryIO], object]) -> None:
    """Call `write` on a temporary file beside `path`, then rename it over `path`."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write `data` to `path` atomically."""
    write_atomic(path, lambda file: file.write(data))


def write_text(path: Path | str, text: str) -> None:
    """Write `text` to `path` atomically, as UTF-8."""
    write_bytes(path, text.encode())


def write_json(path: Path | str, value: Any) -> None:
    """Write `value` to `path` atomically as indented JSON."""
    write_text(path, json.dumps(value, indent=1) + "\n")
