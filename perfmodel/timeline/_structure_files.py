"""Compiled structures on disk, for later processes.

Files lie in one folder per first digit of their name. Adding a file shortens its folder to its part
of the limit, so that the cache never exceeds the limit and no process has to look at all of it.
"""

import hashlib
import json
import os
import tempfile
import zlib
from dataclasses import fields
from pathlib import Path
from typing import Final

import numpy as np

from perfmodel.program import Structure
from perfmodel.session import (
    cache_folder,
    cache_limit_bytes,
    code_digest,
    drop_least_recently_used,
    mark_used,
)
from perfmodel.timeline._tables import CompiledStructure

_MAGIC: Final = b"perfmodel structure\n"
_FOLDERS: Final = 16
"""Number of folders, one per first digit of a name."""
_NARROW: Final = {"i": (np.int8, np.int16, np.int32), "u": (np.uint8, np.uint16, np.uint32)}
"""Storage types of an array, by the kind of its type."""


CODE: Final = (
    "perfmodel.schedule",
    "perfmodel.program",
    "perfmodel.timeline._tables",
    "perfmodel.timeline._structure_files",
)
"""Modules that determine structures and their compiled form."""


def _keyed(key: str) -> str:
    """The key of a structure together with the code that built it."""
    return f"{code_digest(*CODE)} {key}"


def _path(key: str) -> Path:
    """File of the structure named `key`, in the folder of its name's first digit."""
    name = hashlib.sha256(_keyed(key).encode()).hexdigest()[:32]
    return cache_folder("structures") / name[0] / f"{name}.bin"


def save_structure(key: str, compiled: CompiledStructure) -> None:
    """Save a compiled structure, unless its file cannot be written.

    The least recently used files are deleted to keep to `cache_limit_bytes`.
    """
    # One line of JSON, then the arrays in the narrowest integers that hold them.
    arrays = {f"structure.{name}": array for name, array in _arrays(compiled.structure).items()}
    arrays |= _arrays(compiled)
    entries, contents = [], []
    for name, array in arrays.items():
        narrowed = np.ascontiguousarray(_narrowed(array))
        entries.append([name, array.shape, narrowed.dtype.str, array.dtype.str])
        contents.append(narrowed.tobytes())
    body = b"".join(contents)
    header = {
        "key": _keyed(key),
        "checksum": zlib.adler32(body),
        "bytes": len(body),
        "devices": compiled.structure.devices,
        "n_slots": compiled.n_slots,
        "arrays": entries,
    }
    content = _MAGIC + json.dumps(header).encode() + b"\n" + body

    # A file that exceeds the folder's limit would push out all others, and then itself.
    limit_bytes = cache_limit_bytes("structures") / _FOLDERS
    if len(content) > limit_bytes:
        return

    # Through a rename, so that no other process ever reads half a file.
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
        # Older versions wrote files beside the folders, which no limit counts any more.
        for flat in path.parent.parent.glob("*.bin"):
            flat.unlink(missing_ok=True)
    except OSError:
        return
    drop_least_recently_used(path.parent, limit_bytes)


def load_structure(key: str) -> CompiledStructure | None:
    """Load a compiled structure; None if no file holds exactly this structure, made by this code.

    Args:
        key: equal for equal structures only, now and in later runs (`ProgramSpec.key()`).
    """
    path = _path(key)
    try:
        # The header is the line after the magic. A slice of the view costs no copy of the arrays.
        content = memoryview(path.read_bytes())
        if content[: len(_MAGIC)] != _MAGIC:
            return None
        header_end = bytes(content[: 1 << 16]).index(b"\n", len(_MAGIC))
        header = json.loads(bytes(content[len(_MAGIC) : header_end]))
        body = content[header_end + 1 :]

        # Another key under the same name, a file cut short, flipped bits: it is built anew.
        valid = header["key"] == _keyed(key) and header["bytes"] == len(body)
        if not valid or zlib.adler32(body) != header["checksum"]:
            return None

        # Arrays of the structure carry a prefix, as both records have fields of the same name
        # (`pred`).
        structure_arrays, compiled_arrays = {}, {}
        for name, array in _read_arrays(header["arrays"], body).items():
            if name.startswith("structure."):
                structure_arrays[name.removeprefix("structure.")] = array
            else:
                compiled_arrays[name] = array
        structure = Structure(**structure_arrays, devices=header["devices"])
        mark_used(path)
        return CompiledStructure(structure=structure, **compiled_arrays, n_slots=header["n_slots"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read_arrays(entries: list, body: memoryview) -> dict[str, np.ndarray]:
    """Read consecutive arrays from the file, in the types that they had in memory."""
    arrays = {}
    offset = 0
    for name, shape, stored, dtype in entries:
        count = int(np.prod(shape))
        narrow = np.frombuffer(body, stored, count, offset)
        arrays[name] = narrow.reshape(shape).astype(dtype)
        offset += narrow.nbytes
    return arrays


def _arrays(record: Structure | CompiledStructure) -> dict[str, np.ndarray]:
    """Fields of a record that are arrays, by name."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


def _narrowed(array: np.ndarray) -> np.ndarray:
    """The array in the narrowest integers that hold its values; unchanged if it is empty."""
    if array.dtype.kind not in _NARROW or array.size == 0:
        return array
    low = int(array.min())
    high = int(array.max())
    for dtype in _NARROW[array.dtype.kind]:
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return array.astype(dtype)
    return array
