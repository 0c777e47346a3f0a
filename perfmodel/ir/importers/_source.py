"""Reads a program from text, a catalog model, an ONNX file, or a PyTorch or JAX model."""

import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from perfmodel import catalog
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.files import (
    data_limit_bytes,
    parse_json,
    read_text,
    require_archive_within,
    why_no_file,
)
from perfmodel.ir import Program, parse_program
from perfmodel.ir.distribute import megatron_axes, pad_vocabulary
from perfmodel.ir.importers._onnx_program import onnx_program
from perfmodel.ir.importers._program import trace_program
from perfmodel.ir.importers._torch_program import load_torch, rank_program, torch_program
from perfmodel.ir.models import model_program, training_step

Mode = Literal["train", "inference"]
SOURCES: Final = "program.ir, a catalog model, FILE.onnx, FILE.pt2, or FILE.py:FUNCTION"


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """Settings to complete a source."""

    batch: int | None = None
    """Number of samples, for catalog models."""
    seq_len: int = 0
    """Tokens per sequence, for catalog models (0: the model's own)."""
    dtype: str = "fp32"
    """Element type of a catalog model."""
    mode: Mode | None = None
    """Training or inference; None: a training step if the source returns a loss or is a catalog
    model, otherwise the source unchanged."""
    dims: Mapping[str, int] = field(default_factory=dict)
    """Sizes of named dimensions (ONNX)."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values of inputs that shapes or masks depend on."""
    pad_vocab: int = 1
    """Multiple to which vocabularies are padded."""
    ranks: int = 1
    """Number of ranks, if the source is one rank's PyTorch module that calls collectives
    (`rank_program`)."""
    sharded: Mapping[str, int] = field(default_factory=dict)
    """Axis along which a tensor is sharded over these ranks, by its name in the program."""


def read_program(source: str, settings: SourceSettings | None = None) -> Program:
    """Read the program of a source.

    Args:
        source: the text of a program (`.ir`), a catalog model, an ONNX file, a saved `torch.export`
            (`.pt2`), or `FILE.py:FUNCTION`, where FUNCTION() returns a PyTorch module and the tuple
            of its arguments, or a JAX loss and the tuple of its weights and data.

    Raises:
        PerfModelError: no such source, or what its reader refuses.
    """
    settings = settings or SourceSettings()
    if settings.sharded and settings.ranks == 1:
        raise PerfModelError("sharded tensors need several ranks; give their number with --ranks")
    # The suffix decides; a name without one is a catalog model.
    path, _, function = source.partition(":")
    suffix = Path(path).suffix
    if suffix == ".ir":
        try:
            text = read_text(Path(path), data_limit_bytes())
        except ValueError as error:
            raise PerfModelError(f"{path}: not a program in text form ({error})") from None
        try:
            program = parse_program(text)
        except PerfModelError as error:
            raise PerfModelError(f"{path}: {error}") from None
    elif suffix == ".onnx":
        program = onnx_program(path, dims=settings.dims, values=settings.values)
    elif suffix == ".pt2":
        program = _from_torch(_exported(path), (), Path(path).stem, settings)
    elif suffix == ".py" and function:
        made = loaded(Path(path), function)
        program = of_the_file(
            Path(path), lambda: _from_function(made, function, settings), inside=True
        )
    else:
        program = _from_catalog(source, settings)
    if settings.ranks > 1:
        return _for_ranks(program, source, settings)
    if settings.pad_vocab > 1:
        program = pad_vocabulary(program, settings.pad_vocab)
    return _in_mode(program, settings.mode)


def _from_catalog(name: str, settings: SourceSettings) -> Program:
    """Write a catalog model as a program."""
    try:
        model = catalog.model(name)
    except UnknownNameError as error:
        raise PerfModelError(f"{name}: not {SOURCES} ({error})") from None
    if settings.batch is None:
        raise PerfModelError(f"{name}: a catalog model does not state a batch; give --global-batch")
    mode = settings.mode or "train"
    return model_program(
        model, settings.batch, seq_len=settings.seq_len, dtype=settings.dtype, mode=mode
    )


def _from_function(
    made: tuple[Any, tuple[Any, ...]], name: str, settings: SourceSettings
) -> Program:
    """Convert the model and arguments that a function of the user's file returned."""
    # A JAX function states no tensor axes, so they are found from the data flow; readers of graphs
    # do that themselves.
    model, args = made
    # A file that made a PyTorch module has imported torch; nobody else need.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return _from_torch(model, args, name, settings)
    return megatron_axes(trace_program(model, *args, name=name))


