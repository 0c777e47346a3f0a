"""What results print: an object in a line, JSON that every reader takes, and no figure where there
is none."""

import ast
import dataclasses
import importlib
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest

import perfmodel as pm
from perfmodel.calibration import SideBySide, Total
from perfmodel.cli import main
from perfmodel.display import json_text, short_repr
from perfmodel.ops import Gemm
from perfmodel.validation import validate_cases, validate_kernels

SOURCE = Path(pm.__file__).parent
SHORT = 301


def doors(of: ModuleType = pm) -> Iterator[ModuleType]:
    """Packages, and public modules of rooms."""
    for module in pkgutil.iter_modules(of.__path__, f"{of.__name__}."):
        in_a_room = module.ispkg or of is not pm
        if in_a_room and not module.name.rpartition(".")[2].startswith("_"):
            door = importlib.import_module(module.name)
            yield door
            if module.ispkg:
                yield from doors(door)


def offers(door: ModuleType) -> Iterator[object]:
    """All that a door offers, but for what only runs beside PyTorch where that is absent."""
    for name in {*vars(door), *dir(door)}:
        try:
            yield getattr(door, name)
        except ModuleNotFoundError as absent:
            if absent.name != "torch":
                raise


def public_dataclasses() -> list[type]:
    """All that packages and public modules offer."""
    offered = [thing for door in doors() for thing in offers(door)]
    classes = {one for one in offered if isinstance(one, type) and dataclasses.is_dataclass(one)}
    return sorted(
        (one for one in classes if one.__module__.startswith("perfmodel.")),
        key=lambda c: (c.__module__, c.__name__),
    )


def overgrown(annotation: object) -> Any:
    """A value that such a field may hold at worst."""
    text = str(annotation)
    if re.search(
        r"tuple\[[^]]*\.\.\.\]|Mapping|dict|Sequence|list\[|ndarray|Array|DataFrame", text
    ):
        return tuple(range(500))
    if text in ("int", "float", "bool", "int | None", "float | None", "bool | None"):
        return 0.12345678901234567
    return "a name of thirty characters or"


@pytest.mark.parametrize("one", public_dataclasses(), ids=lambda c: f"{c.__module__}.{c.__name__}")
def test_every_public_object_is_one_short_line(one: type) -> None:
    made = object.__new__(one)
    for field in dataclasses.fields(one):
        object.__setattr__(made, field.name, overgrown(field.type))
    text = repr(made)
    assert len(text) < SHORT
    assert text.startswith(one.__qualname__)


@dataclasses.dataclass
class Held:
    values: Any
    name: str = "a"
    __repr__: ClassVar[Any] = short_repr


def test_what_is_left_out_is_told_apart() -> None:
    numbers = np.arange(1e5)
    assert repr(Held(numbers)) == repr(Held(numbers.copy()))
    other = numbers.copy()
    other[50_000] += 1  # numpy itself leaves this one out
    assert (
        len(
            {
                repr(Held(v))
                for v in (numbers, other, numbers.astype("f4"), tuple(numbers), {"x": other})
            }
        )
        == 5
    )
    assert repr(Held(numbers)).startswith("Held(values=float64[100000] #")
    assert len(repr(Held("x" * 10_000, "y" * 10_000))) < SHORT
    assert len(repr(Held(Held(Held(numbers))))) < SHORT
    assert repr(Held(pd.DataFrame({"a": numbers}))) != repr(Held(pd.DataFrame({"a": other})))


def test_small_objects_print_as_dataclasses_do() -> None:
    layout = pm.Layout(tp=8, pp=4, dp=2)
    assert eval(repr(layout), {"Layout": pm.Layout}) == layout
    assert repr(layout) == "Layout(tp=8, pp=4, dp=2)"
    assert repr(Held((1, 2), "b")) == "Held(values=(1, 2), name='b')"
    assert repr(Held((1, 2))) == "Held(values=(1, 2))"


