"""One calibration per folder at a time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from perfmodel.errors import CalibrationError

NAME: Final = ".calibrate.lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the system releases it however the process ends.

    Raises:
        CalibrationError: if another process holds it.
    """
    import fcntl

    path = folder / NAME
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise CalibrationError(f"{folder}: another calibration is writing there; wait for it or stop it") from None
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            break
        os.close(handle)  # its last holder removed the file in between
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)
