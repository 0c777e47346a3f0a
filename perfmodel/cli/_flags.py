"""Flags that several commands share."""

import argparse
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args

from perfmodel.cli._files import add_from, add_job_file, job_fields, require
from perfmodel.cli._show import note
from perfmodel.errors import PerfModelError
from perfmodel.spec import (
    OPTIMIZERS,
    USUAL_DTYPES,
    Cluster,
    Framework,
    Layout,
    Problem,
    RecomputeModule,
)
from perfmodel.spec.notation import written_values
from perfmodel.units import dtype_name, parse_length, parse_quantity, plain_number

if TYPE_CHECKING:
    from perfmodel.ingest.launch import Launch
    from perfmodel.prediction import Prediction, StepProblem

Parsed = TypeVar("Parsed")


def add_json(command: argparse.ArgumentParser) -> None:
    """Add the flag `--json`, which every command has."""
    command.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object to stdout and nothing else",
    )


def add_calibration(command: argparse._ActionsContainer) -> None:
    """Add the flag for the calibration."""
    command.add_argument(
        "--calibration",
        type=_calibration,
        metavar="DIR",
        help="calibration directory made by 'perfmodel fit' (default: the shipped one)",
    )


def add_framework(
    command: argparse._ActionsContainer,
    role: str = "supplies defaults for everything you leave out; default generic",
) -> None:
    """Add the flag of the training framework."""
    command.add_argument(
        "--framework",
        metavar="NAME[@YEAR]",
        help=f"training framework ('perfmodel catalog frameworks'), {role}",
    )


def price_of(text: str, form: str) -> tuple[str, float]:
    """Parse a price NAME=AMOUNT (raises `PerfModelError`, which shows the form)."""
    name, _, amount = text.partition("=")
    try:
        return name.strip(), plain_number(amount.strip())
    except PerfModelError:
        raise PerfModelError(f"a price must be {form}; got {text!r}") from None


def framework_of(arguments: argparse.Namespace) -> Framework:
    """The framework that the flag of `add_framework` names.

    Raises:
        UnknownNameError, PerfModelError: as `catalog.framework`.
    """
    from perfmodel import catalog

    return catalog.framework(arguments.framework or "generic")


def layout_of(problem: "Problem | StepProblem", text: str) -> Layout:
    """Parse a layout, complete it by the framework's defaults, check it, print assumptions.

    Raises:
        LayoutError, UnknownNameError: as `Layout.parse`.
    """
    framework = problem.framework
    layout, assumed = framework.layout(text, problem.model)
    sentences = list(framework.cannot_run(layout))
    if assumed:
        sentences.insert(0, assumed)
    note(sentences)
    return layout


def layouts_of(problem: "Problem | StepProblem", text: str) -> list[Layout]:
    """Layouts separated by ';', each as `layout_of`."""
    return [layout_of(problem, notation) for notation in text.split(";") if notation.strip()]


def add_job(
    command: argparse.ArgumentParser,
    batches: bool = False,
    clusters: bool = False,
    settings: str = "",
    program: bool = False,
) -> None:
    """Add the flags for job, machine and calibration, and --json.

    Args:
        batches: whether there may be several global batches.
        clusters: whether there may be several clusters.
        settings: help on the settings that --set takes besides keys of the job file.
        program: whether a program may stand in place of a job file.
    """
    add_job_file(command, settings, positional=not clusters, program=program)
    add_problem(command, batches, clusters)
    require(command, "model", "clusters" if clusters else "cluster", "global_batch")
    command.add_argument(
        "--strict",
        action="store_true",
        help="refuse to extrapolate beyond the measurements",
    )
    add_calibration(command)
    add_json(command)


def add_problem(
    command: argparse._ActionsContainer, batches: bool = False, clusters: bool = False
) -> None:
    """Add the flags for model, cluster (or `clusters`), job and launch file."""
    add_from(command)
    command.add_argument("--model", help="catalog name, Hugging Face id, config.json or TOML file")
    _add_cluster(command, several=clusters)
    _add_global_batch(command, several=batches)
    add_seq_len(command)
    add_dtype(command)
    _add_job_defaults(command)
    _add_fine_tuning(command)
    add_framework(command)