def test_records_of_a_profile_session_and_comparison_are_short() -> None:
    op = Gemm(m=8, n=8, k=8)
    total = Total(label="a product", family="gemm", op=op, predicted_s=1.0)
    sides = SideBySide({(i,): total for i in range(1000)}, 1.0, {}, 1, True, (), ())
    compared = pm.compare_schedules(
        "gpt2-345m", "dgx-a100", "pp=2", global_batch=8, schedules=["1f1b", "gems"]
    )
    for thing in (
        total,
        Held(total),
        Held(op),
        sides,
        pm.Session(),
        compared,
        pm.problem("gpt2-345m", "dgx-a100", global_batch=8),
    ):
        assert len(repr(thing)) < SHORT
        assert " at 0x" not in repr(thing)


def test_results_are_short_and_their_content_is_reachable() -> None:
    job = {"model": "gpt3-6.7b", "cluster": "dgx-a100", "global_batch": 128}
    predicted = pm.predict(layout="tp=2,pp=8,dp=4", timeline=True, **job)
    found = pm.search(devices=64, **job)
    fixed = predicted.timeline
    assert fixed is not None
    changed = pm.whatif(layout="tp=2,pp=8,dp=4", settings=["compute_rate=2x"], **job)
    for result in (
        predicted,
        found,
        changed,
        fixed,
        fixed.structure,
        found.evaluation.candidates,
        predicted.memory_over_time(),
    ):
        assert len(repr(result)) < SHORT
    for result in (changed, fixed, fixed.structure, found.evaluation.candidates):
        assert len(str(result)) < SHORT
    # Predictions and searches print what the shell prints.
    for result in (predicted, found):
        assert len(str(result).splitlines()) < 60
    for result in (predicted, found, changed):
        assert len(json_text(result.to_dict())) > SHORT
        assert len(result.to_frame()) > 0
        assert len(result._repr_html_()) > SHORT


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("indent", [None, 1])
def test_json_has_null_for_what_is_no_number(indent: int | None) -> None:
    nested = {
        "a": [1.5, float("nan"), (np.float64("inf"), -float("inf"))],
        "b": {"c": float("nan"), "d": "NaN"},
        "e": 2,
    }
    assert strict(json_text(nested, indent)) == {
        "a": [1.5, None, [None, None]],
        "b": {"c": None, "d": "NaN"},
        "e": 2,
    }


INSIDE = {
    "catalog/entries.py",
    "cost/learn/collectives/_weights.py",
    "cost/learn/_weights.py",
    "display/_repr.py",
    "emulate/_measure.py",
    "emulate/wire/_peer.py",
    "emulate/wire/_python_peer.py",
    "emulate/wire/_wire.py",
    "emulate/environment/_orders.py",
    "emulate/runs/_record.py",
    "emulate/runs/_waiting.py",
    "measure/ranks/_launch.py",
    "measure/tables/_sweep.py",
    "measure/_plan.py",
    "measure/tables/_rows.py",
    "ir/_text.py",
    "timeline/_structure_files.py",
    "validation/population/_fit.py",
}
"""Files whose JSON only the package itself reads again."""


def test_all_json_for_others_is_written_in_one_place() -> None:
    writers = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            call = node.func if isinstance(node, ast.Call) else None
            if (
                isinstance(call, ast.Attribute)
                and isinstance(call.value, ast.Name)
                and call.value.id == "json"
            ):
                writers |= (
                    {path.relative_to(SOURCE).as_posix()}
                    if call.attr in ("dump", "dumps")
                    else set()
                )
    assert writers == INSIDE


