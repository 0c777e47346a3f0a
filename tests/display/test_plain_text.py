"""Nothing in a name steers the terminal that it is printed on: escape sequences, control characters, bidirectional
marks."""

import io
from pathlib import Path

import pytest

from perfmodel.cli import main
from perfmodel.display import PlainStream, plain_text

HOSTILE = (
    "\x1b[31mred", "\x1b]0;title\x07", "\x1b[2J\x1b[H", "\x1b]8;;http://x\x1b\\link", "\x1bPq\x1b\\", "\x9b31m",
    "\x1bc",
    "\u202eevil\u202c", "\u2066x\u2069", "\u200bwide", "\ufeff", "\x08\x08", "\x7f", "\x1b", "\u061c", "\u2028",
    "a\rb",
)  # fmt: skip
STEERING = {chr(i) for i in (*range(32), *range(0x7F, 0xA0), 0x61C, *range(0x200B, 0x2010), *range(0x2028, 0x202F),
                             *range(0x2060, 0x206A), 0xFEFF)} - {"\n", "\t"}  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_names_lose_what_steers_a_terminal(text: str) -> None:
    assert not STEERING & set(plain_text(f"name {text} tail"))
    assert plain_text(f"name {text} tail").startswith("name ")
    assert plain_text(f"name {text} tail").endswith("tail") or text == "\x1b"


def test_other_text_stays_as_it_is() -> None:
    text = "Größe 1.2 µs\t模型\n─│ 90 % [1m]"
    assert plain_text(text) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_keeps_colours_and_loses_the_rest() -> None:
    terminal = Terminal()
    PlainStream(terminal).write("\x1b[1mbold\x1b[0m\x1b[2K\x1b]0;title\x07\u202e\x1bc")
    assert terminal.getvalue() == "\x1b[1mbold\x1b[0m\x1b[2K"


@pytest.mark.parametrize("text", HOSTILE)
def test_no_command_prints_a_hostile_name(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--cluster", "dgx-a100", "--global-batch", "8"]
    commands = (
        ["predict", "--model", f"gpt3{text}", *job, "--layout", "tp=2"],
        ["predict", "--model", "gpt3-125m", *job, "--layout", f"tp{text}=2"],
        ["predict", "--model", "gpt3-125m", *job, "--layout", "tp=2", "--framework", f"x{text}"],
        ["predict", "--model", "gpt3-125m", "--cluster", f"c{text}", "--global-batch", "8", "--layout", "tp=2"],
        ["validate", "kernels", str(tmp_path / f"t{text.replace('/', '')}.csv".replace(chr(0), ""))],
    )
    for command in commands:
        main(command)
        out, err = capsys.readouterr()
        assert not STEERING & set(out + err)


def test_the_name_of_a_model_in_a_file_is_printed_plainly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        'cluster = "dgx-a100"\nlayout = "tp=1"\n[job]\nglobal_batch = 8\n'
        '[model]\nname = "m\\u001b[31m\\u202ex"\nlayers = 2\nhidden = 64\nheads = 4\nvocab = 128\nseq_len = 64\n'
    )
    assert main(["predict", str(path)]) == 0
    out, err = capsys.readouterr()
    assert not STEERING & set(out + err)
