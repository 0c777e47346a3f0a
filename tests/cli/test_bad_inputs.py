"""Whatever a user gets wrong ends in one line that says what it is and what to do, and exit status
2; or in an answer.

Every flag of every command with values that it cannot have, and every file that commands read with
something wrong in it. `PERFMODEL_EXPLORE=1` tries all of them, and other mutations of the files
every time.
"""

import json
import math
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import VALUES, mutations, toml_text

from perfmodel.cli import main, parser, parsers, samples
from perfmodel.cost.learn import weights_folder
from perfmodel.ingest import read_trace
from perfmodel.ingest.profiles.chrome import write_measured_trace
from perfmodel.ir import to_text
from perfmodel.ir.distribute import Degrees, distribute
from perfmodel.ir.models import mlp, training_step

EXPLORE = "PERFMODEL_EXPLORE" in os.environ
STEP = "--model gpt3-125m --cluster dgx-a100 --global-batch 8 --layout tp=2,dp=4,zero=1"
BASES = {
    "predict": f"predict {STEP} --devices 8",
    "search": "search --model gpt3-125m --cluster dgx-a100 --global-batch 8 --devices 8 --fix tp=2,recompute=none",
    "whatif": f"whatif {STEP} --sweep compute_rate=1x:2x:2",
    "timeline": f"timeline {STEP} --out out.json",
    "design memory": f"design memory {STEP}",
    "design devices": "design devices --model gpt3-125m --cluster dgx-a100 --global-batch 8 --devices 4 --below 9",
    "design overtake": f"design overtake {STEP} --against dp=8",
    "plot gantt": f"plot gantt {STEP} --out out.png",
    "plot bubble": "plot bubble 1f1b --out out.png",
    "plot roofline": "plot roofline kernels.csv --device h100 --out out.png",
    "plot parity": "plot parity kernels.csv --out out.png",
    "schedules": "schedules 1f1b --stages 2 --micro-batches 4",
    "validate kernels": "validate kernels kernels.csv",
    "validate cases": "validate cases runs.csv",
    "fit": "fit absent.csv --out fitted",
    "import": "import nccl-tests nccl.txt --cluster dgx-h100 --out measured.csv",
    "calibrate": f"calibrate {STEP.replace('--layout', '--layouts')} --out tables --dry-run",
    "compare": "compare --predicted step.json --measured step.json",
    "explain": f"explain {STEP} --profile profile.json",
    "run": "run job.toml --ranks 2",
    "import-model": "import-model absent.py:step --target dgx-h100",
    "catalog": "catalog models llama",
    "doctor": "doctor",
    "hook": "hook megatron",
    "init": "init new.toml",
    "samples": "samples folder",
    "report": "report --tables collectives.csv --html out.html",
    "serve": "serve --model gpt3-125m --cluster dgx-a100 --layout tp=2 --prompt-tokens 64 --output-tokens 8 --batch 4",
    "compare-clusters": "compare-clusters gpt3-125m --clusters a100:4 --global-batch 8 --fix tp=2,recompute=none",
    "distribute": "distribute step.ir --out out.ir",
    "simulate": "simulate step.ir --cluster dgx-a100",
    "emulate": "emulate --world-size 2 --cluster dgx-a100 {} step.ir",
}
"""A command line of each kind that is quick; a flag goes to its end, or where {} stands."""
NUMBERS = (
    "x",
    "",
    "nan",
    "inf",
    "-1",
    "0",
    "1e14",
    "1.5",
    "9" * 30,
    "-inf",
    "1e400",
    "1e-300",
    "½",
    "0x10",
    "1_0",
)
WORDS = (
    "",
    " ",
    ",",
    "=",
    "x" * 300,
    "ключ=значение",
    "a=b=c",
    "tp=0",
    "nan",
    "{}",
    "%s%d",
    "--",
    "1;2",
    "\t",
)
FILES = (
    "absent.csv",
    "folder.d",
    "garbage.bin",
    "empty.csv",
    "x/" * 60 + "deep.toml",
    "job.toml/inside",
)


