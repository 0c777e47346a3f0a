"""Write the defaults of Hugging Face's classes of configurations, for keys that shapes depend on.

`python training/huggingface_defaults.py` needs transformers (extra: zoo) and rewrites
`perfmodel/catalog/data/huggingface/defaults.json`, one family a line.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Final

from perfmodel.catalog.huggingface import FAMILIES, RELATIVES, keys_read

FILE: Final = Path(__file__).parent.parent / "perfmodel/catalog/data/huggingface/defaults.json"


def declared_defaults() -> dict[str, dict[str, Any]]:
    """Defaults that the class of each known family declares for keys that its reader knows.

    What a class derives from other keys (`head_dim` of the hidden size) is declared as None, and
    left out: readers derive it too.
    """
    from transformers import CONFIG_MAPPING

    table: dict[str, dict[str, Any]] = {}
    for family in sorted({*FAMILIES, *RELATIVES}):
        # The language model of a family with several parts has a class of its own.
        names = [f"{family}_text", family]
        name = next((name for name in names if name in CONFIG_MAPPING), None)
        if name is None:
            continue
        read = keys_read(family)
        defaults = {
            field.name: field.default
            for field in fields(CONFIG_MAPPING[name])
            if field.name in read and _is_stated(field.default)
        }
        if defaults:
            table[family] = defaults
    return table


def _is_stated(default: Any) -> bool:
    return default is not MISSING and isinstance(default, bool | int | float | str)


def text_of(table: Mapping[str, Mapping[str, Any]]) -> str:
    """The file's text, with a family a line."""
    lines = [f"{json.dumps(family)}: {json.dumps(entry)}" for family, entry in table.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(text_of(declared_defaults()), "utf-8")
