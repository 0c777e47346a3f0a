"""What the fields of a record mean, from where it is written: the docstrings below them."""

import ast
import inspect
import re
from functools import cache
from types import MappingProxyType


@cache
def documented(kind: type) -> MappingProxyType[str, str]:
    """First sentences of the docstrings of a dataclass's own fields; empty for those that have none."""
    (record,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(record, ast.ClassDef)
    found = {}
    for field, following in zip(record.body, [*record.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = following.value.value if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant) else ""
            found[field.target.id] = _first_sentence(str(text))
    return MappingProxyType(found)


def _first_sentence(text: str) -> str:
    plain = " ".join(text.replace("`", "").split())
    return re.split(r"(?<=[a-z)])\.(?: |$)", plain, maxsplit=1)[0].removesuffix(".")
