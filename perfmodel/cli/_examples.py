"""The end of every command's `--help`: two examples, and the keys of layouts, schedules or tables
that it takes."""

import argparse
import textwrap
from collections.abc import Iterable
from typing import Final

from perfmodel.spec import Layout, key_fields
from perfmodel.spec.notation import SCHEDULES

_OF_A_JOB: Final = "--model llama3-8b --cluster dgx-h100 --global-batch 64"
_TWO: Final = {
    "": ("init job.toml", "predict job.toml"),
    "init": ("init", "init mine/job.toml --force"),
    "predict": (
        "predict job.toml --set layout.tp=8",
        f"predict {_OF_A_JOB} --layout tp=4,pp=2,dp=8,zero=1",
    ),
    "search": (
        "search job.toml --top 5",
        f'search {_OF_A_JOB} --devices 64 --constraint "memory_gib<70"',
    ),
    "report": (
        "report job.toml --html report.html",
        "report --tables kernels.csv --calibration mine --html mine.html",
    ),
    "compare-clusters": (
        "compare-clusters job.toml --clusters h100:64,b200:32 --tokens 1e12",
        "compare-clusters llama3-8b --clusters h100:64,b200:32 --global-batch 256 --by time --tokens 1e12",
    ),
    "check": (
        "check --from train.sh --log train.log --cluster dgx-h100",
        "check job.toml --log train.log --json",
    ),
    "hook": ("hook megatron", "hook hf-trainer"),
    "serve": (
        "serve job.toml --set serving.batch=32",
        "serve --model llama3-8b --cluster dgx-h100 --devices 8 --prompt-tokens 1000 --output-tokens 200 --sweep",
    ),
    "distribute": (
        "distribute gpt2-345m --pad-vocab 8 --global-batch 8 --layout dp=2,tp=2,micro_batches=2 --out gpt.ir",
        "distribute model.onnx --pad-vocab 8 --layout 1/8/1/1 --out model.ir",
    ),
    "simulate": (
        "simulate gpt.ir --cluster dgx-a100",
        "simulate model.ir --cluster dgx-h100 --json",
    ),
    "design": ("design memory job.toml", "design upgrade job.toml --share 0.2"),
    "design upgrade": (
        "design upgrade job.toml",
        "design upgrade job.toml --share 0.2 --fix tp=4",
    ),
    "design memory": (
        "design memory job.toml",
        "design memory job.toml --set layout.recompute=selective",
    ),
    "design devices": (
        "design devices job.toml --below 4",
        "design devices job.toml --below 10 --schedules 1f1b",
    ),
    "design overtake": (
        "design overtake job.toml --against tp=8,dp=8,zero=1",
        "design overtake job.toml --against tp=2,pp=4,dp=8,zero=1 --parameter intra_node_bandwidth",
    ),
    "timeline": (
        "timeline job.toml --out step.json.gz",
        "timeline job.toml --html step.html --png step.png",
    ),
    "explain": (
        "explain job.toml --profile rank0.json",
        "explain job.toml --profile rank*.json --json",
    ),
    "fit": ("fit kernels.csv collectives.csv --out mine", "fit --runs runs.csv --out mine"),
    "validate": ("validate kernels kernels.csv", "validate cases runs.csv"),
    "validate kernels": (
        "validate kernels kernels.csv",
        "validate kernels kernels.csv --calibration mine",
    ),
    "validate cases": (
        "validate cases runs.csv --out predicted.csv",
        "validate cases runs.csv --explain one",
    ),
    "whatif": (
        "whatif job.toml --set inter_node_bandwidth=2x",
        "whatif job.toml --sweep inter_node_bandwidth=1x:4x:7 --png curve.png",
    ),
    "plot": (
        "plot gantt job.toml --out step.png",
        "plot pareto job.toml --out front.pdf --width column",
    ),
    "plot gantt": (
        "plot gantt job.toml --out step.png",
        "plot gantt job.toml --set layout.pp=4 --out step.svg",
    ),
    "plot memory": (
        "plot memory job.toml --out memory.png",
        "plot memory job.toml --out memory.pdf --width page",
    ),
    "plot links": (
        "plot links job.toml --out links.png",
        "plot links job.toml --out links.pdf --width page",
    ),
    "plot breakdown": (
        "plot breakdown job.toml --out parts.png",
        'plot breakdown job.toml --layouts "tp=4,pp=2,dp=8;tp=8,dp=8" --out parts.png',
    ),
    "plot pareto": (
        "plot pareto job.toml --out front.png",
        "plot pareto job.toml --price 2.5 --out front.png",
    ),
    "plot whatif": (
        "plot whatif job.toml --sweep compute_rate=1x:4x:7 --out curve.png",
        "plot whatif job.toml --set memory_bandwidth=2x --sweep compute_rate=1x:4x:7 --out curve.png",
    ),
    "plot bubble": (
        "plot bubble 1f1b zb-h1 --out bubble.png",
        "plot bubble gpipe --stages 4 --out bubble.png",
    ),
    "plot schedules": (
        "plot schedules 1f1b zb-h1 --out orders.png",
        "plot schedules chimera:2 --out orders.png",
    ),
    "plot roofline": (
        "plot roofline kernels.csv --device h100 --out roofs.png",
        "plot roofline kernels.csv --device h100 --out roofs.pdf --width column",
    ),
    "plot parity": (
        "plot parity kernels.csv --out parity.png",
        "plot parity runs.csv --out parity.png",
    ),
    "plot compare": (
        "plot compare --predicted step.json.gz --measured measured.json.gz --out both.png",
        "plot compare --predicted step.json.gz --measured rank0.json rank1.json --out both.png",
    ),
    "calibrate": (
        "calibrate --plan plan.toml --out tables --dry-run",
        f'calibrate {_OF_A_JOB} --layouts "tp=8,dp=1;tp=4,dp=2" --out tables',
        f"calibrate --for-decision {_OF_A_JOB} --devices 64",
    ),
    "calibrate diff": (
        "calibrate diff tables other",
        "calibrate diff a/kernels.csv b/kernels.csv --json",
    ),
    "schedules": (
        "schedules 1f1b interleaved zb-h1 --stages 8 --micro-batches 32",
        "schedules 1f1b zb-h1 job.toml",
    ),
    "run": (
        "run step.ir --ranks 4",
        "run step.ir --ranks 4 --cluster dgx-h100 --out measured.json.gz",
    ),
    "import-model": (
        "import-model model.py:step --target dgx-h100",
        "import-model model.onnx --dim batch=8 --target h100",
    ),
    "import": (
        "import nccl-tests nccl.txt --cluster dgx-h100 --out collectives.csv",
        "import kineto rank*.json --cluster dgx-h100 --out kernels.csv --timeline measured.json.gz",
    ),
    "compare": (
        "compare --predicted step.json.gz --measured measured.json.gz",
        "compare --predicted step.json.gz --measured rank0.json rank1.json --png both.png",
    ),
    "emulate": (
        "emulate --world-size 64 --cluster dgx-h100 -- python train.py",
        "emulate --world-size 64 --cluster dgx-h100 --delay all_reduce=2ms -- python train.py",
    ),
    "catalog": ("catalog models llama", "catalog layout"),
    "samples": ("samples try", "samples try --force"),
    "doctor": ("doctor", "doctor --clear-cache"),
    "completion": ("completion bash", "completion zsh"),
}
"""Examples by the words of a command."""
_TABLES: Final = ("fit", "validate", "plot roofline", "plot parity")
"""Commands that read tables, with all of their sub-commands."""


