"""Launch files of TOML, JSON and YAML, parsed into entries."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from perfmodel.errors import LaunchFileError
from perfmodel.files import compose_yaml, parse_json, parse_toml, read_text
from perfmodel.ingest.launch._entries import Entry, Source, broken, included_entries
from perfmodel.ingest.launch._references import resolved

if TYPE_CHECKING:
    import yaml

_TOML_SECTION: Final = re.compile(r"^\s*\[+\s*([\w.\"'-]+)\s*\]+")
_TOML_KEY: Final = re.compile(r"^\s*([\w.\"'-]+)\s*=")


def read_toml(text: str, place: str) -> Source:
    """Entries of a TOML file."""
    try:
        data = parse_toml(text)
    except (ValueError, RecursionError) as error:
        raise LaunchFileError(f"{place}: not valid TOML: {error}; fix that line") from None
    lines: dict[str, int] = {}
    # Python's reader of TOML forgets where a key stood. A second pass over the lines finds the
    # plain cases; a key that it does not find is reported without its line.
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        header = _TOML_SECTION.match(line)
        key = _TOML_KEY.match(line)
        if header:
            section = header[1].replace('"', "") + "."
        elif key:
            lines.setdefault(section + key[1].replace('"', ""), number)
    return _source_of_entries(_with_lines(data, lines), place)


def read_json(text: str, place: str) -> Source:
    """Entries of a JSON file that holds one object."""
    try:
        data = parse_json(text)
    except json.JSONDecodeError as error:
        raise broken(place, error.lineno, f"not valid JSON: {error.msg}; fix this line") from None
    except ValueError as error:
        raise LaunchFileError(f"{place}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise broken(place, 1, "must hold one JSON object, {...}")
    # JSON without tabs is YAML, and the YAML reader knows line numbers.
    notes: list[str] = []
    lines = {
        key: entry.line
        for key, entry in _yaml_entries(text.replace("\t", " "), place, notes).items()
    }
    return replace(_source_of_entries(_with_lines(data, lines), place), notes=tuple(notes))


def _source_of_entries(entries: dict[str, Entry], place: str) -> Source:
    return Source(
        place=place, entries=entries, written={key: entry.value for key, entry in entries.items()}
    )


def _with_lines(data: Mapping[str, Any], lines: Mapping[str, int]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}

    def walk(table: Mapping[str, Any], prefix: str) -> None:
        for key, value in table.items():
            if isinstance(value, dict) and value:
                walk(value, f"{prefix}{key}.")
            else:
                entries[f"{prefix}{key}"] = Entry(value, lines.get(f"{prefix}{key}", 0))

    walk(data, "")
    return entries


def read_yaml(text: str, place: str, folder: Path) -> Source:
    """Entries of a YAML file, with those of the files that it includes.

    Included are the files of its Hydra `defaults` and MaxText's `base_config`, from `folder`.
    References are resolved as OmegaConf writes them (`${a.b}`, `${.sibling}`,
    `${oc.env:NAME,default}`); one that cannot be resolved stays as it is written.
    """
    notes: list[str] = []
    doubts: list[str] = []
    file_entries = _yaml_entries(text, place, notes)
    merged: dict[str, Entry] = {}
    # References are resolved after all files are merged, as OmegaConf does: an included file may
    # refer to a value that this one replaces.
    for part in _parts(file_entries, folder, notes, doubts):
        merged |= {key.removeprefix(wrapper_of(key)): entry for key, entry in part.items()}
    written = {key: entry.value for key, entry in file_entries.items()}
    return Source(
        place=place,
        entries=resolved(merged, place),
        notes=tuple(notes),
        doubts=tuple(doubts),
        written=written,
    )


WRAPPERS: Final = ("ConfigContainer.", "parameters.")
"""Tables in which the whole configuration may stand: Megatron-Bridge's recipes, MosaicML's jobs."""


def wrapper_of(key: str) -> str:
    """Prefix (with its dot) of the table that wraps the whole configuration and this key; else
    empty."""
    return next((wrapper for wrapper in WRAPPERS if key.startswith(wrapper)), "")


class _Include(str):
    """A file name behind the tag `!include`, in whose place the file's own keys stand
    (levanter)."""


_DEFAULTS_FILES: Final = ("base.yml",)
"""Files with a framework's defaults, which are known without them."""


