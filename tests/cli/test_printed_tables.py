"""Tables for people: nothing is cut or lost, whatever the width of the window and wherever the
output goes."""

import ast
import json
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import perfmodel.cli
import perfmodel.validation
from perfmodel.cli import main, samples
from perfmodel.display import WORD_HEADS, FittedTable, new_console, table
from perfmodel.planning.layouts import interval

SOURCE = Path(perfmodel.cli.__file__).parent
PACKAGE = Path(perfmodel.__file__).parent
FIGURES = st.text("0123456789.,%+-<>/", min_size=1, max_size=18).filter(
    lambda text: not text.isspace()
)
NAMES = st.text("abcdefgh=,._-", min_size=1, max_size=90)
SENTENCES = st.lists(st.text("abcdefgh", min_size=1, max_size=14), min_size=1, max_size=30).map(
    " ".join
)


@st.composite
def tables(draw: st.DrawFn) -> FittedTable:
    """Some rows of a name, figures, and perhaps words."""
    figures = draw(st.integers(1, 9))
    words = draw(st.sampled_from([(), ("remedy",), ("value", "source")]))
    heads = ["name", *(f"head {at}" for at in range(figures)), *words]
    row = st.tuples(NAMES, *[FIGURES] * figures, *[SENTENCES] * len(words))
    return table(
        draw(st.sampled_from(["", "A title"])), heads, draw(st.lists(row, min_size=1, max_size=5))
    )


def missing_from(shown: str, printed: FittedTable) -> list[str]:
    """Cells that are not in a printed table: figures and names whole, words one by one."""
    cells = [
        (head, cell) for row in printed.rows for head, cell in zip(printed.heads, row, strict=True)
    ]
    missing = []
    for head, cell in cells:
        parts = cell.split() if head in WORD_HEADS else cell.splitlines()
        missing += [part for part in parts if part.rstrip() not in shown]
    return missing + [word for head in printed.heads for word in head.split() if word not in shown]


def longest_unit(printed: FittedTable) -> int:
    """Characters of the longest thing that may not be broken."""
    cells = [
        (head, cell)
        for row in (printed.heads, *printed.rows)
        for head, cell in zip(printed.heads, row, strict=True)
    ]
    return max(
        len(part)
        for head, cell in cells
        for part in (cell.split() if head in WORD_HEADS else [cell])
    )


@given(printed=tables(), width=st.integers(40, 200))
def test_a_table_of_any_width_holds_every_cell(printed: FittedTable, width: int) -> None:
    blocks = printed.blocks(width)
    assert len(blocks) == 1 + len(printed.rows)
    assert not missing_from("\n".join(line for block in blocks for line in block), printed)
    allowed = max(width, longest_unit(printed) + 4)
    assert max(len(line) for block in blocks for line in block) <= allowed
    for block, row in zip(blocks[1:], printed.rows, strict=True):
        assert block[0].startswith(row[0].rstrip()), "a row begins with its name"


@given(printed=tables())
def test_a_wide_window_holds_a_row_in_a_line(printed: FittedTable) -> None:
    assert all(len(block) == 1 for block in printed.blocks(2000))


@given(printed=tables(), width=st.integers(40, 120))
def test_figures_of_a_column_end_below_one_another(printed: FittedTable, width: int) -> None:
    marked = table(
        "",
        printed.heads,
        [(row[0], *("7" * len(cell) for cell in row[1:])) for row in printed.rows],
    )
    first, *others = marked.blocks(width)[1:]
    ends = [len(line) for line in first]
    assert all(
        [len(line) for line in block] == ends for block in others if len(block) == len(ends)
    ) or any(head in WORD_HEADS for head in printed.heads)


def test_the_console_prints_names_longer_than_the_window_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    console, name = new_console(), "a" * 130
    console.file = StringIO()
    console.print(table("", ("layout", "step"), [(name, "12.3 s")]))
    assert f"{name}\n    12.3 s" in console.file.getvalue()


def test_all_tables_are_made_in_one_place() -> None:
    makers = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rich.table"):
                makers.add(path.name)
    assert not makers


