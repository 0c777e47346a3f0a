"""Command lines of launch scripts as entries, and scripts that launch."""

import os
import re
from collections.abc import Mapping
from typing import Any, Final

from perfmodel.ingest.launch._entries import Entry, Source
from perfmodel.ingest.launch._shell import Word, run_script

LAUNCHER: Final = ("nproc-per-node", "nnodes")
"""Arguments of torchrun, before the script's name."""


def read_arguments(text: str, where: str, known: frozenset[str]) -> Source:
    """Arguments of the command of a shell script (or of a bare list of arguments) that has most of the `known` ones.

    Names are written with hyphens, without the leading ones; an argument without a value is True, one with several a
    list.
    """
    script = run_script(text, where, os.environ)
    bare = tuple(word for command in script.commands if command[0].text.startswith("--") for word in command)
    candidates = [_entries(command) for command in (bare, *script.commands)]
    best = max(candidates, key=lambda entries: len(known & set(entries)), default={})
    for option, number in script.scheduler.items():
        best.setdefault(f"sbatch-{option}", Entry(str(number), 0))
    notes = (*script.notes, *(f"{one} is taken from the environment" for one in script.from_environment))
    return Source(where=where, entries=best, notes=notes)


def _entries(words: tuple[Word, ...]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    name = ""
    for word in words:
        if word.text.startswith("--") and len(word.text) > 2:
            head, sign, value = word.text[2:].partition("=")
            name = head.replace("_", "-")
            found[name] = Entry(value if sign else True, word.line)
            name = "" if sign else name
        elif word.text.endswith(".py") or re.match(r"-[A-Za-z]", word.text):
            name = ""  # the script's own name, or a short option
        elif name and word.text:
            before = found[name]
            values = word.text if before.value is True else [*_listed(before.value), word.text]
            found[name] = Entry(values, before.line)
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def write_arguments(values: Mapping[str, Any], comments: tuple[str, ...]) -> str:
    """A bash script that launches with these arguments, and with those that it is given itself."""
    rows = [(name, "" if value is True else f" {value}") for name, value in values.items()]
    launcher = "".join(f" --{name.replace('-', '_')}{value}" for name, value in rows if name in LAUNCHER)
    lines = ["#!/bin/bash", *(f"# {comment}" for comment in comments)]
    lines.append("# data, tokenizer, optimizer and checkpoints are the script's own arguments")
    lines.append(f"torchrun{launcher} pretrain_gpt.py \\")
    lines += [f"    --{name}{value} \\" for name, value in rows if name not in LAUNCHER]
    return "\n".join([*lines, '    "$@"']) + "\n"
