"""Nothing in a name steers the terminal or reorders the page that it is printed on: escape
sequences, control characters, bidirectional marks."""

import html
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import perfmodel as pm
from perfmodel.cli import main
from perfmodel.display import (
    PlainStream,
    calibration_page,
    decision_page,
    folded,
    frame_html,
    inline_frame,
    paragraph,
)
from perfmodel.errors import (
    REPLACEMENT,
    PerfModelError,
    Reason,
    Rejection,
    UnknownNameError,
    plain_text,
)
from perfmodel.ingest.launch import Harm, Unread

HOSTILE = (
    "\x1b[31mred",
    "\x1b]0;title\x07",
    "\x1b[2J\x1b[H",
    "\x1b]8;;http://x\x1b\\link",
    "\x1bPq\x1b\\",
    "\x9b31m",
    "\x1bc",
    "\u202eevil\u202c",
    "\u2066x\u2069",
    "\u200bwide",
    "\ufeff",
    "\x08\x08",
    "\x7f",
    "\x1b",
    "\u061c",
    "\u2028",
    "a\rb",
)
STEERING = {
    chr(i)
    for i in (
        *range(32),
        *range(0x7F, 0xA0),
        0x61C,
        *range(0x200B, 0x2010),
        *range(0x2028, 0x202F),
        *range(0x2060, 0x206A),
        0xFEFF,
    )
} - {"\n", "\t"}


@pytest.mark.parametrize("text", HOSTILE)
def test_names_lose_what_steers_a_terminal(text: str) -> None:
    assert not STEERING & set(plain_text(f"name {text} tail"))
    assert plain_text(f"name {text} tail").startswith("name ")
    assert plain_text(f"name {text} tail").endswith("tail") or text == "\x1b"


@given(st.text(), st.sampled_from(HOSTILE), st.text())
def test_nothing_is_left_out_of_a_name_without_a_mark_in_its_place(
    before: str, hostile: str, after: str
) -> None:
    """Two names that differ in what they hide do not look like the harmless one."""
    shown = plain_text(f"{before}{hostile}{after}")
    assert not STEERING & set(shown)
    assert REPLACEMENT in shown
    assert plain_text(shown) == shown
    assert plain_text("plain") == "plain"


@given(st.text(st.characters(exclude_categories=["C", "Zl", "Zp"])))
def test_a_name_without_them_is_shown_as_it_is(text: str) -> None:
    assert plain_text(f"{text}\tlast\r\nnext\n") == f"{text}\tlast\nnext\n"


def test_other_text_stays_as_it_is() -> None:
    text = "Größe 1.2 µs\t模型\n─│ 90 % [1m]"
    assert plain_text(text) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_keeps_colours_and_loses_the_rest() -> None:
    terminal = Terminal()
    PlainStream(terminal).write("\x1b[1mbold\x1b[0m\x1b[2K\x1b]0;title\x07\u202e\x1bc")
    assert terminal.getvalue() == f"\x1b[1mbold\x1b[0m\x1b[2K{3 * REPLACEMENT}"


@pytest.mark.parametrize("text", HOSTILE)
def test_no_command_prints_a_hostile_name(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["--cluster", "dgx-a100", "--global-batch", "8"]
    commands = (
        ["predict", "--model", f"gpt3{text}", *job, "--layout", "tp=2"],
        ["predict", "--model", "gpt3-125m", *job, "--layout", f"tp{text}=2"],
        ["predict", "--model", "gpt3-125m", *job, "--layout", "tp=2", "--framework", f"x{text}"],
        [
            "predict",
            "--model",
            "gpt3-125m",
            "--cluster",
            f"c{text}",
            "--global-batch",
            "8",
            "--layout",
            "tp=2",
        ],
        [
            "validate",
            "kernels",
            str(tmp_path / f"t{text.replace('/', '')}.csv".replace(chr(0), "")),
        ],
    )
    for command in commands:
        main(command)
        out, err = capsys.readouterr()
        assert not STEERING & set(out + err)


def test_the_name_of_a_model_in_a_file_is_printed_plainly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        'cluster = "dgx-a100"\nlayout = "tp=1"\n[job]\nglobal_batch = 8\n'
        '[model]\nname = "m\\u001b[31m\\u202ex"\nlayers = 2\nhidden = 64\nheads = 4\nvocab = 128\nseq_len = 64\n'
    )
    assert main(["predict", str(path)]) == 0
    out, err = capsys.readouterr()
    assert not STEERING & set(out + err)
    assert out.startswith(f"m{REPLACEMENT}{REPLACEMENT}x on ")


def strings(value: object) -> Iterator[str]:
    """Every string within plain values, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from strings([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from strings(inner)


def require_plain_page(page: str) -> None:
    """Neither the page nor the data from which its scripts fill it have a steering character,
    escaped or not."""
    assert not STEERING & set(html.unescape(page))
    for data in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL):
        assert not STEERING & set("".join(strings(json.loads(data))))


@pytest.mark.parametrize("text", HOSTILE)
def test_what_pages_are_made_of_is_plain(text: str) -> None:
    name = f"name {text} tail"
    frame = pd.DataFrame({name: [name, 1.0, None]})
    for page in (
        frame_html(frame, name),
        paragraph(name),
        folded(name, ""),
        inline_frame("", title=name),
    ):
        require_plain_page(page)
    data = {
        "job": {"model": name, "devices": 1, "cluster": name},
        name: [name, {"deep": (name,)}],
        "calibration": name,
    }
    for page in (decision_page(data), calibration_page(data)):
        require_plain_page(page)


@pytest.fixture(scope="module")
def results() -> dict[str, object]:
    """What Python gives for a model and a cluster whose names hold every hostile text."""
    name = "name ".join(HOSTILE)
    hostile_model = replace(pm.model("gpt3-125m"), name=f"m{name}")
    hostile_cluster = replace(pm.cluster("dgx-a100"), name=f"c{name}")
    job: dict[str, Any] = {"devices": 8, "global_batch": 8}
    asked = (hostile_model, hostile_cluster, "tp=2,pp=2,dp=2")
    prediction = pm.predict(*asked, **job)
    return {
        "prediction": prediction,
        "timeline": prediction.timeline,
        "search": pm.search(hostile_model, hostile_cluster, options=pm.SearchOptions(top=2), **job),
        "schedules": pm.compare_schedules(*asked, schedules=["1f1b"], **job),
        "report": pm.report(*asked, **job),
        "model": hostile_model,
        "cluster": hostile_cluster,
        "layout": pm.Layout(pp=2, schedule=f"file:{name}"),
        "rejection": Rejection(Reason.SCHEDULE, name),
        "unread setting": Unread(name, 3, Harm.TIME),
        "error": PerfModelError(f"{name}: bad"),
        "unknown name": UnknownNameError("model", name, [f"{name}s"]),
    }


def test_str_repr_and_html_of_python_objects_are_plain(results: dict[str, object]) -> None:
    for what, result in results.items():
        for text in (str(result), repr(result)):
            assert not STEERING & set(text), what
        if hasattr(result, "_repr_html_"):
            require_plain_page(result._repr_html_())
        if hasattr(result, "to_html"):
            require_plain_page(result.to_html())
