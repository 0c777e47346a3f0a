"""Schedules as text, and the errors of those that cannot run."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.schedule import check, get_schedule, parse_schedule, schedule_names, schedule_text

TWO = "stages 0 | 1\nF0 F1 B0 B1\nF0 B0 F1 B1\n"


@pytest.mark.parametrize("name", schedule_names())
def test_round_trip(name: str) -> None:
    schedule = get_schedule(name)(4, 8)
    again = parse_schedule(schedule_text(schedule))
    for field in ("stage", "offsets", "phase", "chunk", "micro_batch", "span", "paired", "updates"):
        np.testing.assert_array_equal(getattr(again, field), getattr(schedule, field))
    assert again.slices == schedule.slices
    assert check(again) == ()


def test_comments_and_empty_lines_are_skipped() -> None:
    schedule = parse_schedule("# hello\n\nstages 0 | 1  # two devices\nF0 B0\nF0 B0 # last\n")
    assert schedule.n_instructions == 4


def test_a_whole_sequence_is_one_slice() -> None:
    text = "stages 0 | 1\nslices {}\nF0 F1 B1 B0\nF0 F1 B1 B0\n"
    for slices in (1, 2):
        schedule = parse_schedule(text.format(slices))
        assert (schedule.slices, schedule.micro_batches) == (slices, 2)
    for slices in (0, -1):
        with pytest.raises(PerfModelError, match="at least 1"):
            parse_schedule(text.format(slices))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0 B0\n", "the line with the stages is missing"),
        ("stages 0 | 1\nF0 B0\n", "got 1 lines for 2 devices"),
        ("stages 0 | 1\nF0 X0\nF0 B0\n", "line 2: 'X0' is not a pass"),
        ("stages 0 | 1\nF0 B\nF0 B0\n", "line 2: 'B' is not a pass"),
        ("stages 0 | x\nF0\nF0\n", "line 1"),
        ("stages 0 | 1\nF3-1\nF0\n", "descending order"),
        ("stages 0 | 1\nF0+F1+B0\nF0\n", "more than two"),
        ("stages 0 | 1 2\nF0\nF0\n", "same number of stages"),
        ("stages 0 | 1\nslices 2\nF0\nF0\n", "not a multiple of 2 slices"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(PerfModelError, match=message):
        parse_schedule(text)


NUMBERS = st.sampled_from(
    ("", "-1", "0", "1", "2", "x", "|", "0 |", "| 1", "0 | 1", "0 1 | 2 3", "1 | 0", "0 | 0")
)
PASSES = st.sampled_from(
    ("F0", "B0", "F1", "B1", "F0-1", "B1-0", "F0.1", "F0.7", "BI0", "BW0", "F0+B1", "B0!", "F", "+")
)
LINES = st.one_of(
    NUMBERS.map("stages {}".format),
    NUMBERS.map("slices {}".format),
    st.lists(PASSES, max_size=4).map(" ".join),
)


@example(["stages", "F0 B0"])
@example(["stages |", "F0 B0", "F0 B0"])
@example(["stages 0 | 1", "slices 0", "F0 B0", "F0 B0"])
@example(["stages 0 | 1", "slices -2", "F0 B0", "F0 B0"])
@given(st.lists(LINES, max_size=5))
def test_any_text_is_a_schedule_that_can_be_checked_or_one_error(lines: list[str]) -> None:
    message = ""
    try:
        check(parse_schedule("\n".join(lines)))
    except PerfModelError as error:
        message = str(error)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "kind", "instruction"),
    [
        (
            TWO.replace("F0 B0 F1 B1", "B0 F0 F1 B1"),
            "order",
            "device 1 position 0 (B chunk 0 micro-batch 0)",
        ),
        (
            TWO.replace("B0 B1\n", "B0\n", 1),
            "missing",
            "no device runs B of stage 0 for micro-batch 1",
        ),
        (TWO.replace("F0 F1 B0 B1", "F0 F1 F1 B0 B1"), "duplicate", "device 0 position 2"),
        (
            "stages 0 | 1\nF0 B0 F1 B1\nF0 F1 B0 B1\n",
            "deadlock",
            "device 0 position 1 (B chunk 0 micro-batch 0)",
        ),
        ("stages 0 1 | 2 3\nF0 B0 F0.1 B0.1\nF0 F0.1 B0.1 B0\n", "order", "device 0 position 1"),
    ],
)
def test_checker_names_the_instruction(text: str, kind: str, instruction: str) -> None:
    problems = check(parse_schedule(text))
    assert kind in {problem.kind for problem in problems}
    assert any(instruction in str(problem) for problem in problems)


def test_a_file_is_a_schedule(tmp_path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(TWO)
    scheduler = get_schedule(f"file:{path}")
    assert scheduler(2, 2).n_instructions == 8
    with pytest.raises(LayoutError, match="for 2 devices and 2 micro-batches, not 4 and 2"):
        scheduler(4, 2)
    with pytest.raises(PerfModelError, match="cannot be read"):
        get_schedule(f"file:{tmp_path / 'none.txt'}")


@pytest.mark.parametrize("name", ["1f1b:2", "chimera:0", "seq1f1b:x"])
def test_numbers_after_names(name: str) -> None:
    with pytest.raises(LayoutError, match=r"takes no number|whole number"):
        get_schedule(name)
