"""Every operator, expansion, condition and filter of the shell in its variants: the same words as
bash has.

The lines of a group run in one shell, each behind a mark with its number, so that many cost little
more than one.
"""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest
from lines_of_files import lines_of

from perfmodel.ingest.launch.shell import run_script

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")

STUB = (
    'run() { for word in run "$@"; do printf "%s\\036" "$word"; done >&9; printf "\\035" >&9; }\n'
)
"""A command `run` of bash that writes its words down."""
SET = (
    "A=llama-7b.sh; B='a  b c'; C=; N=8; M=3; Z=-5; declare -a L=(p 1 'two words' q); E=(); P=N; W=aXbXc; "
    "declare -A S=([small]=12 [large]=24); D=/data/my.set/file.tar.gz; set -- one 'two 2' three\n"
)
"""Variables of all lines."""


LINES = lines_of("shell_lines.txt")
"""What follows no pattern."""
NUMBERS = ("0", "1", "2", "7", "-3", "N", "M", "Z", "$N", "${M}", "010", "0x1F", "2#101")
OPERATORS = [
    "+",
    "-",
    "*",
    "/",
    "%",
    "**",
    "<<",
    ">>",
    "&",
    "|",
    "^",
    "&&",
    "||",
    "<",
    "<=",
    ">",
    ">=",
    "==",
    "!=",
]
UNARY = ("-{}", "+{}", "!{}", "~{}", "({})", "{} ? 4 : 5", "- {}", "! {}")


def expressions() -> Iterator[str]:
    """Sums, products, shifts and comparisons of some numbers; those that bash refuses are left
    out."""
    for a, b, sign in product(
        ("0", "1", "7", "N", "$M", "Z"), ("1", "2", "3", "-2", "M"), OPERATORS
    ):
        if not (sign in ("**", "<<", ">>") and b == "-2"):
            yield f"{a} {sign} {b}"
    for form, number in product(UNARY, NUMBERS):
        yield form.format(number)
    yield from (*LINES["expressions"], "N\n+ 1")


STRINGS = ("A", "B", "C", "N", "W", "D", "L[1]", "L[2]", "L[-1]", "S[large]", "1", "2")
UNSET = ("NONE", "S[none]", "9")
CHANGES = ("", *LINES["changes"])
LISTS = (*LINES["lists"],)
AROUND = ("{}", '"{}"', "x{}.", '"x{}."', 'a"{}"b', "{}{}", '"{}"{}')


def expansions() -> Iterator[str]:
    """Every change of every kind of variable, and every list with text around it."""
    for name, change in product(STRINGS, CHANGES):
        yield f'run "${{{name}{change}}}"'
    for name, change in product(
        UNSET, (change for change in CHANGES if change.startswith((":-", "-", ":+", "+")))
    ):
        yield f'run "${{{name}{change}}}" ${{{name}{change}}}'
    for name, change in product(("A", "B", "L[2]"), CHANGES):
        yield f"run ${{{name}{change}}}"
    for name, form in product(LISTS, AROUND):
        text = f"${{{name}}}"
        yield f"run {form.format(text, text)}"
    for form in AROUND:
        yield f"run {form.format('$B', '$*')}; run {form.format('$C', '$@')}; run {form.format('$2', '$C')}"
    yield from LINES["expansions"]


TESTS = (*LINES["tests"],)
DOUBLE = (*LINES["tests in double brackets"],)
JOINED = (*LINES["joined tests"],)


def conditions() -> Iterator[str]:
    """Tests of both kinds in the places where scripts have them."""
    for condition in (*TESTS, *JOINED):
        text = condition.replace("( ", "\\( ").replace(" )", " \\)")
        yield f"if [ {text} ]; then run yes; else run no; fi"
        yield f"test {text} && run yes || run no"
    for condition in (*TESTS, *DOUBLE):
        yield f"if [[ {condition} ]]; then run yes; else run no; fi"
        yield f"[[ {condition} ]] || run no; ! [[ {condition} ]] || run yes"
    for expression in (
        "N",
        "C",
        "N - 8",
        "N > M",
        "N < M",
        "N == 8 && M == 3",
        "0",
        "-1",
        "!N",
        "N = 0",
        "N++",
    ):
        yield f"if (({expression})); then run yes $N; else run no $N; fi"
        yield f"let '{expression}' && run yes $N || run no $N"
    patterns = (
        "llama*",
        "*7b*|x",
        "x|y|*.sh",
        "gpt*",
        "'llama*'",
        "$A",
        "l?ama*",
        "[k-m]lama*",
        "[!l]*",
        '"$A"',
        "(l*",
        "*",
    )
    for pattern in patterns:
        yield f"case $A in {pattern}) run yes;; *) run no;; esac"
        yield f"case $A in none) run none;; {pattern}) run yes;; llama*) run late; esac"
    yield from LINES["conditions"]


