"""Output of the few commands whose arguments determine it: `$(dirname $0)`, `$(expr 2 + 3)`.

Nothing is executed: every command has its meaning written here, and all others have an output that
nobody knows.
"""

import re
from collections.abc import Callable
from itertools import groupby
from pathlib import PurePosixPath
from typing import Final

from perfmodel.ingest.launch.shell import _tree as tree
from perfmodel.ingest.launch.shell._values import calculate, unknown

Expand = Callable[[tree.RawWord], list[str]]
MOST_NODES: Final = 100_000
"""Most invented names of nodes."""


def as_lines(here_text: tree.HereText, text: str) -> str:
    """The text of a here-document as a program reads it: the shell ends the word behind `<<<` with
    a line break."""
    # A command's output already ends with a newline before it is cut off, or is empty.
    if here_text.word is None or (here_text.is_output and (not text or text.endswith("\n"))):
        return text
    return f"{text}\n"


def pipeline_output(
    node: tree.Pipeline,
    expand: Expand,
    text_of: Callable[[tree.HereText], str],
    variable: Callable[[str], str | None],
    file_text: Callable[[str], str | None],
    folder: str,
) -> str | None:
    """Text that a pipeline writes; None if it is not known.

    Args:
        node: the pipeline.
        expand: words that a word becomes.
        text_of: text of a here-document.
        variable: value of a variable.
        file_text: text of a file; None of one that is not there.
        folder: folder in which it runs.
    """
    # Each command reads the output of the one before it; an unknown command makes the whole output
    # unknown.
    text: str | None = None
    for command in node.commands:
        if not isinstance(command, tree.Simple):
            return None
        argv: list[str] = []
        for raw in command.raw_words:
            argv += expand(raw)
        stdin = text if command.here is None else text_of(command.here)
        if command.here is not None and command.here.word is not None:
            if stdin is None or unknown(stdin):
                return None
            stdin = as_lines(command.here, stdin)
        # Files that the script writes or that lie beside it are known.
        if (
            stdin is None
            and argv[:1] in (["cat"], ["sort"], ["uniq"], ["wc"], ["head"])
            and not unknown(argv[-1])
        ):
            text = file_text(argv[-1])
            if text is not None:
                argv = argv[:-1]
                stdin = text
        text = command_output(argv, stdin, folder, variable)
        if text is None:
            return None
    return text


def command_output(
    argv: list[str], stdin: str | None, folder: str, variable: Callable[[str], str | None]
) -> str | None:
    """Output of one command with the input `stdin` from the previous one in a pipeline; None if
    unknown."""
    if not argv:
        return None
    head = argv[0]
    arguments = argv[1:]
    operands = [
        argument for argument in arguments if not argument.startswith("-") or argument == "-"
    ]
    # Each command is understood in the forms that launch scripts use, and with others its output is
    # not known.
    if head == "pwd":
        return folder + "\n"
    if head == "cat" and stdin is not None and operands in ([], ["-"]):
        return stdin
    if head == "tee" and stdin is not None:
        return stdin
    prints_arguments = ("echo", "expr", "dirname", "basename", "readlink", "realpath", "seq")
    if head in prints_arguments and unknown(" ".join(arguments)):
        return None
    if head == "echo":
        texts = [argument for argument in arguments if argument not in ("-e", "-n", "-E")]
        return " ".join(texts) + ("" if "-n" in arguments[:1] else "\n")
    if head == "printf" and arguments:
        return formatted(arguments[0], arguments[1:])
    if head == "expr":
        value = calculate(" ".join(arguments))
        return None if value is None else f"{value}\n"
    if head == "dirname" and operands:
        return str(PurePosixPath(operands[0]).parent) + "\n"
    if head == "basename" and operands:
        name = PurePosixPath(operands[0]).name
        return (name.removesuffix(operands[1]) if len(operands) > 1 else name) + "\n"
    # The folder itself does not matter here, only that a path leads to a file beside the script.
    if head in ("readlink", "realpath") and operands:
        return operands[-1] + "\n"
    if (
        head == "seq"
        and all(re.fullmatch(r"-?\d+", word) for word in operands)
        and 1 <= len(operands) <= 2
    ):
        numbers = [int(operand) for operand in operands]
        first, last = (1, numbers[0]) if len(numbers) == 1 else numbers[:2]
        return "".join(f"{i}\n" for i in range(first, min(last, first + MOST_NODES) + 1))
    # Names of nodes are made up: scripts count them and take the first as master.
    is_list = head in ("cat", "sort", "uniq") and operands == ["${PBS_NODEFILE}"]
    shows_hosts = arguments[:2] in (["show", "hostnames"], ["show", "hostname"])
    if is_list or (head == "scontrol" and shows_hosts):
        nodes = variable("SLURM_NNODES") or ""
        if not nodes.isdecimal() or int(nodes) >= MOST_NODES:
            return None
        return "".join(f"node{i}\n" for i in range(int(nodes)))
    # A filter of a pipeline.
    if stdin is None or head not in _FILTERS:
        return None
    return _FILTERS[head](arguments, stdin)