_OTHER_LAYOUTS: Final = ("distribute", "simulate", "serve")
"""Commands whose layouts do not have the keys of a training layout."""


def examples(command: str) -> tuple[str, ...]:
    """Example command lines of a command; empty if there are none."""
    return tuple(f"perfmodel {line}" for line in _TWO.get(command, ()))


def epilog(command: str, parser: argparse.ArgumentParser) -> str:
    """The end of the help of a command."""
    # Help ends with the keys of whatever the command's flags take.
    flags: set[str] = set()
    for action in parser._actions:
        flags |= set(action.option_strings)
    parts = ["\n".join(["examples:", *(f"  {line}" for line in examples(command))])]
    # Layouts of programs and servers have fewer keys, which the flag's own help lists.
    takes_other_layouts = command in _OTHER_LAYOUTS
    if flags & {"--layout", "--layouts", "--fix"} and not takes_other_layouts:
        parts.append(_listed("layout keys", "layout", key_fields(Layout)))
    if flags & {"--layout", "--schedules", "--stages"} and not takes_other_layouts:
        parts.append(_listed("schedules", "schedules", SCHEDULES))
    if command.startswith(_TABLES):
        from perfmodel.cli._vocabulary import vocabulary

        needed: dict[str, list[str]] = {}
        for column in vocabulary("columns"):
            if column["needed"] == "yes":
                needed.setdefault(column["table"], []).append(column["name"])
        for name, columns in needed.items():
            parts.append(_listed(f"columns that a table of {name} needs", "columns", columns))
    return "\n\n".join(parts)


def _listed(noun: str, kind: str, names: Iterable[str]) -> str:
    text = f"{noun} ('perfmodel catalog {kind}' explains them): {', '.join(names)}"
    return textwrap.fill(text, 80, subsequent_indent="  ", break_on_hyphens=False)
