"""Branches of a Python script whose condition is unknown: the variables that they set, and how they
end."""

from dataclasses import dataclass, field
from typing import Any, Literal

from perfmodel.ingest.launch._python_values import MISSING


@dataclass(frozen=True)
class Exit:
    """Why a block of statements ended early."""

    kind: Literal["return", "break", "continue"]
    value: Any = None


class Stopped(Exception):
    """The script ends here, with an error or by `sys.exit`."""

    def __init__(self, reason: str, line: int) -> None:
        super().__init__(reason)
        self.line = line


@dataclass(frozen=True)
class Write:
    """A value before it was replaced in an open branch."""

    container: Any
    key: Any
    """None for the whole list."""
    before: Any

    @property
    def slot(self) -> tuple[int, Any]:
        return id(self.container), self.key

    @property
    def now(self) -> Any:
        if self.key is None:
            return list(self.container)
        return self.container.get(self.key, MISSING)

    def put(self, value: Any) -> None:
        if self.key is None:
            self.container[:] = value
        elif value is MISSING:
            self.container.pop(self.key, None)
        else:
            self.container[self.key] = value


@dataclass
class Branch:
    """The changes of a branch whose condition is unknown, and how it ended."""

    exit: Exit | None = None
    stopped: Stopped | None = None
    writes: dict[tuple[int, Any], Write] = field(default_factory=dict)
    after: dict[tuple[int, Any], Any] = field(default_factory=dict)
