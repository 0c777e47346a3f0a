"""The shipped weights answer what they did when they were last judged."""

import math

from known_answers import answers, read

MEANT = "if the change is meant to move answers, run `python tests/cost/known_answers.py` and review the difference"
ROUNDING = 2e-4
"""Networks compute in single precision, and the table has six digits."""


def test_answers_are_those_of_the_table() -> None:
    now, then = list(answers()), read()
    assert [(a.model, a.machine, a.event) for a in now] == [
        (a.model, a.machine, a.event) for a in then
    ], MEANT
    moved = [
        (new, old)
        for new, old in zip(now, then, strict=True)
        if new.provenance != old.provenance
        or not all(
            math.isclose(getattr(new, name), getattr(old, name), rel_tol=ROUNDING)
            # what is skipped
            or (math.isnan(getattr(new, name)) and math.isnan(getattr(old, name)))
            for name in ("time_us", "lo_us", "hi_us")
        )
    ]
    assert not moved, f"{len(moved)} of {len(now)} moved; {MEANT}; the first: {moved[0]}"
