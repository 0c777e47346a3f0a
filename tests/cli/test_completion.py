"""Completion scripts know the commands, flags and catalog names, and the shells read them."""

import shutil
import subprocess

import pytest

from perfmodel.cli import main


def completions(script: str, *words: str) -> list[str]:
    """What bash offers for the last word of `perfmodel words...`."""
    quoted = " ".join(f"'{word}'" for word in ("perfmodel", *words))
    asked = f'{script}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _shtab_perfmodel; echo "${{COMPREPLY[@]}}"'
    # by standard input: Linux takes no argument above 128 KiB
    return subprocess.run(
        ["bash"], input=asked, capture_output=True, text=True, check=True
    ).stdout.split()


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
def test_bash_completes_commands_flags_and_names(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completions(script, "pre") == ["predict"]
    assert completions(script, "predict", "--mo") == ["--model", "--mode"]
    assert set(completions(script, "predict", "--model", "gpt3-1")) == {
        "gpt3-1.3b",
        "gpt3-125m",
        "gpt3-13b",
        "gpt3-175b",
    }
    assert completions(script, "search", "--cluster", "dgx-h") == ["dgx-h100"]


@pytest.mark.parametrize(
    ("shell", "word"), [("zsh", "#compdef perfmodel"), ("fish", "complete -c perfmodel")]
)
def test_scripts_of_other_shells(shell, word, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert word in script
    assert "gpt3-175b" in script
    if program := shutil.which(shell):
        assert subprocess.run([program, "-n"], input=script, text=True, check=False).returncode == 0