class _NamedFile(NamedTuple):
    """A file that another one includes."""

    name: str
    prefix: str
    """Prefix for its keys."""
    line: int
    """Line of the including file that names it."""


def _parts(
    entries_of_file: dict[str, Entry], folder: Path, notes: list[str], doubts: list[str]
) -> Iterator[dict[str, Entry]]:
    """The files that a file includes, in order of increasing precedence (Hydra: `_self_` is last
    unless listed).

    Args:
        entries_of_file: entries of the file itself.
        folder: folder of the included files.
        notes: list that gets a sentence for every defaults file that is missing.
        doubts: list that gets a sentence for every other file that is missing.
    """
    # Files that a YAML directive includes have the lowest precedence.
    by_directive = {
        key: entry for key, entry in entries_of_file.items() if isinstance(entry.value, _Include)
    }
    entries_of_file = {
        key: entry for key, entry in entries_of_file.items() if key not in by_directive
    }
    included: list[_NamedFile | None] = []
    for key, entry in by_directive.items():
        included.append(_NamedFile(str(entry.value), f"{key}.", entry.line))
    included += _included_files(entries_of_file)
    own_entries = {
        key: entry for key, entry in entries_of_file.items() if key not in ("defaults", "extends")
    }
    # `None` stands for the file itself.
    if None not in included:
        included.append(None)
    for part in included:
        if part is None:
            yield own_entries
            continue
        path = folder / part.name
        if not path.is_file():
            if path.name in _DEFAULTS_FILES:
                notes.append(
                    f"{part.name} (line {part.line}), which the file builds on, was not found in "
                    "the same folder; its settings are missing here"
                )
            else:
                doubts.append(
                    f"everything that the file takes from {part.name} (line {part.line}) may be "
                    "wrong, because that file was not found in the same folder"
                )
            continue
        try:
            text = read_text(path)
        except (OSError, ValueError) as error:
            raise broken(str(path), 0, f"cannot be read ({error})") from None
        entries = included_entries(_yaml_entries(text, str(path)), path, part.line)
        # Includes of an included file are not followed.
        yield {f"{part.prefix}{key}": entry for key, entry in entries.items() if key != "defaults"}


def _included_files(entries: dict[str, Entry]) -> list[_NamedFile | None]:
    """The files that a file names, in order of increasing precedence; None stands for the file
    itself."""
    # MaxText: `base_config: base.yml` is loaded below the file (MaxText/pyconfig.py).
    files: list[_NamedFile | None] = []
    base = entries.get("base_config")
    if base is not None and isinstance(base.value, str):
        files.append(_NamedFile(base.value, "", base.line))

    # Primus: files that this one begins with.
    extended = entries.get("extends", Entry([], 0))
    for name in [extended.value] if isinstance(extended.value, str) else extended.value or []:
        files.append(_NamedFile(str(name), "", extended.line))

    # Hydra: a list of defaults.
    listed = entries.get("defaults", Entry([], 0))
    for item in listed.value if isinstance(listed.value, list) else []:
        if item == "_self_":
            files.append(None)
        else:
            files += _hydra_files(item, listed.line)
    return files


def _hydra_files(item: Any, line: int) -> Iterator[_NamedFile]:
    """The files that an item of Hydra's list of defaults names."""
    if isinstance(item, str):
        # `config/zero3@_here_` is the file config/zero3.yaml, whose keys begin with the package
        # after the mark.
        name, _, package = item.partition("@")
        prefix = "" if package in ("", "_here_", "_global_") else f"{package}."
        yield _NamedFile(f"{name}.yaml", prefix, line)
    elif isinstance(item, dict):
        # `- model: llama` is the file model/llama.yaml, whose keys begin with `model.`.
        for group, name in item.items():
            if not str(group).startswith("override ") and name is not None:
                yield _NamedFile(f"{group}/{name}.yaml", f"{group}.", line)


_TEMPLATE: Final = re.compile(r"\{\{|\{%|<%")
"""Marks that begin a placeholder in Jinja and similar templates."""


