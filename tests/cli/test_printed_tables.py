"""Tables for people: nothing is cut or lost, whatever the width of the window and wherever the output goes."""

import ast
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import perfmodel.cli
from perfmodel.cli import main
from perfmodel.display import WORD_HEADS, FittedTable, new_console, table
from perfmodel.planning.layouts import interval

SOURCE = Path(perfmodel.cli.__file__).parent
FIGURES = st.text("0123456789.,%+-<>/", min_size=1, max_size=18).filter(lambda text: not text.isspace())
NAMES = st.text("abcdefgh=,._-", min_size=1, max_size=90)
SENTENCES = st.lists(st.text("abcdefgh", min_size=1, max_size=14), min_size=1, max_size=30).map(" ".join)


@st.composite
def tables(draw: st.DrawFn) -> FittedTable:
    """Some rows of a name, figures, and perhaps words."""
    figures = draw(st.integers(1, 9))
    words = draw(st.sampled_from([(), ("remedy",), ("value", "source")]))
    heads = ["name", *(f"head {at}" for at in range(figures)), *words]
    row = st.tuples(NAMES, *[FIGURES] * figures, *[SENTENCES] * len(words))
    return table(draw(st.sampled_from(["", "A title"])), heads, draw(st.lists(row, min_size=1, max_size=5)))


def missing_from(shown: str, printed: FittedTable) -> list[str]:
    """Cells that are not in a printed table: figures and names whole, words one by one."""
    cells = [(head, cell) for row in printed.rows for head, cell in zip(printed.heads, row, strict=True)]
    missing = []
    for head, cell in cells:
        parts = cell.split() if head in WORD_HEADS else cell.splitlines()
        missing += [part for part in parts if part.rstrip() not in shown]
    return missing + [word for head in printed.heads for word in head.split() if word not in shown]


def longest_unit(printed: FittedTable) -> int:
    """Characters of the longest thing that may not be broken."""
    cells = [
        (head, cell) for row in (printed.heads, *printed.rows) for head, cell in zip(printed.heads, row, strict=True)
    ]
    return max(len(part) for head, cell in cells for part in (cell.split() if head in WORD_HEADS else [cell]))


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
    marked = table("", printed.heads, [(row[0], *("7" * len(cell) for cell in row[1:])) for row in printed.rows])
    first, *others = marked.blocks(width)[1:]
    ends = [len(line) for line in first]
    assert all([len(line) for line in block] == ends for block in others if len(block) == len(ends)) or any(
        head in WORD_HEADS for head in printed.heads
    )


def test_the_console_prints_names_longer_than_the_window_whole(monkeypatch: pytest.MonkeyPatch) -> None:
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
RUNS = """case_id,source,family,layers,hidden,heads,device,n_devices,seq_len,global_batch,tp,pp,dp,micro_batch,\
measured_iter_time_s
a,a rather long name of a source of runs that has a title,gpt,12,768,12,A100-SXM4-80GB,8,1024,8,1,1,8,1,0.1
b,another long name of a source of runs that has a title,gpt,12,768,12,A100-SXM4-80GB,8,1024,8,2,1,4,1,0.1
"""
COMMANDS = {
    "predict": ("predict", *STEP, "--layout", "tp=2,pp=2,dp=2"),
    "search": ("search", *STEP, "--devices", "8", "--top", "2", "--verbose"),
    "whatif": ("whatif", *STEP, "--layout", "dp=8"),
    "whatif sweep": ("whatif", *STEP, "--layout", "dp=8", "--sweep", "all_reduce_delay_s=0:0.1:3"),
    "schedules": ("schedules", "--stages", "4", "--micro-batches", "8"),
    "schedules of a model": ("schedules", *STEP, "--layout", "pp=4,dp=2"),
    "validate kernels": ("validate", "kernels", "kernels.csv"),
    "validate cases": ("validate", "cases", "runs.csv"),
    "explained case": ("validate", "cases", "runs.csv", "--explain"),
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
    "models": ("catalog", "models"),
    "clusters": ("catalog", "clusters"),
    "devices": ("catalog", "devices"),
    "frameworks": ("catalog", "frameworks"),
    "doctor": ("doctor",),
}


@pytest.fixture
def printed_tables(monkeypatch: pytest.MonkeyPatch) -> list[FittedTable]:
    """Tables that commands print while a test runs."""
    printed: list[FittedTable] = []
    render = FittedTable.__rich_console__

    def recorded(self, console, options):
        printed.append(self)
        return render(self, console, options)

    monkeypatch.setattr(FittedTable, "__rich_console__", recorded)
    return printed


@pytest.mark.parametrize("columns", ["80", ""])
@pytest.mark.parametrize("name", COMMANDS)
def test_every_table_of_every_command_is_whole(
    name: str,
    columns: str,
    printed_tables: list[FittedTable],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a window of 80 columns, and piped."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernels.csv").write_text(KERNELS)
    (tmp_path / "runs.csv").write_text(RUNS)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    else:
        monkeypatch.delenv("COLUMNS", raising=False)
    assert main(COMMANDS[name]) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert printed_tables
    for printed in printed_tables:
        assert not missing_from(shown, printed)
        # Words may take several lines, and correlations are as many as there are errors. All else has 80 columns.
        if columns and WORD_HEADS.isdisjoint(printed.heads) and name != "explained case":
            assert all(len(block) == 1 for block in printed.blocks(80)[1:]), printed.title or printed.heads
    assert "…" not in shown


@given(lo_s=st.floats(1e-5, 1e5), factor=st.floats(1.0, 100.0))
def test_both_ends_of_an_interval_have_one_unit_and_as_many_decimals(lo_s: float, factor: float) -> None:
    text, unit = interval(lo_s, lo_s * factor).split()
    ends = [end.replace(",", "") for end in text.split("-")]
    assert len({len(end.partition(".")[2]) for end in ends}) == 1
    unit_s = {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]
    for end, seconds in zip(ends, (lo_s, lo_s * factor), strict=True):
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
        "event": event, "effect_s": 0.0123, "predicted_s": 0.0456, "measured_s": 0.0579, "predicted_calls": 1234,
        "measured_calls": 1235, "remedy": "measure this collective on your cluster, or give --calibration a fit of it",
    }  # fmt: skip
    report = {
        "layout": "tp=2", "predicted_step_s": 1.0, "measured_step_s": 1.1, "steps": 3, "devices": 8,
        "matched_share": 0.9, "differences": [difference], "unread": {},
    }  # fmt: skip
    _show_explained(report)
    shown = capsys.readouterr().out
    for cell in (event, "+12.3 ms", "45.6 ms", "57.9 ms", "1,234 / 1,235", *difference["remedy"].split()):
        assert cell in shown, cell
