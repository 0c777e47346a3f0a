"""Refuses flags that have no effect with the others, and says which `--set` have none."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from perfmodel.cli._files import flags_of
from perfmodel.errors import PerfModelError


@dataclass(frozen=True, kw_only=True)
class IdleFlags:
    """Flags of some commands that have an effect only under a condition."""

    commands: tuple[str, ...]
    """Commands that the rule applies to; empty for all that have the flags."""
    flags: tuple[str, ...]
    """Flags by their names in the namespace of arguments."""
    act: Callable[[argparse.Namespace], bool]
    """Whether they have an effect in combination with the other arguments."""
    otherwise: str
    """End of the sentence after `has no effect`: where, and what to do instead."""


def _recomputes_selectively(arguments: argparse.Namespace) -> bool:
    """Whether the command's layout, completed by its framework, recomputes parts of layers."""
    from perfmodel import catalog
    from perfmodel.cli._flags import framework_of

    # A command without a single layout searches a space, some of which may recompute selectively.
    if not isinstance(getattr(arguments, "layout", None), str):
        return True
    layout, _ = framework_of(arguments).layout(arguments.layout, catalog.model(arguments.model))
    return layout.recompute == "selective"


def _has_equal_stages(arguments: argparse.Namespace) -> bool:
    return not arguments.model


def _searches(arguments: argparse.Namespace) -> bool:
    """Whether a command that accepts one layout searches for the best instead."""
    return not arguments.layout


_RUN_OF_FAILURES: Final = (
    "mtbf",
    "restart",
    "storage",
    "checkpoint_every",
    "async_checkpoints",
    "stage_checkpoints",
    "pue",
)
IDLE_FLAGS: Final = (
    IdleFlags(
        commands=("predict", "search"),
        flags=_RUN_OF_FAILURES,
        act=lambda arguments: arguments.tokens is not None,
        otherwise="without --tokens; give --tokens N for a whole run",
    ),
    IdleFlags(
        commands=("predict",),
        flags=("price_per_device_hour",),
        act=lambda arguments: arguments.tokens is not None,
        otherwise="without --tokens; give --tokens N for a whole run",
    ),
    IdleFlags(
        commands=(),
        flags=("optimizer", "grad_dtype", "freeze", "lora_rank"),
        act=lambda arguments: arguments.mode != "inference",
        otherwise="with --mode inference; leave it out",
    ),
    IdleFlags(
        commands=(),
        flags=("freeze",),
        act=lambda arguments: not arguments.lora_rank or arguments.freeze == "all",
        otherwise="with --lora-rank, which freezes all other weights; leave one of them out",
    ),
    IdleFlags(
        commands=(),
        flags=("recompute_modules",),
        act=_recomputes_selectively,
        otherwise="without selective recompute; put recompute=selective into the layout",
    ),
    IdleFlags(
        commands=("schedules",),
        flags=(
            "stages",
            "chunks",
            "forward_s",
            "backward_s",
            "transfer_s",
            "micro_batches",
        ),
        act=_has_equal_stages,
        otherwise="with --model, because layout and batch determine it; leave it out",
    ),
    IdleFlags(
        commands=("schedules",),
        flags=("train", "accuracy"),
        act=_has_equal_stages,
        otherwise="with --model, because --train uses its own small model; leave one of them out",
    ),
    IdleFlags(
        commands=("schedules",),
        flags=("png",),
        act=lambda arguments: not arguments.model and arguments.optimise is None,
        otherwise="with --model or --optimise; draw a layout with 'perfmodel timeline --png', or leave --model out",
    ),
    IdleFlags(
        commands=("schedules",),
        flags=("cluster", "framework", "layout", "global_batch", "seq_len", "dtype"),
        act=lambda arguments: bool(arguments.model),
        otherwise="without --model; give the model",
    ),
    IdleFlags(
        commands=("schedules",),
        flags=("out",),
        act=lambda arguments: arguments.optimise is not None or arguments.train,
        otherwise="without --optimise or --train; give one of them, or use --json",
    ),
    IdleFlags(
        commands=("schedules",),
        flags=("steps",),
        act=lambda arguments: arguments.train and arguments.accuracy is None,
        otherwise="without --train, or with --accuracy, which trains for --epochs; leave it out",
    ),
    IdleFlags(
        commands=("schedules",),
        flags=("epochs", "seeds"),
        act=lambda arguments: arguments.accuracy is not None,
        otherwise="without --accuracy; give it, or leave it out",
    ),
    IdleFlags(
        commands=("fit",),
        flags=("family", "seed"),
        act=lambda arguments: bool(arguments.tables),
        otherwise="without TABLEs of measurements; leave it out",
    ),
    IdleFlags(
        commands=("fit",),
        flags=("format",),
        act=lambda arguments: bool(arguments.profile),
        otherwise="without --profile FILE...; leave it out",
    ),
    IdleFlags(
        commands=("emulate",),
        flags=("every", "png"),
        act=lambda arguments: arguments.sweep is not None,
        otherwise="without --sweep; give it, or leave it out",
    ),
    IdleFlags(
        commands=("emulate",),
        flags=("seed",),
        act=lambda arguments: arguments.jitter is not None,
        otherwise="without --jitter; give it, or leave it out",
    ),
    IdleFlags(
        commands=("run",),
        flags=("seed",),
        act=lambda arguments: arguments.inputs is None,
        otherwise="with --inputs; leave one of them out",
    ),
    IdleFlags(
        commands=("search",),
        flags=("dim", "input_value", "pad_vocab", "micro_batches"),
        act=lambda arguments: bool(arguments.program),
        otherwise="without a PROGRAM to search; leave it out",
    ),
    IdleFlags(
        commands=("report",),
        flags=(
            "top",
            "method",
            "fix",
            "schedules",
            "vary",
            "fewer_devices",
            "objective",
            "constraints",
            "min_fit",
            "robust",
            "workers",
            "dask",
            "resume",
        ),
        act=_searches,
        otherwise="with --layout, because nothing is searched; leave one of them out",
    ),
    IdleFlags(
        commands=("report",),
        flags=("format",),
        act=lambda arguments: bool(arguments.profile),
        otherwise="without --profile FILE...; leave it out",
    ),
    IdleFlags(
        commands=("plot",),
        flags=("top",),
        act=lambda arguments: not getattr(arguments, "layouts", None),
        otherwise="with --layouts, which says what to draw; leave one of them out",
    ),
)
"""Rules in the order in which they are tried."""
_SPELLED: Final = {"price_per_device_hour": "price", "constraints": "constraint"}
"""Flags whose names in the namespace differ."""


