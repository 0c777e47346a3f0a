"""Every operator, function, method and statement that Python scripts are followed through, with the
value that Python itself gives it."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from lines_of_files import lines_of

from perfmodel.ingest.launch.python_script import ScriptObject, Unknown, follow

NUMBERS = ("0", "1", "-3", "7", "2.5", "n", "True")
OPERATORS = (
    "+",
    "-",
    "*",
    "/",
    "//",
    "%",
    "**",
    "<",
    "<=",
    ">",
    ">=",
    "==",
    "!=",
    "and",
    "or",
    "is",
    "is not",
)
SEQUENCES = ("'ab'", "''", "[1, 2]", "[]", "(3, 4)", "words", "range(3)")
FORMATS = (
    "",
    ":d",
    ":04d",
    ":4d",
    ":<4",
    ":>4",
    ":^5",
    ":+",
    ":,",
    ":.1f",
    ":6.2f",
    ":.0%",
    ":x",
    ":b",
    ":e",
    ":08.3f",
    ":+d",
)
LINES = lines_of("python_lines.txt")
SET = "import math\nn = 8\nwords = ['a', 'b', 'cc']\n"


def expressions() -> Iterator[str]:
    for a, b, sign in product(NUMBERS, ("1", "2", "-2", "0.5", "n"), OPERATORS):
        if not (sign == "**" and b == "-2") and not (
            sign in ("is", "is not", "**") and a.startswith("-")
        ):
            yield f"{a} {sign} {b}"
    for a, sign in product(SEQUENCES, ("and 1", "or 1", "== 'ab'", "!= [1, 2]")):
        yield f"{a} {sign}"
    for number, form in product(("n", "-3", "2.5", "True"), FORMATS):
        if not (form.endswith(("d", "x", "b")) and number == "2.5"):
            yield f"f'{{{number}{form}}}'"
    yield from (*LINES["calls"], *LINES["methods"], *LINES["others"])


def executed(text: str) -> Any:
    """The value of `x` that Python itself finds."""
    names: dict[str, Any] = {"open": Nothing}
    exec(SET + text, names)
    return names["x"]


class Nothing:
    """A file that is there for `with` alone."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> "Nothing":
        return self

    def __exit__(self, *error: object) -> None:
        return None


def followed(text: str) -> Any:
    """The value of `x` that the reader finds."""
    return follow(SET + text, "run.py").names.get("x")


def is_like(found: Any, value: Any) -> bool:
    """Whether both are one value; the reader has a list for what goes through its elements once."""
    if isinstance(value, float) and isinstance(found, int | float):
        return type(found) is float and math.isclose(found, value)
    return type(found) is type(value) and found == value


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_expressions_have_the_values_of_python() -> None:
    texts = [f"x = {expression}" for expression in expressions()]
    different = [
        (text, executed(text), followed(text))
        for text in texts
        if not is_like(followed(text), executed(text))
    ]
    assert not different, (
        f"{len(different)} of {len(texts)} (text, Python, reader): {different[:5]}"
    )


@pytest.mark.parametrize("text", LINES["statements"])
def test_statements_leave_the_values_of_python(text: str) -> None:
    assert is_like(followed(text), executed(text))


@pytest.mark.parametrize("text", LINES["unknown"])
def test_what_a_script_does_not_tell_is_unknown(text: str) -> None:
    """What depends on the world around, fails, or could fill the memory."""
    assert isinstance(followed(f"x = {text}"), Unknown | ScriptObject)
