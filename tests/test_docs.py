"""The documentation's code, page by page: Python runs, `shell` commands run, other commands at
least parse."""

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from _names import names_page
from _outputs import Shown, arguments_of, is_current, pages, shown_on, write_named_file

import perfmodel
from perfmodel.cli import main, parser, samples
from perfmodel.schedule import parse_schedule, require_valid

ROOT = Path(__file__).parents[1]
COPIED = {"accuracy", "notebooks", "reference"}
"""Folders that docs/conf.py makes."""
PAGES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent.name not in COPIED]
BLOCK = re.compile(r"^```([^`\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INCLUDED = re.compile(r"^```{literalinclude} (\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
"""A model of the user's own, as README reads one."""
RENEWED_BY_EVERY_RUN = {"calibrate_model.md", "check_a_run.md", "search_layouts.md"}
"""Pages whose outputs are compared by every run of the tests; those of the others take longer."""


def commands(text: str) -> list[list[str]]:
    """Arguments of every `perfmodel` command of a block."""
    lines = text.replace("\\\n", " ").splitlines()
    if text.startswith("$ "):  # what follows a command is what it prints
        lines = [line for line in lines if line.startswith("$ ")]
    command_lines = [line.removeprefix("$ ") for line in lines]
    return [arguments_of(line) for line in command_lines if line.startswith("perfmodel ")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", PAGES, ids=[str(page.relative_to(ROOT / "docs")) for page in PAGES]
)
def test_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the page's order; a block that begins with a comment `# NAME.toml` (or .csv, .sh ...)
    becomes this file."""
    monkeypatch.chdir(tmp_path)
    for name, text in samples().items():
        Path(name).write_text(text)
    namespace: dict[str, object] = {"__name__": page.stem}
    for language, text in BLOCK.findall(page.read_text()):
        if write_named_file(text):
            continue
        if language == "python":
            exec(compile(text, str(page), "exec"), namespace)
        elif language == "console":
            (argv,) = commands(text)
            main(argv)  # what it prints is compared below, errors too
        elif language == "shell":
            for argv in commands(text):
                assert main(argv) == 0, argv


@pytest.mark.slow
def test_commands_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in samples().items():
        Path(name).write_text(text)
    Path("config.json").write_text(json.dumps(CONFIG))
    for _, text in BLOCK.findall((ROOT / "README.md").read_text()):
        for argv in commands(text):
            assert main(argv) == 0, argv


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_commands_of_a_page_parse(page: Path) -> None:
    text = page.read_text()
    in_tables = re.findall(r"^\|.*`(perfmodel [^`]* --[^`]* [^`]*)`", text, re.MULTILINE)
    for block in (*(block for _, block in BLOCK.findall(text)), *in_tables):
        for argv in commands(block):
            if not any("..." in word for word in argv):
                parser().parse_args(argv)


@pytest.mark.parametrize(
    "page", PAGES, ids=[str(page.relative_to(ROOT / "docs")) for page in PAGES]
)
def test_code_that_a_page_includes_is_there(page: Path) -> None:
    for file, options in INCLUDED.findall(page.read_text()):
        source = (page.parent / file).read_text()
        values = dict(re.findall(r"^:([a-z-]+): (.*)$", options, re.MULTILINE))
        tree = ast.parse(source)
        (function,) = [
            node for node in tree.body if getattr(node, "name", "") == values["pyobject"]
        ]
        code = ast.get_source_segment(source, function) or ""
        for limit in ("start-after", "end-before"):
            assert values.get(limit, "") in code, limit


def test_files_that_contributing_names_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tables = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    rooms = {path.parent.name for path in (ROOT / "perfmodel").glob("*/__init__.py")}
    assert rooms <= set(re.findall(r"`([a-z_]+)[.`]", tables))
    for name in re.findall(r"`(perfmodel/[\w./]+)`", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`(_\w+\.py)`", tables):
        assert any(
            (ROOT / "perfmodel" / room / name).is_file() for room in ("prediction", "schedule")
        ), name


def test_every_public_name_has_a_line() -> None:
    lines = names_page().splitlines()
    names = [name for name in dir(perfmodel) if not name.startswith("__")]
    rows = {
        match[1]: match[2]
        for line in lines
        if (match := re.match(r"\| `pm\.(\w+)` \| (.*) \|$", line))
    }
    assert set(rows) == set(names)
    assert all(len(text) > 10 and text.endswith(".") for text in rows.values()), rows


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_schedule_in_the_page_can_run() -> None:
    (text,) = re.findall(
        r"```\n(# 1F1B.*?)```", (ROOT / "docs" / "schedules.md").read_text(), re.DOTALL
    )
    require_valid(parse_schedule(text))


@pytest.mark.parametrize(
    "shown",
    [
        pytest.param(
            shown,
            marks=[] if page.name in RENEWED_BY_EVERY_RUN else pytest.mark.slow,
            id=f"{page.stem}: {shown.place} {shown.command.split()[1]}",
        )
        for page in pages()
        for shown in shown_on(page)
    ],
)
def test_what_a_page_says_that_a_command_prints_is_current(shown: Shown) -> None:
    assert is_current(shown.output, shown.printed()), "stale; renew it with python docs/_outputs.py"


def test_printed_output_stands_with_its_command() -> None:
    """Whatever looks like a command line with its output is in a block that is compared."""
    loose = [
        f"{page.name}: {text.splitlines()[0]}"
        for page in PAGES
        for language, text in BLOCK.findall(page.read_text())
        if text.startswith("$ ") and language != "console"
    ]
    assert not loose
    assert sum(
        1
        for page in PAGES
        for language, _ in BLOCK.findall(page.read_text())
        if language == "console"
    ) == len([shown for page in pages() for shown in shown_on(page)])


def test_a_stale_figure_is_noticed() -> None:
    printed = "best: tp=8, 27.53 ms, 1,024 devices\nnext: fit\n"
    assert is_current(printed, printed)
    assert is_current("best:   tp=8, 27.54 ms, 1,024 devices\n next: fit\n", printed)
    assert is_current("best: ... devices\nnext: fit\n", printed)
    assert not is_current("best: tp=8, 31 ms, 1,024 devices\nnext: fit\n", printed)
    assert not is_current("best: tp=8, 27.53 ms, 1,024 devices\n", printed)
    assert not is_current("best: tp=8, 27.53 ms, 1,024 devices\nthen: fit\n", printed)


def test_how_long_a_command_took_is_not_compared() -> None:
    assert is_current(
        "22 were evaluated, in\n0.2 s; exact\n", "22 were evaluated, in 10.3 s; exact\n"
    )
    assert not is_current("22 were evaluated, in 0.2 s\n", "23 were evaluated, in 0.2 s\n")
    assert not is_current("a step in 0.2 s\n", "a step in 0.3 s\n")


def test_the_page_of_seconds_has_a_row_for_each_journey() -> None:
    spec = importlib.util.spec_from_file_location("journeys", ROOT / "benchmarks" / "journeys.py")
    assert spec is not None
    assert spec.loader is not None
    journeys = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        # Dataclasses look for their module by its name.
        patch.setitem(sys.modules, "journeys", journeys)
        spec.loader.exec_module(journeys)
    page = journeys.PAGE.read_text()
    rows = [
        re.match(r"\| (.*?) \| `(.*)` \| [\d.]+, [\d.]+ \|", line) for line in page.splitlines()
    ]
    assert [row.groups() for row in rows if row] == [
        (one.question, one.shown) for one in journeys.JOURNEYS
    ]
    _, _, table = page.partition("-->\n")
    assert journeys.with_table(page, table.partition("\n<!--")[0]) == page
