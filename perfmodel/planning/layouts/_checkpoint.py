"""A search's evaluations on disk, so that one that was interrupted can be continued."""

import hashlib
import io
import zipfile
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.ingest.tables import write_bytes


def fingerprint(*what: object) -> str:
    """A string that is equal for equal searches of one version of the package."""
    return hashlib.sha256(repr((version("perfmodel"), *what)).encode()).hexdigest()


@dataclass
class Evaluations:
    """Step times by the number of their layout, as far as they are known."""

    path: Path | None = None
    """Where they are kept, if anywhere."""
    search: str = ""
    """`fingerprint` of what is searched."""
    step_s: dict[int, float] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path | None, search: str) -> "Evaluations":
        """What an earlier run left at `path`; nothing if the file is new.

        Raises:
            PerfModelError: the file is of another search, or none of ours.
        """
        if path is None or not path.exists():
            return cls(path, search)
        try:
            with np.load(path) as file:
                same = str(file["search"]) == search
                known = dict(zip(file["number"].tolist(), file["step_s"].tolist(), strict=True))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            raise PerfModelError(f"{path} is not the state of a search; name another file") from None
        if not same:
            raise PerfModelError(
                f"{path} is the state of another search (model, cluster, batch, space or version differ); "
                "name another file"
            )
        return cls(path, search, known)

    def save(self) -> None:
        """Write the file, if there is one, atomically."""
        if self.path is None:
            return
        buffer = io.BytesIO()
        number, step_s = np.array(list(self.step_s), np.int64), np.array(list(self.step_s.values()), np.float64)
        np.savez(buffer, search=np.array(self.search), number=number, step_s=step_s)
        write_bytes(self.path, buffer.getvalue())