TEXTS = (
    "one,two,three",
    "a b  c",
    "a-b",
    "x",
    "",
    "1\\n2\\n2\\n1",
    "b 2\\na 1",
    "k=v:w",
    "tp4 pp2",
    "aab",
    " p q ",
)
FILTERS = (*LINES["filters"],)
OUTPUTS = (*LINES["commands"],)


def outputs() -> Iterator[str]:
    """Every filter of every text, and what single commands write, in words and as one word."""
    for text, command in product(TEXTS, FILTERS):
        yield f"run \"$(printf '{text}\\n' | {command})\""
    for command in OUTPUTS:
        yield f'run "$({command})"'
        yield f"run $({command}) end"
        if "\\" not in command:
            yield f'X=$({command}); run "$X" `{command}`'
    yield from LINES["outputs"]


GROUPS = {
    "arithmetic": [f"run $(({expression}))" for expression in expressions()],
    "expansions": list(expansions()),
    "conditions": list(conditions()),
    "outputs": list(outputs()),
    "blocks": LINES["blocks"],
}


def commands_of_bash(lines: Sequence[str], folder: Path) -> list[list[str]]:
    """Words of all `run` of a script; each line in a subshell, in which an error stops nothing
    else."""
    # A program and a function: `env run` starts the one, and most lines the other, which costs
    # nothing.
    program = folder / "run"
    program.write_text(f'#!/bin/bash\n{STUB}run "$@"\n')
    program.chmod(0o755)
    script = f"{STUB}export -f run; PATH={folder}:$PATH\n{SET}" + "".join(isolated(lines))
    record = folder / "record"
    with record.open("w") as file:
        subprocess.run(
            ["bash", "-c", f"exec 9>&{file.fileno()}; {script}"],
            pass_fds=[file.fileno()],
            cwd=folder,
            capture_output=True,
            timeout=60,
            check=False,
        )
    return [command.split("\036")[:-1] for command in record.read_text().split("\035")[:-1]]


def commands_of_reader(lines: Sequence[str], folder: Path) -> list[list[str]]:
    """The same as the package reads it."""
    commands: list[list[str]] = []
    for line in isolated(lines):
        script = run_script(SET + line, str(folder / "x.sh"), {})
        commands += [
            [word.text for word in command.argv] for command in script.commands if command.certain
        ]
    return [command for command in commands if command[0] == "run"]


def isolated(lines: Sequence[str]) -> list[str]:
    """Each line behind a mark, in a subshell."""
    return [f"run @{number}\n(\n{line}\n)\n" for number, line in enumerate(lines)]


def by_line(commands: Sequence[list[str]]) -> list[list[list[str]]]:
    """Commands by the mark before them."""
    groups: list[list[list[str]]] = []
    for command in commands:
        if len(command) == 2 and command[1].startswith("@"):
            groups.append([])
        else:
            groups[-1].append(command)
    return groups


@pytest.mark.parametrize("group", GROUPS)
def test_lines_run_what_bash_runs(group: str, tmp_path: Path) -> None:
    lines = GROUPS[group]
    (tmp_path / "f.txt").write_text("b\na\na\n")
    ran = by_line(commands_of_bash(lines, tmp_path))
    read = by_line(commands_of_reader(lines, tmp_path))
    assert len(ran) == len(read) == len(lines)
    different = [(line, a, b) for line, a, b in zip(lines, ran, read, strict=True) if a != b]
    assert not different, (
        f"{len(different)} of {len(lines)} lines (text, bash, reader): {different[:5]}"
    )
