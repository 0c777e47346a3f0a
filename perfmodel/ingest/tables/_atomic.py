"""Atomic file writes: a reader sees the old file or the new one, never half of either."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from perfmodel.display import json_text


def write_atomic(path: Path | str, write: Callable[[BinaryIO], object]) -> None:
    """Call `write` on a temporary file beside `path`, then rename it over `path`.

    Devices and pipes, such as `/dev/stdout`, are written directly.

    Raises:
        OSError: `path` cannot be written; the error names it, not the temporary file.
    """
    path = Path(path)
    try:
        _write_atomic(path, write)
    except OSError as error:
        why = "its folder is a file" if isinstance(error, FileExistsError) else error.strerror
        raise OSError(
            error.errno, f"cannot be written ({why}); give another path", str(path)
        ) from error


def _write_atomic(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write as `write_atomic` does; errors name the file that the system reports."""
    # a device or a pipe, which must not be replaced
    if path.exists() and not (path.is_file() or path.is_dir()):
        with path.open("wb") as file:
            write(file)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, because a rename is atomic only within one file system.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            # Without it a crash of the machine may leave the new name on an empty file.
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner reads. The umask can be asked for only by
        # setting it.
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
    """Write `value` to `path` atomically as indented JSON, see `json_text`."""
    write_text(path, json_text(value, indent=1) + "\n")
