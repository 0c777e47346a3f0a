"""`perfmodel init` writes a job file to start from; `perfmodel samples` small examples."""

import argparse
import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from perfmodel.cli._flags import add_json
from perfmodel.cli._show import emit, written
from perfmodel.cli._vocabulary import Key, keys
from perfmodel.display import json_text, say, say_verbatim
from perfmodel.errors import PerfModelError
from perfmodel.units import number_of

_HEAD: Final = """\
# A job file: the model, the cluster, the layout, and the options of a search.
#
#   perfmodel predict {name}                     one layout
#   perfmodel search {name}                      the best layouts
#   perfmodel predict {name} --set layout.tp=8   with one key changed
#
# Flags override the values in this file. Keys after a # show their defaults; those without
# a default show in <> what to write.

# perfmodel catalog models; or a Hugging Face config.json, a TOML, a table [model]
model = "llama3-8b"
# perfmodel catalog clusters; or a TOML, a table [cluster]
cluster = "dgx-h100"
# perfmodel catalog frameworks; NAME or NAME@YEAR
framework = "generic"
# number of devices to use
devices = 64
"""
_SECTIONS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "job": ("What a step computes", {"global_batch": 256, "seq_len": 8192}),
    "layout": (
        "The layout: for every command but search",
        {"tp": 4, "pp": 2, "dp": 8, "zero": 1},
    ),
    "network": ("The network between nodes, if it differs from the cluster's", {}),
    "search": ("Layouts to try, and the objective: for search", {"top": 10}),
    "serving": (
        "Requests to a server of the model: for serve",
        {"prompt_tokens": 1024, "output_tokens": 256},
    ),
}
"""Tables of the file, with their subjects and the values that differ from defaults."""


def add_init(commands: Any) -> None:
    """Register the command `init` and its flags."""
    command: argparse.ArgumentParser = commands.add_parser(
        "init", help="write a commented job file to start from"
    )
    command.add_argument(
        "file",
        nargs="?",
        type=Path,
        default=Path("job.toml"),
        metavar="FILE",
        help="job file to write (default job.toml)",
    )
    command.add_argument("--force", action="store_true", help="replace the file if it exists")
    add_json(command)
    command.set_defaults(run=_init)


def add_samples(commands: Any) -> None:
    """Register the command `samples` and its flags."""
    command: argparse.ArgumentParser = commands.add_parser(
        "samples", help="write a small sample of every kind of file, and a command to try for each"
    )
    command.add_argument("folder", type=Path, metavar="DIR", help="folder to write the files to")
    command.add_argument("--force", action="store_true", help="replace existing files")
    add_json(command)
    command.set_defaults(run=_samples)


def _init(arguments: argparse.Namespace) -> int:
    """Write a job file whose comments explain its keys."""
    from perfmodel.ingest.tables import write_text

    path: Path = arguments.file
    if path.suffix != ".toml":
        raise PerfModelError(f"{path}: a job file ends in .toml; give another FILE")
    refuse_existing([path], arguments.force)
    write_text(path, job_text(path.name))

    def show() -> None:
        written([path])
        say_verbatim(f"next: perfmodel predict {shlex.quote(str(path))}")

    emit(arguments, {"written": [str(path)]}, show)
    return 0


def samples() -> dict[str, str]:
    """The files by name."""
    shipped = files("perfmodel.cli") / "samples"
    texts = {file.name: file.read_text("utf-8") for file in shipped.iterdir() if file.is_file()}
    return dict(sorted((texts | {"job.toml": job_text("job.toml")}).items()))


def _samples(arguments: argparse.Namespace) -> int:
    """Write the sample files into a folder."""
    from perfmodel.ingest.tables import write_text

    folder: Path = arguments.folder
    if folder.exists() and not folder.is_dir():
        raise PerfModelError(f"{folder}: is a file, not a folder; give another DIR")
    paths = {folder / name: text for name, text in samples().items()}
    refuse_existing(list(paths), arguments.force)
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in paths.items():
        write_text(path, text)

    def show() -> None:
        say_verbatim((folder / "README.md").read_text("utf-8").removesuffix("\n"))
        say(f"\nwrote {number_of(len(paths), 'file')} to {folder}")
        say_verbatim(f"next: cd {shlex.quote(str(folder))} && perfmodel predict job.toml")

    emit(arguments, {"written": [str(path) for path in paths]}, show)
    return 0


def refuse_existing(paths: list[Path], force: bool) -> None:
    """Raise `PerfModelError` if a file to write already exists, unless it may be replaced."""
    # Check all files before writing the first, so that nothing is written by halves.
    existing = [path for path in paths if path.exists()]
    if existing and not force:
        raise PerfModelError(
            f"{existing[0]}: the file already exists; give another name, or --force to replace it"
        )


def job_text(name: str) -> str:
    """The text of a job file with every key explained; its examples use `name`."""
    parts = [_HEAD.format(name=name)]
    for section, (about, values) in _SECTIONS.items():
        parts.append(f"# {about}.\n[{section}]")
        for key in keys(section):
            # Types such as "text" tell a reader nothing that the value does not.
            is_obvious = key.values in ("text", "words") or not _has_default(key)
            allowed = "" if is_obvious else f" ({key.values})"
            meaning = (key.meaning or key.name) + allowed
            parts.append(
                textwrap.fill(
                    meaning,
                    88,
                    initial_indent="# ",
                    subsequent_indent="# ",
                    break_on_hyphens=False,
                )
            )
            # JSON's notation of plain values is TOML's too.
            if key.name in values:
                parts.append(f"{key.name} = {json_text(values[key.name])}")
            elif _has_default(key):
                parts.append(f"# {key.name} = {json_text(key.default)}")
            else:
                parts.append(f"# {key.name} = {_placeholder(key)}")
        parts.append("")
    return "\n".join(parts)


def _has_default(key: Key) -> bool:
    """Whether a key that is left out has a value that the file can show."""
    return key.default is not MISSING and key.default is not None


def _placeholder(key: Key) -> str:
    """The text to write for a key that the user fills in, in TOML's notation."""
    if key.values == "numbers":
        return "[<numbers>]"
    return '"<text>"' if key.values in ("text", "words") else f"<{key.values}>"