STEP = ("--model", "gpt3-125m", "--cluster", "dgx-a100", "--global-batch", "16")
KERNELS = """source,device,op_family,op,dtype,batch,m,n,k,pass,time_us
a rather long name of a source of kernels,A100-SXM4-80GB,gemm,linear,bf16,1,512,512,512,fwd,10
"""
# Runs state nearly everything: each open setting multiplies what is predicted, and prints no table.
RUN_HEADS = (
    "case_id,source,family,layers,hidden,heads,device,n_devices,seq_len,global_batch,tp,pp,dp,"
    "micro_batch,framework,zero_stage,recompute,measured_iter_time_s"
)
STATED = "megatron-core@2024,1,none,0.1"
RUNS = f"""{RUN_HEADS}
a,a rather long name of a source of runs that has a title,gpt,12,768,12,A100-SXM4-80GB,8,1024,8,1,1,8,1,{STATED}
b,another long name of a source of runs that has a title,gpt,12,768,12,A100-SXM4-80GB,8,1024,8,2,1,4,1,{STATED}
"""
RUNS_OF_MEMORY = f"""{RUN_HEADS},measured_peak_memory_gb
a,a rather long name of a source of runs that has a title,gpt,12,768,12,A100-SXM4-80GB,8,1024,8,1,1,8,1,{STATED},11
b,a rather long name of a source of runs that has a title,gpt,12,768,12,no such device,8,1024,8,1,1,8,1,{STATED},11
"""
PROGRAM = """import jax.numpy as jnp


def a_step_of_a_long_name():
    return lambda x: jnp.tanh(x @ x).sum(), (jnp.zeros((128, 128)),)
"""
FILES = {
    "kernels.csv": KERNELS,
    "runs.csv": RUNS,
    "memory.csv": RUNS_OF_MEMORY,
    "program.py": PROGRAM,
    "profile.json": samples()["profile.json"],
}
OF_MANY_COLUMNS = ("explained case", "fit sites")
ON_KINDS = (
    "predict",
    "--model",
    "gpt3-125m",
    "--cluster",
    "timeprest",
    "--global-batch",
    "16",
    "--dtype",
    "fp16",
)
COMMANDS = {
    "predict": ("predict", *STEP, "--layout", "tp=2,pp=2,dp=2"),
    "search": ("search", *STEP, "--devices", "8", "--top", "2", "--verbose"),
    "whatif": ("whatif", *STEP, "--layout", "dp=8"),
    "whatif sweep": ("whatif", *STEP, "--layout", "dp=8", "--sweep", "all_reduce_delay_s=0:0.1:3"),
    "predict of several kinds": (*ON_KINDS, "--layout", "pp=2"),
    "predict of open settings": (
        *("predict", *STEP, "--devices", "8", "--open"),
        *("--framework", "megatron-core@2024", "--layout", "tp=2,pp=1,micro_batch=1"),
    ),
    "upgrade": ("design", "upgrade", *STEP, "--devices", "8"),
    "schedules": ("schedules", "--stages", "4", "--micro-batches", "8"),
    "schedules of a model": ("schedules", *STEP, "--layout", "pp=4,dp=2"),
    "schedules of a paper": ("schedules", "chimera", *STEP, "--layout", "pp=4,dp=2"),
    "validate kernels": ("validate", "kernels", "kernels.csv"),
    "validate cases": ("validate", "cases", "runs.csv"),
    "validate memory": ("validate", "cases", "memory.csv"),
    "explained case": ("validate", "cases", "runs.csv", "--explain"),
    "report": ("report", "--tables", "kernels.csv", "--html", "page.html"),
    "explain": (
        "explain",
        *STEP,
        "--layout",
        "dp=8",
        "--profile",
        "profile.json",
        "--format",
        "kineto",
    ),
    "fit profile": (
        *("fit", *STEP, "--layout", "dp=8", "--profile", "profile.json", "--format", "kineto"),
        *("--step-time", "0.5", "--out", "of_profile"),
    ),
    "fit sites": ("fit", "--sites", "runs.csv", "--out", "of_sites"),
    "import-model": ("import-model", "program.py:a_step_of_a_long_name", "--target", "dgx-a100"),
    "hook": ("hook",),
    "fit": ("fit", "kernels.csv", "--out", "fitted"),
    "fit runs": ("fit", "--runs", "runs.csv", "--out", "of_runs"),
    "serve": (
        "serve",
        "--model",
        "llama3-8b",
        "--cluster",
        "dgx-h100",
        "--prompt-tokens",
        "512",
        "--output-tokens",
        "64",
    ),
    "catalog": ("catalog",),
    "models": ("catalog", "models"),
    "clusters": ("catalog", "clusters"),
    "devices": ("catalog", "devices"),
    "frameworks": ("catalog", "frameworks"),
    "doctor": ("doctor",),
}


@dataclass(frozen=True)
class Shown:
    """What a command printed, its tables, and the lines of the package that printed them."""

    text: str
    tables: tuple[FittedTable, ...]
    lines: frozenset[tuple[str, int]]


def shipped_sites(*_: object, **__: object) -> dict[str, Any]:
    """The constants that are shipped, in place of a fit that takes minutes."""
    folder = Path(perfmodel.__file__).parent / "prediction" / "sites"
    fitted = {
        name: json.loads((folder / f"{name}.json").read_text())
        for name in ("sustained", "population")
    }
    return fitted | {"skipped_files": {"nodes.csv": "no table of runs"}}


SHOWN: dict[tuple[str, str], Shown] = {}
"""What commands printed in this process: both tests below look at the same outputs."""


