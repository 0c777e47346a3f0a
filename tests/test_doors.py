"""Rooms have front doors of a size that can be held in mind, and tests go through them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import perfmodel

PACKAGE = Path(perfmodel.__file__).parent
TESTS = Path(__file__).parent
MOST_NAMES = 40
WIDE = {"perfmodel"}
"""The door that is wider: a function for every command, and the records that they take
(`pm.NAME`)."""
LOOK_INSIDE = {
    # The command's own module: what it is given in place of a search, of processes or of a printed
    # report.
    "cli/test_cli.py",
    "cli/test_cli_emulate.py",
    "cli/test_printed_tables.py",
    "ir/importers/test_import_model_command.py",
    # Caches and compiled code: how often something is compiled, and where it is kept.
    "cost/learn/test_kernel_fit.py",
    "prediction/test_step_time_function.py",
    "timeline/test_compiled_programs.py",
    "timeline/test_timeline_cache.py",
    "timeline/test_timeline_lanes.py",
    "timeline/test_timeline_makespan.py",
    # Values of Python scripts, which hold for any framework that reads them.
    # Limits and readers that are exchanged for a test.
    "emulate/scripts/device.py",
    "ingest/known_settings.py",
    "ingest/test_recipes.py",
    "measure/fake_backend.py",
    "measure/test_agents.py",
    "prediction/test_fitted_files.py",
    # Arithmetic that everything else shows through predictions alone.
    "planning/health/known_evidence.py",
    "planning/health/known_faults.py",
    "planning/health/test_known_evidence.py",
    "planning/health/test_made_up_health.py",
    # A server's cost of one step, with what its interval is made of.
    "serving/test_serving_intervals.py",
}
"""Files of tests that import private modules, and why."""


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Module and name of everything that a file imports from the package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").partition(".")[0] == "perfmodel"
        ):
            for alias in node.names:
                yield str(node.module), alias.name
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""


def is_private(module: str, name: str) -> bool:
    return module.startswith("perfmodel.") and any(
        part.startswith("_") for part in f"{module}.{name}".split(".")
    )


def test_tests_go_through_doors() -> None:
    inside = set()
    for path in TESTS.rglob("*.py"):
        if any(is_private(module, name) for module, name in imports(path)):
            inside.add(path.relative_to(TESTS).as_posix())
    assert inside == LOOK_INSIDE


@pytest.mark.parametrize(
    "door", sorted(PACKAGE.rglob("__init__.py")), ids=lambda door: door.parent.name
)
def test_doors_are_narrow(door: Path) -> None:
    room = door.parent.relative_to(PACKAGE.parent).as_posix()
    names = {name for module, name in imports(door) if name not in ("lazy_names", "shorten_reprs")}
    assert len(names) <= MOST_NAMES or room in WIDE
