"""Python scripts are followed to the values that executing them would give, and nothing is
executed."""

import time
from contextlib import suppress
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch.python_script import Choice, Followed, ScriptObject, Unknown, follow


def followed(text: str, *arguments: str, **variables: str) -> Followed:
    return follow(dedent(text), "run.py", arguments=arguments, variables=variables)


def value_of(text: str, *arguments: str, **variables: str) -> Any:
    """The value of `x` at the end of a script."""
    return followed(text, *arguments, **variables).names["x"]


# --- the interpreter is the oracle
# ---------------------------------------------------------------------

NUMBERS = st.integers(1, 64)
NAMES = ("tp", "pp", "cp", "gbs")


@st.composite
def statements(draw: st.DrawFn, depth: int = 2) -> list[str]:
    """A few statements over the names `tp`, `pp`, `cp` and `gbs`, and the object `recipe`."""
    lines: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        name, other = draw(st.sampled_from(NAMES)), draw(st.sampled_from(NAMES))
        number = draw(NUMBERS)
        kind = draw(
            st.sampled_from(
                ("set", "sum", "field", "if", "for", "call", "dict", "while", "pick", "text")
            )
        )
        if kind == "set":
            lines.append(f"{name} = {number}")
        elif kind == "sum":
            sign = draw(st.sampled_from(("+", "-", "*", "//", "%")))
            lines.append(f"{name} = {other} {sign} {number}")
        elif kind == "field":
            lines.append(f"recipe.trainer.{name} = {other} if {other} > {number} else {number}")
        elif kind == "pick":
            lines.append(f"{name} = [tp, pp, cp, gbs][{number % 4}] or {number}")
        elif kind == "text":
            lines.append(f"recipe.name_{name} = f'{{{other}}}-{{{name}:04d}}'.replace('-', '_')")
        elif kind == "dict":
            lines.append(f"settings = {{'tp': {number}, 'pp': {other}}}")
            lines += [
                "for key, value in settings.items():",
                "    setattr(recipe.trainer, key, value)",
            ]
        elif kind == "call":
            default = draw(NUMBERS)
            lines += [
                f"def change(target, size, extra={default}):",
                f"    if size > {number}:",
                "        return extra",
            ]
            lines += ["    target.size = size", f"    return size + {number}"]
            lines.append(f"{name} = change(recipe.data, {other})")
        elif depth == 0:
            lines.append(f"{name} = max({other}, {number})")
        else:
            inner = ["    " + line for line in draw(statements(depth=depth - 1))]
            if kind == "if":
                lines += [f"if {name} > {number} and not {other} == {number}:", *inner]
                lines += ["else:", *("    " + line for line in draw(statements(depth=depth - 1)))]
            elif kind == "for":
                lines += [f"for i in range({number % 4}):", *inner]
                lines += [f"    if i + {name} > {number}:", "        break"]
            else:
                lines += ["rounds = 0", f"while rounds < {number % 3}:", *inner, "    rounds += 1"]
    return lines


def plain_fields(owner: Any) -> Any:
    """Attributes of an object, as nested dictionaries without empty ones."""
    if not isinstance(owner, (ScriptObject, SimpleNamespace)):
        return owner
    fields = owner.fields if isinstance(owner, ScriptObject) else vars(owner)
    plain = {name: plain_fields(value) for name, value in fields.items()}
    return {name: value for name, value in plain.items() if value != {}}


@given(statements())
def test_a_script_is_followed_to_the_values_that_executing_it_gives(lines: list[str]) -> None:
    text = "\n".join(["tp, pp, cp, gbs = 2, 4, 1, 128", *lines])
    recipe = SimpleNamespace(trainer=SimpleNamespace(), data=SimpleNamespace())
    executed: dict[str, Any] = {"recipe": recipe}
    exec(text, executed)
    script = followed("recipe = make()\n" + text)
    assert {name: script.names[name] for name in NAMES} == {name: executed[name] for name in NAMES}
    assert plain_fields(script.names["recipe"]) == plain_fields(recipe)


# --- what Python means
# ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x = 2 ** 10 // 3", 341),
        ("x = [i * j for i in range(3) for j in (1, 2) if i != j]", [0, 0, 2, 2]),
        ("x = {k: len(v) for k, v in {'a': 'bc', 'd': ''}.items()}", {"a": 2, "d": 0}),
        (
            "def f(a, *rest, k=3, **more):\n    return a + sum(rest) + k + len(more)\nx = f(1, 2, 3, k=4, z=0)",
            11,
        ),
        ("f = lambda a, b=2: a * b\nx = f(4)", 8),
        (
            "def outer():\n    n = 3\n    def inner():\n        return n\n    return inner()\nx = outer()",
            3,
        ),
        ("x = 1\ndef f():\n    global x\n    x = 5\nf()", 5),
        ("class C:\n    tp: int = 2\n    pp = 4\nx = C(tp=8).tp * C.pp", 32),
        (
            "class C:\n    def __init__(self, n):\n        self.n = n\n"
            "    def twice(self):\n        return 2 * self.n\nx = C(4).twice()",
            8,
        ),
        (
            "from functools import partial\ndef f(a, b):\n    return a - b\nx = partial(f, b=1)(5)",
            4,
        ),
        (
            "import copy\na = make()\na.b.c = 1\nd = copy.deepcopy(a)\nd.b.c = 2\nx = (a.b.c, d.b.c)",
            (1, 2),
        ),
        ("try:\n    raise ValueError('no')\nexcept ValueError:\n    x = 3", 3),
        ("match 'b':\n    case 'a' | 'b':\n        x = 1\n    case _:\n        x = 2", 1),
        ("x = None or 'y'", "y"),
        ("x = list(zip([1, 2], 'ab', strict=True))", [(1, "a"), (2, "b")]),
        ("def f(x):\n    return x + 1\nx = 3\napply(f)", 3),
        ("a, (b, c) = 1, (2, 3)\nx = a + b + c", 6),
        ("x = 'fp8' in 'bf16_with_fp8' and not None", True),
        ("if __name__ == '__main__':\n    x = 7", 7),
        ("values = []\nfor i in (3, 1):\n    values.append(i)\nx = sorted(values)[-1]", 3),
    ],
)
def test_values(text: str, value: object) -> None:
    assert value_of(text) == value