@pytest.fixture
def show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Shown]:
    """Runs a command by its name in a window of so many columns, or piped where none are given."""
    printed: list[tuple[FittedTable, list[tuple[str, int]]]] = []
    render = FittedTable.__rich_console__

    def recorded(self: FittedTable, console: Any, options: Any) -> Any:
        callers = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_stack()]
        printed.append((self, [caller for caller in callers if caller[0].startswith(str(PACKAGE))]))
        return render(self, console, options)

    def shown(name: str, columns: str) -> Shown:
        if (name, columns) in SHOWN:
            return SHOWN[name, columns]
        for file, text in FILES.items():
            (tmp_path / file).write_text(text)
        printed.clear()
        with monkeypatch.context() as patch, redirect_stdout(StringIO()) as out:
            patch.chdir(tmp_path)
            patch.setattr(FittedTable, "__rich_console__", recorded)
            patch.setattr(perfmodel.validation, "fit_sites", shipped_sites)
            if columns:
                patch.setenv("COLUMNS", columns)
            else:
                patch.delenv("COLUMNS", raising=False)
            assert main(COMMANDS[name]) == 0
        made = tuple(made for made, _ in printed)
        lines = frozenset(caller for _, callers in printed for caller in callers)
        return SHOWN.setdefault((name, columns), Shown(out.getvalue(), made, lines))

    return shown


@pytest.mark.parametrize("columns", ["80", ""])
@pytest.mark.parametrize("name", COMMANDS)
def test_every_table_of_every_command_is_whole(
    name: str, columns: str, show: Callable[[str, str], Shown]
) -> None:
    """In a window of 80 columns, and piped."""
    shown = show(name, columns)
    assert shown.tables
    for printed in shown.tables:
        assert not missing_from(shown.text, printed)
        # Words may take several lines, and figures that are as many as there are classes or errors.
        # All else has 80 columns.
        if columns and WORD_HEADS.isdisjoint(printed.heads) and name not in OF_MANY_COLUMNS:
            assert all(len(block) == 1 for block in printed.blocks(80)[1:]), (
                printed.title or printed.heads
            )
    assert "…" not in shown.text


def test_every_place_that_prints_a_table_is_among_these_commands(
    show: Callable[[str, str], Shown],
) -> None:
    printing = frozenset[tuple[str, int]]().union(*(show(name, "").lines for name in COMMANDS))
    unseen = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "print"
            ):
                continue
            made = [inner.func for inner in node.args if isinstance(inner, ast.Call)]
            if not any(isinstance(maker, ast.Name) and maker.id == "table" for maker in made):
                continue
            assert node.end_lineno is not None
            if not any(
                (str(path), line) in printing for line in range(node.lineno, node.end_lineno + 1)
            ):
                unseen.append(f"{path.name}:{node.lineno}")
    assert not unseen


@given(lo_s=st.floats(1e-5, 1e5), factor=st.floats(1.0, 100.0))
def test_both_ends_of_an_interval_have_one_unit_and_as_many_decimals(
    lo_s: float, factor: float
) -> None:
    text, unit = interval(lo_s, lo_s * factor).split()
    ends = [end.replace(",", "") for end in text.split("-")]
    assert len({len(end.partition(".")[2]) for end in ends}) == 1
    unit_s = {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]
    # Ends that round alike are shown once.
    for end, seconds in ((ends[0], lo_s), (ends[-1], lo_s * factor)):
        assert float(end) * unit_s == pytest.approx(seconds, rel=6e-3)


def test_a_path_longer_than_the_window_stays_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = "/a/folder/of/a/long/name" * 8
    new_console().print(table("", ["what", "value"], [("weights", path)]))
    assert path in capsys.readouterr().out.replace("\n", " ").split()


def test_a_profile_beside_its_prediction_shows_all_its_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from perfmodel.cli._compare import _show_explained

    monkeypatch.setenv("COLUMNS", "80")
    event = "all_gather 134217728 bytes, 8 ranks on 1 node of dgx-h100 beside backward of the layers' weights"
    difference = {
        "event": event,
        "effect_s": 0.0123,
        "predicted_s": 0.0456,
        "measured_s": 0.0579,
        "predicted_calls": 1234,
        "measured_calls": 1235,
        "remedy": "measure this collective on your cluster, or give --calibration a fit of it",
    }
    report = {
        "layout": "tp=2",
        "predicted_step_s": 1.0,
        "measured_step_s": 1.1,
        "steps": 3,
        "devices": 8,
        "matched_share": 0.9,
        "differences": [difference],
        "unread": {},
    }
    _show_explained(report)
    shown = capsys.readouterr().out
    for cell in (
        event,
        "+12.3 ms",
        "45.6 ms",
        "57.9 ms",
        "1,234/1,235",
        *difference["remedy"].split(),
    ):
        assert cell in shown, cell
