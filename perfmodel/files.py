"""Safe reading of untrusted files, with limits on size, expanded size, depth and number of nodes.

A compressed file of a few megabytes can hold gigabytes, and a few hundred bytes of YAML can stand
for more nodes than there are atoms. These functions return the content of such a file, or raise a
`ValueError` of one line that names the broken limit. Callers convert it into their own exception,
which names the file.
"""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import tomllib
import zipfile
import zlib
from collections.abc import Callable
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

from perfmodel.errors import CalibrationError, PerfModelError

LIMIT_VARIABLE: Final = "PERFMODEL_FILE_LIMIT_GB"
"""Environment variable that moves the limit on tables, traces and other data."""
USUAL_LIMIT_GB: Final = 0.5
"""Default limit; parsing the worst JSON takes twenty times as much memory."""
MOST_TEXT_BYTES: Final = 16_000_000
"""Largest size in bytes of a file that a person writes: a job, a cluster, a model, a plan, a
schedule. Programs count as data."""
MOST_DEPTH: Final = 64
"""Deepest accepted nesting of tables and lists; Python's own limit is about a thousand."""
MOST_YAML_NODES: Final = 20_000
"""Keys and values of a YAML file once its aliases are written out."""
_CHUNK_BYTES: Final = 1 << 20
_COMPRESSIONS: Final[tuple[tuple[bytes, Callable[..., Any]], ...]] = (
    (b"\x1f\x8b", gzip.open),
    (b"BZh", bz2.open),
    (b"\xfd7zXZ\x00", lzma.open),
)
"""First bytes and reader of gzip, bzip2 and xz."""
_MAGIC_BYTES: Final = max(len(magic) for magic, _ in _COMPRESSIONS)
_ZIP: Final = b"PK\x03\x04"
"""First bytes of a zip archive."""
_ZIP_RATIO: Final = 4
"""Largest ratio of an archive's content to its size on disk at which the size on disk shows its
content, as for weights of a model."""
UNSEALED: Final = "perfmodel-sha256:" + "0" * 64
"""Placeholder for the checksum of a fitted file until `sealed` writes the right one."""
_SEAL: Final = re.compile(rb"perfmodel-sha256:[0-9a-f]{64}")
CHECKSUMS_FILE: Final = "checksums.sha256"
"""Checksums of the fitted JSON files of a folder, in the format of `sha256sum`."""
DAMAGED: Final = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
"""Exceptions that a damaged or truncated compressed file raises."""


class TooLargeError(PerfModelError):
    """A file that exceeds a limit; the message names the limit and how to raise it."""


def data_limit_bytes() -> int:
    """The largest accepted size of a data file in bytes, after decompression.

    Raises:
        ValueError: the environment variable holds no number above 0.
    """
    text = os.environ.get(LIMIT_VARIABLE, "")
    try:
        limit = float(text or USUAL_LIMIT_GB)
    except ValueError:
        limit = 0.0
    if not 0 < limit < 1e6:
        raise ValueError(f"{LIMIT_VARIABLE}={text!r} is not a number of gigabytes above 0")
    return int(limit * 1e9)


def too_large(limit: int) -> TooLargeError:
    """The error for a file with more than `limit` bytes of data."""
    return TooLargeError(
        f"holds more than {limit / 1e9:.3g} GB once it is decompressed; shorten it, or set {LIMIT_VARIABLE} "
        "to a larger limit"
    )


def read_data(path: Path) -> bytes:
    """Bytes of a data file, decompressed if it is in gzip, bzip2 or xz format.

    Raises:
        OSError: no such file.
        TooLargeError: more bytes than `data_limit_bytes`.
        OSError, EOFError, zlib.error, lzma.LZMAError: damaged or truncated compressed data
        (`DAMAGED`).
    """
    # By the first bytes, not the name: files come under any name.
    limit = data_limit_bytes()
    with path.open("rb") as file:
        first = file.read(_MAGIC_BYTES)
        opener = next((opener for magic, opener in _COMPRESSIONS if first.startswith(magic)), None)
        if opener is None:
            return first + _read_within(file, limit - len(first))
    with opener(path) as expanded:
        return _read_within(expanded, limit)


def is_compressed(path: Path) -> bool:
    """Whether a file is in a compressed format that `read_data` decompresses."""
    with path.open("rb") as file:
        first = file.read(_MAGIC_BYTES)
    return any(first.startswith(magic) for magic, _ in _COMPRESSIONS)


def _read_within(file: Any, limit: int) -> bytes:
    """Everything in a file; it is given up as soon as it is larger than the limit."""
    # In pieces, because the size of a decompressed file is not known in advance.
    content = io.BytesIO()
    for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""):
        if content.tell() + len(chunk) > limit:
            raise too_large(limit)
        content.write(chunk)
    return content.getvalue()