def _from_torch(model: Any, args: tuple[Any, ...], name: str, settings: SourceSettings) -> Program:
    """A PyTorch module, or an exported one, as a program of one device or of all ranks."""
    if settings.ranks == 1:
        return torch_program(model, args, values=settings.values, name=name)
    return rank_program(
        model,
        args,
        ranks=settings.ranks,
        sharded=settings.sharded,
        values=settings.values,
        name=name,
        trains=None if settings.mode is None else settings.mode == "train",
    )


def _for_ranks(program: Program, source: str, settings: SourceSettings) -> Program:
    """A program that was read for several ranks.

    Raises:
        PerfModelError: the source is none of PyTorch, or its vocabulary is to be padded.
    """
    if program.n_devices != settings.ranks:
        raise PerfModelError(
            f"{source}: only a PyTorch module can be one of {settings.ranks} ranks; give FILE.pt2 or FILE.py:FUNCTION, "
            "or --layout instead of --ranks"
        )
    if settings.pad_vocab > 1:
        raise PerfModelError(
            f"{source}: ranks hold their parts of a vocabulary already; leave --pad-vocab out"
        )
    return program


def _exported(path: str) -> Any:
    torch = load_torch()
    try:
        require_archive_within(Path(path))
        return torch.export.load(path)
    except Exception as error:
        raise PerfModelError(f"{path}: not a module saved by torch.export ({error})") from None


def _in_mode(program: Program, mode: Mode | None) -> Program:
    """Turn a program that returns a loss into a training step, unless inference is asked for."""
    # Program text may be a training step already.
    loss = any(output.role == "loss" for output in program.outputs)
    # A loss is made a training step unless inference is asked for.
    if program.trains or mode == "inference" or (mode is None and not loss):
        return program
    if not loss:
        raise PerfModelError(
            f"@{program.function.name} returns no loss to train on; make the model return a scalar"
        )
    return training_step(program)


def input_value(text: str) -> tuple[str, Any]:
    """Parse an input value: `name=1`, `name=[[0, 1, 2]]` (JSON) or `name=FILE.npy`.

    Raises:
        PerfModelError: neither.
    """
    name, _, value = text.partition("=")
    try:
        return name, np.load(value) if value.endswith(".npy") else parse_json(value)
    except (ValueError, TypeError, MemoryError, OSError):
        raise PerfModelError(
            f"--input-value {text!r} is not NAME=VALUE; VALUE is a number, a JSON list or FILE.npy"
        ) from None


def sharded_axis(text: str) -> tuple[str, int]:
    """Parse `name=0`: a tensor that is sharded over the ranks, and the axis along which it is cut.

    Raises:
        PerfModelError: neither.
    """
    name, _, axis = text.partition("=")
    if not name or not axis.isdecimal():
        raise PerfModelError(f"--sharded {text!r} is not NAME=AXIS; axes count from 0")
    return name, int(axis)


def loaded(path: Path, function: str) -> tuple[Any, tuple[Any, ...]]:
    """Call a function of a Python file; return the model and the tuple of arguments that it gives.

    Raises:
        PerfModelError: no such file or function, another result, or whatever the file raised, with
            the line.
    """
    # This runs the user's own file; an exception is reported with its line, not with ours.
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.exists() or spec is None or spec.loader is None:
        raise PerfModelError(f"{path}: {why_no_file(path)}")
    loader = spec.loader
    module = importlib.util.module_from_spec(spec)
    of_the_file(path, lambda: loader.exec_module(module))
    entry = getattr(module, function, None)
    if not callable(entry):
        raise PerfModelError(f"{path}: it has no function {function!r}")
    returned = of_the_file(path, entry)
    if not (
        isinstance(returned, tuple)
        and len(returned) == 2
        and callable(returned[0])
        and isinstance(returned[1], (tuple, list))
    ):
        raise PerfModelError(
            f"{path}:{function}() must return a JAX function and the tuple of its arguments"
        )
    return returned[0], tuple(returned[1])


def of_the_file(path: Path, call: Callable[[], Any], inside: bool = False) -> Any:
    """Call a function of the user's file, with errors that name its line.

    Raises:
        PerfModelError: what the call raised (if `inside`: within the file), in one line with the
            place.
    """
    try:
        return call()
    except PerfModelError:
        raise
    except Exception as error:
        # The last line inside the user's file is the one to look at.
        frames = traceback.extract_tb(error.__traceback__)
        lines = [
            frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()
        ]
        if inside and not lines:
            raise
        line = lines[-1] if lines else None
        if isinstance(error, SyntaxError):
            line = error.lineno
        place = f"{path}, line {line}" if line else str(path)
        raise PerfModelError(f"{place}: {type(error).__name__}: {error}") from error
