"""What the ranks of a collective send one another, by gloo's algorithms: from two ranks to any number.

A call of n ranks with operands of S bytes sends, one message after another on every rank:

- all_reduce: a ring, 2 (n - 1) messages of S / n;
- all_gather: a ring, n - 1 messages of S;
- all_to_all: n - 1 messages of S / n, to each of the others;
- send: one message of S.

The ranks of a program carry out everything else by these.
"""

from typing import Final, NamedTuple

from perfmodel.errors import UnknownNameError


class Messages(NamedTuple):
    """Of one rank in one call."""

    count: int
    share: float
    """Size of each, as a share of the operand."""

    @property
    def sent(self) -> float:
        """All of them together, as a share of the operand."""
        return self.count * self.share


def messages(kind: str, ranks: int) -> Messages:
    """What each rank sends.

    Raises:
        UnknownNameError: for a collective without an algorithm.
    """
    if kind not in _ALGORITHMS:
        raise UnknownNameError("collective between processes", kind, _ALGORITHMS)
    return _ALGORITHMS[kind](ranks)


_ALGORITHMS: Final = {
    "send": lambda n: Messages(1, 1.0),
    "all_reduce": lambda n: Messages(2 * (n - 1), 1 / n),
    "all_gather": lambda n: Messages(n - 1, 1.0),
    "all_to_all": lambda n: Messages(n - 1, 1 / n),
}
