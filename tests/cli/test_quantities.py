"""Quantities, element types and names on the command line, as people write them; flags that would
have no effect."""

import json
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import pytest
from command_line import run
from hypothesis import given, settings
from hypothesis import strategies as st

import perfmodel as pm
from perfmodel.cli import IDLE_FLAGS, main, parser, parsers
from perfmodel.planning.what_if import parse_setting
from perfmodel.units import DTYPE_ALIASES, DTYPE_BYTES, dtype_name

STEP = ("--model", "gpt3-125m", "--cluster", "dgx-a100", "--global-batch", "16")
LAID_OUT = (*STEP, "--layout", "dp=8")


@pytest.mark.parametrize(
    ("text", "how", "value"),
    [
        ("inter_node_bandwidth=200Gbit/s", "to", 25e9),
        ("inter_node_latency=5us", "to", 5e-6),
        ("all_reduce_delay_s=2ms", "to", 2e-3),
        ("memory_bytes=80GiB", "to", 80 * 2**30),
        ("inter_node_bandwidth=2x", "times", 2.0),
        ("host_bandwidth=64GB/s", "to", 64e9),
    ],
)
def test_settings_of_what_if_carry_units(text: str, how: str, value: float) -> None:
    setting = parse_setting(text)
    assert (setting.how, setting.value) == (how, pytest.approx(value))


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_every_element_type_has_its_usual_names(name: str) -> None:
    assert DTYPE_ALIASES[name]
    for alias in (name, *DTYPE_ALIASES[name].split()):
        for spelled in (alias, alias.upper(), f"torch.{alias}"):
            assert dtype_name(spelled) == name
    assert len({alias for names in DTYPE_ALIASES.values() for alias in names.split()}) == sum(
        len(names.split()) for names in DTYPE_ALIASES.values()
    )
    assert dtype_name("posit8") == "posit8"