def _is_template(text: str, line: int) -> bool:
    """Whether a line (from 1; 0 for any) has placeholders."""
    lines = text.splitlines()
    searched = lines[line - 1] if 0 < line <= len(lines) else text
    return bool(_TEMPLATE.search(searched))


def _merged_tables(root: Any) -> set[int]:
    """Identities of tables that are merged elsewhere by `<<`; many are defined only for that
    purpose."""
    # An explicit stack: a stranger's file may nest deeper than Python's own
    # recursion goes, and aliases may form a ring.
    tables: set[int] = set()
    visited: set[int] = set()
    waiting: list[Any] = [root]
    while waiting:
        node = waiting.pop()
        if id(node) in visited or not isinstance(node.value, list):
            continue
        visited.add(id(node))
        for item in node.value:
            key_node, child = item if isinstance(item, tuple) else (None, item)
            waiting.append(child)
            if key_node is None or key_node.value != "<<":
                continue
            # `<<: *table` merges one table, `<<: [*table, *other]` several.
            is_list = isinstance(child.value, list) and child.id == "sequence"
            tables.update(map(id, child.value if is_list else [child]))
    return tables


def _template_error(place: str, line: int) -> LaunchFileError:
    return broken(
        place, line, "this is a template, not YAML; replace the parts in {{ }} or {% %} first"
    )


def _yaml_tree(text: str, place: str) -> "yaml.MappingNode":
    """The nodes of a YAML file, which, unlike loaded values, have line numbers.

    Raises:
        LaunchFileError: no YAML, a template of YAML, or YAML without keys.
    """
    import yaml

    try:
        root = compose_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 0
        if _is_template(text, line):
            raise _template_error(place, line) from None
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise broken(place, line, f"not valid YAML: {problem}; fix this line") from None
    except ValueError as error:
        raise LaunchFileError(f"{place}: {error}; this is not a launch file") from None
    if not isinstance(root, yaml.MappingNode):
        raise broken(place, 1, "must hold keys and values, `key: value`")
    return root


def _yaml_entries(text: str, place: str, notes: list[str] | None = None) -> dict[str, Entry]:
    """Entries of a YAML file; the last value of a repeated key counts, as in all common loaders.

    Args:
        notes: list that gets a sentence for every key that is given twice.
    """
    import yaml

    root = _yaml_tree(text, place)
    loader = yaml.SafeLoader("")
    entries: dict[str, Entry] = {}

    def value_of(node: yaml.Node) -> Any:
        if node.tag == "!include" and isinstance(node, yaml.ScalarNode):
            return _Include(node.value)
        try:
            return loader.construct_object(node, deep=True)
        except (
            yaml.YAMLError,
            ValueError,
            TypeError,
        ):  # a tag of the framework's own, or a date that is none
            return str(node.value)

    merged_tables = _merged_tables(root)

    def walk(node: yaml.MappingNode, prefix: str, is_merged: bool) -> None:
        visited: set[str] = set()
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                if _is_template(text, line):
                    raise _template_error(place, line)
                raise broken(
                    place, line, "a key must be plain text, as in `key: value`; fix this line"
                )
            if key_node.value in visited and key_node.value != "<<" and notes is not None:
                notes.append(
                    f"{prefix}{key_node.value} appears twice; the last value counts (line {line})"
                )
            visited.add(key_node.value)
        try:
            # Replaces `<<` by the pairs that it stands for, in front of the table's own.
            loader.flatten_mapping(node)
        except yaml.YAMLError:
            raise broken(
                place, node.start_mark.line + 1, "`<<` must name another table; fix it"
            ) from None
        # Values merged by `<<` come first; the table's own values replace them.
        last = {
            str(key_node.value): (key_node.start_mark.line + 1, child)
            for key_node, child in node.value
        }
        for key, (line, child) in last.items():
            if isinstance(child, yaml.MappingNode) and child.value:
                walk(child, f"{prefix}{key}.", is_merged or id(child) in merged_tables)
            else:
                entries[f"{prefix}{key}"] = Entry(value_of(child), line, is_default=is_merged)

    walk(root, "", is_merged=False)
    return entries