def require_archive_within(path: Path) -> None:
    """Check the expanded size of a zip archive (`.npz`, `.pt2`) by its table of contents; other
    files pass unchecked.

    Raises:
        TooLargeError: its members hold more than `data_limit_bytes`, and several times what the
            archive takes on disk.
        OSError, zipfile.BadZipFile: no such file, or a damaged one.
    """
    with path.open("rb") as file:
        if file.read(len(_ZIP)) != _ZIP:
            return

    # Stated sizes can be trusted: the reader of a member stops at the size that is stated here.
    limit = data_limit_bytes()
    on_disk = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        expanded = sum(member.file_size for member in archive.infolist())
    if expanded > limit and expanded > _ZIP_RATIO * on_disk:
        raise too_large(limit)


def read_text(path: Path, limit: int = MOST_TEXT_BYTES) -> str:
    """A text file (UTF-8) that a person wrote.

    Raises:
        OSError: no such file.
        TooLargeError: a larger one; a device or a pipe that does not end, too.
        UnicodeDecodeError: bytes that are not text.
    """
    # Reading one byte more than the limit shows whether there is more, also for a pipe.
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise TooLargeError(
            f"holds more than {limit / 1e6:.3g} MB, more than a file of this kind may have"
        )
    # Editors of some systems write a mark of the byte order first, which is no part of the text.
    return content.decode("utf-8-sig")


def why_no_file(path: Path) -> str:
    """Why a path is not a file that can be read: it is a folder, or there is nothing."""
    return (
        "is a folder; give a file in it"
        if path.is_dir()
        else "no such file; give a file that exists"
    )


def parse_json(text: str | bytes) -> Any:
    """Parse JSON text.

    Raises:
        json.JSONDecodeError: not JSON.
        ValueError: nested too deeply, or a number of thousands of digits.
    """
    if not text.strip():
        raise json.JSONDecodeError("it is empty", "", 0)
    try:
        return _parsed(json.loads, text)
    except json.JSONDecodeError as error:
        if error.doc[error.pos :].startswith(_COMMENTS):
            raise json.JSONDecodeError(
                "JSON has no comments; remove them", error.doc, error.pos
            ) from None
        raise


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML text.

    Raises:
        tomllib.TOMLDecodeError: not TOML.
        ValueError: nested too deeply, or a number of thousands of digits.
    """
    return _parsed(tomllib.loads, text)


_COMMENTS: Final = ("//", "/*", "#")
"""Beginnings of comments in other notations."""
_NESTED: Final = (dict, list)
"""Values that hold others."""


def _parsed(parse: Callable[[Any], Any], text: str | bytes) -> Any:
    """The value that a text states; nested no deeper than `MOST_DEPTH`."""
    # Parsers recurse, so deep nesting may exceed Python's limit before it can be counted.
    try:
        value = parse(text)
    except RecursionError:
        raise _too_deep() from None

    # The depth is counted level by level, without recursion: dotted keys of TOML nest deeper than
    # Python can recurse.
    level = [value] if isinstance(value, _NESTED) else []
    depth = 0
    while level:
        if depth > MOST_DEPTH:
            raise _too_deep()
        children: list[Any] = []
        for holder in level:
            inside = holder.values() if isinstance(holder, dict) else holder
            children += [child for child in inside if isinstance(child, _NESTED)]
        level = children
        depth += 1
    return value


def _too_deep() -> ValueError:
    return ValueError(f"nested deeper than {MOST_DEPTH} levels; flatten it")


def compose_yaml(text: str) -> Any:
    """Parse YAML text to its root node, with aliases that are safe to follow; None if it is empty.

    Raises:
        yaml.YAMLError: not YAML.
        TooLargeError: more than `MOST_YAML_NODES` keys and values, aliases written out; or an alias
            within itself.
        ValueError: nested too deeply.
    """
    import yaml

    class BoundedLoader(yaml.SafeLoader):
        """Stops at the limit while it reads, because each node takes a tenth of a millisecond."""

        nodes = depth = 0

        # Called once for each node as it is written, an alias counting as one.
        def compose_node(self, parent: Any, index: Any) -> Any:
            self.nodes += 1
            self.depth += 1
            if self.nodes > MOST_YAML_NODES:
                raise _too_many_nodes()
            if self.depth > MOST_DEPTH:
                raise _too_deep()
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    loader = BoundedLoader(text)
    try:
        root = loader.get_single_node()
    except RecursionError:
        raise _too_deep() from None
    finally:
        loader.dispose()
    if root is not None:
        _require_few_nodes(root)
    return root


_DIRECTIVES: Final = re.compile(
    r"^\ufeff?%[^\n]*\n(?:(?:%[^\n]*|[ \t]*(?:#[^\n]*)?)\r?\n)*(?=---(?:\s|$))", re.MULTILINE
)
"""Directives (`%YAML 1.2`) before the line that begins their document, which change nothing that is
read here."""


def load_yaml_documents(text: str) -> list[Any]:
    """Values of all documents of a YAML text, with aliases that are safe to follow; empty documents
    are left out.

    Raises:
        yaml.YAMLError: not YAML.
        TooLargeError: more than `MOST_YAML_NODES` keys and values in a document, aliases written
            out.
        ValueError: nested too deeply, or a value that its type does not have.
    """
    import yaml

    values = []
    text = _DIRECTIVES.sub("", text)
    # Text of several lines is indented, so that a line of dashes always begins a document.
    for document in re.split(r"^---(?=\s|$)", text, flags=re.MULTILINE):
        root = compose_yaml(document)
        if root is not None:
            values.append(yaml.SafeLoader("").construct_document(root))
    return values


def _require_few_nodes(root: Any) -> None:
    """Raise `TooLargeError` for more than `MOST_YAML_NODES`, counted as if every alias were written
    out."""
    # Aliases make a graph out of the tree. Each node is counted once, so that this takes no longer
    # than reading it.
    counts: dict[int, int] = {}
    open_nodes: set[int] = set()

    def count(node: Any) -> int:
        if id(node) in open_nodes:
            raise TooLargeError("an alias contains itself; write out its value")
        if id(node) not in counts:
            open_nodes.add(id(node))
            counts[id(node)] = 1 + sum(count(child) for child in _yaml_children(node))
            open_nodes.discard(id(node))
        if counts[id(node)] > MOST_YAML_NODES:
            raise _too_many_nodes()
        return counts[id(node)]

    # Aliases of aliases can be deeper than the written text.
    try:
        count(root)
    except RecursionError:
        raise _too_deep() from None


def _yaml_children(node: Any) -> list[Any]:
    """Nodes inside a node: items of a list, keys and values of a table, nothing of a scalar."""
    if isinstance(node.value, str):
        return []
    # A table's value is a list of pairs, a list's a list of nodes.
    children = []
    for child in node.value:
        children.extend(child if isinstance(child, tuple) else (child,))
    return children


def _too_many_nodes() -> TooLargeError:
    return TooLargeError(
        f"more than {MOST_YAML_NODES:,} keys and values once its aliases are written out"
    )


def sealed(content: bytes) -> bytes:
    """Write a fitted file's SHA-256 checksum in place of its placeholder `UNSEALED`."""
    return content.replace(UNSEALED.encode(), _seal(content), 1)


