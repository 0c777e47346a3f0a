"""Samples work with the commands named beside them; --help lists what can be said, with examples
that parse."""

import json
import re
import shlex
from pathlib import Path

import pytest
from command_line import run

from perfmodel.cli import VOCABULARY, examples, parser, parsers, samples, vocabulary
from perfmodel.ingest.tables import COLUMNS, RUN_COLUMNS
from perfmodel.schedule import schedule_names
from perfmodel.spec import Layout, key_fields
from perfmodel.spec.notation import SCHEDULES

README = samples()["README.md"]
COMMANDS = re.findall(r"\| `([\w.]+)` \|.*`perfmodel ([^`]*)` \|", README)
ROOT = Path(__file__).parents[2]


def test_every_sample_has_a_command():
    assert {name for name, _ in COMMANDS} | {"README.md"} == set(samples())


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_a_sample_works_with_its_command(name, command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "samples", ".")[0] == 0
    assert Path(name).read_text() == samples()[name]
    status, out, err = run(capsys, *shlex.split(command))
    assert status == 0, err
    assert "skipped" not in out or name == "profile.json"


def test_samples_replace_nothing(capsys, tmp_path):
    assert run(capsys, "samples", str(tmp_path / "new" / "one"))[0] == 0
    status, _, err = run(capsys, "samples", str(tmp_path / "new" / "one"))
    assert status == 2
    assert err.count("\n") == 1
    assert run(capsys, "samples", str(tmp_path / "new" / "one"), "--force")[0] == 0


@pytest.mark.parametrize("one", list(parsers(parser())), ids=lambda one: one.prog)
def test_help_ends_in_examples_that_parse(one):
    command = " ".join(one.prog.split()[1:])
    found = examples(command)
    assert len(found) in (2, 3)
    text = one.format_help()
    for line in found:
        assert line in text
        words = shlex.split(line)[1:]
        assert words[: len(command.split())] == command.split()
        parser().parse_args(words)
    flags = {flag for action in one._actions for flag in action.option_strings}
    if "--layout" in flags and command not in ("distribute", "simulate", "serve"):
        assert all(re.search(rf"\b{name}\b", text) for name in (*key_fields(Layout), *SCHEDULES))


@pytest.mark.parametrize("kind", VOCABULARY)
def test_catalog_explains_every_word(kind, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run(capsys, "catalog", kind)
    assert status == 0
    records = json.loads(run(capsys, "catalog", kind, "--json")[1])[kind]
    assert records == vocabulary(kind)
    assert all(record["meaning"] and record["name"] in out for record in records)
    assert max(map(len, (line for line in out.splitlines() if line.startswith("    ")))) <= 80


def test_schedules_are_those_that_are_registered():
    # docs/howto/add_a_schedule.md, whose code may have run in this process
    documented = {"eager-1f1b"}
    assert set(SCHEDULES) == set(schedule_names()) - documented


def test_columns_are_those_that_are_read():
    assert {record["name"] for record in vocabulary("columns")} == {*COLUMNS, *RUN_COLUMNS}
    read = set()
    for path in (ROOT / "perfmodel" / "validation").glob("_*.py"):
        text = path.read_text()
        read |= set(re.findall(r'\b(?:count|number|text)\(row, "(\w+)"', text))
        read |= set(re.findall(r'\brow(?:\.get\(|\[)"(\w+)"', text))
    assert read <= set(RUN_COLUMNS)