def wrong_flags(command: str) -> list[tuple[str, ...]]:
    """The command line with every flag of the command, with every value of the flag's kind."""
    of_command = next(one for one in parsers(parser()) if one.prog == f"perfmodel {command}")
    words = ["--no-such-flag", "--json=yes", "more.csv", ""]
    for action in of_command._actions:
        if not action.option_strings or action.nargs == 0:
            continue
        kind = (
            FILES
            if action.type is Path
            else NUMBERS
            if action.type in (int, float)
            else (*WORDS, *FILES[:3])
        )
        words += [f"{action.option_strings[-1]}={value}" for value in kind]
    before, _, after = BASES[command].partition("{}")
    return [(*shlex.split(before), word, *shlex.split(after)) for word in words]


def judged(status: int, out: str, err: str) -> str:
    """What is wrong with how a command ended; nothing if all is well."""
    if "Traceback" in err or "object at 0x" in err + out:
        return "it shows its inside"
    if status == 2:
        lines = [
            line
            for line in err.splitlines()
            if not re.match(r"perfmodel: (\S+: )?(assumed|these settings were not read)", line)
        ]
        if len(lines) != 1 or not lines[0].startswith("perfmodel") or len(lines[0]) > 1600:
            return f"not one line: {err[:400]!r}"
        return f"it printed besides: {out[:100]!r}" if out else ""
    if status != 0:
        return f"exit status {status}"
    return nonsense(out)


def nonsense(out: str) -> str:
    """Figures that cannot be in what a command printed."""
    try:
        report = json.loads(out)
    except ValueError:
        return next(
            (f"it prints {word}" for word in re.findall(r"(?<![\w.-])-?(?:nan|inf)(?![\w-])", out)),
            "",
        )
    return next(
        (f"{name} is {value}" for name, value in figures(report) if not sane(name, value)), ""
    )