def require_intact(content: bytes, name: object, *, needed: bool = True) -> None:
    """Check a fitted file against the checksum in it.

    Args:
        content: bytes of the whole file.
        name: name of the file for messages.
        needed: whether a file without a checksum is refused.

    Raises:
        CalibrationError: the checksum is missing, or is another one.
    """
    seal = _SEAL.search(content)
    if seal is None and not needed:
        return
    if seal is None:
        raise CalibrationError(
            f"{name}: has no checksum; fit it again, or install perfmodel again if it came with it"
        )

    # The checksum is that of the file with the placeholder in its place.
    unsealed = content[: seal.start()] + UNSEALED.encode() + content[seal.end() :]
    if _seal(unsealed) != seal[0]:
        raise CalibrationError(
            f"{name}: is damaged: its checksum does not match its content; copy or fit it again, or install "
            "perfmodel again if it came with it"
        )


def _seal(content: bytes) -> bytes:
    """A checksum as it stands in a fitted file."""
    return b"perfmodel-sha256:" + hashlib.sha256(content).hexdigest().encode()


def checksum_lines(folder: Path) -> str:
    """The lines of `CHECKSUMS_FILE` for the JSON files now in a folder."""
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("*.json"))
    }
    return "".join(f"{digest}  {name}\n" for name, digest in digests.items())


def read_checked(folder: Traversable, name: str) -> bytes:
    """Bytes of a fitted file, checked against `CHECKSUMS_FILE` beside it.

    Raises:
        CalibrationError: the file or its checksum is missing, or the two disagree.
    """
    # Fitted files come with the package, so that a remedy is to install it again.
    try:
        content = (folder / name).read_bytes()
        checksums = (folder / CHECKSUMS_FILE).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(
            f"{folder / name}: it or {CHECKSUMS_FILE} cannot be read ({error}); install perfmodel again"
        ) from None
    if f"{hashlib.sha256(content).hexdigest()}  {name}" not in checksums.splitlines():
        raise CalibrationError(
            f"{folder / name}: does not agree with its checksum in {CHECKSUMS_FILE}; install perfmodel again, or run "
            "`make checksums` if you changed the file on purpose"
        )
    return content
