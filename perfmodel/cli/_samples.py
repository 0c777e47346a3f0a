"""`perfmodel samples`: small files of every kind that commands read, to try them on."""

import argparse
from importlib.resources import files
from pathlib import Path
from typing import Any

from perfmodel.cli._emit import emit
from perfmodel.cli._flags import add_json
from perfmodel.cli._init import job_text, refuse_existing
from perfmodel.errors import PerfModelError


def add_command(commands: Any) -> None:
    """Register the command."""
    command: argparse.ArgumentParser = commands.add_parser(
        "samples", help="write small files of every kind, with a command to try each on"
    )
    command.add_argument("folder", type=Path, metavar="DIR", help="where they go")
    command.add_argument("--force", action="store_true", help="replace files that are there")
    add_json(command)
    command.set_defaults(run=_execute)


def samples() -> dict[str, str]:
    """The files by name."""
    shipped = files("perfmodel.cli") / "samples"
    texts = {one.name: one.read_text("utf-8") for one in shipped.iterdir() if one.is_file()}
    return dict(sorted((texts | {"job.toml": job_text("job.toml")}).items()))


def _execute(arguments: argparse.Namespace) -> int:
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
        print((folder / "README.md").read_text("utf-8"), end="")
        print(f"\nwrote {len(paths)} files to {folder}")

    emit(arguments, {"written": [str(path) for path in paths]}, show)
    return 0
