"""Headings say `1 device`, not `1 devices`."""

import re

import pytest
from command_line import run

from perfmodel.units import number_of

ONE_DEVICE = ("--model", "gpt3-1.3b", "--cluster", "dgx-h100")


@pytest.mark.parametrize(
    "words",
    [
        ("predict", *ONE_DEVICE, "--global-batch", "8", "--layout", "dp=1"),
        ("search", *ONE_DEVICE, "--global-batch", "1", "--devices", "1", "--fix", "recompute=none"),
        ("serve", *ONE_DEVICE, "--prompt-tokens", "128", "--output-tokens", "16"),
    ],
    ids=lambda words: words[0],
)
def test_no_heading_has_one_of_several(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run(capsys, *words)
    assert printed.status == 0
    assert "on 1 device of dgx-h100" in printed.out
    assert not re.search(r"(?<![\d.,])1 (devices|layouts|requests|steps|layers) ", printed.out)


@pytest.mark.parametrize(
    ("count", "noun", "words"),
    [(1, "device", "1 device"), (2, "process", "2 processes"), (0, "batch", "0 batches")],
)
def test_nouns_go_with_their_number(count: int, noun: str, words: str) -> None:
    assert number_of(count, noun) == words
