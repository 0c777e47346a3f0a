"""What is remembered between calls, all of it in one place.

A session never changes an answer, only how soon it comes: a value is found again by everything that it follows from
(whole frozen records, the content of files), never by a name, a path or a time. So no call has to name its session,
and any may be cleared at any moment.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from threading import Lock
from typing import Any, Final, TypeVar

T = TypeVar("T")


def _one(value: Any) -> float:
    return 1.0


class Cache:
    """Values by key; where they grow too large, those used least recently go."""

    def __init__(self, most: float, size: Callable[[Any], float] = _one) -> None:
        self._most, self._size = most, size
        self._values: OrderedDict[Hashable, tuple[Any, float]] = OrderedDict()
        self._held = 0.0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get_or_compute(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key, made where there is none yet. What cannot be made leaves nothing behind.

        Args:
            key: all that the value follows from; the value must not change afterwards.
        """
        with self._lock:
            if found := self._values.get(key):
                self._values.move_to_end(key)
                return found[0]
        value = make()  # without the lock: it may ask for others
        size = self._size(value)
        with self._lock:
            self._held += size - self._values.pop(key, (None, 0.0))[1]
            self._values[key] = value, size
            while self._held > self._most and len(self._values) > 1:
                self._held -= self._values.popitem(last=False)[1][1]
        return value

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._values.clear()
            self._held = 0.0


def _array_bytes(value: Any) -> float:
    return float(value.n_bytes)


class Session:
    """Owner of loaded weights, priced parts of layouts and compiled programs.

    Calls use the default session; under `with Session():` they use another, for instance one that is dropped
    afterwards with everything in it. Sent to another process, a session arrives as that process's own.
    """

    def __init__(self) -> None:
        self.weight_files = Cache(8)
        """Content of calibration folders, by folder and what the file system says of its files."""
        self.cost_models = Cache(8)
        """Models of kernels and collectives with all they have priced, and what runs said, by content of the folder."""
        self.problems = Cache(64)
        """What is predicted, by model, cluster, job, framework, cost models, scenario."""
        self.parts = Cache(128)
        """What its layouts have in common: a store for each setting (without prices) and problem (with them)."""
        self.batches = Cache(1)
        """The programs of the last batch, joined for evaluation."""
        self.programs = Cache(1.5 * 2**30, _array_bytes)
        """Programs compiled for evaluation, by `ProgramSpec`."""
        self.kernels = Cache(4096)
        """Compiled kernels of programs that are executed, by op, attributes as written, and shapes."""

    def __repr__(self) -> str:
        held = (f"{name}={len(store)}" for name, store in vars(self).items())
        return f"{type(self).__name__}({', '.join(held)})"

    def clear(self) -> None:
        """Forget everything; later calls answer as before, after working it out again."""
        for store in vars(self).values():
            store.clear()

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
    """The session that calls use here and now."""
    return _active.get()[-1]