KERNELS = """source,device,op_family,op,dtype,batch,m,n,k,pass,time_us
x,DEVICE,gemm,linear,bf16,1,512,512,512,fwd,10
"""
# The run states its framework: an unnamed one is predicted under a hundred settings.
RUNS = """case_id,source,family,layers,hidden,heads,device,n_devices,seq_len,global_batch,tp,pp,dp,micro_batch,\
framework,zero_stage,recompute,measured_iter_time_s
a,x,gpt,12,768,12,DEVICE,8,1024,8,1,1,8,1,megatron-core@2024,1,none,TIME
"""
STEP = ("--model", "gpt3-125m", "--cluster", "dgx-a100", "--global-batch", "8")


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    for name, text in (("kernels", KERNELS), ("runs", RUNS)):
        text = text.replace("TIME", "1.0")
        (tmp_path / f"{name}_unknown.csv").write_text(text.replace("DEVICE", "NoSuchGPU"))
        (tmp_path / f"{name}_one.csv").write_text(text.replace("DEVICE", "A100-SXM4-80GB"))
        (tmp_path / f"{name}_empty.csv").write_text(text.partition("\n")[0] + "\n")
    (tmp_path / "runs_zero.csv").write_text(
        RUNS.replace("DEVICE", "A100-SXM4-80GB").replace("TIME", "0")
    )
    return tmp_path


@pytest.mark.parametrize("kind", ["kernels", "cases"])
@pytest.mark.parametrize("which", ["empty", "unknown", "zero"])
def test_validating_nothing_says_so(
    kind: str, which: str, tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if (kind, which) == ("kernels", "zero"):
        pytest.skip("tables of kernels with such times are refused")
    file = str(tables / f"{'runs' if kind == 'cases' else kind}_{which}.csv")
    assert main(["validate", kind, file, "--json"]) == 0
    report = strict(capsys.readouterr().out)
    figures = {name: value for name, value in report["all"].items() if name not in ("n", "memory")}
    assert report["all"]["n"] == 0
    assert set(figures.values()) == {None}
    assert main(["validate", kind, file]) == 0
    text = capsys.readouterr().out
    assert "could be compared" in text or "hold no rows" in text
    assert not re.search(r"nan|\binf\b|0\.0 %", text)
    validate = validate_kernels if kind == "kernels" else validate_cases
    report = validate([file])
    assert repr(report).startswith("ValidationReport(n=0")


def test_a_fit_to_few_rows_claims_no_errors(
    tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has kept none out to tell errors by: those on what it learned are no errors."""
    arguments = ["fit", str(tables / "kernels_one.csv"), "--out", str(tables / "fitted")]
    assert main([*arguments, "--json"]) == 0
    figures = strict(capsys.readouterr().out)["gemm"]
    assert (figures["rows"], figures["kept_out"]) == (1, 0)
    assert (figures["mean_ape"], figures["median_ape"], figures["coverage_90"]) == (
        None,
        None,
        None,
    )
    assert main(arguments) == 0
    assert not re.search(r"nan|None| 0 +0 ", capsys.readouterr().out)


@pytest.mark.parametrize(
    "command",
    [
        ("predict", *STEP, "--layout", "dp=8"),
        ("predict", *STEP, "--layout", "pp=4,dp=2,schedule=pipedream"),
        ("search", *STEP, "--devices", "8", "--top", "2"),
        ("search", *STEP, "--devices", "8", "--pareto", "time,memory"),
        ("whatif", *STEP, "--layout", "dp=8", "--sweep", "all_reduce_delay_s=0:0.1:3"),
        ("schedules", "--stages", "4", "--micro-batches", "8"),
        ("validate", "kernels", "kernels_one.csv"),
        ("validate", "cases", "runs_one.csv"),
        ("validate", "cases", "runs_one.csv", "--explain"),
        ("catalog", "models"),
        ("catalog", "clusters"),
        ("catalog", "devices"),
        ("doctor",),
        ("calibrate", *STEP, "--layouts", "1M1P8D", "--dry-run", "--out", "out"),
    ],
    ids=lambda c: "-".join(word for word in c[:2] if not word.startswith("--")),
)
def test_json_of_every_command_is_json(
    command: tuple[str, ...],
    tables: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tables)
    assert main([*command, "--json"]) == 0
    assert isinstance(strict(capsys.readouterr().out), dict)


def test_the_package_offers_its_public_names_and_no_others():
    assert [name for name in dir(pm) if name.startswith("_")] == ["__doc__", "__version__"]
    assert not {"import_module", "TYPE_CHECKING", "Any"} & set(dir(pm))
    assert all(getattr(pm, name) is not None for name in dir(pm))
