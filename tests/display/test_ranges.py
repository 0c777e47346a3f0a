"""A range whose ends read alike is shown as one figure, wherever a range is shown."""

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from perfmodel.planning.layouts import interval
from perfmodel.units import duration, relative, span

PACKAGE = Path(__file__).parents[2] / "perfmodel"
BY_HAND = re.compile(
    r"\{(duration|figure|scaled)\([^{}]*\)\} to \"?\s*(f\")?\{\1\(|[%f]\} to (\"\s*f\")?\{"
)
"""An f-string that writes a range of formatted figures by itself."""
CHANGES = ("cli/_yours.py",)
"""Files that say from what to what a step changes, which is no range."""


def test_every_range_of_figures_is_written_by_span() -> None:
    by_hand = [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if BY_HAND.search(path.read_text())
    ]
    assert by_hand == list(CHANGES)


@given(low=st.floats(1e-7, 1e4), factor=st.floats(1, 1.01))
def test_both_ends_are_shown_only_if_they_differ(low: float, factor: float) -> None:
    ends = (duration(low), duration(low * factor))
    text = span(*ends)
    assert text == (ends[0] if ends[0] == ends[1] else " to ".join(ends))
    lower, separator, upper = interval(low, low * factor).partition("-")
    assert not separator or lower != upper.split()[0]


@given(change=st.floats(-1, 1e6))
def test_a_change_of_ten_times_is_shown_as_a_factor(change: float) -> None:
    text = relative(change)
    assert text.endswith(" times") == (change >= 9)
    assert len(text) <= 15
