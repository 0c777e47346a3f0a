"""Errors of the command line name the thing, and say what to change."""

import pytest

from perfmodel.cli import main

STEP = "--model gpt3-125m --cluster dgx-a100 --global-batch 8"


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        (f"predict {STEP} --layout dp=8 --framework @2024", "the name before @ is missing"),
        (f"predict {STEP} --layout dp=8 --tokens -1T", "write --tokens=VALUE"),
        ("distribute no_file_here.ir --out x.ir", "No such file or directory; give a file that"),
    ],
)
def test_an_error_says_what_to_change(
    command: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(command.split())
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    assert status == 2
    assert not out
    assert remedy in err.splitlines()[-1]
