"""What the package says about itself: bounds of dependencies, metadata, files that a maintainer
expects."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import perfmodel

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def script(name: str):
    specification = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_every_dependency_is_tested_at_its_lower_bound():
    pins = dict(line.split("==") for line in script("bounds").constraints().splitlines())
    for requirement in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["viz"]:
        name, _, version = requirement.partition(">=")
        assert pins[name] == version


@pytest.mark.parametrize(
    "requirement", ["jax", "jax>0.7", "jax==0.7.1", "jax>=0.7,<1", "jax ~= 0.7"]
)
def test_a_dependency_without_a_plain_lower_bound_is_refused(requirement, tmp_path):
    pyproject = tmp_path / "pyproject.toml"
    extras = "[project.optional-dependencies]\nviz = []\n"
    pyproject.write_text(f'[project]\ndependencies = ["{requirement}"]\n{extras}')
    with pytest.raises(ValueError, match="must be NAME>=VERSION"):
        script("bounds").lowest_versions(pyproject)


def test_continuous_integration_runs_every_supported_python_and_both_ends_of_the_bounds():
    supported = {
        classifier.rsplit(" ", 1)[1]
        for classifier in PROJECT["classifiers"]
        if re.search(r"Python :: 3\.\d+$", classifier)
    }
    combinations = script("bounds").COMBINATIONS
    assert {python for python, _ in combinations} == supported
    assert {versions for _, versions in combinations} == {"lowest", "newest"}
    assert "timeout 900 make smoke-bounds" in (ROOT / ".ci" / "run").read_text("utf-8")


def test_an_absent_python_is_skipped_with_a_line_that_says_so(monkeypatch, capsys):
    bounds = script("bounds")
    monkeypatch.setattr(bounds, "COMBINATIONS", (("3.99", "newest"),))
    monkeypatch.setattr(bounds, "build_wheel", lambda folder: folder / "none.whl")
    monkeypatch.setattr("sys.argv", ["bounds.py"])
    assert bounds.main() == 0
    assert "SKIPPED Python 3.99" in capsys.readouterr().out


def test_the_citation_names_this_version_and_the_five_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == perfmodel.__version__
    assert citation["license"] == PROJECT["license"]
    papers = " ".join(paper["title"] for paper in citation["references"])
    for name in ("Chimera", "DistIR", "DistSim", "Emulation", "TiMePReSt"):
        assert name in papers
    assert len(citation["references"]) == 5
    assert all(paper["authors"] and paper["year"] for paper in citation["references"])


def test_the_package_is_typed_and_says_where_it_comes_from():
    assert (ROOT / "perfmodel" / "py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert PROJECT["urls"]
    assert "vulnerability" in (ROOT / "SECURITY.md").read_text("utf-8")


def test_pre_commit_runs_the_linters_of_make_lint():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"][0][
        "hooks"
    ]
    entries = {hook["entry"].split()[0].rsplit("/", 1)[1] for hook in hooks}
    recipe = (
        (ROOT / "Makefile").read_text("utf-8").partition("\nlint:")[2].partition("\nformat:")[0]
    )
    assert entries == set(re.findall(r"\$\(BIN\)/(\S+)", recipe))


def test_rooms_of_mutants_are_where_their_table_says() -> None:
    """A file that has moved would drop out of the mutations without a word."""
    rooms = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text("utf-8"))
    for entries in rooms.values():
        for entry in entries:
            named = [name for name in (*entry["files"], *entry["tests"]) if "*" not in name]
            for name in named:
                file, _, function = name.partition("::")
                assert (ROOT / file).is_file(), name
                assert f"def {function}" in (ROOT / file).read_text("utf-8") or not function, name
            assert any(list(ROOT.glob(pattern)) for pattern in entry["files"]), entry["files"]
