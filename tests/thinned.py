"""Cases of tests that repeat one another: a few run with `make test`, all with `make slow` too."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(n: int, cases: Iterable[Any]) -> list[Any]:
    """The cases, of which all but one in `n` are left to `make slow`.

    Args:
        cases: values of one parameter, or tuples of the values of several.
    """
    thinned = []
    for place, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        marks = () if place % n == n // 2 else (pytest.mark.slow,)
        thinned.append(pytest.param(*values, marks=marks))
    return thinned
