"""Reads a launch file: model, layout, job and number of devices."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from perfmodel import catalog
from perfmodel.errors import LaunchFileError
from perfmodel.files import TooLargeError, read_text
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._launch import Launch, Overrides, Reading
from perfmodel.ingest.launch._model import changed_model
from perfmodel.ingest.launch._recognise import recognised
from perfmodel.ingest.launch._settle import settle
from perfmodel.ingest.launch._table import Fields
from perfmodel.ingest.launch.shell import SHELLS
from perfmodel.spec import Layout, Model

LARGEST_BYTES: Final = 4_000_000
"""Largest size of a launch file."""
_COMMENT: Final = re.compile(r"^# perfmodel: (\S+)$", re.MULTILINE)
"""Pattern of the comment in which `export_launch` keeps settings of the training script, in the
notation of layouts."""


def read_launch(
    path: Path | str,
    *,
    devices: int | None = None,
    global_batch: int | None = None,
    layout: str = "",
    model: Model | str | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    needs_layout: bool = True,
) -> Launch:
    """Read a launch file of a training framework: model, layout, job, number of devices.

    Formats: an argument list, shell script or YAML of Megatron-LM's arguments (its own test cases,
    Primus, FlagScale, GPT-NeoX), YAML of NeMo, Megatron-Bridge, nanotron, llm-foundry, MaxText,
    levanter and Accelerate, command lines of MaxText, DeepSpeed's JSON, torchtitan's TOML; files
    and commands of fine-tuning by Hugging Face's Trainer, LLaMA-Factory, axolotl, torchtune, Oumi,
    MS-Swift and XTuner; commands of Colossal-AI's programs; commands and scripts that name a
    recipe of torchtitan, Megatron-Bridge or NeMo 2; Kubernetes manifests and SkyPilot tasks that
    run any of these. Arguments override the
    file.

    Args:
        path: the file. A shell or Python script may be followed by its arguments,
            `"run.sh 8 24 2"`, and preceded by variables, `"TP=8 run.sh"`.
        devices: number of devices that it runs on, if the file does not state it.
        global_batch: sequences per step.
        layout: in the notation of `Layout.parse`; the file supplies the keys that it leaves out.
        model: the model, or its name in the catalog.
        seq_len: tokens per sequence.
        dtype: element type of the products.
        needs_layout: False if another layout is wanted anyway; undefined values in the file's
            layout, such as variables that nothing sets, are then not refused.

    Raises:
        LaunchFileError: a file that cannot be read, is of no known format, or has a value that its
            key cannot have; names file, line and remedy.
    """
    # Users paste their launch command; it must have the same meaning here as in the shell.
    call = _called(str(path))
    return parse_launch(
        text_of(Path(call.path)),
        call.path,
        devices=devices,
        global_batch=global_batch,
        layout=layout,
        model=model,
        seq_len=seq_len,
        dtype=dtype,
        needs_layout=needs_layout,
        arguments=call.arguments,
        variables=call.variables,
    )


@dataclass(frozen=True)
class _Call:
    """A file name with the variables and arguments around it on a command line."""

    path: str
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def _called(text: str) -> _Call:
    """The parts of `NAME=VALUE ... bash run.sh 8 24 2`; a text that is the name of an existing file
    is only that."""
    if Path(text).exists():
        return _Call(text)
    try:
        argv = shlex.split(text)
    except ValueError:
        return _Call(text)
    variables: dict[str, str] = {}
    while argv:
        assignment = re.fullmatch(r"([A-Za-z_]\w*)=(.*)", argv[0], re.DOTALL)
        if assignment is None:
            break
        variables[assignment[1]] = assignment[2]
        del argv[0]
    # `bash run.sh` and `sbatch run.sh` run the script that they name.
    if len(argv) > 1 and argv[0] in (*SHELLS, "sbatch"):
        del argv[0]
    if not argv or (len(argv) == 1 and not variables):
        return _Call(text)
    return _Call(argv[0], tuple(argv[1:]), variables)


def parse_launch(
    text: str,
    place: str,
    *,
    devices: int | None = None,
    global_batch: int | None = None,
    layout: str = "",
    model: Model | str | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    needs_layout: bool = True,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Launch:
    """Read a launch file from its text; see `read_launch`.

    Args:
        place: path or name of the text, for messages; its ending tells the syntax.
        arguments: arguments of a shell script, `$1` and those after it.
        variables: shell variables that are set when the script starts.
    """
    source, form = recognised(text, place, arguments, variables)
    if source.without_model is not None and model is None and source.recipe_model is None:
        raise source.without_model
    if model is None:
        model = source.model
    elif isinstance(model, str):
        model = catalog.model(model)
    overrides = Overrides(
        devices=source.devices if devices is None else devices,
        global_batch=global_batch,
        layout=layout,
        model=model,
        seq_len=seq_len,
        dtype=dtype,
        needs_layout=needs_layout,
    )
    # Values that the caller states are not read from the file, where they may depend on unset
    # variables.
    stated, unread = form.read(source.entries, place, overrides.states, source.notes)
    if overrides.model is None and source.recipe_model is not None:
        overrides = replace(
            overrides,
            model=changed_model(source.recipe_model, stated.fields, source.entries, place),
        )
    commented = _commented(text, place, form)
    stated = replace(stated, fields=stated.fields | commented)
    framework = form.framework_of(stated, source.entries)
    launch = settle(
        stated,
        overrides,
        place=place,
        form=form,
        framework_name=framework,
        unread=unread,
        notes=source.notes,
        source_doubts=source.doubts,
    )
    names = frozenset(stated.fields.keys() - form.always.keys())
    reading = Reading(form=form, entries=source.entries, commented=commented, stated=names)
    return replace(launch, reading=reading)


def text_of(path: Path) -> str:
    """A launch file's text; raises `LaunchFileError` if it cannot be read."""
    try:
        return read_text(path, LARGEST_BYTES)
    except TooLargeError:
        raise LaunchFileError(
            f"{path}: larger than {LARGEST_BYTES // 10**6} MB; this is not a launch file"
        ) from None
    except OSError as error:
        raise LaunchFileError(
            f"{path}: cannot be read ({error.strerror}); give a launch file"
        ) from None
    except UnicodeDecodeError:
        raise LaunchFileError(f"{path}: not a text file; give a launch file") from None


def _commented(text: str, place: str, form: LaunchFormat) -> Fields:
    """Settings that the format has no key for, from the comment that `export_launch` writes."""
    comment = _COMMENT.search(text)
    if comment is None:
        return {}
    layout = Layout.parse(comment[1])
    if layout.schedule.startswith("file:"):
        raise LaunchFileError(
            f"{place}: {layout.schedule}: a launch file may not refer to a schedule file; give --layout"
        )
    names = [part.partition("=")[0] for part in comment[1].split(",")]
    by_script = [name for name in form.in_script if name in names]
    return {name: layout.value(name) for name in (*form.elsewhere, *by_script)}
