"""Nothing but a session keeps state: every cache of a module, and everything that its functions
change, is listed."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import perfmodel

ROOT = Path(perfmodel.__file__).parent
CACHED = {
    "catalog._devices._part_names": "names of the package's devices",
    "cost.learn.stack.fastest_units": "figures of the package's devices",
    "cost.learn.stack.larger_part": "figures of the package's devices",
    "catalog._clusters._catalog": "files of the package",
    "spec._documented.documented": "source of the package",
    "spec.notation.schedule_name": "words",
    "spec._layout._types": "fields of a class",
    "spec._sections.key_fields": "fields of a class",
    "spec._sections._switches": "fields of a class",
    "catalog._devices._catalog": "files of the package",
    "catalog._recipes.exchange_library": "a file of the package, by name of a dispatcher",
    "catalog._frameworks._files": "files of the package",
    "catalog._frameworks._names": "files of the package",
    "catalog._frameworks._from_catalog": "files of the package",
    "catalog._models._catalog": "files of the package",
    "catalog._recipes._recipes": "a file of the package, by name of a framework",
    "catalog.entries._adapter": "a checker of a class",
    "catalog.huggingface._defaults._declared": "a file of the package",
    "catalog.entries.stated_entries": "files of the package, by folder",
    "cost._events._lattice": "kernels of more and less work, by kernel",
    "workload._parameters.parameters": "numbers of a model's parameters",
    "ops._op._amounts": "work of a kernel by its shape",
    "ops._op._field_getter": "fields of a class",
    "planning.layouts._enumerate.enumerate_grids": "local to a call",
    "cost.learn.collectives._fabrics._fabric": "links from figures of a cluster and files of the package",
    "cost.learn.collectives._fabrics._known_device": "a file of the package, by name of a device",
    "cost.learn.collectives._fabrics.names_of_parts": "a file of the package, by name of a device",
    "cost.learn.collectives._fabrics._fabric_of_row": "links from cells of a row and files of the package",
    "cost.learn.stack.in_catalog": "a file of the package, by name of a device",
    "calibration.beliefs._covariance._likelihood": "JAX's compiled code, by frozen components",
    "ingest.launch._model.shape": "a model without its names",
    "ingest.launch._recipe_tables._file_of_recipes": "a file of the package",
    "ingest.profiles._profile.collective_of": "names of kernels",
    "ingest.profiles._profile.family_of": "names of kernels and operators",
    "prediction._check._sharded_layers": "numbers of layers of a model on a shard",
    "prediction.placement._placement": "numbers of ranks from whole numbers",
    "prediction.sites.constants.memory_spread": "a file of the package, by name of a source",
    "prediction.sites.constants.source_figures": "a file of the package",
    "prediction.sites.constants.source_medians": "a file of the package",
    "prediction.sites.constants.sustained": "a file of the package, by name of a source",
    "prediction.sites.known_runs.standard_nodes": "nodes of a quadrature",
    "prediction.sites._population._fitted": "a file of the package",
    "prediction.sites._population.population": "a file of the package, by name of a source",
    "session.code_digest": "the package's own code",
    "catalog._frameworks._latest_year": "files of the package",
    "prediction.sites.constants.kind_patterns": "a file of the package",
    "prediction.sites.constants.team_patterns": "a file of the package",
    "prediction.sites.constants.teams_of": "a file of the package, by name of a source",
    "validation.unstated.priors._shipped": "a file of the package",
    "validation.unstated.priors.choice_priors": "a file of the package, by name of a source",
    "validation.population._score._inverse": "one function of matrices",
    "validation.rows.phrases.read_phrases": "words of a closed vocabulary",
    "validation.rows.vocabulary.read_switches": "words of a closed vocabulary",
    "viz._style._picture": "one class for all pictures",
}
"""Pure functions of hashable values and of files that come with the package, which do not
change."""
CHANGED = {
    "schedule._registry._SCHEDULERS": "schedules by name, each registered once",
}
"""What modules hold and their functions change."""
MUTATING = {
    "append",
    "add",
    "extend",
    "insert",
    "update",
    "setdefault",
    "pop",
    "popitem",
    "clear",
    "remove",
    "discard",
}


@pytest.fixture(scope="module")
def modules() -> list[tuple[str, ast.Module]]:
    """All modules by name; parsed when a test asks for them, as each of pytest's workers imports
    this file."""
    return [
        (".".join(path.relative_to(ROOT).with_suffix("").parts), ast.parse(path.read_text()))
        for path in sorted(ROOT.rglob("*.py"))
    ]


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Outermost functions and methods."""
    for node in tree.body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef):
                yield inner


def test_only_pure_functions_are_cached(modules: list[tuple[str, ast.Module]]) -> None:
    found = set()
    for module, tree in modules:
        names = {
            a.asname or a.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "functools"
            for a in node.names
            if a.name in ("cache", "lru_cache")
        }
        assert not any(
            isinstance(n, ast.Attribute) and n.attr in ("cache", "lru_cache")
            for n in ast.walk(tree)
        ), module
        if not names:
            continue
        of_functions = {
            id(n): function.name for function in functions(tree) for n in ast.walk(function)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in names:
                found.add(f"{module}.{of_functions.get(id(node), node.lineno)}")
    assert found == set(CACHED)


def test_functions_change_nothing_that_their_module_holds(
    modules: list[tuple[str, ast.Module]],
) -> None:
    found = set()
    for module, tree in modules:
        held = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        for function in functions(tree):
            local = {
                n.id
                for n in ast.walk(function)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
            local |= {a.arg for a in ast.walk(function) if isinstance(a, ast.arg)}
            for node in ast.walk(function):
                match node:
                    case ast.Global(names=names):
                        found |= {f"{module}.{name}" for name in names}
                    case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                        found |= {f"{module}.{name}"} if name in held - local else set()
                    case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)) if (
                        attr in MUTATING
                    ):
                        found |= {f"{module}.{name}"} if name in held - local else set()
                    case ast.Attribute(value=ast.Name(id=name), ctx=ast.Store()):
                        found |= {f"{module}.{name}"} if name in held - local else set()
    assert found == set(CHANGED)


def test_stores_belong_to_objects(modules: list[tuple[str, ast.Module]]) -> None:
    """A `Cache` or a `Session` on a module's own level is the default session alone."""
    found = [
        f"{module}.{ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)}"
        for module, tree in modules
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        if any(
            isinstance(n, ast.Name) and n.id in ("Cache", "Session") for n in ast.walk(node.value)
        )
    ]
    assert found == ["session._DEFAULT"]