ARGUMENTS = """
    import argparse
    def parse():
        parser = argparse.ArgumentParser()
        group = parser.add_argument_group("sizes")
        group.add_argument("--tp-size", "-t", type=int, default=2)
        group.add_argument("--names", nargs="+", default=["a"])
        parser.add_argument("--fp8", action="store_true")
        parser.add_argument("--devices", type=int, required=True)
        return parser.parse_args()
    args = parse()
    x = (args.tp_size, args.names, args.fp8, args.devices)
"""


def test_arguments_are_those_that_the_parser_makes_of_them() -> None:
    assert value_of(ARGUMENTS, "-t", "8", "--fp8", "--devices", "16", "--names", "b", "c") == (
        8,
        ["b", "c"],
        True,
        16,
    )
    assert value_of(ARGUMENTS)[:3] == (2, ["a"], False)
    assert isinstance(value_of(ARGUMENTS)[3], Unknown)


def test_words_that_must_be_given_may_be_missing(capsys: pytest.CaptureFixture[str]) -> None:
    text = """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("config")
        parser.add_argument("sizes", nargs="+", type=int)
        args = parser.parse_args()
        x = (args.config, args.sizes)
    """
    assert value_of(text, "a.yaml", "1", "2") == ("a.yaml", [1, 2])
    assert all(isinstance(value, Unknown) for value in value_of(text))
    assert capsys.readouterr() == ("", "")


def test_arguments_that_the_script_would_refuse() -> None:
    with pytest.raises(
        LaunchFileError, match=r"run.py, line \d+: the script refuses its arguments: .*--tp-size"
    ):
        value_of(ARGUMENTS, "--tp-size")


def test_variables_of_the_environment() -> None:
    text = "import os\nx = (os.environ.get('TP', 4), os.getenv('PP'), os.environ.get('SLURM_NNODES', 1))"
    tp, pp, nodes = value_of(text)
    assert (tp, pp) == (4, None)
    # The scheduler sets it: the default says nothing of a job.
    assert isinstance(nodes, Unknown)
    assert value_of(text, TP="8", SLURM_NNODES="2") == ("8", None, "2")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("x = 1\nif asked():\n    x = 2", (2, 1)),
        ("x = 2 if asked() else 1", (2, 1)),
        ("if asked():\n    x = 2\nelse:\n    x = 1", (2, 1)),
        ("def f():\n    if asked():\n        return 2\n    return 1\nx = f()", (2, 1)),
        ("x = 1\nfor name in asked():\n    x = 2", (2, 1)),
        ("a = make()\na.b = 1\nif asked():\n    a.b = 2\nx = a.b", (2, 1)),
    ],
)
def test_what_an_undecided_condition_changes_stays_open(text: str, values: tuple[int, int]) -> None:
    value = value_of(text)
    assert isinstance(value, Choice)
    assert value.values == values
    assert "asked()" in value.condition


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\nif asked():\n    x = 1",
        "if asked():\n    x = 1\nelse:\n    x = 1",
        "x = 1\nif asked():\n    raise ValueError('wrong')",
        "if asked():\n    x = 1\nelse:\n    raise ValueError('wrong')",
        "x = 1\nif asked() and False:\n    x = 2",
        "if asked() or True:\n    x = 1",
        "x = 1\nif asked():\n    y = 3\n    z = y",
    ],
)
def test_a_condition_that_makes_no_difference_decides_nothing(text: str) -> None:
    assert value_of(text) == 1


def test_an_error_ends_a_script() -> None:
    text = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--n', type=int, default=3)\n"
    text += "if p.parse_args().n != 4:\n    raise ValueError('needs four')\nx = 1\n"
    with pytest.raises(LaunchFileError, match=r"run.py, line 5: the script stops here: needs four"):
        value_of(text)
    assert value_of(text, "--n", "4") == 1


@pytest.mark.parametrize(
    "text",
    [
        "x = 10 ** 10 ** 10",
        "x = 'a' * 10 ** 12",
        "x = [0]\nfor i in range(100):\n    x = x + x",
        "x = 0\nwhile True:\n    x = x + 1",
        "def f():\n    return f()\nx = f()",
        "x = [0]\nfor i in range(60):\n    x = [x, x]\ny = [0]\nfor i in range(60):\n    y = [y, y]\nz = x == y",
        "x = f'{1:1000000000}'",
        "x = list(range(10 ** 15))",
        "for a in range(9999):\n    for b in range(9999):\n        for c in range(9999):\n            x = a",
        "x = ((" * 100 + "1" + "))" * 100,
        "import os\nx = os.system('touch executed')",
    ],
)
def test_hostile_scripts_end_soon(
    text: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    start_s = time.perf_counter()
    with suppress(LaunchFileError):
        followed(text)
    assert time.perf_counter() - start_s < 10.0
    assert list(tmp_path.iterdir()) == []