def _add_cluster(command: argparse._ActionsContainer, *, several: bool) -> None:
    """Add the flags of the machine, or of several to compare, each with its devices."""
    if several:
        command.add_argument(
            "--clusters",
            metavar="C[:N],...",
            help="catalog names, TOML files or device names, each with a device count",
        )
        command.add_argument(
            "--devices",
            dest="device_counts",
            type=whole_numbers,
            metavar="N[,N...]",
            help="number of devices of clusters without :N; if there are several numbers, each is tried",
        )
    else:
        command.add_argument("--cluster", help="catalog name or TOML")
        command.add_argument(
            "--devices",
            type=int,
            metavar="N",
            help="devices used (default: what the layout needs)",
        )


def _add_global_batch(command: argparse._ActionsContainer, *, several: bool) -> None:
    """Add the flag of the global batch; a search may rank several together."""
    if several:
        command.add_argument(
            "--global-batch",
            "--batches",
            type=whole_numbers,
            metavar="B[,B...]",
            help="sequences per step; layouts of several batch sizes are ranked together",
        )
    else:
        command.add_argument("--global-batch", type=int, metavar="B", help="sequences per step")


def _add_job_defaults(command: argparse._ActionsContainer) -> None:
    """Add the flags of mode, precision and optimizer, which the framework decides by default."""
    command.add_argument(
        "--mode",
        choices=("train", "inference"),
        help="predict a training step or a forward pass (default train)",
    )
    command.add_argument(
        "--attention",
        choices=("flash", "unfused"),
        help="flash: fused attention; unfused: scores are written to memory (default: the framework's; generic: flash)",
    )
    command.add_argument(
        "--optimizer",
        metavar="NAME",
        help=f"{', '.join(OPTIMIZERS)} (default: the launch file's, else adam)",
    )
    command.add_argument(
        "--grad-dtype",
        type=dtype_name,
        choices=USUAL_DTYPES,
        help="element type for accumulating and reducing gradients (default: the framework's)",
    )
    command.add_argument(
        "--recompute-modules",
        type=_flag_words,
        metavar="M[,M...]",
        help=f"modules for recompute=selective: {', '.join(get_args(RecomputeModule))} (default: core_attn)",
    )


def _add_fine_tuning(command: argparse._ActionsContainer) -> None:
    """Add the flags of weights that are not trained, and of adapters."""
    command.add_argument(
        "--freeze",
        choices=("embedding", "all"),
        help="freeze the embedding, or everything except LoRA adapters",
    )
    command.add_argument(
        "--lora-rank",
        type=int,
        metavar="R",
        help="LoRA rank on the attention projections; freezes all other weights",
    )


_OF_JOB: Final = ("optimizer", "grad_dtype", "recompute_modules")
"""Flags that are fields of `Job`."""
_JOB_FLAGS: Final = (
    "model",
    "cluster",
    "seq_len",
    "dtype",
    "mode",
    "attention",
    *_OF_JOB,
    "freeze",
    "lora_rank",
    "framework",
    "calibration",
)
"""Flags that pass a job to another command, except its batch."""


def add_seq_len(command: argparse._ActionsContainer) -> None:
    """Tokens per sequence."""
    command.add_argument(
        "--seq-len",
        type=sequence_length,
        metavar="S",
        help="tokens per sequence, 4096 or 128k (default: the model's)",
    )


def sequence_length(text: str) -> int:
    """Tokens, of which a k is 1024."""
    return _argument(parse_length, text)


def token_count(text: str) -> float:
    """Tokens to train on, such as 1e12 or 1T."""
    return _argument(lambda text: parse_quantity(text, "tokens"), text)


def _argument(parse: Callable[[str], Parsed], text: str) -> Parsed:
    """The value of a flag's text; an error becomes one of argparse."""
    try:
        return parse(text)
    except PerfModelError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_dtype(command: argparse._ActionsContainer) -> None:
    """The element type of a job."""
    command.add_argument(
        "--dtype",
        type=dtype_name,
        choices=("bf16", "fp16", "fp32", "tf32", "fp8", "fp4", "int8"),
        help="element type (default: the first of bf16, fp16, fp32 that the device has)",
    )


