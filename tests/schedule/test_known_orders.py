"""Schedules run their passes in the order that they did when they were last looked at."""

from known_orders import TABLE, entries

MEANT = "if the change is meant to move passes, run `python tests/schedule/known_orders.py` and review the difference"


def test_orders_and_figures_are_those_of_the_table() -> None:
    now, then = "\n".join(entries()).splitlines(), TABLE.read_text().splitlines()
    moved = [(new, old) for new, old in zip(now, then, strict=False) if new != old]
    assert not moved, (
        f"{len(moved)} lines moved, the first from\n{moved[0][1]}\nto\n{moved[0][0]}\n{MEANT}"
    )
    assert len(now) == len(then), MEANT