@pytest.mark.parametrize(
    "flags",
    [
        ("--dtype", "bfloat16"),
        ("--dtype", "torch.bfloat16"),
        ("--seq-len", "2k"),
        ("--tokens", "1T"),
    ],
)
def test_the_command_line_takes_them(
    flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    plain = {"bfloat16": "bf16", "torch.bfloat16": "bf16", "2k": "2048", "1T": "1e12"}

    def report(value: str) -> dict[str, Any]:
        assert main(["predict", *LAID_OUT, flags[0], value, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert report(flags[1]) == report(plain[flags[1]])


def test_python_takes_names_of_element_types() -> None:
    job = pm.Job(global_batch=8, seq_len=1024, dtype="bfloat16", grad_dtype="float32")
    assert (job.dtype, job.gradients.grad_dtype) == ("bf16", "fp32")


IDLE = {
    "mtbf": ("predict", *LAID_OUT, "--mtbf", "1000"),
    "pue of a search": ("search", *STEP, "--devices", "8", "--pue", "1.2"),
    "price": ("predict", *LAID_OUT, "--price", "2"),
    "optimizer": ("predict", *LAID_OUT, "--mode", "inference", "--optimizer", "lion"),
    "lora in inference": ("predict", *LAID_OUT, "--mode", "inference", "--lora-rank", "8"),
    "freeze": ("predict", *LAID_OUT, "--freeze", "embedding", "--lora-rank", "8"),
    "recompute modules": ("predict", *LAID_OUT, "--recompute-modules", "mlp"),
    "recompute modules of a trace": (
        "timeline",
        *LAID_OUT,
        "--recompute-modules",
        "mlp",
        "--out",
        "x.json",
    ),
    "picture of predicted schedules": (
        "schedules",
        *STEP,
        "--layout",
        "pp=4,dp=2",
        "--png",
        "x.png",
    ),
    "stages of a model": ("schedules", *STEP, "--layout", "pp=4,dp=2", "--stages", "4"),
    "micro-batches of a model": (
        "schedules",
        *STEP,
        "--layout",
        "pp=4,dp=2",
        "--micro-batches",
        "4",
    ),
    "training of a model": ("schedules", *STEP, "--layout", "pp=4,dp=2", "--train"),
    "cluster of equal stages": ("schedules", "--cluster", "dgx-a100"),
    "file of equal stages": ("schedules", "--out", "x.txt"),
    "steps": ("schedules", "--steps", "4"),
    "epochs": ("schedules", "--train", "--epochs", "2"),
    "family": ("fit", "--runs", "runs.csv", "--family", "gemm", "--out", "fitted"),
    "format": ("fit", "kernels.csv", "--format", "kineto", "--out", "fitted"),
    "sizes of a program": ("search", *STEP, "--devices", "8", "--micro-batches", "4"),
    "space of one layout": ("report", *LAID_OUT, "--fix", "tp=2", "--html", "x.html"),
    "constraint of one layout": (
        "report",
        *LAID_OUT,
        "--constraint",
        "mfu>0.5",
        "--html",
        "x.html",
    ),
    "format of no profile": ("report", *LAID_OUT, "--format", "kineto", "--html", "x.html"),
    "top of named layouts": (
        "plot",
        "breakdown",
        *STEP,
        "--layouts",
        "dp=8",
        "--top",
        "4",
        "--out",
        "x.png",
    ),
    "recompute modules of a picture": (
        "plot",
        "gantt",
        *LAID_OUT,
        "--recompute-modules",
        "mlp",
        "--out",
        "x.png",
    ),
    "recompute modules of a size": ("design", "memory", *LAID_OUT, "--recompute-modules", "mlp"),
}


@pytest.mark.parametrize("name", IDLE)
def test_flags_without_effect_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(IDLE[name]) == 2
    shown = capsys.readouterr().err
    assert "no effect" in shown
    assert len(shown.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "command",
    [
        ("predict", *STEP, "--layout", "dp=8,recompute=selective", "--recompute-modules", "mlp"),
        ("predict", *LAID_OUT, "--tokens", "1T", "--mtbf", "1000", "--price", "2"),
        ("predict", *LAID_OUT, "--freeze", "all", "--lora-rank", "8"),
        ("schedules", "1f1b", "--stages", "4", "--micro-batches", "8", "--chunks", "2"),
    ],
)
def test_flags_with_effect_are_taken(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 0, capsys.readouterr().err


IDLE_CHANGES = {
    "layout.tp=2": ("predict", *LAID_OUT),
    "job.seq_len=1024": ("predict", *LAID_OUT, "--seq-len", "512"),
    "job.global_batch=32": ("predict", *LAID_OUT),
    "model=gpt3-1.3b": ("predict", *LAID_OUT),
    "search.top=2": ("predict", *LAID_OUT),
    "serving.batch=2": ("predict", *LAID_OUT),
    "layout.dp=4": ("search", *STEP, "--devices", "2", "--fix", "tp=1,pp=1"),
    "search.top=3": ("search", *STEP, "--devices", "2", "--fix", "tp=1,pp=1", "--top", "1"),
    "search.batches=[32]": ("search", *STEP, "--devices", "2", "--fix", "tp=1,pp=1"),
}


@pytest.mark.parametrize("change", IDLE_CHANGES)
def test_keys_of_a_job_without_effect_are_said(
    change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = IDLE_CHANGES[change]
    printed = run(capsys, *command, "--set", change, "--json")
    assert printed.status == 0, printed.err
    assert printed.err.startswith(f"perfmodel: --set {change} has no effect ")
    plain = run(capsys, *command, "--json")
    assert _without_time(printed.out) == _without_time(plain.out)


@pytest.mark.parametrize(
    "change",
    [
        "job.seq_len=1024",
        "job.optimizer=sgd",
        "layout.micro_batch=2",
        "devices=16",
        "framework=fsdp",
    ],
)
def test_keys_of_a_job_with_effect_change_the_answer(
    change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = () if change.startswith("layout") else ("--layout", "tp=1,pp=1")
    printed = run(capsys, "predict", *STEP, *layout, "--set", change, "--json")
    assert "has no effect" not in printed.err
    assert printed.out != run(capsys, "predict", *STEP, "--layout", "tp=1,pp=1", "--json").out


def _without_time(text: str) -> dict[str, Any]:
    return json.loads(text) | {"seconds": 0}


def test_rules_name_flags_that_there_are() -> None:
    known = set()
    for one in parsers(parser()):
        for word in one.prog.split():
            known |= {(word, action.dest) for action in one._actions}
    for rule in IDLE_FLAGS:
        for flag in rule.flags:
            for command in rule.commands or ("predict",):
                assert (command, flag) in known


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("predit", "--model", "x"), "did you mean 'predict'?"),
        (("serch",), "did you mean 'search'?"),
        (("catalog", "modls"), "did you mean 'models'?"),
        (("validate", "kernls", "x.csv"), "did you mean 'kernels'?"),
        (("predict", *LAID_OUT, "--globl-batch", "8"), r"did you mean --global-batch?"),
        (("predict", *LAID_OUT, "--mode", "trian"), "did you mean 'train'?"),
        (("schedules", "--schedules", "chimera"), "(--schedules is a flag of perfmodel search, "),
        (("serve", "--storage", "5"), "(--storage is a flag of perfmodel predict, "),
        (
            ("design", "upgrade", "--layuot", "dp=8"),
            "unrecognized arguments: --layuot; see 'perfmodel design upgrade",
        ),
    ],
)
def test_words_that_are_none_get_a_hint(
    words: tuple[str, ...], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run(capsys, *words)
    assert printed.status == 2
    assert hint in printed.err


FLAGS_OF = {
    command.prog: {flag for action in command._actions for flag in action.option_strings}
    for command in parsers(parser())
}


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(sorted(FLAGS_OF.keys() - {"perfmodel"})),
    st.sampled_from(sorted(set().union(*FLAGS_OF.values()))),
)
def test_a_flag_of_another_command_is_said_to_be_one(command: str, flag: str) -> None:
    """A hint never names what was refused; what a command takes as an abbreviation is no flag of
    another."""
    if any(name.startswith(flag) for name in FLAGS_OF[command]):
        return
    with redirect_stderr(StringIO()) as err, pytest.raises(SystemExit):
        parser().parse_args([*command.split()[1:], f"{flag}=1"])
    said = err.getvalue()
    assert f"did you mean {flag}?" not in said
    assert f"({flag} is a flag of perfmodel " in said or "required" in said or "expected" in said


def test_the_catalog_alone_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["catalog"]) == 0
    shown = capsys.readouterr().out
    assert main(["catalog", "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)["kinds"]
    for kind in ("models", "clusters", "devices", "frameworks", "schedules", "columns"):
        assert f"perfmodel catalog {kind}" in shown
        assert counts[kind] > 5
