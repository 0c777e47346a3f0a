"""Folders of files that can be made again, kept below a size."""

import os
from contextlib import suppress
from pathlib import Path


def drop_least_recently_used(folder: Path, limit_bytes: float) -> None:
    """Delete files of `folder`, those not used for longest first, until the others are within `limit_bytes`.

    Other processes may read, write and drop files meanwhile: a file goes as a whole, whoever holds it open keeps it,
    and one that is already gone or cannot be deleted is passed over.
    """
    files: list[tuple[float, int, str]] = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    files.append((max(status.st_mtime, status.st_atime), status.st_size, entry.path))
    excess = sum(size for _, size, _ in files) - limit_bytes
    for _, size, path in sorted(files):
        if excess <= 0:
            return
        with suppress(OSError):
            os.unlink(path)
            excess -= size


def mark_used(path: Path) -> None:
    """Note that `path` is in use now; file systems do not do so by themselves at every read."""
    with suppress(OSError):
        os.utime(path)
