"""Numbers in layouts, flags and jobs are written in plain digits, finite, and no larger than any
system has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cli import parser, parsers
from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.spec import Job, Layout
from perfmodel.units import plain_number, plain_whole

NOT_PLAUSIBLE = (
    "1_0",
    "+8",
    "0x8",
    "nan",
    "inf",
    "-inf",
    "-0.0",
    "1e300",
    "1e-300",
    "1e999",
    "\uff18",
    "",
)
"""Numbers that no quantity has, or that are not in plain digits."""
NOT_PLAIN = (
    "1_0",
    "+8",
    "0x8",
    "1e3",
    "nan",
    "inf",
    "-0",
    "\uff18",
    "\u0663",
    "8.0",
    "1,0",
    "8 8",
    "\u00bd",
    "\u00b2",
    "9" * 30,
    "",
    "--8",
)
"""Whole numbers that Python, or a reader of other notations, might take."""
KEYS = (
    "tp",
    "pp",
    "dp",
    "cp",
    "ep",
    "vpp",
    "micro_batch",
    "zero",
    "replicate",
    "prefetch",
    "offload_layers",
    "partition",
)
COMMAS = (
    "tp=2,,dp=4",
    ",tp=2",
    "tp=2,",
    "tp=2, ,dp=4",
    "8M16P1D,",
    "8M16P1D,,zero=1",
    "partition=6,,6,pp=2",
)
TWICE = ("tp=2,tp=4", "tp=2,tensor_parallel=2", "8M16P1D,tp=8", "zero=1,zero_stage=1", "TP=2,tp=2")


@pytest.mark.parametrize("text", NOT_PLAIN)
@pytest.mark.parametrize("key", KEYS)
def test_a_layout_takes_plain_digits_alone(key: str, text: str) -> None:
    if key == "partition" and "," in text:
        return  # commas divide numbers per stage too
    with pytest.raises(PerfModelError) as error:
        Layout.parse(f"{key}={text}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", [*COMMAS, *TWICE])
def test_a_comma_too_many_and_a_key_given_twice_are_refused(text: str) -> None:
    with pytest.raises(LayoutError, match=r"extra comma|given twice"):
        Layout.parse(text)


@pytest.mark.parametrize("text", ["10000001", "99999999999999999"])
def test_numbers_that_no_layout_has_are_refused(text: str) -> None:
    for layout in (f"tp={text}", f"{text}M1P1D", f"partition={text}-1,pp=2"):
        with pytest.raises(LayoutError):
            Layout.parse(layout)


def test_every_numeric_flag_of_every_command_takes_plain_numbers_alone() -> None:
    numeric = [
        (command, action)
        for command in parsers(parser())
        for action in command._actions
        if action.option_strings and action.type in (int, float)
    ]
    assert len(numeric) > 50
    for command, action in numeric:
        unusual = NOT_PLAIN if action.type is int else NOT_PLAUSIBLE
        for text in unusual:
            with pytest.raises(SystemExit) as stop:
                command.parse_known_args([action.option_strings[-1], text])
            assert stop.value.code == 2


@pytest.mark.parametrize("seq_len", [100_000_001, 10**9])
def test_a_sequence_that_no_model_has_is_refused(seq_len: int) -> None:
    with pytest.raises(PerfModelError, match="seq_len"):
        Job(global_batch=1, seq_len=seq_len)


@given(st.integers(-(10**17), 10**17))
def test_every_plain_whole_number_is_read(number: int) -> None:
    assert plain_whole(str(number)) == number


@given(st.floats(1e-29, 1e29) | st.floats(-1e29, -1e-29) | st.just(0.0))
def test_every_plausible_number_is_read_as_python_writes_it(number: float) -> None:
    assert plain_number(repr(number)) == number