def formatted(form: str, values: list[str]) -> str | None:
    """Output of printf; None for forms that are not known."""
    form = form.replace("\\n", "\n").replace("\\t", "\t")
    marks = re.findall(r"%(?:0?\d*d|s)", form)
    if "%" in re.sub(r"%(?:0?\d*d|s)", "", form) or unknown(" ".join(values)):
        return None
    # With more values than marks printf repeats its form, and marks without a value get nothing.
    if not marks:
        return form
    times = max(1, -(-len(values) // len(marks)))
    padded = [*values, *[""] * (times * len(marks) - len(values))]
    arguments: list[str | int] = []
    for mark, value in zip(marks * times, padded, strict=True):
        if mark.endswith("s"):
            arguments.append(value)
        elif re.fullmatch(r"-?\d*", value):
            arguments.append(int(value or 0))
        else:
            return None
    return (form * times) % tuple(arguments)


def _calculated(arguments: list[str], text: str) -> str | None:
    """Output of `bc`."""
    # bc's `scale` sets decimals; the sizes that scripts calculate with it are whole numbers.
    value = calculate(re.sub(r"scale\s*=\s*\d+\s*;", "", text))
    return None if value is None else f"{value}\n"


def _counted(arguments: list[str], text: str) -> str | None:
    """Output of `wc -l` or `wc -w`."""
    match arguments:
        case ["-l"]:
            return f"{text.count(chr(10))}\n"
        case ["-w"]:
            return f"{len(text.split())}\n"
    return None


_ONE_LINE: Final = re.compile(r"-n?\s*1")
"""Options of `head` and `tail` that ask for a single line."""


def _first_line(arguments: list[str], text: str) -> str | None:
    """Output of `head`, of which scripts take one line."""
    if arguments and not _ONE_LINE.fullmatch(" ".join(arguments)):
        return None
    return text.partition("\n")[0] + "\n"


def _last_line(arguments: list[str], text: str) -> str | None:
    """Output of `tail -n 1`."""
    if not _ONE_LINE.fullmatch(" ".join(arguments)):
        return None
    return "".join(text.splitlines(keepends=True)[-1:])


def _on_one_line(arguments: list[str], text: str) -> str | None:
    """Output of `xargs` without a command: all words on one line."""
    return None if arguments else " ".join(text.split()) + "\n"


def _reversed(arguments: list[str], text: str) -> str | None:
    """Output of `rev`: each line backwards."""
    return None if arguments else "".join(f"{line[::-1]}\n" for line in text.splitlines())


def _translated(arguments: list[str], text: str) -> str | None:
    """Output of `tr A B` for single characters, and of `tr -d` for characters that are listed one
    by one."""
    if len(arguments) != 2:
        return None
    old, new = (argument.replace("\\n", "\n") for argument in arguments)
    if old != "-d":
        return text.replace(old, new) if len(old) == len(new) == 1 else None
    # Ranges and classes stand for characters that are not listed.
    if re.search(r"\w-\w|\[|\\[^n]", arguments[1]):
        return None
    return "".join(character for character in text if character not in new)


def _field(arguments: list[str], text: str) -> str | None:
    """Output of `cut -d , -f 2`: one field of each line, empty where the line has fewer, but all of
    a line that has no separator."""
    options = re.fullmatch(r"-d\s*(.) -f\s*(\d+)", " ".join(arguments))
    if options is None:
        return None
    separator = options[1]
    number = int(options[2])
    lines = []
    for line in text.splitlines():
        fields = line.split(separator)
        if len(fields) == 1:
            lines.append(line)
        else:
            lines.append(fields[number - 1] if len(fields) >= number else "")
    return "".join(f"{line}\n" for line in lines)


def _sorted(arguments: list[str], text: str) -> str | None:
    """Output of `sort` or `sort -u`."""
    lines = text.splitlines()
    if arguments not in ([], ["-u"]):
        return None
    return "".join(f"{line}\n" for line in sorted(set(lines) if arguments else lines))


def _without_repeats(arguments: list[str], text: str) -> str | None:
    """Output of `uniq`, which leaves out lines that repeat the one before."""
    return None if arguments else "".join(f"{line}\n" for line, _ in groupby(text.splitlines()))


def _columns(arguments: list[str], text: str) -> str | None:
    """Output of `awk '{print $2}'`, also with `-F` and a separator; None for other programs."""
    program = re.fullmatch(r"(?:-F\s*(\S+) )?\{\s*print \$(\d+|NF)\s*;?\s*\}", " ".join(arguments))
    # A separator of several characters is a pattern.
    if program is None or (program[1] is not None and len(program[1]) > 1):
        return None
    columns = []
    for line in text.splitlines():
        parts = line.split(program[1]) if program[1] else line.split()
        index = len(parts) if program[2] == "NF" else int(program[2])
        # Column 0 is the whole line, and one that is not there is empty.
        columns.append(line if index == 0 else "".join(parts[index - 1 : index]))
    return "".join(f"{column}\n" for column in columns)


_SET: Final = r"(?:\\[dwS]|\[\^?[\w .,=:/-]+\])"
_EXTRACTS: Final = re.compile(
    rf"(\(\?<=[\w =:./,-]*\)|[\w =:./,-]*)(\\K)?({_SET}[+*]?)?([\w =:./,-]*)"
)
"""Patterns of `grep -o`: a plain text, perhaps only in front of what is written, and one set of
characters."""


def _matches(arguments: list[str], text: str) -> str | None:
    """Output of `grep -o`, for patterns with at most one set of characters; None for others."""
    options = "".join(argument.lstrip("-") for argument in arguments if argument.startswith("-"))
    patterns = [argument for argument in arguments if not argument.startswith("-")]
    parts = _EXTRACTS.fullmatch(patterns[0]) if len(patterns) == 1 else None
    # `+` and `(?<=` mean more than themselves only in Perl's and the extended patterns.
    if (
        parts is None
        or "o" not in options
        or set(options) - set("oPE")
        or not set(options) & set("PE")
    ):
        return None
    before, keep, characters, behind = parts.groups(default="")
    pattern = re.compile(
        f"{before}(?P<written>{characters}{behind})" if keep else f"(?P<written>{patterns[0]})"
    )
    pieces: list[str] = []
    for line in text.splitlines():
        pieces += [match["written"] for match in pattern.finditer(line)]
    return "".join(f"{piece}\n" for piece in pieces if piece)


def _replaced(arguments: list[str], text: str) -> str | None:
    """Output of `sed 's/old/new/'` for texts without special characters; None for others."""
    programs = [argument for argument in arguments if argument != "-e"]
    if len(programs) != 1:
        return None
    program = re.fullmatch(r"s([/,|#:])([\w ./,:=-]*)\1([\w ./,:=-]*)\1(g?)", programs[0])
    if (
        program is None
        or "." in program[2]
        or not program[2]
        or program[1] in program[2] + program[3]
    ):
        return None
    times = -1 if program[4] else 1
    return "".join(
        line.replace(program[2], program[3], times) for line in text.splitlines(keepends=True)
    )


_FILTERS: Final[dict[str, Callable[[list[str], str], str | None]]] = {
    "awk": _columns,
    "bc": _calculated,
    "cut": _field,
    "grep": _matches,
    "head": _first_line,
    "rev": _reversed,
    "sed": _replaced,
    "sort": _sorted,
    "tail": _last_line,
    "tr": _translated,
    "uniq": _without_repeats,
    "wc": _counted,
    "xargs": _on_one_line,
}
"""Commands that read the output of the one before: each is given its arguments and that text, and
returns None for forms whose output is not known."""
