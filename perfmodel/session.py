"""Everything that is cached between calls.

A session never changes an answer, only how soon it comes: values are cached by everything that they
depend on (whole frozen records, the content of files), never by a name, a path or a time. So no
call has to name its session, and any may be cleared at any moment. Caches on disk, for later
processes, follow at the end.
"""

import hashlib
import math
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from importlib.resources import files
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple, TypeVar

from perfmodel.errors import PerfModelError

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)


class _Entry(NamedTuple):
    """A value in a cache."""

    value: Any
    size: float


class Cache:
    """A least-recently-used cache of limited size.

    Args:
        most: size of all values together that is kept, in the unit of `size`.
        size: function that returns the size of a value; by default each counts as one.
    """

    def __init__(self, most: float, size: Callable[[Any], float] = lambda value: 1.0) -> None:
        self._most = most
        self._size = size
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._total_size = 0.0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get_or_compute(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of a key, computing it if absent; a failed computation is not stored.

        Args:
            key: everything that the value depends on; the value must not change afterwards.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                return entry.value

        # Computed without the lock, because it may need other values of this cache. Two threads may
        # make the same value; the later one stays.
        value = make()
        with self._lock:
            self._keep(key, value)
        return value

    def get_or_compute_each(
        self, keys: Sequence[Key], make: Callable[[list[Key]], Iterable[tuple[Key, T]]]
    ) -> list[T]:
        """Return the values of keys, computing all absent ones in one call.

        Args:
            make: computes the values of the absent keys, and returns them by key; it may add values
                of further keys.
        """
        # Keys are records of many fields, whose hashes take longer than all the rest: as few
        # look-ups as can be.
        with self._lock:
            entries = [self._entries.get(key) for key in keys]
            absent: dict[Key, None] = {}
            for key, entry in zip(keys, entries, strict=True):
                if entry is None:
                    absent[key] = None
                else:
                    self._entries.move_to_end(key)
        if not absent:
            return [entry.value for entry in entries if entry is not None]

        # Computed without the lock, as in `get_or_compute`. They need not all fit into the cache.
        computed = dict(make(list(absent)))
        with self._lock:
            for key, value in computed.items():
                self._keep(key, value)
        return [
            computed[key] if entry is None else entry.value
            for key, entry in zip(keys, entries, strict=True)
        ]

    def _keep(self, key: Hashable, value: Any) -> None:
        """Store a value as the last one, and drop the oldest ones beyond the size of the cache."""
        entry = _Entry(value, self._size(value))
        n_before = len(self._entries)
        stored = self._entries.setdefault(key, entry)
        if len(self._entries) == n_before:
            self._total_size -= stored.size
            self._entries[key] = entry
            self._entries.move_to_end(key)
        self._total_size += entry.size

        # The last value stays, however large it is.
        while self._total_size > self._most and len(self._entries) > 1:
            _, dropped = self._entries.popitem(last=False)
            self._total_size -= dropped.size

    def clear(self) -> None:
        """Forget all values."""
        with self._lock:
            self._entries.clear()
            self._total_size = 0.0


class Session:
    """Holds loaded weights, priced parts of layouts and compiled programs.

    Calls use the default session. Inside `with Session():` they use a new one, which is dropped
    afterwards with its contents. A session that is pickled for another process becomes the session
    of that process.
    """

    def __init__(self) -> None:
        self.weight_files = Cache(8)
        """Content of calibration folders, by folder and what the file system says of its files."""
        self.cost_models = Cache(8)
        """Cost models with the events that they have priced, and corrections from runs, by content
        of the calibration folder."""
        self.problems = Cache(64)
        """Problems prepared for prediction, by model, cluster, job, framework, cost models and
        scenario."""
        self.parts = Cache(128)
        """Results that layouts share: one cache per setting (without prices), and one per problem
        (with prices)."""
        self.batches = Cache(1)
        """The programs of the last batch, joined for evaluation."""
        self.grid_models = Cache(1)
        """Parts that the grids of the last search share, by problem."""
        self.programs = Cache(1.5 * 2**30, lambda program: float(program.n_bytes))
        """Programs compiled for evaluation, by `ProgramSpec`."""
        self.kernels = Cache(4096)
        """Compiled kernels of programs that are executed, by op, attributes as written, and
        shapes."""

    def __repr__(self) -> str:
        counts = [f"{name}={len(store)}" for name, store in vars(self).items()]
        return f"{type(self).__name__}({', '.join(counts)})"

    def clear(self) -> None:
        """Forget everything; later calls recompute the same answers."""
        for store in vars(self).values():
            store.clear()

    # A stack per context: threads and tasks that enter a session of their own do not see each
    # other's.
    def __enter__(self) -> "Session":
        _active.set((*_active.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        _active.set(_active.get()[:-1])

    def __reduce__(self) -> tuple[Callable[[], "Session"], tuple[()]]:
        return current_session, ()


_DEFAULT: Final = Session()
_active: ContextVar[tuple[Session, ...]] = ContextVar("perfmodel session", default=(_DEFAULT,))


def current_session() -> Session:
    """The session that calls use in this context."""
    return _active.get()[-1]


# --- caches on disk
# -------------------------------------------------------------------------------------------


CACHES: Final = ("structures", "pipelines", "xla", "peer")
"""Folders below `cache_dir()`: compiled structures, pipelines, what XLA compiled, the C code of
emulated ranks."""


def cache_folder(name: str) -> Path:
    """One of `CACHES`, which `perfmodel doctor` lists and clears; it may not exist yet."""
    if name not in CACHES:
        raise ValueError(f"no cache is called {name!r}; list it in `CACHES`")
    return cache_dir() / name


def cache_dir() -> Path:
    """Folder of the caches: `$PERFMODEL_CACHE`, else the platform's folder for user caches."""
    chosen = os.environ.get("PERFMODEL_CACHE")
    if chosen:
        return Path(chosen)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "perfmodel"


_CACHE_LIMIT: Final = "PERFMODEL_CACHE_LIMIT_GB"


_DEFAULT_LIMIT_GB: Final = 2.0


CACHE_SHARES: Final = {"structures": 0.75, "pipelines": 0.125, "xla": 0.125}
"""Share of the limit for each of the `CACHES` that grow."""


def cache_limit_bytes(kind: str | None = None) -> float:
    """Size limit of all disk caches, or of one of `CACHE_SHARES`, by `$PERFMODEL_CACHE_LIMIT_GB`
    (0: no cache).

    Raises:
        PerfModelError: if the variable is not a number of gigabytes.
    """
    # An empty variable counts as none.
    text = os.environ.get(_CACHE_LIMIT) or str(_DEFAULT_LIMIT_GB)
    try:
        limit_gb = float(text)
    except ValueError:
        limit_gb = math.nan
    if not 0 <= limit_gb < math.inf:
        raise PerfModelError(
            f"{_CACHE_LIMIT}={text!r} is not a number of gigabytes; set it to a number such as 2, or 0 for no cache"
        )
    return limit_gb * 1e9 * (CACHE_SHARES[kind] if kind else 1.0)


@cache
def code_digest(*names: str) -> str:
    """A hash of the sources of packages and modules.

    Cached results of these modules are valid for exactly this code, whatever changes elsewhere.
    """
    digest = hashlib.sha256()
    for name in names:
        # A name is a module, or a package with modules directly in it.
        package, _, module = name.rpartition(".")
        module_file = files(package) / f"{module}.py"
        if module_file.is_file():
            sources = [module_file]
        else:
            sources = sorted(files(name).iterdir(), key=lambda source: source.name)
        for source in sources:
            if source.name.endswith(".py"):
                digest.update(f"{name} {source.name} ".encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def drop_least_recently_used(folder: Path, limit_bytes: float) -> None:
    """Delete the least recently used files of `folder` until the rest fit in `limit_bytes`.

    Other processes may read, write and drop files meanwhile: a file goes as a whole, whoever holds
    it open keeps it, and one that is already gone or cannot be deleted is passed over.
    """
    files = sorted(_files_in(folder), key=lambda file: (file.used_s, file.bytes, file.path))
    excess_bytes = sum(file.bytes for file in files) - limit_bytes
    for file in files:
        if excess_bytes <= 0:
            return
        with suppress(OSError):
            os.unlink(file.path)
            excess_bytes -= file.bytes


class _StoredFile(NamedTuple):
    """A file of a cache folder."""

    path: str
    used_s: float
    """Time of its last use."""
    bytes: int


def _files_in(folder: Path) -> list[_StoredFile]:
    """The files of a folder that can be read; none if the folder cannot."""
    files: list[_StoredFile] = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                files += _stored(entry)
    return files


def _stored(entry: os.DirEntry[str]) -> Iterator[_StoredFile]:
    """The entry of a folder, if it is a file."""
    if entry.is_file(follow_symlinks=False):
        status = entry.stat(follow_symlinks=False)
        # File systems mounted with noatime do not move the time of access, hence `mark_used` and
        # the later of both.
        yield _StoredFile(entry.path, max(status.st_mtime, status.st_atime), status.st_size)


def mark_used(path: Path) -> None:
    """Record that `path` was used now, as file systems do not record every read."""
    with suppress(OSError):
        os.utime(path)
