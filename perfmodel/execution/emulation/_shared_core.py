"""A core that the script's thread shares with its collectives, which come first."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pandas as pd


class User(NamedTuple):
    """A collective under way."""

    start_s: float
    end_s: float
    core_s: float
    """Its processor time, spread over its duration."""


def users_of(calls: "pd.DataFrame") -> list[User]:
    """Collectives as they were recorded."""
    rows: Any = calls.itertuples()
    return [User(max(row.start_s, row.issued_s), row.end_s, row.core_s) for row in rows]


def own_s(start_s: float, end_s: float, users: Sequence[User]) -> float:
    """Seconds of the core that the users leave in an interval; the inverse of `done_at_s`."""
    return sum((high - low) * _left(low, users) for low, high in pairwise(_moments_s(start_s, end_s, users)))


def done_at_s(start_s: float, work_s: float, users: Sequence[User]) -> float:
    """When work is done that begins at `start_s` and has what the users leave of the core."""
    for low_s, high_s in pairwise(_moments_s(start_s, float("inf"), users)):
        share = _left(low_s, users)
        if share > 0 and (high_s - low_s) * share >= work_s:
            return low_s + work_s / share
        work_s -= (high_s - low_s) * share
    raise AssertionError("the last interval is endless")


def _moments_s(low_s: float, high_s: float, users: Sequence[User]) -> list[float]:
    """The limits, and when the share of the core changes between them."""
    changes_s = {moment_s for user in users for moment_s in user[:2] if low_s < moment_s < high_s}
    return sorted({low_s, high_s, *changes_s})


def _left(moment_s: float, users: Sequence[User]) -> float:
    taken = sum(core_s / (end_s - start_s) for start_s, end_s, core_s in users if start_s <= moment_s < end_s)
    return max(0.0, 1.0 - taken)
