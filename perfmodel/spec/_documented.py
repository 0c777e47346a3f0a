"""Records that files can state: the keys are the record's fields, described by their docstrings."""

import ast
import inspect
import re
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar


class Stated:
    """A dataclass that a file may state (`catalog.checked`); keys that are not its fields are
    refused."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


@cache
def documented(kind: type) -> MappingProxyType[str, str]:
    """First sentences of the docstrings of a dataclass's fields; empty for fields without one."""
    # Python keeps no docstrings of fields: they are read from the source, each below its field.
    record = next(
        node for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef)
    )
    sentences = {}
    field = ""
    for statement in record.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            field = statement.target.id
            sentences[field] = ""
        elif (
            field and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        ):
            sentences[field] = _first_sentence(str(statement.value.value))
            field = ""
    return MappingProxyType(sentences)


def _first_sentence(text: str) -> str:
    """A docstring up to its first full stop, without line breaks; dots inside numbers and names are
    none."""
    plain = " ".join(text.replace("`", "").split())
    return re.split(r"(?<=[a-z)])\.(?: |$)", plain, maxsplit=1)[0].removesuffix(".")