def figures(report: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(report, dict):
        for key, value in report.items():
            yield from figures(value, key)
    elif isinstance(report, list):
        for value in report:
            yield from figures(value, name)
    else:
        yield name, report


def sane(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return True
    if not math.isfinite(value):
        return False
    return value > 0 if name == "step_time_s" else value >= 0 if name in ("mfu", "peak") else True


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in samples().items():
        Path(name).write_text(text)
    Path("folder.d").mkdir()
    Path("garbage.bin").write_bytes(bytes(range(256)) * 4)
    Path("empty.csv").touch()
    Path("step.json").write_text(step_trace())
    Path("cal").mkdir()
    for name in ("step.ir", "prices.csv", "plan.toml", "cal/optimizer.safetensors"):
        Path(name).write_bytes(SOUND[name])
    return tmp_path


@cache
def step_trace() -> str:
    """The sample of a profile as a timeline of this package's own."""
    with tempfile.TemporaryDirectory() as folder:
        profile, own = Path(folder, "profile.json"), Path(folder, "step.json")
        profile.write_text(samples()["profile.json"])
        write_measured_trace(read_trace("kineto", [profile]), own, "kineto")
        return own.read_text()


@cache
def step_program() -> str:
    """A small program over two devices in its text form."""
    return to_text(distribute(training_step(mlp(4, (8, 8, 8))), Degrees.parse("tp=2")))


CHOSEN = 9
"""Of the wrong flags of a command, as many are tried."""
QUICK_JOB = """\
model = "gpt3-125m"
cluster = "dgx-a100"
devices = 8
[job]
global_batch = 8
[layout]
tp = 2
dp = 4
zero = 1
[search]
top = 1
fix = "tp=2,recompute=none,zero=1"
constraints = ["memory_gib<70"]
"""
READ_BY = {
    "job.toml": "predict job.toml --json",
    "cluster.toml": "predict job.toml --cluster cluster.toml --json",
    "model.toml": "predict job.toml --model model.toml --json",
    "train.sh": "predict --from train.sh --cluster dgx-h100 --json",
    "kernels.csv": "validate kernels kernels.csv --json",
    "collectives.csv": "validate kernels collectives.csv --json",
    "runs.csv": "validate cases runs.csv --json",
    "nccl.txt": "import nccl-tests nccl.txt --cluster dgx-h100 --out measured.csv --json",
    "profile.json": "import kineto profile.json --kind compute --out profiled.csv --json",
    "step.json": "compare --predicted step.json --measured step.json --json",
    "step.ir": "simulate step.ir --cluster dgx-a100 --json",
    "prices.csv": "emulate --world-size 2 --cluster dgx-a100 --prices prices.csv --json step.ir",
    "plan.toml": "calibrate --plan plan.toml --dry-run --json",
    "cal/optimizer.safetensors": "report --calibration cal --json",
}
"""A command per file."""
CELLS = (
    "",
    "nan",
    "inf",
    "-1",
    "0",
    "1e300",
    "text",
    "-0.0",
    "1,5",
    '"',
    "9" * 40,
    "2024-01-01",
    "\0",
    "😀",
    "True",
)


@pytest.mark.parametrize("base", BASES)
def test_a_wrong_flag_is_named(base: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = wrong_flags(base)
    chosen = cases if EXPLORE else random.Random(base).sample(cases, min(CHOSEN, len(cases)))
    found = {argv: judged(*run(capsys, *argv)) for argv in chosen}
    assert {argv: wrong for argv, wrong in found.items() if wrong} == {}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("base", BASES)
def test_output_that_cannot_be_written_is_said_in_one_line(
    base: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--json"], [], ["--help"]):
        before, _, after = BASES[base].partition("{}")
        with open("/dev/full", "w") as full, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", full)
            status, _, err = run(capsys, *shlex.split(before), *words, *shlex.split(after))
        said = [
            line
            for line in err.splitlines()
            if "standard output cannot be written: No space left" in line
        ]
        # a command that fails by itself, as here for want of a file, has nothing to print
        assert status == 2, words
        assert "Traceback" not in err
        assert len(said) == 1 or judged(status, "", err) == "", err


def test_a_closed_output_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["catalog", "models"]) == 2
    assert "standard output is closed" in capsys.readouterr().err


def cut(text: bytes, at: float, cell: str) -> bytes:
    return text[: int(at * len(text))]


def without_a_line(text: bytes, at: float, cell: str) -> bytes:
    lines = text.splitlines(keepends=True)
    return b"".join(line for i, line in enumerate(lines) if i != int(at * len(lines)))


def twice_a_line(text: bytes, at: float, cell: str) -> bytes:
    lines = text.splitlines(keepends=True)
    i = int(at * len(lines))
    return b"".join([*lines[: i + 1], *lines[i:]])


def with_garbage(text: bytes, at: float, cell: str) -> bytes:
    i = int(at * len(text))
    return text[:i] + bytes(range(120, 256)) + text[i:]


def another_word(text: bytes, at: float, cell: str) -> bytes:
    words = re.split(rb"([\s,=\"\[\]{}:|]+)", text)
    places = [i for i in range(0, len(words), 2) if words[i]]
    words[places[int(at * len(places))]] = cell.encode()
    return b"".join(words)


def swapped_columns(text: bytes, at: float, cell: str) -> bytes:
    rows = [line.split(b",") for line in text.splitlines()]
    if not rows or len(rows[0]) < 2:
        return text[::-1]
    i = int(at * (len(rows[0]) - 1))
    for row in rows[1:]:
        if len(row) > i + 1:
            row[i], row[i + 1] = row[i + 1], row[i]
    return b"\n".join(b",".join(row) for row in rows) + b"\n"


def another_unit(text: bytes, at: float, cell: str) -> bytes:
    return (
        text.replace(b"time_us", b"time_ms")
        .replace(b"_time_s", b"_time_ms")
        .replace(b"(us)", b"(ms)")
    )


def in_another_coding(text: bytes, at: float, cell: str) -> bytes:
    coding = ("utf-16", "utf-8-sig", "utf-32", "cp037")[int(4 * at)]
    return text.decode("utf-8", "replace").encode(coding, "replace")


def with_other_separators(text: bytes, at: float, cell: str) -> bytes:
    return text.replace(b",", b";" if at < 0.5 else b"\t").replace(b"\n", b"\r\n")


MUTATIONS = (
    cut,
    without_a_line,
    twice_a_line,
    with_garbage,
    another_word,
    another_word,
    another_word,
    swapped_columns,
    another_unit,
    in_another_coding,
    with_other_separators,
)
PRICES = (
    "collective,ranks,bytes,time_s,core_s\nall_reduce,2,4,1e-5,1e-6\nall_reduce,2,4096,2e-5,1e-6\n"
)
PLAN = """\
device = "h100"
[rule]
target = 0.05
[[kernels]]
family = "gemm"
op = "linear"
dtype = "bf16"
"m,n,k" = [[64, 64, 64], [128, 64, 64]]
[[collectives]]
collective = "all_reduce"
num_ranks = 2
bytes = [1024, 4096]
"""
SOUND = {name: text.encode() for name, text in samples().items()} | {
    "job.toml": QUICK_JOB.encode(),
    "step.json": step_trace().encode(),
    "step.ir": step_program().encode(),
    "prices.csv": PRICES.encode(),
    "plan.toml": PLAN.encode(),
    "cal/optimizer.safetensors": (weights_folder(None) / "optimizer.safetensors").read_bytes(),
}


@settings(max_examples=1500 if EXPLORE else 90, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(sorted(READ_BY)),
    st.sampled_from(MUTATIONS),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(CELLS),
)
def test_a_damaged_file_is_named(here, capsys, name, mutation, at, cell) -> None:
    Path("job.toml").write_text(QUICK_JOB)
    Path(name).write_bytes(mutation(SOUND[name], at, cell))
    try:
        assert judged(*run(capsys, *shlex.split(READ_BY[name]))) == ""
    finally:
        Path(name).write_bytes(SOUND[name])


PARSED = {
    name: tomllib.loads(SOUND[name].decode())
    for name in ("job.toml", "cluster.toml", "model.toml", "plan.toml")
}
VALUES_OF_FILES = [
    (name, words, changed)
    for name, data in PARSED.items()
    for words, changed in mutations(data, (*VALUES, -(10**30), "a" * 300, [[1]], {"": 0}))
]


@settings(
    max_examples=len(VALUES_OF_FILES) if EXPLORE else 40, suppress_health_check=list(HealthCheck)
)
@given(st.sampled_from(VALUES_OF_FILES))
def test_a_wrong_value_of_a_file_is_named(here, capsys, case) -> None:
    name, words, changed = case
    Path("job.toml").write_text(QUICK_JOB)
    Path(name).write_text(toml_text(changed))
    command = "search job.toml --json" if words.startswith("search") else READ_BY[name]
    try:
        assert judged(*run(capsys, *shlex.split(command))) == "", words
    finally:
        Path(name).write_bytes(SOUND[name])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["predict", "job.toml", "--seq-len", "1e14"], "seq-len"),
        (["predict", "job.toml", "--no-such"], "--no-such"),
        (["catalog", "layouts"], "layout"),
    ],
)
def test_the_program_itself_says_it_too(here: Path, argv: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "perfmodel", *argv], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert judged(done.returncode, done.stdout, done.stderr) == ""
    assert said in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("fit", "--runs", "FOLDER", "--out", "x"),
        ("validate", "cases", "FOLDER"),
        ("validate", "kernels", "FOLDER"),
        ("predict", "--model", "FOLDER", "--cluster", "dgx-h100", "--layout", "tp=8"),
        ("fit", "FOLDER", "--out", "x"),
    ],
)
def test_a_folder_is_not_called_missing(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    arguments = [str(folder) if word == "FOLDER" else word for word in words]
    if "--model" in words:
        arguments += ["--global-batch", "8"]
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert f"{folder}: is a folder" in err
    assert "no such" not in err


def test_an_empty_json_is_called_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("\n")
    words = ("--model", tmp_path / "config.json", "--cluster", "dgx-h100", "--global-batch", "8")
    status, _, err = run(capsys, "predict", *words, "--layout", "tp=8")
    assert status == 2
    assert "config.json: not valid JSON: it is empty" in err


def test_a_file_that_is_no_text_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").write_bytes(b"\xff\xfe\x00bad")
    status, _, err = run(capsys, "predict", tmp_path / "job.toml")
    assert status == 2
    assert "job.toml: not a text file in UTF-8; give a TOML file" in err
    assert "codec" not in err


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("catalog", "models", "abacus"), "'perfmodel catalog models' lists all"),
        (
            ("search", "--model", "gpt2", "--cluster", "dgx-a100", "--devices", "8"),
            "such as time,memory; got time",
        ),
    ],
)
def test_errors_of_lists_end_with_what_to_do(
    words: tuple[str, ...], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--global-batch", "8", "--pareto", "time") if words[0] == "search" else ()
    status, _, err = run(capsys, *words, *flags)
    assert (status, len(err.strip().splitlines())) == (2, 1)
    assert remedy in err
