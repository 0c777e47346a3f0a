"""What the shell can say Python can, by the same words, and the reverse."""

import inspect
from pkgutil import resolve_name
from typing import Any

import pytest

import perfmodel as pm
from perfmodel import catalog
from perfmodel.calibration import explain_profile, fit_profile
from perfmodel.catalog.job_files import JOB_WORDS, PROBLEM_WORDS
from perfmodel.cli import parser, parsers
from perfmodel.planning.layouts.search_words import SEARCH_WORDS

COMMANDS = {
    one.prog.removeprefix("perfmodel "): one for one in parsers(parser()) if one.prog != "perfmodel"
}
OF_THE_SHELL = {"help", "json", "verbose", "job_file", "set", "out", "png", "html", "trace"}
"""How results are printed and written (`to_dict`, `to_frame`, the functions of `viz`), and where
words come from."""
WRITTEN_BY = {
    "script": "export_launch",
    "launch_file": "read_launch",
    "export": "export_launch",
    "trace": "viz:write_trace",
    "png": "viz:write_gantt",
}
"""Functions of Python by the flag that asks for the same; before a colon the package below
`perfmodel` that has it."""
OBJECTS = {
    "model",
    "cluster",
    "job",
    "site",
    "progress",
    "space",
    "options",
    "kernels",
    "words",
    "fields",
    "of_job",
}
"""Arguments of Python that are objects, or that flags say one by one."""
RENAMED = {"flash_attention": "attention", "batches": "global_batch"}
"""Words of Python by the flag that says them."""
OF_A_RUN = {
    "mtbf",
    "restart",
    "storage",
    "checkpoint_every",
    "async_checkpoints",
    "stage_checkpoints",
    "pue",
}
"""Fields of `Reliability`, and energy of the site."""
PROBLEM = {
    "model",
    "cluster",
    "devices",
    "framework",
    "global_batch",
    "seq_len",
    "dtype",
    "mode",
    "attention",
    "optimizer",
    "grad_dtype",
    "recompute_modules",
}
OF_WEIGHTS = {"freeze", "lora_rank"}
"""Flags for several fields of a job: `frozen`, `frozen_embedding`, `adapter_rank`."""
OF_A_PROGRAM = {"dim", "input_value", "pad_vocab", "micro_batches"}
"""What a program's source leaves open (`perfmodel.ir.importers.read_program`), and its
pipelines."""
ASKED: dict[str, tuple[Any, dict[str, str], set[str]]] = {
    "predict": (pm.predict, {}, {"timeline"}),
    "whatif": (pm.whatif, {"set": "settings"}, set()),
    "schedules": (
        pm.compare_schedules,
        {"names": "schedules"},
        {"calibration", "strict", "devices"},
    ),
    "explain": (explain_profile, {}, {"problem", "most"}),
    "fit": (fit_profile, {"step_time": "step_s"}, {"problem", "out"}),
}
"""By command: its function, flags that have another name there, and what flags need not say:
`timeline` is a command of its own, a problem is said in words, `most` only shortens."""


@pytest.mark.parametrize(
    "name", sorted({command.partition(" ")[0] for command in COMMANDS} - {"completion"})
)
def test_a_command_alone_is_as_among_all(name: str) -> None:
    """A command line begins with the command that it is of: the others need not be described to
    read it."""
    alone = {
        one.prog.removeprefix("perfmodel "): one
        for one in parsers(parser(name))
        if one.prog != "perfmodel"
    }
    assert set(alone) == {command for command in COMMANDS if command.partition(" ")[0] == name}
    for command, described in alone.items():
        assert described.format_help() == COMMANDS[command].format_help()


def flags(command: str) -> set[str]:
    return {action.dest for action in COMMANDS[command]._actions} - OF_THE_SHELL


def function_named(name: str) -> Any:
    """The function of `perfmodel`, or of the package before the colon."""
    package, _, function = name.rpartition(":")
    return resolve_name(f"perfmodel.{package}:{function}" if package else f"perfmodel:{function}")


def takes(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_a_search_is_said_alike():
    said = {RENAMED.get(word, word) for word in SEARCH_WORDS}
    # what no flag has, --set search.WORD and the file say
    assert said - flags("search") == {"distinct", "every"}
    python = said | PROBLEM | takes(pm.search) | takes(pm.read_launch)
    others = flags("search") - python - OF_A_RUN - OF_WEIGHTS - OF_A_PROGRAM
    assert others == {"launch_file", "export", "script", "pareto"}
    for word in others | set(WRITTEN_BY):
        assert callable(function_named(WRITTEN_BY.get(word, word)))
    assert takes(pm.search) - OBJECTS - PROBLEM - {"set"} <= {"settings", "calibration"}


def test_words_of_a_problem_are_flags_or_keys():
    named = takes(catalog.problem) - {"of_job"}
    assert named - OBJECTS <= set(PROBLEM_WORDS)
    flagged = {RENAMED.get(word, word) for word in PROBLEM_WORDS} & flags("predict")
    assert flagged == PROBLEM - {"model", "cluster"}
    # the others are --set job.WORD
    assert {word for word in PROBLEM_WORDS if RENAMED.get(word, word) not in flags("predict")} <= {
        *JOB_WORDS,
        "job",
    }


@pytest.mark.parametrize("command", ASKED)
def test_arguments_of_a_function_are_flags(command):
    function, renamed, only_python = ASKED[command]
    said = {
        renamed.get(word, word)
        for word in flags(command) | ({"set"} if "set" in renamed else set())
    }
    assert takes(function) - OBJECTS - only_python <= said | {"problem"}


def test_every_question_of_the_shell_has_a_function():
    known = {
        "predict": "predict",
        "search": "search",
        "design upgrade": "planning.design:rank_upgrades",
        "design memory": "planning.design:memory_to_fit",
        "design devices": "planning.design:devices_for",
        "design overtake": "planning.design:overtake",
        "timeline": "viz:write_trace",
        "explain": "calibration:explain_profile",
        "fit": "fit",
        "validate kernels": "validation:validate_kernels",
        "validate cases": "validation:validate_cases",
        "whatif": "whatif",
        "calibrate": "measure:run_plan",
        "schedules": "schedule_facts",
        "import-model": "trace",
        "import": "ingest:read_measurements",
        "plot gantt": "gantt",
        "report": "report",
        "compare-clusters": "compare_clusters",
        "serve": "serve",
        "check": "check_run",
    }
    of_the_shell = {
        "init",
        "samples",
        "run",
        "distribute",
        "simulate",
        "emulate",
        "doctor",
        "hook",
        "completion",
        "catalog",
        "compare",
        "calibrate diff",
    }
    assert all(callable(function_named(name)) for name in known.values())
    pictures = {name for name in COMMANDS if name.startswith("plot")}
    assert set(COMMANDS) == set(known) | of_the_shell | pictures | {"design", "validate"}
