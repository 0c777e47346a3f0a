"""`perfmodel catalog` lists what has a name; messages name it when there is much to list."""

import json

import pytest

from perfmodel import catalog
from perfmodel.cli import main
from perfmodel.display import new_console, table
from perfmodel.errors import UnknownNameError


@pytest.mark.parametrize("kind", ["models", "clusters", "devices"])
def test_every_name_is_listed_with_its_figures(kind, capsys):
    assert main(["catalog", kind, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)[kind]
    assert [entry["name"] for entry in listed] == list(getattr(catalog, kind)())


def test_the_overview_counts_what_is_listed(capsys):
    assert main(["catalog", "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)["kinds"]
    for kind, count in counts.items():
        assert main(["catalog", kind, "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)[kind]) == count


@pytest.mark.parametrize("kind", ["models", "clusters", "devices", "frameworks"])
def test_no_name_is_cut_in_a_narrow_window(kind, capsys, monkeypatch):
    main(["catalog", kind, "--json"])
    names = {one["name"] for one in json.loads(capsys.readouterr().out)[kind]}
    monkeypatch.setenv("COLUMNS", "60")
    main(["catalog", kind])
    first = {line.split(" ")[0].split("@")[0] for line in capsys.readouterr().out.splitlines()}
    assert names <= first


def test_a_word_narrows_the_list(capsys):
    assert main(["catalog", "models", "GPT3-175"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "gpt3-175b" in lines[1]
    assert " 175B " in lines[1]
    assert "12,288" in lines[1]


def test_a_word_that_nothing_contains_is_named(capsys):
    assert main(["catalog", "devices", "abacus"]) == 2
    assert "no name in devices contains 'abacus'" in capsys.readouterr().err


def test_unknown_names_get_the_nearest_or_examples():
    with pytest.raises(UnknownNameError, match=r"did you mean .*'gpt3-175b'"):
        catalog.model("gpt3-175")
    with pytest.raises(UnknownNameError, match="'perfmodel catalog' lists all") as caught:
        catalog.model("zzzzzz")
    assert len(str(caught.value)) < 300
    assert "known: a, b" in str(UnknownNameError("letter", "zz", ["b", "a", "b"]))


def test_brackets_are_printed_as_they_are(capsys):
    """Names of extras stand in brackets, which the table's markup would swallow."""
    new_console().print(table("", ("what", "value"), [("extras", "pip install 'perfmodel[viz]'")]))
    assert "perfmodel[viz]" in capsys.readouterr().out


def test_frameworks_are_listed_with_year_and_sources(capsys) -> None:
    assert main(["catalog", "frameworks", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["frameworks"]
    assert {entry["name"] for entry in listed} == set(catalog.frameworks())
    for entry in listed:
        assert entry["sources"]
        assert catalog.framework(
            f"{entry['name']}@{entry['since']}" if entry["since"] else entry["name"]
        )
    assert main(["catalog", "frameworks", "nanotron"]) == 0
    assert "nanotron@2024" in capsys.readouterr().out
