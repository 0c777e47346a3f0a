"""Results as short text for notebooks and debuggers, and as valid JSON."""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import islice
from math import isfinite
from typing import Any, Final

from perfmodel.errors import plain_text

MOST: Final = 300
"""Most characters of an object's repr."""
_MOST_OF_VALUE: Final = 64
_MOST_LEAVES: Final = 100
_LEFT_OUT: Final = ", ..."


def shorten_reprs(door: str) -> None:
    """Use `short_repr` for all dataclasses that a package offers from its own modules.

    Dataclasses with a repr of their own are declared with `dataclass(repr=False)`.
    """
    module = sys.modules[door]
    package = module.__package__ or door
    for offered in vars(module).values():
        if _is_own(offered, package) and offered.__dataclass_params__.repr:
            offered.__repr__ = short_repr


def _is_own(offered: Any, package: str) -> bool:
    return (
        isinstance(offered, type)
        and is_dataclass(offered)
        and offered.__module__.startswith(package)
    )


def short_repr(record: Any) -> str:
    """A repr without default fields; if it is long, with sizes instead of long values.

    A digest of the full repr stands for omitted content, so that different objects look different.
    The content itself is in the fields, `to_dict`, `to_frame` and the HTML of notebooks.
    """
    return plain_text(_short_repr(record))


def _short_repr(record: Any) -> str:
    """Return `short_repr` before characters that reorder or hide text are removed."""
    name = type(record).__qualname__

    # Fields at their defaults are left out.
    values = {}
    for field_info in fields(record):
        value = getattr(record, field_info.name, None)
        if field_info.repr and not _is_default(value, field_info.default):
            values[field_info.name] = value

    # Count leaves lazily: an array of millions must not be walked to find out that it is long.
    if len([*islice(_leaves(list(values.values())), _MOST_LEAVES + 1)]) <= _MOST_LEAVES:
        text = f"{name}({', '.join(f'{field}={value!r}' for field, value in values.items())})"
        if len(text) <= MOST:
            return text

    # Too long: fields as sizes, then fewer fields, with a digest that distinguishes this object
    # from others.
    parts = [f"{field}={_value_text(value)}" for field, value in values.items()]
    sign = f" #{digest(record)})"
    text = f"{name}({', '.join(parts)}"
    longest = MOST - len(sign)
    while len(text) > longest:
        parts.pop()
        text = f"{name}({', '.join(parts)}{_LEFT_OUT}"
    return text + sign


def _is_default(value: Any, default: Any) -> bool:
    """Whether a plain value is the default of its field."""
    if value is default:
        return True

    # Other values are not compared: equality of arrays is not a truth value, and that of large
    # containers takes long.
    is_plain = type(value) in (bool, int, float, str)
    return is_plain and type(default) is type(value) and value == default


def digest(value: object) -> str:
    """A hash of the object's full repr, twelve hexadecimal digits."""
    hashed = hashlib.sha256()
    _update_digest(hashed, value)
    return hashed.hexdigest()[:12]


def _leaves(value: Any) -> Iterator[None]:
    """Number of leaves: one for every number and word in nested containers; many for an array."""
    if isinstance(value, (Mapping, tuple, list, set, frozenset)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield None
            yield from _leaves(inner)
    elif not _is_array(value):
        yield None
    else:
        yield from [None] * (_MOST_LEAVES + 1)


def _is_array(value: Any) -> bool:
    return isinstance(getattr(value, "shape", None), tuple) and not is_dataclass(value)


def _value_text(value: Any) -> str:
    """A field's value, or its type and size."""
    if _is_array(value):
        return f"{getattr(value, 'dtype', type(value).__name__)}{list(value.shape)}"
    if isinstance(value, (Mapping, tuple, list, set, frozenset)):
        # The repr of a long container is not even made.
        if len([*islice(_leaves(value), _MOST_LEAVES)]) < _MOST_LEAVES:
            text = repr(value)
            if len(text) <= _MOST_OF_VALUE:
                return text
        return f"<{type(value).__name__} of {len(value):,}>"
    if isinstance(value, (str, bytes)):
        return repr(value) if len(value) <= _MOST_OF_VALUE else f"{value[:_MOST_OF_VALUE]!r}..."
    text = repr(value)
    if len(text) > _MOST_OF_VALUE and type(value).__str__ is not object.__str__:
        # Records with their own notation, such as layouts.
        text = str(value)
    return text if len(text) <= _MOST_OF_VALUE else f"<{type(value).__qualname__}>"


def _update_digest(hashed: Any, value: Any) -> None:
    """Update a hash with a value, including every number in it."""
    # Types, names and lengths are hashed, too; without them, different values could produce the
    # same bytes.
    hashed.update(type(value).__qualname__.encode())
    if isinstance(value, type):
        hashed.update(repr(value).encode())
    elif is_dataclass(value):
        for field_info in fields(value):
            if field_info.repr:
                hashed.update(field_info.name.encode())
                _update_digest(hashed, getattr(value, field_info.name, None))
    elif isinstance(value, Mapping):
        _update_digest(hashed, list(value.items()))
    elif isinstance(value, (tuple, list)):
        hashed.update(str(len(value)).encode())
        for inner in value:
            _update_digest(hashed, inner)
    else:
        hashed.update(_content(value))


def _content(value: Any) -> bytes:
    """The whole content of an array or a table; the repr of anything else."""
    # Anything that pandas or numpy holds counts to its last element.
    if hasattr(value, "to_csv"):
        return value.to_csv().encode()
    if hasattr(value, "tobytes") and hasattr(value, "shape"):
        try:
            return f"{value.dtype}{value.shape}".encode() + value.tobytes()
        except Exception:  # a traced array holds nothing yet
            pass
    return repr(value).encode()


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON text with `null` for numbers that JSON cannot represent (RFC 8259, section 6)."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:  # also of what refers to itself, which then recurses too deep
        return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, at any depth of lists and mappings."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value
