"""Results as JSON that every reader takes."""

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON with `null` in place of what is no finite number, for which JSON has no sign (RFC 8259, section 6)."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:  # also of what refers to itself, which then recurses too deep
        return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value