def job_flags(arguments: argparse.Namespace) -> list[str]:
    """Flags that give another command the same job and machine, without the batch."""
    files = [] if arguments.job_file is None else [str(arguments.job_file)]
    flags = []
    # Batch, devices and layout are said by flags, and the command of these flags searches nothing
    # else.
    said_by_flags = ("layout", "search.", "devices", "job.global_batch")
    for change in (*arguments.job_changes, *arguments.set):
        if not change.lstrip().startswith(said_by_flags):
            flags += ["--set", change]
    if getattr(arguments, "launch_file", None) is not None:
        flags += ["--from", str(arguments.launch_file)]
    for name in _JOB_FLAGS:
        # Only flags that were stated: defaults would override the files that stand before them.
        value = getattr(arguments, name, None) if name in arguments.given else None
        if value is not None:
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            flags += [f"--{name.replace('_', '-')}", text]
    return [*files, *flags]


def predict_command(
    arguments: argparse.Namespace, prediction: "Prediction", cluster: str = ""
) -> str:
    """The command line that repeats this prediction.

    Args:
        cluster: name of the cluster on the command line, where `arguments` name several.
    """
    flags = job_flags(arguments)
    if cluster:
        flags += ["--cluster", cluster]

    # Without a file, the devices are those of the layout. A file may state more than it uses.
    has_file = arguments.job_file is not None or getattr(arguments, "launch_file", None) is not None
    in_file = _in_file(arguments)
    if has_file and in_file.get("devices") != prediction.devices:
        flags += ["--devices", str(prediction.devices)]
    layout = _layout_text(arguments, prediction)
    if not _same_batch(arguments, in_file, prediction):
        flags += ["--global-batch", str(prediction.global_batch)]
    return f"perfmodel predict {shlex.join([*flags, '--layout', layout])}"


def search_command(arguments: argparse.Namespace, prediction: "Prediction") -> str:
    """The command line that ranks other layouts of the same job on the same number of devices."""
    flags = job_flags(arguments)
    in_file = _in_file(arguments)
    if in_file.get("devices") != prediction.devices:
        flags += ["--devices", str(prediction.devices)]
    if in_file.get("global_batch") != prediction.global_batch:
        flags += ["--global-batch", str(prediction.global_batch)]
    return f"perfmodel search {shlex.join(flags)}"


def _in_file(arguments: argparse.Namespace) -> dict[str, int]:
    """Devices and global batch that the job or launch file states, so that a command with the same
    file need not repeat them."""
    launch: Launch | None = getattr(arguments, "launch", None)
    if arguments.job_file is None and launch is None:
        return {}
    batch = arguments.global_batch
    # Commands that predict several clusters count devices per cluster.
    devices = getattr(arguments, "devices", None)
    # A stated layout may have other devices than the file's.
    if devices is None and launch is not None and "layout" not in arguments.given:
        devices = None if launch.layout is None else launch.layout.devices
    values = {"devices": devices, "global_batch": batch[0] if isinstance(batch, list) else batch}
    return {
        name: value
        for name, value in values.items()
        if name not in arguments.given and value is not None
    }


def _same_batch(
    arguments: argparse.Namespace, in_file: dict[str, int], prediction: "Prediction"
) -> bool:
    """Whether the file leads to the prediction's global batch also with the prediction's layout."""
    if in_file.get("global_batch") != prediction.global_batch:
        return False
    launch: Launch | None = getattr(arguments, "launch", None)
    if launch is None or launch.states("global_batch"):
        return True

    # Scripts that state the batch of one replica have another global batch with more replicas.
    if launch.layout is None:
        return False
    names = ("tp", "pp", "cp", "dp", "micro_batch")
    return all(launch.layout.value(name) == prediction.layout.value(name) for name in names)


def _layout_text(arguments: argparse.Namespace, prediction: "Prediction") -> str:
    """The notation of a prediction's layout, with fields for which a launch file differs."""
    launch = getattr(arguments, "launch", None)
    if launch is None:
        return prediction.layout_notation

    # With --from, the file fills in every field that the layout text leaves open. Fields that
    # differ there are written out.
    stated = Layout.stated(prediction.layout_notation)
    for name, value in prediction.layout.values().items():
        if launch.layout is None or launch.layout.value(name) != value:
            stated[name] = value
    return written_values(stated)