def refuse_idle_flags(arguments: argparse.Namespace) -> None:
    """Refuse flags that have no effect in combination with the others.

    Raises:
        PerfModelError: naming them, and what to do.
    """
    for rule in IDLE_FLAGS:
        if rule.commands and arguments.command not in rule.commands:
            continue
        idle = [flag for flag in rule.flags if flag in arguments.given and hasattr(arguments, flag)]
        if idle and not rule.act(arguments):
            named = flags_of(_SPELLED.get(flag, flag) for flag in idle)
            verb = "has" if len(idle) == 1 else "have"
            raise PerfModelError(f"{arguments.command}: {named} {verb} no effect {rule.otherwise}")


def idle_changes(arguments: argparse.Namespace) -> list[str]:
    """Sentences about every `--set KEY=VALUE` of the job that a flag overrides, or that the command
    does not read."""
    sentences = []
    for change in getattr(arguments, "job_changes", ()):
        key = change.partition("=")[0].strip()
        section, _, name = key.partition(".")
        if not _reads_section(arguments, section):
            sentences.append(f"--set {change} has no effect on {arguments.command}")
            continue
        flag = _flag_of_key(section, name)
        if flag in arguments.given and hasattr(arguments, flag):
            sentences.append(
                f"--set {change} has no effect with {flags_of([_SPELLED.get(flag, flag)])}"
            )
    return sentences


def _reads_section(arguments: argparse.Namespace, section: str) -> bool:
    """Whether a command reads a section of the job file."""
    match section:
        case "search":
            return hasattr(arguments, "fix")
        case "serving":
            return bool(arguments.command == "serve")
        case "layout":
            return "layout" in getattr(arguments, "needed", ()) or arguments.takes_layout
    return True


def _flag_of_key(section: str, name: str) -> str:
    """The flag that is equivalent to a key of the job file, by its name among arguments."""
    match section:
        case "job":
            return name
        case "search":
            return "global_batch" if name == "batches" else name
        case "serving":
            return name.removesuffix("_s")
    return section
