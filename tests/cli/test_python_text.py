"""What Python prints of a prediction and of a search is what the shell prints."""

import shlex
from dataclasses import replace

import pytest

import perfmodel as pm
from perfmodel.cli import main

JOB = "--model llama3-8b --cluster dgx-h100 --global-batch 64"


@pytest.fixture(autouse=True)
def wide_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are not wrapped, so that those that differ by design can be told."""
    monkeypatch.setenv("COLUMNS", "400")


def printed(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(shlex.split(command)) == 0
    return capsys.readouterr().out


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def test_a_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    prediction = pm.predict("llama3-8b", "dgx-h100", "tp=4,dp=4,zero=1", global_batch=64)
    shell = lines(printed(f"predict {JOB} --layout tp=4,dp=4,zero=1", capsys))
    # the shell also says which settings it was not told, and which command to go on with
    beside = ("not stated", "next:")
    assert lines(str(prediction)) == [line for line in shell if not line.startswith(beside)]
    assert "step time" in str(prediction)
    assert repr(prediction) != str(prediction)


def test_a_search(capsys: pytest.CaptureFixture[str]) -> None:
    result = pm.search("llama3-8b", "dgx-h100", devices=8, global_batch=64, top=3, method="auto")
    shell = lines(printed(f"search {JOB} --devices 8 --top 3", capsys))

    def without_time(text: list[str]) -> list[str]:
        return [
            line for line in text if not line.startswith("next:") and "fully evaluated" not in line
        ]

    assert without_time(lines(str(result))) == without_time(shell)


def test_a_search_is_a_list_of_predictions() -> None:
    result = pm.search("llama3-8b", "dgx-h100", devices=8, global_batch=64, top=3, method="auto")
    assert len(result) == 3
    assert result[0] is result.best is result.layouts[0]
    assert list(result) == list(result.layouts)
    assert result[-1] is result.layouts[-1]
    with pytest.raises(IndexError):
        replace(result, layouts=()).best  # noqa: B018