def add_layout(
    command: argparse.ArgumentParser, text: str = 'parallel layout, e.g. "tp=8,pp=16,dp=8,zero=1"'
) -> None:
    """The layout of a command that takes one."""
    command.add_argument("--layout", help=text)
    require(command, "layout")


def require_measured(arguments: argparse.Namespace, problem: "StepProblem", layout: Layout) -> None:
    """With --strict, refuse unmeasured layouts, for commands that print no prediction.

    Raises:
        NoDataError: under --strict, part of the layout's step rests on extrapolation.
    """
    if arguments.strict:
        from perfmodel.prediction import explain

        explain(problem, layout, strict=True)


def refuse_strict(arguments: argparse.Namespace, command: str) -> None:
    """Refuse --strict for commands without a single layout.

    Raises:
        PerfModelError: it was given.
    """
    if arguments.strict:
        raise PerfModelError(
            f"{command}: --strict works only for a single layout; leave it out, or use 'perfmodel search --strict'"
        )


def problem_of(arguments: argparse.Namespace, *, quiet: bool = False) -> Problem:
    """The problem described by the flags of `add_job`, with the first global batch. Prints
    assumptions as `problem_on` does."""
    from perfmodel import catalog

    if isinstance(arguments.global_batch, list):
        arguments.global_batch = arguments.global_batch[0]
    return problem_on(arguments, catalog.cluster(arguments.cluster), arguments.devices, quiet=quiet)


def problem_on(
    arguments: argparse.Namespace,
    cluster: Cluster,
    devices: int | None,
    *,
    quiet: bool = False,
) -> Problem:
    """The problem that the flags of `add_job` describe; prints assumptions unless `quiet`."""
    from perfmodel import catalog

    model = catalog.model(arguments.model)
    framework = framework_of(arguments)
    job = framework.job(
        model,
        cluster.device,
        global_batch=arguments.global_batch,
        seq_len=arguments.seq_len,
        dtype=arguments.dtype,
        **stated_job(arguments),
    )

    # `predict` prints its assumptions by itself.
    job = replace(job, assumed=(*job.assumed, *cluster.assumed))
    if not quiet and (arguments.command != "predict" or arguments.json):
        note(job.assumed)
    return Problem(model=model, cluster=cluster, job=job, framework=framework, devices=devices)


def stated_job(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of the job that flags and files state, but batch, sequence length and dtype."""
    # Files first, flags over them.
    stated = job_fields(arguments) | arguments.of_job
    # A command may have some of the flags only.
    flags = vars(arguments)
    attention = flags.get("attention")
    if attention is not None:
        stated["flash_attention"] = attention == "flash"
    stated |= {name: flags[name] for name in ("mode", *_OF_JOB) if flags.get(name) is not None}

    # The two flags set three fields together, so that no value of the file survives.
    freeze = flags.get("freeze")
    lora_rank = flags.get("lora_rank")
    if freeze or lora_rank:
        stated["frozen"] = freeze == "all" or bool(lora_rank)
        stated["frozen_embedding"] = freeze == "embedding"
        stated["adapter_rank"] = lora_rank or 0
    return stated


def _calibration(text: str) -> Path | None:
    return None if text == "default" else Path(text)


def _flag_words(text: str) -> tuple[str, ...]:
    names = tuple(word.strip() for word in text.split(",") if word.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} is empty; give names separated by commas")
    return names


MOST_DIGITS: Final = 18


def whole_numbers(text: str) -> list[int]:
    """Parse whole numbers above 0 that are separated by commas."""
    numbers = []
    for part in text.split(","):
        digits = part.strip()
        # Python reads digits of every script, and any number of them.
        is_number = digits.isascii() and digits.isdecimal() and len(digits) <= MOST_DIGITS
        if not is_number or int(digits) == 0:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a list of whole numbers above 0, like 1,2,4,8"
            )
        numbers.append(int(digits))
    return numbers
